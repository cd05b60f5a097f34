"""Conversion of a Hugging Face ``config.json`` to the sizes of a Crius model. Torch-free; no code of it is executed."""

import json
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from crius.errors import ConfigError
from crius.models.config import parse_rope_scaling, rope_scaling_of, rope_scaling_text
from crius.strict_json import load_object

_LARGEST_FILE = 1 << 20
_MOST_LAYERS = 100_000
_LARGEST_NUMBER = 2**63 - 1


class Size(NamedTuple):
    """One number of a config.json.

    Attributes:
        key: Hugging Face's name.
        field: our name.
        kind: type that the value must have.
        has_default: transformers has a default for a file without this key.
        other: name of the key in other versions of transformers; both names are read.
    """

    key: str
    field: str
    kind: type = int
    has_default: bool = False
    other: str = ""


_SIZES = (
    Size("hidden_size", "dim"),
    Size("intermediate_size", "ffn_dim"),
    Size("num_hidden_layers", "num_layers"),
    Size("num_attention_heads", "num_heads"),
    Size("num_key_value_heads", "num_kv_heads", int, True),
    Size("head_dim", "head_dim", int, True),
    Size("vocab_size", "vocab_size"),
    Size("rms_norm_eps", "norm_eps", float, True),
    Size("rope_theta", "rope_theta", float, True),
    Size("tie_word_embeddings", "tied_embeddings", bool, True),
)
# Keys that change the computation, with the values for which our decoders compute the same.
_COMPUTES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
}
_OF_ROPE = ("partial_rotary_factor",)  # not written: transformers moves it into rope_parameters
_ROW = "#"


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """Names and keys of an architecture in Hugging Face's transformers.

    Attributes:
        model_type: ``model_type`` in its config.json.
        architecture: name of its class.
        names: our parameter name patterns, mapped to Hugging Face's. ``*`` is the layer number. ``#`` in Hugging Face's
            name is the row of dim 0 of our parameter: Hugging Face stores each row, such as one expert, as a tensor.
        sizes: numbers of its config.json that only some models have.
        computes: more keys of its config.json that change the computation, with the values for which we compute the
            same. We write the first value. None in the values: transformers behaves so without the key.
        defaults: our fields that a config.json may omit, with the defaults of the transformers class. Without an entry
            here, ``num_kv_heads`` is ``num_heads`` and ``head_dim`` is ``dim / num_heads``.
    """

    model_type: str
    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    sizes: tuple[Size, ...] = ()
    computes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def splits_rows(self) -> bool:
        """Whether Hugging Face stores the rows of some parameter of ours as separate tensors."""
        return any(_ROW in theirs for theirs in self.names.values())

    def translated(self, name: str) -> str:
        """Hugging Face's name of our parameter ``name``; with ``#`` for the row, see ``rows_of``."""
        number = re.search(r"\.(\d+)\.", name)
        if number is None:
            return self.names[name]
        pattern = f"{name[: number.start()]}.*.{name[number.end() :]}"
        return self.names[pattern].replace("*", number[1])


def rows_of(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The Hugging Face tensors that ``name``, from ``HuggingFace.translated``, stands for, and their shapes.

    Args:
        name: Hugging Face's name, with or without ``#``.
        shape: shape of our parameter.
    """
    if _ROW not in name:
        return {name: shape}
    return {name.replace(_ROW, str(row)): shape[1:] for row in range(shape[0])}


def read_model_settings(
    path: str, families: Mapping[str, HuggingFace], where: str = "--model.from_hf", *, with_weights: bool = False
) -> tuple[str, dict[str, Any]]:
    """Read a config.json into fields of ``[model]``, including all sizes.

    Args:
        path: path of the file or of its folder.
        families: Hugging Face's names of the models that the file may describe, by our model name.
        where: where the path was given, for the error message.
        with_weights: the weights in the same folder are read too. They must not be quantised, and their model computes
            rotary frequencies as transformers does.

    Returns:
        The path of the file, and the values by name of the field.

    Raises:
        ConfigError: the file cannot be read, or describes a model that Crius lacks; all mismatches are listed.
    """
    file, content = _read(path, where)
    kind = content.get("model_type")
    name = next((name for name, family in families.items() if family.model_type == kind), "")
    if not name:
        raise ConfigError(
            f"{file} has model_type {_shown(kind)}, not the model_type of {_any_of(families) or 'any model'}.",
            where=where,
            fix=f"use a config.json of {_any_of(family.model_type for family in families.values())}",
        )
    settings: dict[str, Any] = {"name": name, "flavor": "custom"}
    taken = _take(content, families[name], settings, is_float32=with_weights)
    wrong = list(dict.fromkeys((*_differences(content, families[name]), *taken)))
    if with_weights and (quantised := content.get("quantization_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        wrong.append(f"quantization_config: weights quantised by {_shown(method)} are not read; give unquantised ones")
    if wrong:
        fix = f"give the config.json of another {families[name].model_type}"
        errors = (ConfigError(f"{file}: {what}.", where=where, fix=fix) for what in wrong)
        raise ConfigError.together(list(errors))
    return str(file), settings


def settings_in(content: Mapping[str, Any], family: HuggingFace, name: str) -> dict[str, Any]:
    """What ``read_model_settings`` makes of the content of a config.json that it accepts."""
    settings = {"name": name, "flavor": "custom"}
    wrong = list(_take(content, family, settings, is_float32=True))
    assert not wrong, wrong
    return settings


def with_changes(content: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with what differs between two results of ``config_of``; all its other keys stay.

    Args:
        content: the config.json.
        before: of the model that it describes.
        now: of the model that it shall describe.
    """
    changed = {key: value for key, value in now.items() if before[key] != value}
    if not changed.keys() & {"rope_theta", "rope_scaling"}:
        return {**content, **changed}
    both = {key: now[key] for key in ("rope_theta", "rope_scaling")}
    return {key: value for key, value in content.items() if key != "rope_parameters"} | changed | both  # it has both


def config_of(family: HuggingFace, model: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model, with the keys that change the computation.

    ``read_model_settings`` reads ``model`` back from it.

    Args:
        family: Hugging Face's names of the model.
        model: settings of ``[model]``, including all sizes.
    """
    sizes = {size.key: model[size.field] for size in (*_SIZES, *family.sizes)}
    computes = {**_COMPUTES, **family.computes}
    scaling, _ = parse_rope_scaling(model["rope_scaling"])
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **sizes,
        "rope_scaling": load_object(rope_scaling_text(scaling).encode()) if scaling else None,
        **{key: same[0] for key, same in computes.items() if key not in _OF_ROPE},
    }


def _any_of(names: Iterable[str]) -> str:
    return " or ".join(", ".join(names).rsplit(", ", 1))


def _shown(value: object) -> str:
    return json.dumps(value)[:100]


def _read(path: str, where: str) -> tuple[Path, dict[str, Any]]:
    file = Path(path)
    try:
        file = file.expanduser()
        file = file / "config.json" if file.is_dir() else file
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError("it is not a regular file")
        with file.open("rb") as opened:
            content = opened.read(_LARGEST_FILE + 1)
    except (OSError, ValueError, RuntimeError) as error:
        first, _, rest = path.partition("/")
        is_name = bool(rest) and "/" not in rest and not path.startswith((".", "~")) and not Path(first).exists()
        fix = "give a config.json, or its folder; to resume a run that was started from it, use --config RUN/run.toml"
        if is_name:
            fix = f"hf download {shlex.quote(path)} config.json --local-dir DIR, then --model.from_hf DIR"
        raise ConfigError(
            f"{str(file)[:300]} cannot be read: {error.strerror if isinstance(error, OSError) else error}.",
            where=where,
            why="this takes a local file or folder; nothing is downloaded" if is_name else "",
            fix=fix,
        ) from None
    try:
        if len(content) > _LARGEST_FILE:
            raise ValueError("it is longer than 1 MiB")
        return file, load_object(content)
    except ValueError as error:
        fix = "give the config.json of a model"
        raise ConfigError(f"{file} is not a valid config.json: {str(error)[:200]}.", where=where, fix=fix) from None


def _differences(content: Mapping[str, Any], family: HuggingFace) -> Iterator[str]:
    """Keys of a file that our model does not support."""
    architectures = content.get("architectures") or [family.architecture]
    of_base_model = family.architecture.replace("ForCausalLM", "Model")
    if architectures not in ([family.architecture], [of_base_model]):
        yield f"architectures is {_shown(architectures)}; only {_shown([family.architecture])} is supported"
    for key, same in {**_COMPUTES, **family.computes}.items():
        value = content.get(key)
        if value not in same and key in content:
            yield f"{key} {_shown(value)} is not supported, only {json.dumps(same[0])} is"
        elif value not in same:
            yield f"it has no {key}; only {key} {json.dumps(same[0])} is supported, and transformers' default differs"
    layers = content.get("layer_types")
    if layers is not None and layers != ["full_attention"] * _length(content.get("num_hidden_layers")):
        yield f"layer_types {_shown(layers)} is not supported, only full_attention in every layer is"


def _length(value: object) -> int:
    return value if isinstance(value, int) and 0 < value <= _MOST_LAYERS else 0


def _fits(value: object, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, int if kind is int else int | float) and 0 < value <= _LARGEST_NUMBER


def _take(
    content: Mapping[str, Any], family: HuggingFace, settings: dict[str, Any], *, is_float32: bool
) -> Iterator[str]:
    """Put the sizes of a file into ``settings``. Yields a message for each wrong value."""
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}  # in the order of transformers
    if not isinstance(rope, dict):
        yield f"rope_scaling {_shown(rope)} is not an object"
        rope = {}
    if any(isinstance(value, dict) for value in rope.values()):
        yield f"rope_parameters {_shown(rope)} differ by kind of layer, which is not supported"
        rope = {}
    if rope.get("partial_rotary_factor") not in (1, None):
        yield f"partial_rotary_factor {_shown(rope['partial_rotary_factor'])} is not supported, only 1 is"
    known = {"rope_theta": rope["rope_theta"]} if rope.get("rope_theta") is not None else {}
    for name, field_name, kind, has_default, other in (*_SIZES, *family.sizes):
        both = [key for key in (name, other) if key and key in content]
        key = both[0] if both else name
        if len(both) == 2 and content[name] != content[other]:
            one, two = (f"{given} {_shown(content[given])}" for given in (name, other))
            yield f"{one} and {two} are two names of one size, with two values"
            continue
        value = known.get(key, content.get(key))
        if value is None and has_default:
            if field_name in family.defaults and not (key in content and field_name == "num_kv_heads"):
                settings[field_name] = family.defaults[field_name]
            continue
        if not _fits(value, kind):
            right = {int: "a whole number above 0", float: "a number above 0", bool: "true or false"}[kind]
            yield f"{key} is {_shown(value)}, not {right}" if key in content or key in known else f"it has no {key}"
            continue
        settings[field_name] = value
    settings.setdefault("num_kv_heads", settings.get("num_heads", -1))
    settings.setdefault("head_dim", -1)
    settings.setdefault("tied_embeddings", False)
    try:
        scaling = rope_scaling_of(rope)
    except ValueError as error:
        yield str(error)
        return
    settings["rope_scaling"] = rope_scaling_text(scaling, is_float32=is_float32)

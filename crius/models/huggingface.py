"""A ``config.json`` of Hugging Face as the sizes of a model that Crius has. Torch-free; nothing of it is executed."""

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
        key: theirs.
        field: ours.
        kind: what it has to be.
        has_default: transformers has a default for a file that leaves it out.
        other: what other versions of transformers call it; either is read.
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
# Keys that change what is computed, and the values that mean what our decoders compute.
_COMPUTES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
}
_OF_ROPE = ("partial_rotary_factor",)  # left out of what is written: transformers moves it into rope_parameters
_ROW = "#"


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """What Hugging Face's transformers calls an architecture.

    Attributes:
        model_type: in its config.json.
        architecture: its class.
        names: our parameter name patterns to theirs; ``*`` is the layer number. ``#`` in theirs is the row of dim 0 of
            ours, which they have as a tensor of its own, such as each of the experts.
        sizes: numbers of its config.json that not every model has.
        computes: keys of its config.json, beside those of every model, that change what is computed, and the values
            that mean what we compute; the first of them is written. None: transformers takes it so without the key.
        defaults: our fields that a config.json may leave out, with the values of their configuration class. Key/value
            heads are as many as query heads, and a head ``dim / num_heads`` wide, unless this says otherwise.
    """

    model_type: str
    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    sizes: tuple[Size, ...] = ()
    computes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def splits_rows(self) -> bool:
        """They have the rows of a parameter of ours as tensors of their own."""
        return any(_ROW in theirs for theirs in self.names.values())

    def translated(self, name: str) -> str:
        """Their name of our parameter ``name``; with ``#`` those of its rows, see ``rows_of``."""
        number = re.search(r"\.(\d+)\.", name)
        if number is None:
            return self.names[name]
        pattern = f"{name[: number.start()]}.*.{name[number.end() :]}"
        return self.names[pattern].replace("*", number[1])


def rows_of(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The tensors that ``name`` stands for, of ``HuggingFace.translated``, and their shapes.

    Args:
        name: theirs.
        shape: of our parameter.
    """
    if _ROW not in name:
        return {name: shape}
    return {name.replace(_ROW, str(row)): shape[1:] for row in range(shape[0])}


def read_model_settings(
    path: str, families: Mapping[str, HuggingFace], where: str = "--model.from_hf", *, with_weights: bool = False
) -> tuple[str, dict[str, Any]]:
    """Fields of ``[model]`` that a config.json stands for, all sizes among them.

    Args:
        path: of the file, or of its folder.
        families: what Hugging Face calls the models that it may be of, by our name.
        where: the path comes from.
        with_weights: the weights beside it are taken too, and so must not be quantised.

    Returns:
        The file, and values by the name of the field.

    Raises:
        ConfigError: it cannot be read, or is of a model that Crius does not have; all that does not fit together.
    """
    file, content = _read(path, where)
    kind = content.get("model_type")
    name = next((name for name, family in families.items() if family.model_type == kind), "")
    if not name:
        raise ConfigError(
            f"{file} is of model_type {_shown(kind)}, which is not that of {_any_of(families) or 'any model'}.",
            where=where,
            fix=f"use a config.json of {_any_of(family.model_type for family in families.values())}",
        )
    settings: dict[str, Any] = {"name": name, "flavor": "custom"}
    wrong = list(dict.fromkeys((*_differences(content, families[name]), *_take(content, families[name], settings))))
    if with_weights and (quantised := content.get("quantization_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        wrong.append(f"quantization_config: weights quantised by {_shown(method)} are not read, only whole ones are")
    if wrong:
        fix = f"give the config.json of another {families[name].model_type}"
        errors = (ConfigError(f"{file}: {what}.", where=where, fix=fix) for what in wrong)
        raise ConfigError.together(list(errors))
    return str(file), settings


def config_of(family: HuggingFace, model: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model, as far as it changes what is computed: ``read_model_settings`` reads ``model`` again.

    Args:
        family: of the model.
        model: settings of ``[model]``, all sizes among them.
    """
    sizes = {size.key: model[size.field] for size in (*_SIZES, *family.sizes)}
    computes = {**_COMPUTES, **family.computes}
    scaling = parse_rope_scaling(model["rope_scaling"])
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
            raise ValueError("it is no regular file")
        with file.open("rb") as opened:
            content = opened.read(_LARGEST_FILE + 1)
    except (OSError, ValueError, RuntimeError) as error:
        first, _, rest = path.partition("/")
        is_name = bool(rest) and "/" not in rest and not path.startswith((".", "~")) and not Path(first).exists()
        fix = "give a config.json, or its folder; a run that was started with it goes on by --config RUN/run.toml"
        if is_name:
            fix = f"hf download {shlex.quote(path)} config.json --local-dir DIR, then --model.from_hf DIR"
        raise ConfigError(
            f"{str(file)[:300]} cannot be read: {error.strerror if isinstance(error, OSError) else error}.",
            where=where,
            why="this takes a file or a folder of this machine, and fetches nothing" * is_name,
            fix=fix,
        ) from None
    try:
        if len(content) > _LARGEST_FILE:
            raise ValueError("it is longer than 1 MiB")
        return file, load_object(content)
    except ValueError as error:
        fix = "give the config.json of a model"
        raise ConfigError(f"{file} is no config.json: {str(error)[:200]}.", where=where, fix=fix) from None


def _differences(content: Mapping[str, Any], family: HuggingFace) -> Iterator[str]:
    """What of a file our model does not compute."""
    architectures = content.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        yield f"architectures is {_shown(architectures)}, and what is built is {_shown([family.architecture])}"
    for key, same in {**_COMPUTES, **family.computes}.items():
        value = content.get(key)
        if value not in same and key in content:
            yield f"{key} {_shown(value)} is not built, only {json.dumps(same[0])} is"
        elif value not in same:
            yield f"it has no {key}, which stands for another value than {json.dumps(same[0])}, and only that is built"
    layers = content.get("layer_types")
    if layers is not None and layers != ["full_attention"] * _length(content.get("num_hidden_layers")):
        yield f"layer_types {_shown(layers)} is not built, only full_attention in each of the num_hidden_layers is"


def _length(value: object) -> int:
    return value if isinstance(value, int) and 0 < value <= _MOST_LAYERS else 0


def _fits(value: object, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, int if kind is int else int | float) and 0 < value <= _LARGEST_NUMBER


def _take(content: Mapping[str, Any], family: HuggingFace, settings: dict[str, Any]) -> Iterator[str]:
    """Put the sizes of a file into ``settings``; yields what is wrong with them."""
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}  # in the order of transformers
    if not isinstance(rope, dict):
        yield f"rope_scaling {_shown(rope)} is no object"
        rope = {}
    if any(isinstance(value, dict) for value in rope.values()):
        yield f"rope_parameters {_shown(rope)} differ by kind of layer, which is not built"
        rope = {}
    if rope.get("partial_rotary_factor") not in (1, None):
        yield f"partial_rotary_factor {_shown(rope['partial_rotary_factor'])} is not built, only 1 is"
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
    settings["rope_scaling"] = rope_scaling_text(scaling)

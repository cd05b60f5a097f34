"""A ``config.json`` of Hugging Face as the sizes of a model that Crius has. Torch-free; nothing of it is executed."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crius.errors import ConfigError
from crius.models.config import ROPE_SCALING_KEYS, rope_scaling_of
from crius.strict_json import load_object

_LARGEST_FILE = 1 << 20

# Their key, our field, what it has to be, and whether transformers has a default for a file that leaves it out.
_SIZES = (
    ("hidden_size", "dim", int, False),
    ("intermediate_size", "ffn_dim", int, False),
    ("num_hidden_layers", "num_layers", int, False),
    ("num_attention_heads", "num_heads", int, False),
    ("num_key_value_heads", "num_kv_heads", int, True),
    ("head_dim", "head_dim", int, True),
    ("vocab_size", "vocab_size", int, False),
    ("rms_norm_eps", "norm_eps", float, True),
    ("rope_theta", "rope_theta", float, True),
    ("tie_word_embeddings", "tied_embeddings", bool, True),
)
# Keys that change what is computed, and the values that mean what our decoders compute.
_COMPUTES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
}


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """What Hugging Face's transformers calls an architecture.

    Attributes:
        model_type: in its config.json.
        architecture: its class.
        names: our parameter name patterns to theirs; ``*`` is the layer number.
        defaults: our fields that a config.json may leave out, with the values of their configuration class. Key/value
            heads are as many as query heads, and a head ``dim / num_heads`` wide, unless this says otherwise.
    """

    model_type: str
    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


def read_model_settings(path: str, families: Mapping[str, HuggingFace]) -> tuple[str, dict[str, Any]]:
    """Fields of ``[model]`` that a config.json stands for, all sizes among them.

    Args:
        path: of the file, or of its folder.
        families: what Hugging Face calls the models that Crius has, by our name.

    Returns:
        The file, and values by the name of the field.

    Raises:
        ConfigError: it cannot be read, or is of a model that Crius does not have; all that does not fit together.
    """
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    found = _read(file, path)
    kind = found.get("model_type")
    name = next((name for name, family in families.items() if family.model_type == kind), "")
    if not name:
        raise ConfigError(
            f"{file} is of a model_type that Crius does not have: {str(kind)[:100]}.",
            where="--model.from_hf",
            fix=f"use a config.json of {' or '.join(family.model_type for family in families.values())}",
        )
    settings: dict[str, Any] = {"name": name, "flavor": "custom"}
    wrong = [*_differences(found, families[name]), *_take(found, families[name], settings)]
    if wrong:
        errors = (ConfigError(f"{file}: {what}.", where="--model.from_hf") for what in wrong)
        raise ConfigError.together(list(errors))
    return str(file), settings


def _read(file: Path, path: str) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            content = opened.read(_LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        is_name = not Path(path).expanduser().exists() and path.count("/") == 1 and not path.startswith((".", "~", "/"))
        raise ConfigError(
            f"{file} cannot be read: {error.strerror if isinstance(error, OSError) else error}.",
            where="--model.from_hf",
            why="this takes a file or a folder of this machine, and fetches nothing" * is_name,
            fix=f"hf download {path} config.json --local-dir DIR, then --model.from_hf DIR"
            if is_name
            else "give a config.json, or its folder",
        ) from None
    try:
        if len(content) > _LARGEST_FILE:
            raise ValueError("it is longer than 1 MiB")
        return load_object(content)
    except ValueError as error:
        raise ConfigError(f"{file} is no config.json: {error}.", where="--model.from_hf") from None


def _differences(found: Mapping[str, Any], family: HuggingFace) -> Iterator[str]:
    """What of a file our model does not compute."""
    architectures = found.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        yield f"architectures is {str(architectures)[:100]}, and of {family.model_type} Crius has {family.architecture}"
    for key, same in _COMPUTES.items():
        value = found.get(key)
        if value not in same:
            yield f"{key} {str(value)[:100]} is not built, only {json.dumps(same[0])} is"
    layers = found.get("layer_types") or ()
    if any(kind != "full_attention" for kind in layers):
        yield f"layer_types {str(layers)[:100]} are not built, only full_attention is"


def _fits(value: object, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, int if kind is int else int | float) and value > 0


def _take(found: Mapping[str, Any], family: HuggingFace, settings: dict[str, Any]) -> Iterator[str]:
    """Put the sizes of a file into ``settings``; yields what is wrong with them."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        yield f"rope_scaling {str(rope)[:100]} is no object"
        rope = {}
    if rope.get("partial_rotary_factor", 1) != 1:
        yield f"partial_rotary_factor {str(rope['partial_rotary_factor'])[:100]} is not built, only 1 is"
    known = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    for key, field_name, kind, has_default in _SIZES:
        value = known.get(key, found.get(key))
        if value is None and has_default:
            settings |= {field_name: family.defaults[field_name]} if field_name in family.defaults else {}
            continue
        if not _fits(value, kind):
            right = {int: "a whole number above 0", float: "a number above 0", bool: "true or false"}[kind]
            yield f"{key} is {str(value)[:100]}, not {right}" if key in found or key in known else f"it has no {key}"
            continue
        settings[field_name] = value
    settings.setdefault("num_kv_heads", settings.get("num_heads"))
    if "head_dim" not in settings and {"dim", "num_heads"} <= settings.keys():
        settings["head_dim"] = settings["dim"] // settings["num_heads"]
    try:
        scaling = rope_scaling_of(rope)
    except ValueError as error:
        yield str(error)
        return
    kept = {key: rope[key] for key in ROPE_SCALING_KEYS} if scaling else {}
    settings["rope_scaling"] = json.dumps({"rope_type": "llama3", **kept}) if scaling else "none"

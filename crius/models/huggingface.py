"""Conversion of a Hugging Face ``config.json`` to the sizes of a Crius model. Torch-free; no code of it is executed."""

import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from crius.errors import ConfigError
from crius.models.config import WORDS, DecoderConfig, LayerKind
from crius.models.keys import Noted
from crius.models.rope import parse_rope_scaling, rope_scaling_of, rope_scaling_text, scaling_section
from crius.models.words import parse_words, shortest, usual_words, words_text
from crius.strict_json import load_object
from crius.untrusted import read_linked

_LARGEST_FILE = 1 << 20
_MOST_LAYERS = 100_000
_LONGEST = 4_000
_LARGEST_NUMBER = 2**63 - 1


class Size(NamedTuple):
    """One number of a config.json.

    Attributes:
        key: Hugging Face's name.
        field: our name.
        kind: type that the value must have.
        has_default: transformers has a default for a file without this key.
        other: name of the key in other versions of transformers; both names are read.
        power: our value is the file's to this power.
        null: our value for null in the file; None: null is as no key.
    """

    key: str
    field: str
    kind: type = int
    has_default: bool = False
    other: str = ""
    power: float = 1.0
    null: float | None = None

    def told(self, value: Any) -> Any:
        """The file's value for ours."""
        if self.null is not None and value == self.null:
            return None
        if self.power == 1.0:
            return value
        number = float(f"{value ** (1 / self.power):.12g}")
        return int(number) if number.is_integer() else number


class Kinds(NamedTuple):
    """How a config.json says which layers have a window, and which have positions.

    Attributes:
        windows: no layer has a window, all have one, or those that ``layer_types`` lists.
        window: the window of a file without ``sliding_window``; 0: none.
        full_every: where ``layer_types`` is missing, each layer whose number is a multiple of this has no window.
        period: key of a file's own ``full_every``.
        local_theta: base of the rotary frequencies of layers with a window, which are not stretched; 0: as in others.
        local_key: key of a file's own ``local_theta``.
        no_positions_every: where ``no_rope_layers`` is missing, each layer whose number is a multiple of this has no
            positions; 0: all layers have positions.
    """

    windows: Literal["none", "all", "listed"] = "none"
    window: int = 0
    full_every: int = 0
    period: str = ""
    local_theta: float = 0.0
    local_key: str = ""
    no_positions_every: int = 0


NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""Names of a plain decoder in transformers; a bias has the name of its weight, with ``bias`` at the end."""

ATTENTION_BIAS = (
    Size("attention_bias", "qkv_bias", bool, True),
    Size("attention_bias", "o_bias", bool, True),
)
MLP_BIAS = Size("mlp_bias", "mlp_bias", bool, True)


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
_FULL = "full_attention"
_WINDOW = "sliding_attention"
_ORIGINAL = "original_max_position_embeddings"
_ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
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
            A bias needs no name of its own.
        sizes: numbers and words of its config.json that only some models have.
        kinds: how its config.json says what differs from layer to layer.
        config: class of the model's config, whose defaults need not be said.
        computes: more keys of its config.json that change the computation, with the values for which we compute the
            same. We write the first value. None in the values: transformers behaves so without the key. No values:
            transformers does not read the key.
        defaults: our fields that a config.json may omit, with the defaults of the transformers class. Without an entry
            here, ``num_kv_heads`` is ``num_heads`` and ``head_dim`` is ``dim / num_heads``.
    """

    model_type: str
    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    sizes: tuple[Size, ...] = ()
    kinds: Kinds = Kinds()
    config: type[DecoderConfig] = DecoderConfig
    computes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def splits_rows(self) -> bool:
        """Whether Hugging Face stores the rows of some parameter of ours as separate tensors."""
        return any(_ROW in theirs for theirs in self.names.values())

    @property
    def must_compute(self) -> dict[str, tuple[Any, ...]]:
        """Keys that change the computation and are not read, with the values for which we compute the same."""
        read = {size.key for size in self.sizes}
        return {key: same for key, same in {**_COMPUTES, **self.computes}.items() if same and key not in read}

    def translated(self, name: str) -> str:
        """Hugging Face's name of our parameter ``name``; with ``#`` for the row, see ``rows_of``."""
        number = re.search(r"\.(\d+)\.", name)
        pattern = name if number is None else f"{name[: number.start()]}.*.{name[number.end() :]}"
        if pattern not in self.names and pattern.endswith(".bias"):
            theirs = self.names[pattern.removesuffix("bias") + "weight"].removesuffix("weight") + "bias"
        else:
            theirs = self.names[pattern]
        return theirs.replace("*", number[1]) if number else theirs


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
    file, content = read_config(path, where)
    name, family = family_of(content, families)
    settings, wrong = judged(content, family, name, with_weights=with_weights)
    if not name:
        kind = _shown(content.get("model_type"))
        wrong += [f"{key} {_shown(value)} is in no family" for key, value in content.unread.items()]
        raise ConfigError(
            f"{file} has model_type {kind}, not the model_type of {_any_of(families) or 'any model'}.",
            where=where,
            why="; ".join(wrong)[:_LONGEST] or "its other keys are known: docs/adding_a_model.md adds such a family",
            fix=f"use a config.json of {_any_of(family.model_type for family in families.values())}",
        )
    if wrong:
        fix = f"give the config.json of another {family.model_type}"
        errors = (ConfigError(f"{file}: {what}.", where=where, fix=fix) for what in wrong)
        raise ConfigError.together(list(errors))
    return str(file), settings


def family_of(content: Mapping[str, Any], families: Mapping[str, HuggingFace]) -> tuple[str, HuggingFace]:
    """Name and description of the family of a config.json.

    If its ``model_type`` is unknown, the name is empty, and the family reads every key that some family reads.
    """
    kind = content.get("model_type")
    for name, family in families.items():
        if family.model_type == kind:
            return name, family
    computes: dict[str, tuple[Any, ...]] = {}
    for family in families.values():
        for key, same in family.must_compute.items():
            if key in content and key != "sliding_window":  # a pattern says it
                computes[key] = (*computes.get(key, ()), *same)
    has_positions = {"no_rope_layers", "no_rope_layer_interval"}.isdisjoint(content)
    any_of_them = HuggingFace(
        model_type="",
        architecture="",
        sizes=tuple(size for family in families.values() for size in family.sizes if size.key in content),
        kinds=Kinds(
            windows="listed",
            full_every=1,
            local_theta=1.0,
            local_key="rope_local_base_freq",
            no_positions_every=0 if has_positions else 4,
        ),
        computes=computes,
    )
    return "", any_of_them


def judged(
    content: Mapping[str, Any], family: HuggingFace, name: str, *, with_weights: bool
) -> tuple[dict[str, Any], list[str]]:
    """Fields of ``[model]`` in the content of a config.json, and what it has that is not supported.

    Args:
        content: the content.
        family: family of the file, from ``family_of``.
        name: its name, or empty.
        with_weights: as in ``read_model_settings``.
    """
    settings: dict[str, Any] = {"name": name, "flavor": "custom"}
    taken = _take(content, family, settings, is_float32=with_weights)
    wrong = list(dict.fromkeys((*_differences(content, family), *taken)))
    if with_weights and (quantised := content.get("quantization_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        wrong.append(f"quantization_config: weights quantised by {_shown(method)} are not read; give unquantised ones")
    return settings, wrong


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
    if not changed.keys() & _ROPE_KEYS:
        return {**content, **changed}
    rope = {key: value for key, value in now.items() if key in _ROPE_KEYS}
    return {key: value for key, value in content.items() if key not in _ROPE_KEYS} | changed | rope


def config_of(family: HuggingFace, model: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model, with the keys that change the computation.

    ``read_model_settings`` reads ``model`` back from it.

    Args:
        family: Hugging Face's names of the model.
        model: settings of ``[model]``, including all sizes.
    """
    words = usual_words(family.config) | parse_words(model.get("words") or "{}")
    fields = {**words, **model}
    sizes = {size.key: size.told(fields[size.field]) for size in (*_SIZES, *family.sizes)}
    scaling, _ = parse_rope_scaling(model["rope_scaling"])
    computes = {key: same[0] for key, same in family.must_compute.items() if key not in _OF_ROPE}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **sizes,
        "rope_scaling": scaling_section(scaling) if scaling else None,
        **computes,
        **_kinds_told(family.kinds, words["pattern"], model, scaling),
    }


def _kinds_told(kinds: Kinds, pattern: Sequence[LayerKind], model: Mapping[str, Any], scaling: Any) -> dict[str, Any]:
    """Keys of a config.json that say what differs from layer to layer."""
    layers = [pattern[index % len(pattern)] for index in range(model["num_layers"])]
    windows = {layer.window for layer in layers if layer.window}
    told: dict[str, Any] = {}
    if kinds.windows != "none":
        told["sliding_window"] = max(windows, default=None)
    if kinds.windows == "listed":
        told["layer_types"] = [_WINDOW if layer.window else _FULL for layer in layers]
    if kinds.no_positions_every:
        told["no_rope_layers"] = [int(layer.positions) for layer in layers]
    if kinds.local_theta:
        local = next((layer.rope_theta for layer in layers if layer.window), kinds.local_theta)
        told["rope_scaling"] = None
        told["rope_parameters"] = {
            _FULL: {**scaling_section(scaling), "rope_theta": model["rope_theta"]},
            _WINDOW: {"rope_type": "default", "rope_theta": local or model["rope_theta"]},
        }
    return told


def _any_of(names: Iterable[str]) -> str:
    return " or ".join(", ".join(names).rsplit(", ", 1))


def _shown(value: object) -> str:
    return json.dumps(value)[:100]


def read_config(path: str, where: str) -> tuple[Path, Noted]:
    """The place and the content of a config.json.

    Raises:
        ConfigError: the file cannot be read.
    """
    file = Path(path)
    try:
        file = file.expanduser()
        file = file / "config.json" if file.is_dir() else file
        content = read_linked(file.parent, file.name, _LARGEST_FILE)
    except (OSError, ValueError, RuntimeError) as error:
        what = f"{str(file)[:300]} cannot be read: {error.strerror if isinstance(error, OSError) else error}."
        fix = "give a config.json, or its folder; to resume a run that was started from it, use --config RUN/run.toml"
        raise ConfigError(what, where=where, fix=fix) from None
    try:
        return file, Noted(load_object(content))
    except ValueError as error:
        fix = "give the config.json of a model"
        raise ConfigError(f"{file} is not a valid config.json: {str(error)[:200]}.", where=where, fix=fix) from None


def _differences(content: Mapping[str, Any], family: HuggingFace) -> Iterator[str]:
    """Keys of a file that our model does not support."""
    architectures = content.get("architectures") or [family.architecture]
    of_base_model = family.architecture.replace("ForCausalLM", "Model")
    if family.architecture and architectures not in ([family.architecture], [of_base_model]):
        yield f"architectures is {_shown(architectures)}; only {_shown([family.architecture])} is supported"
    for key, same in family.must_compute.items():
        value = content.get(key)
        if value not in same and key in content:
            yield f"{key} {_shown(value)} is not supported, only {json.dumps(same[0])} is"
        elif value not in same:
            yield f"it has no {key}; only {key} {json.dumps(same[0])} is supported, and transformers' default differs"
    layers = content.get("layer_types")
    full = [_FULL] * _length(content.get("num_hidden_layers"))
    if family.kinds.windows != "listed" and layers is not None and layers != full:
        yield f"layer_types {_shown(layers)} is not supported, only {_FULL} in every layer is"


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
    rope, local = yield from _ropes(content, family)
    known = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if rope.get(key) is not None}
    words: dict[str, Any] = {}
    for size in (*_SIZES, *family.sizes):
        name, field_name, kind, has_default, other, power, null = size
        target = words if field_name in WORDS else settings
        both = [key for key in (name, other) if key and key in content]
        key = both[0] if both else name
        if len(both) == 2 and content[name] != content[other]:
            one, two = (f"{given} {_shown(content[given])}" for given in (name, other))
            yield f"{one} and {two} are two names of one size, with two values"
            continue
        value = known.get(key, content.get(key))
        if value is None and null is not None and key in content:
            target[field_name] = null
            continue
        if value is None and has_default:
            if field_name in family.defaults and not (key in content and field_name == "num_kv_heads"):
                target[field_name] = family.defaults[field_name]
            continue
        if value is None or not _fits(value, kind):
            right = {int: "a whole number above 0", float: "a number above 0", bool: "true or false"}[kind]
            yield f"{key} is {_shown(value)}, not {right}" if key in content or key in known else f"it has no {key}"
            continue
        value = float(value) if kind is float and target is words else value
        target[field_name] = value if power == 1.0 else value**power
    if words.get("rotary_share", 1.0) > 1:
        yield f"partial_rotary_factor {words['rotary_share']} is above 1"
    if rope.get("partial_rotary_factor") not in (1, None) and "rotary_share" not in words:
        yield f"partial_rotary_factor {_shown(rope['partial_rotary_factor'])} is not supported, only 1 is"
    settings.setdefault("num_kv_heads", settings.get("num_heads"))
    settings.setdefault("head_dim", -1)
    settings.setdefault("tied_embeddings", False)
    pattern = yield from _pattern(content, family.kinds, local)
    if pattern:
        words["pattern"] = pattern
    if text := words_text(words, family.config):
        settings["words"] = text
    # in the order of transformers
    lengths = (content.get(_ORIGINAL), rope.get(_ORIGINAL), content.get("max_position_embeddings"))
    original = next((length for length in lengths if length is not None), None)
    try:
        scaling = rope_scaling_of({**rope, _ORIGINAL: original} if original is not None else rope)
    except ValueError as error:
        yield str(error)
        return
    settings["rope_scaling"] = rope_scaling_text(scaling, is_float32=is_float32)


def _ropes(content: Mapping[str, Any], family: HuggingFace) -> Generator[str, None, tuple[dict[str, Any], float]]:
    """Rotary positions of layers without a window, and the base of those of layers with one. Yields messages."""
    kinds = family.kinds
    local = kinds.local_theta
    theta = content.get(kinds.local_key, local) if kinds.local_key else local
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"  # in the order of transformers
    rope = content.get(key) or {}
    if not isinstance(rope, dict):
        yield f"{key} {_shown(rope)} is not an object"
        return {}, local
    if any(isinstance(value, dict) for value in rope.values()):
        if not local or not rope.keys() <= {_FULL, _WINDOW} or not all(isinstance(one, dict) for one in rope.values()):
            yield f"{key} {_shown(rope)} differ by kind of layer, which is not supported"
            return {}, local
        near = rope.get(_WINDOW, {})
        if near.get("rope_type", "default") != "default":
            yield f"rope_type {_shown(near['rope_type'])} of {_WINDOW} is not supported, only default is"
        theta = near.get("rope_theta", theta)
        rope = rope.get(_FULL, {})
    elif local and rope and key == "rope_parameters" and family.model_type:  # an unknown one may have one rope for all
        yield f"{key} {_shown(rope)} do not say to which kind of layer they belong, {_FULL} or {_WINDOW}"
    if local and not _fits(theta, float):
        yield f"rope_theta {_shown(theta)} of {_WINDOW} is not a number above 0"
        return rope, local
    return rope, theta


def _pattern(
    content: Mapping[str, Any], kinds: Kinds, local: float
) -> Generator[str, None, tuple[LayerKind, ...] | None]:
    """The kinds of the layers; None: the file says nothing of them. Yields messages."""
    count = _length(content.get("num_hidden_layers"))
    if kinds == Kinds() or not count:
        return None
    window = content.get("sliding_window", kinds.window) or 0
    if not isinstance(window, int) or isinstance(window, bool) or window < 0:
        yield f"sliding_window is {_shown(window)}, not a whole number above 0"
        return None
    has_window = [kinds.windows == "all" and window > 0] * count
    if kinds.windows == "listed":
        every = content.get(kinds.period, kinds.full_every) if kinds.period else kinds.full_every
        types = content.get("layer_types")
        if types is None and not _fits(every, int):
            yield f"{kinds.period or 'full_every'} is {_shown(every)}, not a whole number above 0"
            return None
        if types is None:
            types = [_FULL if (index + 1) % every == 0 else _WINDOW for index in range(count)]
        if not isinstance(types, list) or len(types) != count or any(kind not in (_FULL, _WINDOW) for kind in types):
            yield f"layer_types {_shown(types)} is not one of {_FULL} and {_WINDOW} for each layer"
            return None
        has_window = [kind == _WINDOW for kind in types]
        if any(has_window) and not window:
            yield f"layer_types has {_WINDOW}, but there is no sliding_window"
    has_positions = [True] * count
    if every := kinds.no_positions_every:
        every = content.get("no_rope_layer_interval", every)
        listed = content.get("no_rope_layers")
        if listed is None and not _fits(every, int):
            yield f"no_rope_layer_interval is {_shown(every)}, not a whole number above 0"
            return None
        if listed is None:
            listed = [int((index + 1) % every != 0) for index in range(count)]
        if not isinstance(listed, list) or len(listed) < count or any(one not in (0, 1) for one in listed):
            yield f"no_rope_layers {_shown(listed)} is not 0 or 1 for each layer"
            return None
        has_positions = [bool(one) for one in listed]
    near = LayerKind(window, float(local), stretched=not local)
    return shortest(
        [
            (near if has_window[index] else LayerKind())._replace(positions=has_positions[index])
            for index in range(count)
        ]
    )

"""Words of a decoder as text: ``model.words``, JSON of fields of ``DecoderConfig`` that are no sizes. Torch-free."""

import json
from collections.abc import Mapping
from typing import Any, get_args

from crius.models.config import WORDS, DecoderConfig, LayerKind
from crius.models.description import Activation, Norm, Placement
from crius.strict_json import load_object

_CHOICES = {"qk_norm": get_args(Norm), "norms": get_args(Placement), "activation": get_args(Activation)}
_MOST_KINDS = 100_000


def usual_words(family: type[DecoderConfig]) -> dict[str, Any]:
    """The words of a family that are not given."""
    return {name: getattr(family, name) for name in WORDS}


_PLAIN = usual_words(DecoderConfig)


def parse_words(text: str) -> dict[str, Any]:
    """Parse ``model.words`` into fields of ``DecoderConfig``.

    Raises:
        ValueError: the text is not valid; the message says why.
    """
    given = load_object(text.encode())
    return {name: _parsed(name, value) for name, value in given.items()}


def words_text(words: Mapping[str, Any], family: type[DecoderConfig], flavor: DecoderConfig | None = None) -> str:
    """The text of ``words`` that differ from a plain decoder, a family's defaults or a flavor; empty if none does."""
    own = usual_words(family)
    told = {}
    for name, value in words.items():
        usual = [_PLAIN[name], own[name], *([getattr(flavor, name)] if flavor else [])]
        if any(value != other for other in usual):
            told[name] = [_told(kind) for kind in value] if name == "pattern" else value
    return json.dumps(told) if told else ""


def _told(kind: LayerKind) -> dict[str, Any]:
    plain = LayerKind()._asdict()
    return {name: value for name, value in kind._asdict().items() if value != plain[name]}


def _parsed(name: str, value: Any) -> Any:
    if name not in WORDS:
        raise ValueError(f"there is no word {json.dumps(name)[:100]}; the words are {', '.join(WORDS)}")
    if name == "pattern":
        return _pattern(value)
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise ValueError(f"{name} {json.dumps(value)[:100]} is none of {', '.join(_CHOICES[name])}")
        return value
    if name == "attention_scale" and value is None:
        return None
    return _checked(name, value, _PLAIN[name] if _PLAIN[name] is not None else 1.0)


def _checked(name: str, value: Any, like: Any) -> Any:
    """``value``, if it is a truth as ``like`` is, or a number above 0; also 0 if ``like`` is."""
    if isinstance(like, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{name} {json.dumps(value)[:100]} is neither true nor false")
    elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63 or value == 0 != like:
        least = "above 0" if like else "of at least 0"
        raise ValueError(f"{name} {json.dumps(value)[:100]} is no number {least}")
    elif name == "window" and not isinstance(value, int):
        raise ValueError(f"window {value} is no whole number")
    elif name == "rotary_share" and value > 1:
        raise ValueError(f"rotary_share {value} is above 1")
    return float(value) if isinstance(like, float) else value


def _pattern(value: Any) -> tuple[LayerKind, ...]:
    plain = LayerKind()._asdict()
    if not isinstance(value, list) or not 0 < len(value) <= _MOST_KINDS:
        raise ValueError("pattern is no list of kinds of layers")
    kinds = []
    for kind in value:
        if not isinstance(kind, dict) or not kind.keys() <= plain.keys():
            raise ValueError(f"pattern has {json.dumps(kind)[:100]}; a kind of layers has only {', '.join(plain)}")
        kinds.append(LayerKind(**{name: _checked(name, given, plain[name]) for name, given in kind.items()}))
    return shortest(kinds)


def shortest(kinds: list[LayerKind]) -> tuple[LayerKind, ...]:
    """The shortest pattern that gives ``kinds`` when it is repeated."""
    for period in range(1, len(kinds)):
        if all(kind == kinds[index % period] for index, kind in enumerate(kinds)):
            return tuple(kinds[:period])
    return tuple(kinds)

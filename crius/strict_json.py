"""JSON from outside: one object, with unique keys and finite numbers. No torch."""

import codecs
import json
import math
from collections import Counter
from typing import Any, NoReturn


def load_object(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``, in UTF-8, with or without a byte order mark.

    Raises:
        ValueError: it is not an object, has a key twice, has NaN, an infinity or a number too large to be finite, or is
            nested too deeply.
    """
    try:
        found = json.loads(
            data.removeprefix(codecs.BOM_UTF8).decode(),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {ascii(twice)[:100]} is there twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:100]} is too large")
    return number


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")

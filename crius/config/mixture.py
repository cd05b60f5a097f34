"""``[[data.mix]]`` and ``[[data.stage]]``: tables of a mixture, kept as JSON texts in ``RunConfig``."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, get_args

from crius.config.data import DataConfig
from crius.untrusted import parse_json

TABLES = ("data.mix", "data.stage")
"""Settings that are arrays of tables in TOML, and JSON objects on a command line."""

ONE_CORPUS = ("data.source", "data.format", "data.path", "data.text_field", "data.columns")
"""Settings of a single corpus, in place of which a mixture has entries."""

DENOMINATOR = 10**6
"""Shares are exact where integers up to this sum give them; else they are rounded to a millionth."""

OnEnd = Literal["repeat", "stop", "share"]

_CHOICES = {"on_end": get_args(OnEnd), "format": ("documents", "chat")}

KINDS = ("weight", "tokens", "epochs")
"""Keys that give a source its share."""


@dataclass(frozen=True, kw_only=True)
class MixEntry:
    """A source of a mixture.

    Attributes:
        name: name in reports.
        source, path, format, field, columns: as the settings of ``[data]``; field is ``data.text_field``.
        weight: share of the sequences, or a whole number that stands for a ratio.
        tokens: tokens that it should give to the run; the share follows.
        epochs: how often it should be read; the share follows.
        on_end: after its sequences were read once, or for its epochs: repeat them, stop the run, or share its weight
            among the others in proportion.
    """

    name: str = ""
    source: str = ""
    path: tuple[str, ...] = ()
    format: str = ""
    field: str = ""
    columns: tuple[str, ...] = ()
    weight: float | None = None
    tokens: float | None = None
    epochs: float | None = None
    on_end: OnEnd = "repeat"

    @property
    def share(self) -> tuple[str, float]:
        """The key that gives the share, and its number; an empty key if there is none."""
        given = [(kind, getattr(self, kind)) for kind in KINDS if getattr(self, kind) is not None]
        return given[0] if len(given) == 1 else ("", 0)

    def corpus(self, data: DataConfig) -> DataConfig:
        """The section of this source alone."""
        return replace(
            data,
            mix=(),
            stage=(),
            source=self.source,
            path=self.path,
            format="chat" if self.format == "chat" else "documents",
            text_field=self.field or data.text_field,
            columns=self.columns,
        )


def table_text(table: Mapping[str, Any]) -> str:
    """A table of TOML as the text that stands for it."""
    return json.dumps(table, ensure_ascii=False, default=str)


def tables_of(texts: Sequence[str]) -> list[Any]:
    """The tables that ``texts`` stand for; a text that is not JSON stays."""
    found: list[Any] = []
    for text in texts:
        try:
            found.append(parse_json(text))
        except ValueError:
            found.append(text)
    return found


def read_entry(text: str) -> MixEntry:
    """An entry of ``data.mix``.

    Raises:
        ValueError: it is not one; the message is the end of a sentence about it.
    """
    table = _object(text, MixEntry.__dataclass_fields__)
    for name, value in table.items():
        if name in KINDS:
            _check_number(name, value)
            continue
        texts = value if name in ("path", "columns") and isinstance(value, list) else [value]
        if not all(isinstance(one, str) for one in texts):
            raise ValueError(f"has {name} = {json.dumps(value)}, which is not text")
        if value not in _CHOICES.get(name, [value]):
            raise ValueError(f"has {name} = {value}, which is not one of {', '.join(_CHOICES[name])}")
        if name in ("path", "columns"):
            table[name] = tuple(texts)
    return MixEntry(**table)


def read_stage(text: str) -> tuple[int, dict[str, float]]:
    """The first step of an entry of ``data.stage``, and the weight of each source that is read then.

    Raises:
        ValueError: as ``read_entry``.
    """
    table = _object(text, ("from", "weights"))
    first = table.get("from")
    weights = table.get("weights")
    if type(first) is not int or first < 1:
        raise ValueError(f"has from = {json.dumps(first)}, which is not the number of a step")
    if not isinstance(weights, dict) or not weights:
        raise ValueError("has no weights")
    for name, value in weights.items():
        _check_number(f"weights.{name}", value)
    return first, weights


def _object(text: str, known: Iterable[str]) -> dict[str, Any]:
    (table,) = tables_of([text])
    if not isinstance(table, dict):
        raise ValueError("is not a table")
    if unknown := [name for name in table if name not in known]:
        raise ValueError(f"has the unknown key {unknown[0]}; the keys are {', '.join(known)}")
    return table


def _check_number(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"has {name} = {json.dumps(value)}, which is not a positive number")


def exact(number: float) -> Fraction:
    """The fraction that a number of TOML was written as: 0.1 is 1/10."""
    return Fraction(str(number))


def sums_up(weights: Iterable[float]) -> bool:
    """Whether the numbers are shares that sum to 1, or whole numbers."""
    numbers = [exact(weight) for weight in weights]
    return sum(numbers) == 1 or all(number.denominator == 1 for number in numbers)


def integers(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Integers in the ratio of ``shares``, without a common divisor. If their sum is above ``DENOMINATOR``, they are
    rounded to that sum by largest remainder; a positive share gets at least 1.
    """
    common = math.lcm(*(share.denominator for share in shares))
    exact = [int(share * common) for share in shares]
    total = sum(exact)
    if total // math.gcd(*exact) > DENOMINATOR:
        floors = [max(number * DENOMINATOR // total, int(number > 0)) for number in exact]
        by_remainder = sorted(range(len(exact)), key=lambda one: (-(exact[one] * DENOMINATOR % total), one))
        missing = max(0, DENOMINATOR - sum(floors))
        exact = [floor + int(place in by_remainder[:missing]) for place, floor in enumerate(floors)]
    divisor = math.gcd(*exact)
    return tuple(number // divisor for number in exact)

"""``optimizer.param_groups``: settings of single parameters, as text."""

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal


def fits(pattern: str, name: str) -> bool:
    """Whether the parts of ``pattern`` are neighbouring parts of ``name``; ``*`` stands for anything within one part.

    ``wk``, ``attention.wk``, ``layers.0`` and ``layers.*.attention`` all fit ``layers.0.attention.wk``.
    """
    wanted = pattern.split(".")
    parts = name.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatchcase, parts[start:], wanted)) for start in starts)


def fits_any(patterns: Iterable[str], name: str) -> str:
    """The first of ``patterns`` that fits ``name``, or an empty string."""
    return next((pattern for pattern in patterns if fits(pattern, name)), "")


def nearest(pattern: str, names: Sequence[str]) -> str:
    """The pattern that was most likely meant by ``pattern``, which fits none of ``names``; empty if nothing is near."""
    runs: dict[str, None] = {}
    for name in names:
        parts = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name).split(".")
        runs |= {".".join(parts[i:j]): None for i in range(len(parts)) for j in range(len(parts), i, -1)}
    near = difflib.get_close_matches(pattern, [run for run in runs if run != "*"], n=1, cutoff=0.5)
    return near[0] if near else ""


Kind = Literal["adamw", "muon"]
KINDS: tuple[Kind, ...] = ("adamw", "muon")
KEYS = ("lr_factor", "weight_decay", "optimizer")
EXAMPLE = "attention.wq: lr_factor=0.5 weight_decay=0"


@dataclass(frozen=True)
class GroupSpec:
    """One entry of ``optimizer.param_groups``.

    Attributes:
        pattern: pattern of parameter names, see ``fits``; ``attention.wq`` and ``norm.weight`` work too.
        lr_factor: factor of the learning rate of the step.
        weight_decay: None keeps the weight decay of the parameter's group.
        optimizer: None keeps the optimizer that ``optimizer.name`` gives the parameter.
    """

    pattern: str
    lr_factor: float = 1.0
    weight_decay: float | None = None
    optimizer: Kind | None = None


def parse_group(text: str) -> GroupSpec:
    """A spec from ``PATTERN: key=value ...``.

    Raises:
        ValueError: ``text`` is wrong; the message says in a few words how.
    """
    pattern, colon, rest = (part.strip() for part in text.partition(":"))
    pairs = [part.partition("=") for part in rest.split()]
    if not pattern or not colon or not pairs or any(not key or not value for key, _, value in pairs):
        raise ValueError("is not of the form PATTERN: key=value ...")
    keys = [key for key, _, _ in pairs]
    unknown = next((key for key in keys if key not in KEYS), None)
    if unknown:
        raise ValueError(f"has the unknown key {unknown}")
    if len(set(keys)) < len(keys):
        raise ValueError("has a key twice")
    values = {key: value for key, _, value in pairs}
    kind = values.get("optimizer")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"has optimizer={kind}, which is not {' or '.join(KINDS)}")
    numbers = {key: _number(key, values[key]) for key in ("lr_factor", "weight_decay") if key in values}
    return GroupSpec(pattern, numbers.get("lr_factor", 1.0), numbers.get("weight_decay"), kind)


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"has {key}={text}, which is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"has {key}={text}, which must be finite and 0 or more")
    return value


def group_of(specs: Sequence[GroupSpec], name: str) -> GroupSpec | None:
    """The first of ``specs`` that fits the parameter ``name``; later ones do not count."""
    return next((spec for spec in specs if fits(spec.pattern, name)), None)

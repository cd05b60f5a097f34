"""``optimizer.param_groups``: settings of single parameters, as text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from crius.config.patterns import fits

Kind = Literal["adamw", "muon"]
KINDS: tuple[Kind, ...] = ("adamw", "muon")
KEYS = ("lr_factor", "weight_decay", "optimizer")
EXAMPLE = "attention.wq: lr_factor=0.5 weight_decay=0"


@dataclass(frozen=True)
class GroupSpec:
    """One entry of ``optimizer.param_groups``.

    Attributes:
        pattern: over parameter names, see ``crius.config.patterns.fits``; ``attention.wq`` and ``norm.weight`` fit too.
        lr_factor: of the learning rate of the step.
        weight_decay: None leaves that of the parameter's group.
        optimizer: None leaves the one that ``optimizer.name`` means.
    """

    pattern: str
    lr_factor: float = 1.0
    weight_decay: float | None = None
    optimizer: Kind | None = None


def parse_group(text: str) -> GroupSpec:
    """A spec from ``PATTERN: key=value ...``.

    Raises:
        ValueError: says in a few words what is wrong with ``text``.
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
    """The first of ``specs`` that fits the parameter ``name``; it counts alone, those after it are not looked at."""
    return next((spec for spec in specs if fits(spec.pattern, name)), None)

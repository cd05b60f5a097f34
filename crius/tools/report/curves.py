"""Curves for a picture, and how far two of them are apart. Torch-free."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Curve = tuple[list[int], list[float | None]]
"""Steps, ascending, and the value of each; None is a gap: a loss that was not finite."""

PARTED = 1e-6
"""Relative difference from which on two curves have parted. The order of sums in float32 stays below it at first."""


def finite(value: Any) -> float | None:
    """``value`` where it is a finite number, else None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def curve(steps: Sequence[int], values: Iterable[Any]) -> Curve:
    """The values of ``steps`` as numbers; what is not a finite number is a gap."""
    return list(steps), [finite(value) for value in values]


def thinned(whole: Curve, most: int) -> Curve:
    """``whole`` with at most ``most`` points: the least and the largest value of equal groups, and the last point.

    Args:
        whole: the curve.
        most: number of points, at least 4.
    """
    steps, values = whole
    if len(steps) <= most:
        return whole
    size = -(-len(steps) // ((most - 1) // 2))
    kept: list[int] = []
    for start in range(0, len(steps), size):
        known = [place for place in range(start, min(start + size, len(steps))) if values[place] is not None]
        ends = {min(known, key=values.__getitem__), max(known, key=values.__getitem__)} if known else {start}  # type: ignore[arg-type]
        kept += sorted(ends)
    kept += [len(steps) - 1] if kept[-1] != len(steps) - 1 else []
    return [steps[place] for place in kept], [values[place] for place in kept]


@dataclass(frozen=True)
class Distance:
    """How far a curve is from another one.

    Attributes:
        num_steps: steps that both have, with a finite value each.
        largest: largest relative difference, ``abs(a - b) / max(abs(a), abs(b))``; 0 where no step is common.
        step: the first step with it; None where no step is common.
        parts: the first step with a difference above ``PARTED``; None where there is none.
        curve: the relative difference in each of these steps.
    """

    num_steps: int
    largest: float
    step: int | None
    parts: int | None
    curve: Curve


def distance(a: Curve, b: Curve) -> Distance:
    """How far ``b`` is from ``a``."""
    others = dict(zip(*b, strict=True))
    steps: list[int] = []
    differences: list[float] = []
    for step, left in zip(*a, strict=True):
        right = others.get(step)
        if left is not None and right is not None:
            steps.append(step)
            differences.append(0.0 if left == right else abs(left - right) / max(abs(left), abs(right)))
    largest = max(differences, default=0.0)
    return Distance(
        num_steps=len(steps),
        largest=largest,
        step=steps[differences.index(largest)] if steps else None,
        parts=next((step for step, value in zip(steps, differences, strict=True) if value > PARTED), None),
        curve=(steps, list(differences)),
    )

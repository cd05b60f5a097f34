"""Curves for a picture, and the distance of two curves. Torch-free."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from crius.tools.report.history import Columns, finite

Curve = tuple[list[int], list[float | None]]
"""Steps, ascending, and the value at each step. None is a gap: a value that was not finite."""

TOLERANCE = 1e-5
"""Relative difference of two losses that counts as equal. In float32 two layouts of one run differ by about 1e-6,
because they sum in another order. A changed setting exceeds this in the first steps. Runs in bfloat16 differ more."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Two values at one step, and their relative difference: infinite if a value is missing or not finite."""

    step: int
    first: float | None
    other: float | None
    relative: float


def common_points(first: Columns, other: Columns, name: str) -> list[Point]:
    """The values of column ``name`` at each step that both runs have."""
    values, others = (dict(zip(run.get("step", ()), run.get(name, ()), strict=True)) for run in (first, other))
    return [
        Point(step=step, first=value, other=others[step], relative=relative(value, others[step]))
        for step, value in values.items()
        if step in others
    ]


def relative(first: Any, other: Any) -> float:
    """``|a - b| / max(|a|, |b|)``; infinite if ``a`` or ``b`` is missing, not a number or not finite."""
    a = finite(first)
    b = finite(other)
    if a is None or b is None:
        return math.inf
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def curve(steps: Sequence[int], values: Iterable[Any]) -> Curve:
    """The values of ``steps`` as numbers. A value that is not a finite number becomes a gap."""
    return list(steps), [finite(value) for value in values]


def thinned(whole: Curve, most: int) -> Curve:
    """``whole`` with at most ``most`` points: the smallest and the largest value of equal groups, and the last point.

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

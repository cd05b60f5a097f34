"""How far predictions are from what was measured."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Pair = tuple[float, float]  # predicted, measured


@dataclass(frozen=True)
class Errors:
    """Of predictions, as shares of what was measured: ``abs(predicted / measured - 1)``.

    Attributes:
        n: rows.
        median: of the errors; NaN where there are no rows.
        mape: their mean.
        p90: nine of ten are at most this.
        bias: median of ``predicted / measured - 1``, with its sign.
    """

    n: int
    median: float
    mape: float
    p90: float
    bias: float

    @classmethod
    def of(cls, pairs: Iterable[Pair]) -> "Errors":
        """Errors of (predicted, measured)."""
        signed = [predicted / measured - 1 for predicted, measured in pairs]
        if not signed:
            return cls(0, math.nan, math.nan, math.nan, math.nan)
        sizes = sorted(map(abs, signed))
        ninth = sizes[math.ceil(0.9 * len(sizes)) - 1]
        return cls(len(sizes), statistics.median(sizes), statistics.fmean(sizes), ninth, statistics.median(signed))

    def as_json(self) -> dict[str, Any]:
        """The same; what cannot be said is null."""
        values = {"median": self.median, "mape": self.mape, "p90": self.p90, "bias": self.bias}
        return {"n": self.n, **{name: round(value, 4) if self.n else None for name, value in values.items()}}

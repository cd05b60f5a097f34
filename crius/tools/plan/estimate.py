"""``Estimate``: a number with the sum that produced it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Estimate:
    """Memory of one rank in bytes, or time of one step in seconds.

    Attributes:
        parts: by what they are for; they sum to the total.
        note: of memory: the moment of the peak and the rank; of time: what bounds it.
        detail: finer parts of some of ``parts``, by name: for explanations, never added again.
    """

    parts: Mapping[str, float]
    note: str = ""
    detail: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """All parts."""
        return sum(self.parts.values())

"""Times of a benchmark, and how they are printed. No torch."""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Samples:
    """Seconds of the same work, measured in turns with other work."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median; 0 with fewer than two samples."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median

    def as_dict(self) -> dict[str, object]:
        """For the JSON, in milliseconds."""
        return {
            "milliseconds": 1e3 * self.median,
            "spread": self.spread,
            "samples_ms": [1e3 * seconds for seconds in self.seconds],
        }


def show(as_json: bool, record: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Print a result: ``record`` as JSON, or ``lines`` for people."""
    sys.stdout.write((json.dumps(record, indent=2) if as_json else "\n".join(lines)) + "\n")

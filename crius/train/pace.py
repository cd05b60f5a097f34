"""How long a step may take: what the watchdog waits for, learnt from the steps so far."""

from collections import deque

FACTOR = 3.0
LEAST_SECONDS = 10.0
LEAST_STEPS = 10
_WARM_STEPS = 2  # with compilation and first allocations in them
_WINDOW = 1000


class Pace:
    """The times of the last steps."""

    def __init__(self) -> None:
        self._done = 0
        self._seconds: deque[float] = deque(maxlen=_WINDOW)

    def count(self, seconds: float) -> None:
        """Add one step."""
        self._done += 1
        if self._done > _WARM_STEPS:
            self._seconds.append(seconds)

    def limit_seconds(self) -> float:
        """3 times the 99th percentile, at least 10 s; 0 while fewer than 10 steps are done."""
        if self._done < LEAST_STEPS:
            return 0.0
        ordered = sorted(self._seconds)
        return max(LEAST_SECONDS, FACTOR * ordered[int(0.99 * (len(ordered) - 1))])

"""Where the wall time of a run goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class TimeLedger:
    """Seconds by phase. Phases do not overlap, so that they add up to the wall time, up to what no phase covers.

    Args:
        started: ``time.monotonic()`` at the start of the run; what lies before the first phase is ``startup``.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self.seconds: dict[str, float] = {"startup": time.monotonic() - started}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the context as ``name``."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin

    def wall(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._started

    def summary(self) -> str:
        """One line: the wall time and its parts."""
        wall = self.wall()
        parts = dict(self.seconds, other=wall - sum(self.seconds.values()))
        return f"{wall:.1f} s = " + " + ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())

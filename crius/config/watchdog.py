"""``[watchdog]``: the end of a run that hangs."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """How long a rank may stay in one phase of a step before the run is stopped, with a report of all ranks."""

    enable: bool = True
    """Watch the ranks."""

    limit_seconds: float = 0.0
    """Longest time in a phase, but for start and load. 0: in the phases of a step 3 times the 99th percentile of the
    steps so far, at least 10 s; in the others, and until 10 steps are done, startup_seconds."""

    startup_seconds: float = 600.0
    """Longest time in start and load, and without limit_seconds in the first steps with their compilation, a save, a
    validation."""

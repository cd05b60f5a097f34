"""Where the wall time of a run goes, over all its attempts: what was worth it, and what it cost to get there."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from crius.run_file import Mirror

OF_STEPS = ("compute", "compile", "data", "save_blocked", "validation", "report", "profiler", "gc")
"""Phases whose time is lost with the steps that come again after a failure."""

_RECORD_BYTES = 1024


class TimeLedger:
    """Seconds by phase. Phases do not overlap, so that they add up to the wall time, up to what no phase covers.

    ``initialise``: until the model is there; ``load``: the checkpoint; ``compile``: what torch.compile took of the
    steps; ``data``: waiting for batches; ``compute``: the steps; ``save_blocked``: waiting for checkpoints; ``lost``:
    steps that a failure took back; ``down``: from a failure until processes run again.

    Args:
        started: ``time.monotonic()`` at the start of the command; what lies before the first phase is ``initialise``.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._mirror: Mirror | None = None
        self._unseen = 0.0
        self.seconds: dict[str, float] = {"initialise": time.monotonic() - started}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the context as ``name``."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._add(name, time.monotonic() - begin)
            self._write()

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count some of the time of one phase as that of another."""
        moved = min(seconds, self.seconds.get(source, 0.0))
        self._add(source, -moved)
        self._add(target, moved)

    def mirror_to(self, path: Path) -> None:
        """Keep ``path`` equal to this ledger, for the attempt after one that is killed."""
        self._mirror = Mirror(path, _RECORD_BYTES)
        self._write()

    def take_over(self, path: Path, failed_at: float) -> None:
        """Go on from the ledger of an attempt that failed.

        Args:
            path: where it was mirrored to.
            failed_at: when that attempt was over, in seconds of ``time.monotonic``.
        """
        now = time.monotonic()
        try:
            record = json.loads(path.read_bytes())
            self.seconds, last = dict(record["seconds"]), float(record["at"])
        except (OSError, ValueError, KeyError, TypeError):  # it did not get so far
            self.seconds, last = {}, self._started
        self._unseen = failed_at - last
        self._add("down", now - failed_at)

    def lose(self, kept: Mapping[str, float]) -> None:
        """Count as lost what the failed attempt did after the checkpoint that the run goes on from.

        Args:
            kept: the ledger in that checkpoint; empty where it is of another command.
        """
        for name in OF_STEPS:
            if name in self.seconds:
                self.move(name, "lost", self.seconds[name] - kept.get(name, 0.0))
        self._add("lost", self._unseen)
        self._unseen = 0.0

    def wall(self) -> float:
        """Seconds since the start of the command."""
        return time.monotonic() - self._started

    def goodput(self) -> float:
        """Share of the wall time in [0, 1] that went into steps which count."""
        return self.seconds.get("compute", 0.0) / self.wall()

    def parts(self) -> dict[str, float]:
        """Seconds by phase, with ``other`` for what no phase covers: together the wall time."""
        return dict(self.seconds, other=self.wall() - sum(self.seconds.values()))

    def summary(self) -> str:
        """One line: the wall time and its parts."""
        parts = self.parts()
        text = " + ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
        return f"{sum(parts.values()):.1f} s = {text}; goodput {self.goodput():.1%}"

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def _write(self) -> None:
        if self._mirror:
            self._mirror.write({"at": time.monotonic(), "seconds": self.seconds})

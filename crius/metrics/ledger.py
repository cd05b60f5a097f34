"""Use of the wall time of a run, over all its attempts: time that counted, and the rest."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from crius.run_file import Mirror
from crius.untrusted import parse_json, read_named

OF_STEPS = ("compute", "compile", "data", "save_blocked", "validation", "samples", "report", "profiler", "gc")
"""Phases whose time is lost with steps that a failure makes the run repeat."""

_RECORD_BYTES = 1024


class TimeLedger:
    """Seconds by phase. Phases do not overlap, so that they add up to the wall time, except for time that no phase
    covers.

    ``initialise``: until the model exists; ``load``: loading the checkpoint; ``compile``: time of torch.compile, which
    is taken out of the phase that it comes in, such as ``compute`` or ``validation``; ``data``: waiting for batches;
    ``compute``: the steps; ``save_blocked``: waiting for checkpoints;
    ``lost``: steps that a failure undid; ``down``: from a failure until processes run again.

    Args:
        started: ``time.monotonic()`` at the start of the command; time before the first phase counts as ``initialise``.
        compiled: seconds that this process has compiled so far.
    """

    def __init__(self, started: float, compiled: Callable[[], float] = lambda: 0.0) -> None:
        self._started = started
        self._compiled = compiled
        self._mirror: Mirror | None = None
        self._unseen = 0.0
        self.seconds: dict[str, float] = {"initialise": time.monotonic() - started}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time in the context as ``name``."""
        begin = time.monotonic()
        before = self._compiled()
        try:
            yield
        finally:
            compiled = self._compiled() - before
            self._add(name, time.monotonic() - begin - compiled)
            if compiled:
                self._add("compile", compiled)
            self._write()

    def mirror_to(self, path: Path) -> None:
        """Keep ``path`` equal to this ledger, for the next attempt if this one is killed."""
        self._mirror = Mirror(path, _RECORD_BYTES)
        self._write()

    def take_over(self, path: Path, failed_at: float) -> None:
        """Continue from the ledger of a failed attempt.

        Args:
            path: file that the ledger was mirrored to.
            failed_at: end of that attempt, in seconds of ``time.monotonic``.
        """
        now = time.monotonic()
        try:
            record = parse_json(read_named(path))
            self.seconds = dict(record["seconds"])
            last = float(record["at"])
        except (OSError, ValueError, KeyError, TypeError):  # that attempt had no ledger yet
            self.seconds = {}
            last = self._started
        self._unseen = failed_at - last
        self._add("down", now - failed_at)

    def lose(self, kept: Mapping[str, float]) -> None:
        """Count as lost the time that the failed attempt spent after the checkpoint that the run resumes from.

        Args:
            kept: ledger in that checkpoint; empty if it is of another command.
        """
        for name in OF_STEPS:
            if name in self.seconds:
                undone = self.seconds[name] - kept.get(name, 0.0)
                self._add(name, -undone)
                self._add("lost", undone)
        self._add("lost", self._unseen)
        self._unseen = 0.0

    def wall(self) -> float:
        """Seconds since the start of the command."""
        return time.monotonic() - self._started

    def goodput(self) -> float:
        """Share of the wall time in [0, 1] that went into steps that count."""
        return self.seconds.get("compute", 0.0) / self.wall()

    def parts(self) -> dict[str, float]:
        """Seconds by phase, with ``other`` for time that no phase covers; they add up to the wall time."""
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

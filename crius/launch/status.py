"""The place of this process in the run, for error reports and the watchdog: one object that the training loop
updates."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from crius.run_file import Mirror
from crius.untrusted import parse_json, read_named

_RECORD_BYTES = 128

ALONE_PHASES = ("compile", "profiler", "gc")
"""Phases in which one rank works and the others may wait in their step: meanwhile none of them is late."""

PHASES = (
    "start",
    "load",
    *ALONE_PHASES,
    "data",
    "forward",
    "backward",
    "pipeline",
    "optimizer",
    "save",
    "validation",
    "samples",
)
"""Phases of a rank. ``pipeline`` is forward and backward together, because a schedule mixes them."""

STEP_PHASES = ("data", "forward", "backward", "pipeline", "optimizer")
"""Phases that every step has; other phases take times of their own."""


@dataclass
class Heartbeat:
    """Place of a process in the run.

    Attributes:
        step: step that is being computed, from 1; None before the first.
        phase: one of ``PHASES``.
        since: time of the last update, in seconds of ``time.monotonic``.
        limit_seconds: longest time in this phase; 0 if that is not known yet.
        waits_for: rank that this process needs to continue; None while it works, or waits in a collective.
    """

    step: int | None = None
    phase: str = "start"
    since: float = 0.0
    limit_seconds: float = 0.0
    waits_for: int | None = None


class Status(Heartbeat):
    """The step and the phase of this process.

    In a local worker every update also goes to a small file, so that the launcher knows where a worker was that is
    killed or stopped and cannot report.
    """

    def __init__(self) -> None:
        super().__init__(since=time.monotonic())
        self._mirror: Mirror | None = None
        self._listeners: list[Callable[[int | None, str], None]] = []

    def update(self, *, step: int | None = None, phase: str | None = None, waits_for: int | None = None) -> None:
        """Record a new ``step`` (being computed, from 1) or a new ``phase``, or that a long phase is still alive.

        ``waits_for`` is the rank that this process needs to continue; None means that it works.
        """
        self.step = self.step if step is None else step
        self.phase = self.phase if phase is None else phase
        self.since = time.monotonic()
        self.waits_for = waits_for
        if self._mirror:
            self._mirror.write(astuple(self))
        for listener in self._listeners:
            listener(self.step, self.phase)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set ``phase`` within the context, then return to the phase before."""
        before = self.phase
        self.update(phase=phase)
        try:
            yield
        finally:
            self.update(phase=before)

    def mirror_to(self, path: Path) -> None:
        """Keep ``path`` equal to this status from now on."""
        self._mirror = Mirror(path, _RECORD_BYTES)
        self.update()

    @contextlib.contextmanager
    def listening(self, listener: Callable[[int | None, str], None]) -> Iterator[None]:
        """Call ``listener(step, phase)`` after each update in the context, as planted faults do."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)


def mirror_path(folder: Path, rank: int) -> Path:
    """Path of the status of ``rank`` in ``folder``."""
    return folder / f"rank-{rank}.status"


def read_mirror(path: Path) -> Heartbeat:
    """The status that a process mirrored to ``path``; ``Heartbeat()`` if there is none yet."""
    try:
        return Heartbeat(*parse_json(read_named(path)[:_RECORD_BYTES]))
    except (OSError, ValueError, TypeError):
        return Heartbeat()


status = Status()
"""The status of this process: ``status.update(step=5, phase="data")``."""

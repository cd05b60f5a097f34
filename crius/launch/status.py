"""Where this process is in the run, for error reports and the watchdog: one object that the training loop updates."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from crius.run_file import Mirror

_RECORD_BYTES = 128

ALONE_PHASES = ("compile", "profiler", "gc")
"""Work of one rank for which the others may wait in their step: while it lasts, none of them is late."""

PHASES = (
    *("start", "load", *ALONE_PHASES),
    *("data", "forward", "backward", "pipeline", "optimizer", "save", "validation"),
)
"""What a rank can be at. ``pipeline`` is forward and backward under a schedule; the schedule mixes them."""

STEP_PHASES = ("data", "forward", "backward", "pipeline", "optimizer")
"""Phases that every step has; the others take their own time."""


@dataclass
class Heartbeat:
    """Where a process is.

    Attributes:
        step: the step that is being computed, 1 is the first; None before it.
        phase: one of ``PHASES``.
        since: seconds of ``time.monotonic`` when it last said so.
        limit_seconds: how long it may stay there; 0 where that is not known yet.
        waits_for: the rank without which it cannot go on; None where it works, or waits in a collective.
    """

    step: int | None = None
    phase: str = "start"
    since: float = 0.0
    limit_seconds: float = 0.0
    waits_for: int | None = None


class Status(Heartbeat):
    """The step and the phase this process is in.

    Inside a local worker every update also goes to a small file, because a worker that is killed or stopped cannot
    report and the launcher still wants to say where it was.
    """

    def __init__(self) -> None:
        super().__init__(since=time.monotonic())
        self._mirror: Mirror | None = None
        self._listeners: list[Callable[[int | None, str], None]] = []

    def update(self, *, step: int | None = None, phase: str | None = None, waits_for: int | None = None) -> None:
        """Note a new ``step`` (the one being computed, 1 is the first) or ``phase``, or that a long one goes on.

        ``waits_for`` is the rank without which this process cannot go on; None says that it works.
        """
        self.step = self.step if step is None else step
        self.phase = self.phase if phase is None else phase
        self.since, self.waits_for = time.monotonic(), waits_for
        if self._mirror:
            self._mirror.write(astuple(self))
        for listener in self._listeners:
            listener(self.step, self.phase)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in ``phase`` inside, and then again in the phase of before."""
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
        """Call ``listener(step, phase)`` after each update inside, as planted faults do."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)


def mirror_path(folder: Path, rank: int) -> Path:
    """Where the status of ``rank`` lies in ``folder``."""
    return folder / f"rank-{rank}.status"


def read_mirror(path: Path) -> Heartbeat:
    """What a process mirrored to ``path``; ``Heartbeat()`` where it did not get that far."""
    try:
        return Heartbeat(*json.loads(path.read_bytes()[:_RECORD_BYTES]))
    except (OSError, ValueError, TypeError):
        return Heartbeat()


status = Status()
"""The status of this process: ``status.update(step=5, phase="data")``."""

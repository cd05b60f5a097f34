"""Where this process is in the run, for error reports: one object that the training loop updates."""

import contextlib
import os
from pathlib import Path

_RECORD_BYTES = 96


class Status:
    """The step and the phase a process is in.

    Inside a local worker every update also goes to a small file, because a worker that is killed cannot report and
    the launcher still wants to say at which step it was. That costs one ``pwrite``, about a microsecond.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.phase = "start"
        self._mirror: int | None = None

    def update(self, *, step: int | None = None, phase: str | None = None) -> None:
        """Note a new ``step`` (the one being computed, 1 is the first) or ``phase`` (one word, such as "data")."""
        self.step = self.step if step is None else step
        self.phase = self.phase if phase is None else phase
        if self._mirror is not None:
            record = f"{'' if self.step is None else self.step}\n{self.phase}".encode()[:_RECORD_BYTES]
            with contextlib.suppress(OSError):  # a full disk must not end a run that works
                os.pwrite(self._mirror, record.ljust(_RECORD_BYTES), 0)

    def mirror_to(self, path: Path) -> None:
        """Keep ``path`` equal to this status from now on."""
        self._mirror = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self.update()


def read_mirror(path: Path) -> tuple[int | None, str]:
    """Step and phase that a process mirrored to ``path``; ``(None, "start")`` when it did not get that far."""
    try:
        step, phase = path.read_bytes().decode(errors="replace").split("\n", 1)
    except (OSError, ValueError):
        return None, "start"
    return int(step) if step else None, phase.strip()


status = Status()
"""The status of this process: ``status.update(step=5, phase="data")``."""

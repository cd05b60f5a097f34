"""One layout after the other, each in workers of its own, so that a crash or a hang is a row and not the end."""

import contextlib
import functools
import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crius.launch.environment import Placement
from crius.launch.local import run_workers
from crius.launch.report import log_path
from crius.signals import STOP_SIGNALS
from crius.tools.verify.worker import RESULT, Task

STOPPED = tuple(sorted(128 + number for number in STOP_SIGNALS))
"""Exit codes after a signal to this process."""


@dataclass(frozen=True)
class Outcome:
    """How a task ended.

    Attributes:
        result: what rank 0 wrote; None where the task failed.
        seconds: wall time.
        note: why it failed, and where to read more.
        code: exit code of the workers.
    """

    result: dict[str, Any] | None
    seconds: float
    note: str
    code: int


class Stopped(Exception):
    """A signal ended the verb.

    Args:
        code: its exit code.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def run(work: Callable[[Task, Placement], None], task: Task, num_ranks: int) -> Outcome:
    """Run ``work`` on ``num_ranks`` workers; what they and the launcher say stays in the logs.

    Raises:
        Stopped: by a signal.
    """
    begin = time.monotonic()
    (task.run_dir / RESULT).unlink(missing_ok=True)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = run_workers(functools.partial(work, task), num_ranks, task.run_dir)
    seconds = time.monotonic() - begin
    if code in STOPPED:
        raise Stopped(code)
    if code == 0:
        return Outcome(json.loads((task.run_dir / RESULT).read_text(encoding="utf-8")), seconds, "", 0)
    log = log_path(task.run_dir / "logs", 0)
    report = said.getvalue().strip()
    with log.open("a", encoding="utf-8") as file:
        file.write(report + "\n")
    headline = report.splitlines()[0] if report else f"exit code {code}"
    if seconds >= task.seconds:
        headline = f"nothing after {task.seconds} s"
    return Outcome(None, seconds, f"{headline}; see {log}", code)

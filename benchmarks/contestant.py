"""The contestant's side of a comparison by turns: it trains some steps on request, and waits in between.

No torch here: trainers other than Crius use this too.
"""

import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

_STATUS = Path("/proc/self/status")


def cpu_seconds() -> float:
    """CPU seconds of all threads of this process so far, in user and in kernel mode."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def page_faults() -> int:
    """Pages that the kernel gave this process so far without reading a disk: memory that was freed and taken again."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def peak_rss_mib() -> float:
    """Largest resident set of this process so far, in MiB.

    From Linux's VmHWM, which starts at zero in a new program; ``ru_maxrss`` starts at the value of the parent process.
    """
    try:
        return resident_bytes("VmHWM") / (1 << 20)
    except OSError:
        unit = 1 << 20 if sys.platform == "darwin" else 1 << 10  # of ru_maxrss: bytes on macOS, KiB elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def resident_bytes(field: str) -> int:
    """A size of this process as Linux counts it.

    Args:
        field: field of ``/proc/self/status``: VmRSS is resident now, VmHWM the largest so far.

    Raises:
        OSError: this system lacks the field.
    """
    size = re.search(rf"^{field}:\s*(\d+) kB$", _STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    if size is None:
        raise OSError(f"{_STATUS} has no {field}")
    return int(size[1]) * 1024


class Channel:
    """The line to the driver, which neither prints nor forks can disturb.

    Output of the process goes to its stderr from now on: stdout is for the answers.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        self._orders = os.fdopen(os.dup(0), "r", encoding="utf-8")
        self._answers = os.dup(1)  # forked workers have it too, but only one of them may write
        os.dup2(2, 1)

    def answer(self, words: Mapping[str, Any]) -> None:
        """Write one line of JSON."""
        os.write(self._answers, (json.dumps(words) + "\n").encode())

    def order(self) -> int:
        """Wait for the number of steps to train next; 0 if the comparison is over, or the driver is gone."""
        line = self._orders.readline()
        return int(line) if line.strip() else 0


class Driver(Protocol):
    """The process that gives the orders."""

    def answer(self, words: Mapping[str, Any]) -> None:
        """Send one answer."""

    def order(self) -> int:
        """Wait for the number of steps to train next; 0 ends the comparison."""


class Turns:
    """Counts the steps of a training loop, and pauses it between its turns.

    The CPU seconds of a turn include those since the turn before, so work that a process does ahead while it waits
    counts.

    Args:
        driver: a ``Channel``, or a replacement.
        warmup: steps before the contestant is ready, at least 1.
        facts: facts about the contestant for the driver; sent once.
        settle: waits for queued work of the steps before, as on a GPU.

    Attributes:
        losses: steps since the last answer with their losses, which become numbers between turns alone.
        began: step before the first one of this turn.
    """

    def __init__(
        self, driver: Driver, warmup: int, facts: Mapping[str, Any], settle: Callable[[], None] = lambda: None
    ) -> None:
        self._driver = driver
        self._warmup = warmup
        self._facts = facts
        self._settle = settle
        self.losses: list[tuple[int, SupportsFloat]] = []
        self.began = self._step = self._end = 0
        self._wall = self._cpu = 0.0
        self._faults = 0

    def after_step(self, loss: SupportsFloat | None = None) -> bool:
        """Count one more step, and wait for the next turn if it was the last step of a turn.

        Args:
            loss: of the step; None if ``losses`` has it already, or nobody knows it.

        Returns:
            Whether to continue training.
        """
        self._step += 1
        if loss is not None:
            self.losses.append((self._step, loss))
        if self._step not in (self._warmup, self._end):
            return True
        self._settle()
        wall = time.perf_counter() - self._wall
        cpu = cpu_seconds()
        faults = page_faults()
        if self._step == self._warmup:
            answer = {"ready": True, **self._facts}
        else:
            times = {"wall_seconds": wall, "cpu_seconds": cpu - self._cpu, "page_faults": faults - self._faults}
            answer = {"steps": self._step - self.began, **times}
        losses = [(step, float(loss)) for step, loss in self.losses]
        self.losses.clear()
        self._driver.answer({**answer, "losses": losses, "peak_rss_mib": peak_rss_mib()})
        self._cpu = cpu
        self._faults = faults
        asked = self._driver.order()
        self.began = self._step
        self._end = self._step + asked
        self._wall = time.perf_counter()
        return asked > 0

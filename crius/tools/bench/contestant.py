"""The side of a contestant in a comparison by turns: trains some steps when it is told to, and waits in between.

No torch here: trainers that are not Crius use this too.
"""

import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

_STATUS = Path("/proc/self/status")


def cpu_seconds() -> float:
    """CPU time of all threads of this process so far, in user and in kernel mode."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def page_faults() -> int:
    """Pages that the kernel had to give this process so far without reading a disk: memory freed and taken again."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def peak_rss_mib() -> float:
    """Largest resident set of this process so far, in MiB.

    Of Linux's VmHWM, which starts anew with a program; ``ru_maxrss`` begins with that of the process that started it.
    """
    try:
        return resident_bytes("VmHWM") / (1 << 20)
    except OSError:
        unit = 1 << 20 if sys.platform == "darwin" else 1 << 10  # of ru_maxrss: bytes there, KiB elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def resident_bytes(field: str) -> int:
    """A size of this process as Linux counts it.

    Args:
        field: of ``/proc/self/status``: VmRSS is resident now, VmHWM the largest so far.

    Raises:
        OSError: this system has no such field.
    """
    size = re.search(rf"^{field}:\s*(\d+) kB$", _STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    if size is None:
        raise OSError(f"{_STATUS} has no {field}")
    return int(size[1]) * 1024


class Channel:
    """The line to the driver, kept where neither prints nor forks disturb it.

    What the process prints from now on goes to its stderr: stdout belongs to the answers.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        self._orders = os.fdopen(os.dup(0), "r", encoding="utf-8")
        self._answers = os.dup(1)  # forked workers have it too; only one of them may write
        os.dup2(2, 1)

    def answer(self, words: Mapping[str, Any]) -> None:
        """Say one line of JSON."""
        os.write(self._answers, (json.dumps(words) + "\n").encode())

    def order(self) -> int:
        """Wait for the number of steps to train next; 0 where the comparison is over, or the driver is gone."""
        line = self._orders.readline()
        return int(line) if line.strip() else 0


class Driver(Protocol):
    """Who gives the orders."""

    def answer(self, words: Mapping[str, Any]) -> None:
        """Say one answer."""

    def order(self) -> int:
        """Wait for the number of steps to train next; 0 ends the comparison."""


class Turns:
    """Counts the steps of a training loop, and holds it between its turns.

    CPU seconds of a turn include those since the turn before: what a process prepares while it waits counts.

    Args:
        driver: a ``Channel``, or what stands for one.
        warmup: steps before the contestant is ready, at least 1.
        facts: about the contestant, for the driver; said once.
        settle: waits for what the steps before have queued, as on a GPU.
    """

    def __init__(
        self, driver: Driver, warmup: int, facts: Mapping[str, Any], settle: Callable[[], None] = lambda: None
    ) -> None:
        self._driver, self._warmup, self._facts, self._settle = driver, warmup, facts, settle
        self._step = self._end = 0
        self._asked = 0
        self._began = self._cpu = 0.0
        self._faults = 0

    def after_step(self, losses: Callable[[], list[tuple[int, float]]]) -> bool:
        """Note one more step, and wait for the next turn where this was the last of one.

        Args:
            losses: the steps that were reported since the last call of it, with their losses; called between turns.

        Returns:
            Whether to train on.
        """
        self._step += 1
        if self._step not in (self._warmup, self._end):
            return True
        self._settle()
        wall, cpu, faults = time.perf_counter() - self._began, cpu_seconds(), page_faults()
        if self._step == self._warmup:
            answer = {"ready": True, "losses": losses(), **self._facts}
        else:
            times = {"wall_seconds": wall, "cpu_seconds": cpu - self._cpu, "page_faults": faults - self._faults}
            answer = {"steps": self._asked, **times, "losses": losses()}
        self._driver.answer({**answer, "peak_rss_mib": peak_rss_mib()})
        self._cpu, self._faults = cpu, faults
        self._asked = self._driver.order()
        self._end = self._step + self._asked
        self._began = time.perf_counter()
        return self._asked > 0

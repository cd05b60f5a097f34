"""The real job with restarts, in a folder of its own: started, killed where a verb wants it, watched until its end."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crius.config.run import RunConfig
from crius.errors import ConfigError
from crius.launch.crew import CrewAttempt, Supervision
from crius.launch.environment import FAULTS, Placement
from crius.launch.local import run_workers
from crius.launch.lock import run_lock
from crius.launch.stop import PREEMPTED
from crius.run_file import open_log
from crius.tools.faults.planted import PlantedFaults
from crius.tools.verify.equality import Equality, compare
from crius.tools.verify.run import STOPPED
from crius.tools.verify.worker import speak_to
from crius.train import job
from crius.train.reports import RECOVERIES
from crius.train.tools import Tools
from crius.untrusted import parse_json, read_below, text_named

UNDISTURBED = "undisturbed"
KILLED = "killed"
"""Folders of the two runs."""
CONSOLE = "console.log"
"""File in the folder of the logs with the console output of a run."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """Course of a run.

    Attributes:
        config: the run.
        num_ranks: ranks of every attempt, unless ``assignment`` gives another number.
        folder: folder of the run; it must not exist.
        seconds: time of all attempts together.
        restarts: number of restarts: as many as planned kills.
        threads: threads of a rank; None shares the cores out.
        assignment: gives config and number of ranks of an attempt, and faults in the grammar of ``CRIUS_FAULT`` that
            are planted in addition to the user's; None: the same for all, without faults.
        on_poll, on_failure: see ``Supervision``.
    """

    config: RunConfig
    num_ranks: int
    folder: Path
    seconds: float
    restarts: int = 0
    threads: int | None = None
    assignment: Callable[[int], tuple[RunConfig, int, str]] | None = None
    on_poll: Callable[[int, Mapping[int, int]], None] = lambda number, pids: None
    on_failure: Callable[[CrewAttempt], None] = lambda attempt: None


@dataclass(frozen=True, kw_only=True)
class Life:
    """Outcome of a run.

    Attributes:
        folder: folder of the run.
        seconds: wall time over all attempts.
        failures: failed attempts, in order.
        trouble: why it did not reach its end, as its last output; empty if it did.
        processes_left: processes of the run and their children that outlived it; None if this system cannot tell.
    """

    folder: Path
    seconds: float
    failures: tuple[CrewAttempt, ...]
    trouble: str
    processes_left: tuple[int, ...] | None

    @property
    def summary(self) -> dict[str, Any]:
        """``summary.json`` of a run that reached its end."""
        found: dict[str, Any] = parse_json(read_below(self.folder, "summary.json"))
        return found

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """Records of ``crius.train.reports``, one for each failure that was followed by a new step."""
        path = self.folder / "logs" / RECOVERIES
        return [parse_json(line) for line in text_named(path).splitlines()] if path.exists() else []

    def kills(self) -> list[CrewAttempt]:
        """The attempts that ended by SIGKILL to one of their ranks."""
        return [attempt for attempt in self.failures if "SIGKILL" in attempt.cause]


@contextlib.contextmanager
def own_folder(folder: Path, verb: str) -> Iterator[None]:
    """Lock the folder of both runs for this process.

    Raises:
        ConfigError: another process has the folder; or one of the runs already exists, and would resume and prove
            nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with run_lock(folder, verb):
        for name in (UNDISTURBED, KILLED):
            if (folder / name).exists():
                raise ConfigError(
                    f"{folder / name} already exists.",
                    where="--job.run_dir",
                    why="both runs must start from step 0",
                    fix=f"give another folder, or rm -r {folder / UNDISTURBED} {folder / KILLED}",
                )
        yield


Findings = tuple[list[str], dict[str, Any], list[str], str]
"""Findings of a verb about its two runs: missing kills, fields of the JSON, lines before the differences, the
verdict."""


def compare_runs(
    verb: str,
    first: Course,
    second: Callable[[Life], Course],
    conclude: Callable[[Life, Life, Equality], Findings],
    not_ended: str,
    as_json: bool,
    tolerance: float = 0.0,
) -> int:
    """Run one undisturbed run and one with kills, and print whether they are the same.

    Args:
        verb: verb of ``crius verify``.
        first: course of the undisturbed run.
        second: gives the course of the killed run from the outcome of the first.
        conclude: called with both outcomes, and their equality.
        not_ended: text to print if the killed run does not reach its end; ``{kills}`` is the number of kills.
        as_json: print JSON instead of lines.
        tolerance: see ``equality.compare``.

    Returns:
        The exit code: 0; 1 if something differs, a kill did not happen, or a run did not reach its end.

    Raises:
        ConfigError: see ``own_folder``.
        SystemExit: a signal to this process ended a run.
    """
    folder = first.folder.parent
    with own_folder(folder, f"verify {verb}"):
        calm = live(first)
        if calm.trouble:
            return report_trouble("the undisturbed run failed", calm, as_json)
        killed = live(second(calm))
    if killed.trouble:
        return report_trouble(not_ended.format(kills=len(killed.kills())), killed, as_json)
    equality = compare(calm.folder, killed.folder, first.config.training.steps, tolerance)
    absent, fields, lines, verdict = conclude(calm, killed, equality)
    is_good = bool(equality) and not absent
    if as_json:
        document = {
            **equality.as_dict(),
            "verb": verb,
            "identical": is_good,
            "problems": [*equality.problems, *absent],
            **fields,
            "goodput": killed.summary["goodput"],
            "goodput_undisturbed": calm.summary["goodput"],
            "seconds": killed.seconds,
            "seconds_undisturbed": calm.seconds,
            "folder": str(folder),
        }
        lines = [json.dumps(document, indent=2)]
    else:
        lines += [*equality.lines(), verdict]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if is_good else 1


def costs(calm: Life, killed: Life) -> str:
    """Text about the undisturbed run's time and both goodputs."""
    goodputs = f"{killed.summary['goodput']:.1%} and {calm.summary['goodput']:.1%}"
    return f"{calm.seconds:.1f} s without; goodput {goodputs}; runs in {calm.folder.parent}"


def processes_left(life: Life) -> list[str]:
    """A line about processes that outlived the run; empty if there are none."""
    return [f"processes were left: {life.processes_left}"] if life.processes_left else []


def report_trouble(what: str, life: Life, as_json: bool) -> int:
    """Print why there is nothing to compare; returns the exit code."""
    text = json.dumps({"identical": False, "problems": [what, life.trouble]}, indent=2)
    sys.stdout.write((text if as_json else f"{life.trouble}\n{what}") + "\n")
    return 1


class _TooLate(Exception):
    """A run exceeded its time."""


def live(course: Course) -> Life:
    """Run to the end, with restarts, as ``crius train`` would. Its output goes to ``logs/console.log``.

    Raises:
        SystemExit: a signal to this process ended it.
    """
    began = time.monotonic()
    family = Family()
    failures: list[CrewAttempt] = []
    logs = course.folder / "logs"
    logs.mkdir(parents=True)
    said = io.StringIO()
    late = ""
    try:
        with contextlib.redirect_stderr(said):
            code = run_workers(
                _target(course, began, course.config, ""),
                course.num_ranks,
                course.folder,
                threads=course.threads,
                supervision=_supervision(course, began, family, failures),
            )
    except _TooLate:
        code = 1
        late = f"not at its end after {course.seconds:g} s (--timeout)"
    with open_log(logs / CONSOLE) as console:
        console.write(said.getvalue())
    if code in (PREEMPTED, *STOPPED):
        raise SystemExit(code if code in STOPPED else STOPPED[-1])
    trouble = late
    if code and not late:
        trouble = said.getvalue().strip().split("\n\n")[-1] or f"exit code {code}"
    return Life(
        folder=course.folder,
        seconds=time.monotonic() - began,
        failures=tuple(failures),
        trouble=f"{trouble}\nlogs: {logs}" if trouble else "",
        processes_left=family.left(),
    )


def _target(course: Course, began: float, config: RunConfig, faults: str) -> Callable[[Placement], None]:
    return functools.partial(run_rank, config, course.folder, began, faults)


def _supervision(course: Course, began: float, family: "Family", failures: list[CrewAttempt]) -> Supervision:
    """The supervision of a run that notes its processes in ``family``, and its failures in ``failures``."""

    def poll(number: int, pids: Mapping[int, int]) -> None:
        family.look(pids.values())
        if time.monotonic() - began > course.seconds:
            raise _TooLate
        course.on_poll(number, pids)

    def fail(attempt: CrewAttempt) -> None:
        failures.append(attempt)
        course.on_failure(attempt)

    def assign(number: int) -> tuple[Callable[[Placement], None], int]:
        assert course.assignment
        config, num_ranks, faults = course.assignment(number)
        return _target(course, began, config, faults), num_ranks

    restarts = course.restarts
    return Supervision(
        launch=dataclasses.replace(course.config.launch, max_restarts=restarts, max_failures_at_step=restarts + 1),
        watchdog=course.config.watchdog,
        assignment=assign if course.assignment else None,
        on_poll=poll,
        on_failure=fail,
    )


def run_rank(config: RunConfig, folder: Path, began: float, faults: str, placement: Placement) -> None:
    """One rank of the real job.

    Args:
        config: the run.
        folder: folder of the run.
        began: ``time.monotonic()`` at the start of its first attempt.
        faults: faults in addition to the user's.
        placement: place of this process.

    Raises:
        CriusError: any error of the training.
    """
    if placement.rank == 0:  # until now its output went to the console, which is the verb's
        assert placement.log_dir is not None
        speak_to(placement.log_dir / CONSOLE)
    if planted := ";".join(filter(None, (os.environ.get(FAULTS, ""), faults))):
        os.environ[FAULTS] = planted
    ours = PlantedFaults()
    job.run(config, folder, began, placement, tools=Tools(around=ours.around, prepare=ours.prepare))


class Family:
    """The processes of a run and their children, to detect processes that outlive the run. Needs /proc."""

    _SECONDS = 1.0
    """Seconds between two checks; children of workers, such as compilers, live long."""

    def __init__(self) -> None:
        self._seen: dict[int, str] = {}
        self._looked = -self._SECONDS

    def look(self, pids: Iterable[int]) -> None:
        """Record the processes ``pids`` and all their live children."""
        now = time.monotonic()
        waiting = list(pids)
        if now - self._looked < self._SECONDS and all(pid in self._seen for pid in waiting):
            return
        self._looked = now
        while waiting:
            pid = waiting.pop()
            self._seen[pid] = _start_of(pid)
            waiting += _children(pid)

    def left(self, seconds: float = 2.0) -> tuple[int, ...] | None:
        """Processes that still exist after at most ``seconds``; None without /proc."""
        if not Path("/proc/self/stat").exists():
            return None
        deadline = time.monotonic() + seconds
        while (left := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _alive(self) -> tuple[int, ...]:
        return tuple(pid for pid, start in self._seen.items() if start and _start_of(pid) == start)


def _start_of(pid: int) -> str:
    """Start of a process, in ticks since boot; empty if there is none, or only a zombie."""
    try:
        state, *fields = text_named(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


def _children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob(f"{pid}/task/*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in text_named(path).split()]
    return found

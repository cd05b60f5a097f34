"""The workers of one attempt. The launcher starts, polls and ends them together; each worker sets itself up and
reports."""

import contextlib
import faulthandler
import gc
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from io import TextIOWrapper
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from crius.config.operation import LaunchConfig, WatchdogConfig
from crius.host import usable_cores
from crius.launch.environment import Placement
from crius.launch.report import Blame, ErrorReport, Failure, leave, log_path, report_of, write_json, write_report
from crius.launch.status import mirror_path, status
from crius.launch.stop import PREEMPTED, ask_for_signal, heeded_signals
from crius.launch.witness import testify
from crius.redact import printable, redact
from crius.run_file import open_log
from crius.signals import QUESTIONS, STOP_SIGNALS


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """How the launcher supervises a run that can resume.

    Attributes:
        launch: number of restarts, and the time to save after a signal.
        watchdog: limits of the time that a rank may stay in one phase.
        assignment: gives the job of a rank and the number of ranks for an attempt; None: the same in each attempt.
        on_poll: called about ten times per second with the attempt and the process ids of its live ranks.
        on_failure: called with each failed attempt that counts, before the next one starts.
    """

    launch: LaunchConfig
    watchdog: WatchdogConfig
    assignment: Callable[[int], tuple[Callable[[Placement], None], int]] | None = None
    on_poll: Callable[[int, Mapping[int, int]], None] | None = None
    on_failure: "Callable[[CrewAttempt], None] | None" = None


@dataclass(frozen=True)
class CrewAttempt:
    """One start of all workers, and its end.

    Attributes:
        attempt: number of the attempt; 0 is the first start.
        started: start, in seconds of ``time.monotonic``.
        ended: end of the last worker, by the same clock.
        step: highest step that any rank began to compute; 0 before step 1.
        cause: headline of the failure that ended it.
        rank: rank that failed.
        phase: phase of that rank.
        failed: when the failure was noticed, by the same clock; other ranks may have continued until ``ended``.
    """

    attempt: int
    started: float
    ended: float
    step: int
    cause: str
    rank: int = 0
    phase: str = "start"
    failed: float = 0.0


@dataclass
class History:
    """The failed attempts of one command.

    Attributes:
        attempts: the attempts, in order.
        furthest: highest step of all attempts; -1 if there are none.
        in_a_row: failures since the last step that was newer than all before.
    """

    attempts: list[CrewAttempt] = field(default_factory=list)
    furthest: int = -1
    in_a_row: int = 0

    def add(self, attempt: CrewAttempt) -> None:
        """Count a failed attempt."""
        self.attempts.append(attempt)
        self.in_a_row = 1 if attempt.step > self.furthest else self.in_a_row + 1
        self.furthest = max(self.furthest, attempt.step)

    def write(self, scratch: Path) -> None:
        """Write ``attempts.json``."""
        write_json(scratch / "attempts.json", [asdict(attempt) for attempt in self.attempts])


def reason_to_stop(root: Failure, history: History, launch: LaunchConfig) -> str:
    """Why the run does not restart after ``root`` failed; empty if it does.

    A ``CriusError`` names something that the user must correct, so it would come again. A device that computes wrong
    numbers needs a person to look at it.
    """
    if root.blame is Blame.ERROR and root.rendered:
        return "it would fail again"
    if history.in_a_row >= launch.max_failures_at_step:
        where = f"at step {history.furthest}" if history.furthest > 0 else "before step 1"
        return f"{history.in_a_row} failures in a row {where} (launch.max_failures_at_step)"
    if len(history.attempts) > launch.max_restarts:
        return f"launch.max_restarts {launch.max_restarts}"
    return ""


# fork: a worker has the parent's torch from the start and begins in milliseconds. macOS's frameworks do not survive a
# fork.
_Process: type[BaseProcess] = (
    multiprocessing.get_context("fork").Process
    if sys.platform == "linux"
    else multiprocessing.get_context("spawn").Process
)
_POLL_SECONDS = 0.1
_PARENT_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Exit:
    """The end of a worker."""

    code: int
    """Minus the signal's number when a signal ended the process."""
    monotonic: float


class Crew:
    """The workers of an attempt, live and ended."""

    def __init__(self) -> None:
        self.alive: dict[int, BaseProcess] = {}
        self.exits: dict[int, Exit] = {}
        self.signalled_at = math.inf
        """When the launcher first sent a signal, in seconds of ``time.monotonic``."""

    def start(self, processes: Iterator[tuple[int, BaseProcess]]) -> None:
        """Start the workers, in the order of their ranks."""
        # a signal between a fork and the worker's own handlers would be recorded in a copy of this process's list
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, *QUESTIONS))
        try:
            for rank, process in processes:
                process.start()
                self.alive[rank] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def pids(self) -> dict[int, int]:
        """Process ids of the live workers, by rank."""
        return {rank: process.pid for rank, process in self.alive.items() if process.pid is not None}

    def poll(self, seconds: float = _POLL_SECONDS) -> None:
        """Wait a moment and record the workers that have ended."""
        connection.wait([process.sentinel for process in self.alive.values()], timeout=seconds)
        now = time.monotonic()
        for rank, process in list(self.alive.items()):
            # not by the sentinel: it stays silent while a process that the worker forked has its other end open
            if process.exitcode is not None:
                self.exits[rank] = Exit(process.exitcode, now)
                del self.alive[rank]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all live workers."""
        self.signalled_at = min(self.signalled_at, time.monotonic())
        for pid in self.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def failed(self) -> dict[int, Exit]:
        """Workers that ended with another code than done or saved."""
        return {rank: end for rank, end in self.exits.items() if end.code not in (0, PREEMPTED)}

    def end(self) -> None:
        """Kill all live workers, and wait for them."""
        while self.alive:
            self.send(signal.SIGKILL)
            self.poll()


def worker_processes(
    target: Callable[[Placement], None],
    num_ranks: int,
    log_dir: Path,
    folder: Path,
    threads: int | None,
    *,
    number: int = 0,
    takes_signals: bool = False,
) -> Iterator[tuple[int, BaseProcess]]:
    """The workers of one attempt, not started yet, by rank.

    Args:
        target: job of one rank.
        num_ranks: ranks of this host, which are all ranks of the run.
        log_dir: log folder of the run.
        folder: private folder of this attempt; its parent is the scratch folder of the command.
        threads: threads of each worker; None keeps the user's number, or else shares out the cores.
        number: number of the attempt.
        takes_signals: whether ``target`` sets the handlers of stop signals, see ``crius.launch.stop``; signals wait
            until it does.
    """
    num_threads = str(threads or os.environ.get("OMP_NUM_THREADS") or max(1, usable_cores() // num_ranks))
    loopback = "lo0" if sys.platform == "darwin" else "lo"  # nothing listens on a network
    for rank in range(num_ranks):
        meeting = f"file:{folder / 'store'}"
        placement = Placement(
            rank, rank, num_ranks, num_ranks, "local", meeting, log_dir, attempt=number, scratch=folder.parent
        )
        exports = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "OMP_NUM_THREADS": num_threads,
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or loopback,
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME") or loopback,
        }
        args = (target, placement, exports, folder, os.getpid(), takes_signals)
        yield rank, _Process(target=worker_main, args=args, name=f"rank-{rank}")


def worker_main(
    target: Callable[[Placement], None],
    placement: Placement,
    exports: Mapping[str, str],
    folder: Path,
    parent: int,
    takes_signals: bool,
) -> NoReturn:
    """Run ``target`` as one local worker and end the process.

    Args:
        target: the job. It must close what it opens: nothing (``atexit``, threads) runs after it.
        placement: place of this worker; ``log_dir`` is set.
        exports: environment variables to set.
        folder: private folder of this attempt. It gets the mirrored status and a second copy of the error report, which
            the launcher can read even if the disk of the run is full.
        parent: process id of the launcher.
        takes_signals: whether ``target`` sets the handlers of stop signals; signals wait until it does.
    """
    code = 1
    try:
        _end_with(parent)
        _reset_signals(takes_signals)
        gc.freeze()  # a collection writes to all objects, and so would copy the launcher's memory page by page
        _redirect(placement)
        os.environ.update(exports)
        testify(folder, placement.rank)
        status.mirror_to(mirror_path(folder, placement.rank))
        code, report = attempt(target, placement)
        if report is not None:
            write_report(report, folder)
    except BaseException:  # an error in these lines themselves; the launcher then prints that there is no report
        sys.stderr.write(printable(redact(traceback.format_exc())))
    finally:
        leave(code)


def attempt(target: Callable[[Placement], None], placement: Placement) -> tuple[int, ErrorReport | None]:
    """Call ``target`` and turn its end into an exit code.

    An exception is reported in ``placement.log_dir``: ``rank-N.error.json``, and the whole traceback in ``rank-N.log``.
    The exit code is 0, or the code of a SystemExit or CriusError, or 130 for KeyboardInterrupt, else 1.
    """
    assert placement.log_dir is not None
    try:
        target(placement)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, None
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0, None
        error: BaseException = stop  # sys.exit("some text")
    except BaseException as raised:  # torch's CheckpointException is not an Exception
        error = raised
    else:
        return 0, None
    report = report_of(error, placement.rank)
    write_report(report, placement.log_dir)
    with contextlib.suppress(OSError), open_log(log_path(placement.log_dir, placement.rank)) as log:
        log.write(printable(redact("".join(traceback.format_exception(error)))))
    return report.exit_code, report


def _end_with(parent: int) -> None:
    """End with the launcher, even if it is killed with SIGKILL."""
    asked_kernel = ask_for_signal(signal.SIGKILL)
    if os.getppid() != parent:  # the launcher ended before the line above
        os._exit(1)
    if not asked_kernel:
        threading.Thread(target=_watch, args=(parent,), name="crius-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    os._exit(1)


def _reset_signals(takes_signals: bool) -> None:
    for number in heeded_signals():  # the launcher's handlers are useless here
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes; the launcher passes it on
    if not takes_signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked while the launcher forked


def _redirect(placement: Placement) -> None:
    """Send the output of this process, also that of C code, to its log; rank 0 stays on the console."""
    assert placement.log_dir is not None
    if placement.rank != 0:
        log = os.open(log_path(placement.log_dir, placement.rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        # the old streams may write elsewhere than to 1 and 2 (a test runner's capture does)
        sys.stdout, sys.stderr = (
            os.fdopen(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
            for number in (1, 2)
        )
    elif isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # `crius train | tee` shows a step when it is done
    faulthandler.enable(file=2)  # a crash in C code leaves a Python traceback

"""Local workers: start them, keep them together, end them all, and say once why a run failed.

Output: rank 0 writes straight to the console, so that it knows whether that is a terminal, and what its C code writes
to stderr is seen; the job adds a logging handler for ``logs/rank-0.log``. The output of every other rank goes to
``logs/rank-N.log`` at file-descriptor level. A traceback goes to the log of its rank, also for rank 0.
"""

import contextlib
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from crius.errors import EnvironmentError
from crius.launch.environment import Placement
from crius.launch.report import (
    Blame,
    ErrorReport,
    Failure,
    failure_of_exit,
    failure_of_report,
    log_path,
    read_report,
    render,
    report_path,
    root_cause,
    write_json,
)
from crius.launch.status import read_mirror
from crius.launch.worker import HANDLED_SIGNALS, attempt, worker_main

PREEMPTED = 75
"""Exit code of a worker that was asked to stop and saved first: no failure."""

# fork: a worker has the parent's torch from the start and begins in milliseconds. macOS's frameworks do not survive it.
_Process: type[BaseProcess] = (
    multiprocessing.get_context("fork").Process
    if sys.platform == "linux"
    else multiprocessing.get_context("spawn").Process
)
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class _Stop:
    """A signal that the launcher caught, and when in seconds of ``time.monotonic``."""

    signal: signal.Signals
    monotonic: float


@dataclass(frozen=True)
class _Exit:
    code: int
    """Minus the signal's number when a signal ended the process."""
    monotonic: float


class _Crew:
    """The workers of a run, those that live and those that have ended."""

    def __init__(self) -> None:
        self.alive: dict[int, BaseProcess] = {}
        self.exits: dict[int, _Exit] = {}
        self.signalled_at = math.inf
        """When the launcher first sent a signal, in seconds of ``time.monotonic``."""

    def start(self, processes: Iterator[tuple[int, BaseProcess]]) -> None:
        # a signal that comes between a fork and the worker's own handlers would be noted in a copy of our list
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        try:
            for rank, process in processes:
                process.start()
                self.alive[rank] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> None:
        """Wait a moment and note who has ended."""
        connection.wait([process.sentinel for process in self.alive.values()], timeout=_POLL_SECONDS)
        now = time.monotonic()
        for rank, process in list(self.alive.items()):
            # not by the sentinel: it stays silent while a process that the worker forked holds its other end
            if process.exitcode is not None:
                self.exits[rank] = _Exit(process.exitcode, now)
                del self.alive[rank]

    def send(self, number: signal.Signals) -> None:
        self.signalled_at = min(self.signalled_at, time.monotonic())
        for process in self.alive.values():
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def failed(self) -> dict[int, _Exit]:
        return {rank: end for rank, end in self.exits.items() if end.code not in (0, PREEMPTED)}

    def end(self) -> None:
        while self.alive:
            self.send(signal.SIGKILL)
            self.poll()


def run_workers(
    target: Callable[[Placement], None],
    num_ranks: int,
    run_dir: Path,
    *,
    grace_seconds: float = 2.0,
    stop_seconds: float = 30.0,
    threads: int | None = None,
) -> int:
    """Run ``target`` in ``num_ranks`` processes of this host and wait for all of them.

    On Linux workers are forked: the caller may have imported torch, but must not have initialised CUDA or run a torch
    operation. A forked torch keeps the parent's thread count, so ``target`` calls
    ``torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))``. Elsewhere ``target`` must be picklable.

    The first rank that fails ends the run, and the last thing on stderr is one block about the root cause. SIGINT,
    SIGTERM and SIGUSR1 reach the workers as SIGTERM; a second one kills them. No worker outlives this process.

    Args:
        target: the job of one rank. It returns, raises, or leaves with ``SystemExit(75)`` for "preempted and saved".
        num_ranks: at least 1.
        run_dir: folder of the run; logs and error reports go to ``run_dir/logs``.
        grace_seconds: after a failure, time for the other ranks to report, and again to end after SIGTERM.
        stop_seconds: after a signal to this process, time for the workers to save and end.
        threads: ``OMP_NUM_THREADS`` of a worker; None keeps the user's, else the cores are shared out.

    Returns:
        0, 75 when all ranks left with it, 1 or the CriusError's code after a failure, 130 or 143 after a signal.

    Raises:
        EnvironmentError: ``run_dir`` cannot be written.
    """
    assert num_ranks >= 1
    log_dir = _prepare_logs(run_dir, 0)
    for stale in log_dir.glob("rank-*.error.json"):
        stale.unlink()
    scratch = Path(tempfile.mkdtemp(prefix="crius-"))
    crew = _Crew()
    try:
        with _caught_signals() as stops:
            crew.start(_processes(target, num_ranks, log_dir, scratch, threads))
            _supervise(crew, stops, grace_seconds, stop_seconds)
            return _conclude(crew, stops, scratch, log_dir)
    finally:
        crew.end()
        shutil.rmtree(scratch, ignore_errors=True)


def run_single(target: Callable[[Placement], None], placement: Placement, run_dir: Path) -> int:
    """Run ``target`` in this process, as the only rank or as one that torchrun or Slurm started.

    Errors are reported as ``run_workers`` does, every rank for itself; torchrun also gets its error file.
    The caller ends with ``crius.launch.worker.leave(code)`` when a rank of many failed: a normal exit can wait for
    peers that are gone.

    Returns:
        The exit code: 0, that of a CriusError or SystemExit, 130 after Ctrl-C, else 1.

    Raises:
        EnvironmentError: ``run_dir`` cannot be written.
    """
    log_dir = _prepare_logs(run_dir, placement.rank)
    report_path(log_dir, placement.rank).unlink(missing_ok=True)
    code, report = attempt(target, replace(placement, log_dir=log_dir))
    if report is not None:
        _report_to_torchrun(report, os.environ)
        _say(render([failure_of_report(report)], log_dir))
    return code


def _report_to_torchrun(report: ErrorReport, environ: Mapping[str, str]) -> None:
    """Write the file from which torchrun takes the error it shows, in the form its ``record`` decorator uses."""
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": "\n".join(report.traceback), "timestamp": str(int(report.wall))}
        text = report.rendered or f"{report.exception}: {report.message}"
        write_json(Path(path), {"message": {"message": text, "extraInfo": extra}})


def _prepare_logs(run_dir: Path, rank: int) -> Path:
    log_dir = run_dir / "logs"
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        log_path(log_dir, rank).open("a").close()
    except OSError as error:
        raise EnvironmentError(
            f"the logs of this run cannot be written to {log_dir}: {error.strerror}.",
            where="--job.run_dir",
            fix="name a folder that you may write: --job.run_dir DIR",
        ) from error
    return log_dir


def _processes(
    target: Callable[[Placement], None], num_ranks: int, log_dir: Path, scratch: Path, threads: int | None
) -> Iterator[tuple[int, BaseProcess]]:
    num_threads = str(threads or os.environ.get("OMP_NUM_THREADS") or max(1, _num_cores() // num_ranks))
    loopback = "lo0" if sys.platform == "darwin" else "lo"  # so that gloo listens on no network
    for rank in range(num_ranks):
        placement = Placement(rank, rank, num_ranks, num_ranks, "local", f"file:{scratch / 'store'}", log_dir)
        exports = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "OMP_NUM_THREADS": num_threads,
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or loopback,
        }
        args = (target, placement, exports, scratch, os.getpid())
        yield rank, _Process(target=worker_main, args=args, name=f"rank-{rank}")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[_Stop]]:
    """The list that the signals to this process go to, instead of ending it."""
    stops: list[_Stop] = []

    def note(number: int, frame: FrameType | None) -> None:
        stops.append(_Stop(signal.Signals(number), time.monotonic()))

    before = {number: signal.signal(number, note) for number in HANDLED_SIGNALS}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _supervise(crew: _Crew, stops: list[_Stop], grace_seconds: float, stop_seconds: float) -> None:
    """Wait for the workers; after a failure or a signal make sure that all of them end."""
    term_at = kill_at = math.inf
    while crew.alive:
        crew.poll()
        now = time.monotonic()
        if stops and crew.signalled_at == math.inf:
            crew.send(signal.SIGTERM)
            kill_at = min(kill_at, now + stop_seconds)
        if crew.failed() and term_at == math.inf:
            term_at = now + grace_seconds
            kill_at = min(kill_at, now + 2 * grace_seconds)
        if now >= term_at and crew.signalled_at == math.inf:
            crew.send(signal.SIGTERM)
        if now >= kill_at or len(stops) > 1:
            crew.send(signal.SIGKILL)


def _conclude(crew: _Crew, stops: list[_Stop], scratch: Path, log_dir: Path) -> int:
    """Print what is to be said and choose the exit code."""
    failures = [_failure(crew, stops, rank, end, scratch) for rank, end in crew.failed().items()]
    root = root_cause(failures) if failures else None
    if not stops or (root is not None and root.blame is not Blame.ENDED and root.monotonic < stops[0].monotonic):
        if root is None:
            return max(end.code for end in crew.exits.values())
        _say(render(failures, log_dir))
        return root.exit_code
    if root is not None and root.blame is Blame.ERROR:  # such as a full disk while saving
        _say(render(failures, log_dir))
    by = stops[0].signal
    saved = all(end.code == PREEMPTED for end in crew.exits.values())
    _say(f"stopped by {by.name}" + (", saved first" if saved else ""))
    # a script may start again what exits with 75, but not what a person stopped
    return PREEMPTED if saved and by is not signal.SIGINT else 128 + by


def _failure(crew: _Crew, stops: list[_Stop], rank: int, end: _Exit, scratch: Path) -> Failure:
    report = read_report(scratch, rank)
    if report is not None:
        failure = failure_of_report(report)
        ended = failure.monotonic > crew.signalled_at and not stops
    else:
        step_and_phase = read_mirror(scratch / f"rank-{rank}.status")
        failure = failure_of_exit(rank, end.code, step_and_phase, end.monotonic)
        # `timeout`, a container's stop and the like send their signal to the workers as well as to us
        ended = end.monotonic > crew.signalled_at or (bool(stops) and -end.code in HANDLED_SIGNALS)
    return replace(failure, blame=Blame.ENDED) if ended else failure


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()

"""Local workers: starts them, supervises them, restarts them, ends them all, and reports once why a run failed.

Output: rank 0 writes straight to the console, so that it knows whether that is a terminal, and so that the output of
its C code to stderr is visible; the job adds a logging handler for ``logs/rank-0.log``. The output of every other rank
goes to ``logs/rank-N.log`` at file-descriptor level. A traceback goes to the log of its rank, also for rank 0.
"""

import contextlib
import fcntl
import functools
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from crius.config.operation import WatchdogConfig
from crius.errors import EnvironmentError
from crius.launch.crew import Crew, CrewAttempt, Exit, History, Supervision, attempt, reason_to_stop, worker_processes
from crius.launch.environment import Placement
from crius.launch.report import (
    Blame,
    Failure,
    failure_of_exit,
    failure_of_report,
    log_path,
    read_report,
    render,
    report_path,
    report_to_torchrun,
    root_cause,
    say,
)
from crius.launch.status import Heartbeat, mirror_path, read_mirror
from crius.launch.stop import PREEMPTED, Stop, caught_signals, messenger, tell_stop_signal
from crius.launch.watchdog import Hang, Watch, answer, hang_error, sentry
from crius.launch.witness import caught_questions, is_asked
from crius.run_file import is_private_folder, open_log
from crius.signals import STOP_SIGNALS


@functools.cache
def warn_where_untested() -> None:
    """Print to stderr, once per process, that Crius is not tested on this system, if it is not."""
    if sys.platform != "linux":
        name = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
        sys.stderr.write(f"warning: Crius is tested on Linux; on {name} it is not\n")


_PREFIX = "crius-"
_OWNER = "owner"  # the launcher locks it as long as it lives; empty until then


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new private folder in ``TMPDIR`` while the context is open. Removes folders of launchers that were killed."""
    _collect()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    owner = os.open(folder / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # without locks or space nobody removes it later
            fcntl.flock(owner, fcntl.LOCK_EX)
            os.write(owner, str(os.getpid()).encode())
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(owner)


def _collect() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if is_private_folder(folder) and _is_orphan(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_orphan(folder: Path) -> bool:
    """Whether a launcher that is gone made ``folder``. Raises OSError if it lives, or if no launcher made it."""
    owner = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(owner).st_size > 0
    finally:
        os.close(owner)


@dataclass
class _Run:
    """One command: the state that its attempts share, and the present attempt.

    Attributes:
        target: job of one rank.
        grace_seconds: time for the other ranks to report after a failure.
        stop_seconds: time for the workers to save and end after a signal.
        threads: threads of a worker; None shares the cores out.
        stops: signals to this process to stop.
        asked: signals to this process that ask where the ranks are.
    """

    target: Callable[[Placement], None]
    num_ranks: int
    run_dir: Path
    scratch: Path
    grace_seconds: float
    stop_seconds: float
    threads: int | None
    supervision: Supervision | None
    stops: list[Stop]
    asked: list[int]
    history: History = field(default_factory=History)
    crew: Crew = field(default_factory=Crew)
    number: int = 0
    started: float = 0.0
    hang: Hang | None = None

    @property
    def log_dir(self) -> Path:
        return self.run_dir / "logs"

    @property
    def folder(self) -> Path:
        """Private folder of the attempt."""
        return self.scratch / f"attempt-{self.number}"

    def attempt(self) -> None:
        """Start the workers and wait until all have ended."""
        for stale in self.log_dir.glob("rank-*.error.json"):
            stale.unlink()
        with contextlib.suppress(OSError):
            self.log_dir.mkdir(parents=True, exist_ok=True)  # it may have been removed since the last attempt
        self.folder.mkdir()
        self.crew = Crew()
        self.started = time.monotonic()
        self.hang = None
        target = self.target
        num_ranks = self.num_ranks
        watch = None
        if self.supervision:
            if self.supervision.assignment:
                target, num_ranks = self.supervision.assignment(self.number)
            if self.supervision.watchdog.enable:
                watch = Watch(self.supervision.watchdog, self.started)
        processes = worker_processes(
            target,
            num_ranks,
            self.log_dir,
            self.folder,
            self.threads,
            number=self.number,
            takes_signals=self.supervision is not None,
        )
        self.crew.start(processes)
        self._supervise(watch)

    def _supervise(self, watch: Watch | None) -> None:
        """Wait for the workers; after a failure, a signal or a hang make sure that all of them end."""
        crew = self.crew
        term_at = math.inf
        kill_at = math.inf
        while crew.alive:
            crew.poll()
            now = time.monotonic()
            if self.supervision and self.supervision.on_poll:
                self.supervision.on_poll(self.number, crew.pids())
            if self.stops and crew.signalled_at == math.inf:
                tell_stop_signal(self.scratch, self.stops[0].signal)
                crew.send(messenger())
                kill_at = min(kill_at, now + self.stop_seconds)
            if crew.failed() and term_at == math.inf:
                term_at = now + self.grace_seconds
                # a worker that saves when asked to stop cannot do so without its peers: it is not asked
                kill_at = min(kill_at, term_at if self.supervision else term_at + self.grace_seconds)
            if now >= term_at and crew.signalled_at == math.inf:
                crew.send(signal.SIGKILL if self.supervision else signal.SIGTERM)
            if now >= kill_at or len(self.stops) > 1:
                crew.send(signal.SIGKILL)
            if not self.hang and (is_asked(self.folder, crew.alive) or self.asked):
                self.asked.clear()
                asks = watch or Watch(WatchdogConfig(), self.started)
                pids = crew.pids()
                found = asks.examine(pids, self.folder, self.beats(pids), wakes=False)
                answer(found, self.folder, self.run_dir / "incidents", "dump")
            if self.hang or self.stops or crew.failed() or watch is None:
                continue  # they are already ending, or nobody watches
            if watch.is_late(self.beats(crew.alive), now):
                witnesses = watch.examine(crew.pids(), self.folder, self.beats(crew.alive))
                self.hang = Hang(hang_error(witnesses), witnesses, self.folder)
                crew.send(signal.SIGKILL)

    def beats(self, ranks: Iterable[int]) -> dict[int, Heartbeat]:
        """Last heartbeat of each of ``ranks``."""
        return {rank: read_mirror(mirror_path(self.folder, rank)) for rank in ranks}

    def failures(self) -> list[Failure]:
        """The ranks that failed in this attempt."""
        return [self._failure(rank, end) for rank, end in self.crew.failed().items()]

    def _failure(self, rank: int, end: Exit) -> Failure:
        report = read_report(self.folder, rank)
        if report is not None:
            failure = failure_of_report(report)
            ended = failure.monotonic > self.crew.signalled_at and not self.stops
        else:
            beat = read_mirror(mirror_path(self.folder, rank))
            failure = failure_of_exit(rank, end.code, (beat.step, beat.phase), end.monotonic)
            # `timeout`, a container's stop and the like send their signal to the workers and to this process
            ended = end.monotonic > self.crew.signalled_at or (bool(self.stops) and -end.code in STOP_SIGNALS)
        return replace(failure, blame=Blame.ENDED) if ended else failure

    def can_go_on(self) -> bool:
        """Whether the run can restart; if so, the failure is reported, counted and written down."""
        failures = self.failures()
        if self.supervision is None or self.stops or not (failures or self.hang):
            return False
        root = self.hang.failure if self.hang else root_cause(failures)
        step = max((beat.step or 0 for beat in self.beats(self.crew.exits).values()), default=0)
        cause = f"rank {root.rank}: {root.headline.splitlines()[0]}"
        now = time.monotonic()
        ended = CrewAttempt(self.number, self.started, now, step, cause, root.rank, root.phase, root.monotonic)
        self.history.add(ended)
        self.history.write(self.scratch)
        if self.supervision.on_failure:
            self.supervision.on_failure(ended)
        if reason_to_stop(root, self.history, self.supervision.launch):
            return False
        say(self.hang.publish(self.run_dir / "incidents") if self.hang else render(failures, self.log_dir))
        self.number += 1
        say(f"restarting from the newest checkpoint ({self.number} of {self.supervision.launch.max_restarts})")
        shutil.rmtree(self.scratch / f"attempt-{self.number - 1}", ignore_errors=True)
        return True

    def conclude(self) -> int:
        """Print the final report and choose the exit code."""
        if self.hang:
            tries = self._tries(self.hang.failure)
            say(self.hang.publish(self.run_dir / "incidents") + (f"\n  {'tries':<6} {tries}" if tries else ""))
            return self.hang.error.exit_code
        failures = self.failures()
        stops = self.stops
        root = root_cause(failures) if failures else None
        if not stops or (root is not None and root.blame is not Blame.ENDED and root.monotonic < stops[0].monotonic):
            if root is None:
                return max(end.code for end in self.crew.exits.values())
            say(render(failures, self.log_dir, tries=self._tries(root)))
            return root.exit_code
        if root is not None and root.blame is Blame.ERROR:  # for example a full disk while saving
            say(render(failures, self.log_dir))
        by = stops[0].signal
        if all(end.code == 0 for end in self.crew.exits.values()):  # the signal came after the last step
            return 0
        saved = all(end.code == PREEMPTED for end in self.crew.exits.values())
        say(f"stopped by {by.name}" + (", saved first" if saved else ""))
        # a script may restart a run that exits with 75, but not a run that a person stopped
        return PREEMPTED if saved and by is not signal.SIGINT else 128 + by

    def _tries(self, root: Failure) -> str:
        """Number of starts of the run, and why it is not restarted; empty if it was started once."""
        if self.supervision is None or len(self.history.attempts) < 2:
            return ""
        reason = reason_to_stop(root, self.history, self.supervision.launch)
        return f"{len(self.history.attempts)}, given up: {reason}"


def run_workers(
    target: Callable[[Placement], None],
    num_ranks: int,
    run_dir: Path,
    *,
    grace_seconds: float = 2.0,
    stop_seconds: float = 30.0,
    threads: int | None = None,
    supervision: Supervision | None = None,
) -> int:
    """Run ``target`` in ``num_ranks`` processes of this host and wait for all of them.

    On Linux workers are forked: the caller may have imported torch, but must not have initialised CUDA or run a torch
    operation. A forked torch keeps the parent's thread count, so ``target`` calls
    ``torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))``. Elsewhere ``target`` must be picklable.

    The first rank that fails ends the attempt. Under ``supervision`` all ranks may then restart and continue from their
    newest checkpoint. The last output on stderr is one block about the root cause. SIGHUP, SIGINT, SIGTERM and SIGUSR1
    reach the workers as SIGTERM, with a note which signal it was; a second signal kills the workers. SIGUSR2, to this
    process or to a worker, asks where all ranks are; the ranks continue. No worker outlives this process.

    Args:
        target: job of one rank. It returns, raises, or leaves with ``SystemExit(75)`` for "preempted and saved".
        num_ranks: at least 1.
        run_dir: folder of the run; logs and error reports go to ``run_dir/logs``.
        grace_seconds: time for the other ranks to report after a failure, and without ``supervision`` also to end after
            SIGTERM.
        stop_seconds: time for the workers to save and end after a signal to this process; under ``supervision`` it is
            ``launch.grace_seconds``. Under ``supervision`` ``target`` calls ``catch_stop_signals``, and signals wait
            until then.
        threads: ``OMP_NUM_THREADS`` of a worker; None keeps the user's number, or else shares out the cores.
        supervision: restarts and the watchdog; None: one attempt, and a rank may hang for ever.

    Returns:
        0; 75 if all ranks left with it; 1 or the CriusError's code after a failure; 1 after a hang; 128 + number after
            a signal.

    Raises:
        EnvironmentError: ``run_dir`` cannot be written.
    """
    assert num_ranks >= 1
    warn_where_untested()
    _prepare_logs(run_dir, 0)
    if supervision:
        stop_seconds = supervision.launch.grace_seconds
    with caught_signals() as stops, caught_questions() as asked, scratch_folder() as scratch:
        seconds = grace_seconds, stop_seconds
        run = _Run(target, num_ranks, run_dir, scratch, *seconds, threads, supervision, stops, asked)
        try:
            run.attempt()
            while run.can_go_on():
                run.attempt()
            return run.conclude()
        finally:
            run.crew.end()


def run_single(
    target: Callable[[Placement], None], placement: Placement, run_dir: Path, watchdog: WatchdogConfig | None = None
) -> int:
    """Run ``target`` in this process, as the only rank or as a rank that torchrun or Slurm started.

    Errors are reported as by ``run_workers``, by every rank for itself; torchrun also gets its error file. If a rank of
    many failed, the caller ends with ``crius.launch.report.leave(code)``: a normal exit can wait for peers that are
    gone.

    Args:
        target: job of this rank.
        placement: its place.
        run_dir: folder of the run.
        watchdog: limits by which a thread of each rank watches the ranks of this host; it also reports where this rank
            is when SIGUSR2 asks. None: no watching. A process alone is not watched.

    Returns:
        The exit code: 0, or the code of a CriusError or SystemExit, or 130 after Ctrl-C, else 1.

    Raises:
        EnvironmentError: ``run_dir`` cannot be written.
    """
    if placement.rank == 0:
        warn_where_untested()
    log_dir = _prepare_logs(run_dir, placement.rank)
    report_path(log_dir, placement.rank).unlink(missing_ok=True)
    with sentry(watchdog, placement, run_dir) if watchdog else contextlib.nullcontext():
        code, report = attempt(target, replace(placement, log_dir=log_dir))
    if report is not None:
        report_to_torchrun(report, os.environ)
        say(render([failure_of_report(report)], log_dir))
    return code


def _prepare_logs(run_dir: Path, rank: int) -> Path:
    log_dir = run_dir / "logs"
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        open_log(log_path(log_dir, rank)).close()
    except OSError as error:
        raise EnvironmentError(
            f"the logs of this run cannot be written to {log_dir}: {error.strerror}.",
            where="--job.run_dir",
            fix="give a writable folder: --job.run_dir DIR",
        ) from error
    return log_dir

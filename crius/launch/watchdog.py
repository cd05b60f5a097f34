"""The watchdog: finds a rank that makes no progress, and reports which one, where it is, and what the others wait for.

It also reports this for a healthy run if a signal asks for it.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from crius.config.operation import WatchdogConfig
from crius.errors import HangError
from crius.launch.environment import Placement
from crius.launch.report import Blame, Failure, leave, report_of, report_to_torchrun, say, write_json, write_report
from crius.launch.status import ALONE_PHASES, PHASES, STEP_PHASES, Heartbeat, mirror_path, read_mirror, status
from crius.launch.witness import (
    Collective,
    ask,
    flight_path,
    forget,
    is_asked,
    pending_collective,
    process_start,
    process_state,
    read,
    record_stack,
    stack_path,
    threads_path,
    wait_for_answers,
    write_flight,
)
from crius.run_file import is_private_folder, write_whole
from crius.signals import QUESTIONS, STACKS
from crius.table import aligned
from crius.untrusted import read_named

_ANSWER_SECONDS = 1.0
_PAUSE_SECONDS = 3.0
"""Seconds without the launcher running that mean that it was stopped with its workers, as by Ctrl-Z: no rank hung
then."""
# lines of a stack on the screen; the report has all
_NUM_NEWEST = 3
_NUM_FRAMES = 12
HEADINGS = ("rank", "host", "process", "phase", "step", "seconds", "waits for")
_STATES = {"T": "stopped (SIGSTOP)", "t": "stopped by a debugger"}


def limit_seconds(beat: Heartbeat, config: WatchdogConfig) -> float:
    """Longest time of a rank in its present phase, in seconds."""
    if beat.phase in ("start", "load"):
        return config.startup_seconds
    if config.limit_seconds > 0:
        return config.limit_seconds
    return beat.limit_seconds if beat.phase in STEP_PHASES and beat.limit_seconds > 0 else config.startup_seconds


@dataclass(frozen=True, kw_only=True)
class Witness:
    """Facts about one rank of a run that hangs.

    Attributes:
        seconds: time in the phase.
        limit_seconds: longest time allowed in the phase.
        waits_for: rank that it needs to continue, by its own report.
        state: stopped (SIGSTOP) or the like; empty for a process that runs or waits.
        pending: collective that it waits in, if it reported one; a stopped process cannot.
        stack: lines of the main thread's stack, most recent call first; empty if it did not answer.
        threads: stacks of all its threads, most recent call last; empty if it did not answer.
    """

    rank: int
    host: str
    pid: int
    step: int | None
    phase: str
    seconds: float
    limit_seconds: float
    waits_for: int | None = None
    state: str = ""
    pending: Collective | None = None
    stack: tuple[str, ...] = ()
    threads: str = ""

    @property
    def place(self) -> str:
        """Phase and step."""
        return f"{self.phase} of step {self.step}" if self.step is not None else f"{self.phase}, before step 1"

    def row(self) -> tuple[str, ...]:
        """A row of the table with the headings ``HEADINGS``."""
        step = "-" if self.step is None else str(self.step)
        other = "" if self.waits_for is None else f"rank {self.waits_for}"
        waits = self.pending or self.state or other or ("none" if self.threads else "no answer")
        return str(self.rank), self.host, str(self.pid), self.phase, step, f"{self.seconds:.1f}", str(waits)

    def frames(self) -> tuple[str, ...]:
        """Frames of the main thread: the newest ones, then frames outside libraries, down to the job."""
        end = next((index for index, line in enumerate(self.stack) if "launch/crew.py" in line), len(self.stack))
        shown = [*self.stack[:_NUM_NEWEST], *(line for line in self.stack[_NUM_NEWEST:end] if not _is_library(line))]
        return tuple(shown[: min(end, _NUM_FRAMES)]) or ("  no answer",)


def _is_library(line: str) -> bool:
    return any(part in line for part in ("site-packages", "dist-packages", "/lib/python"))


def choose_culprit(witnesses: list[Witness]) -> Witness:
    """The rank that the others most likely wait for.

    A stopped process comes first. Else it is the rank that got least far: by step, by phase, then by collective. A rank
    that has entered no collective, or an earlier one of the same group, is behind the others, and so is a rank that
    does not report waiting for another rank. Else it is the rank that has been there longest.
    """

    def progress(witness: Witness) -> tuple[bool, int, int]:
        phase = PHASES.index(witness.phase) if witness.phase in PHASES else len(PHASES)
        return not witness.state, witness.step or 0, phase

    least = min(map(progress, witnesses))
    behind = [witness for witness in witnesses if progress(witness) == least]

    def waits(witness: Witness) -> tuple[bool, int]:
        first = witness.pending
        groups = {other.pending.group for other in behind if other.pending}
        return first is not None or witness.waits_for is not None, first.seq if first and len(groups) == 1 else 0

    return min(behind, key=lambda witness: (waits(witness), -witness.seconds, witness.rank))


@dataclass(frozen=True)
class Hang:
    """A run that hangs: the error, and the state of each rank."""

    error: HangError
    witnesses: list[Witness]
    folder: Path
    """Folder with the dumps of the flight recorder."""

    @property
    def failure(self) -> Failure:
        """The hang as a failure of the named rank; it counts as any other failure."""
        culprit = choose_culprit(self.witnesses)
        return Failure(
            rank=culprit.rank,
            step=culprit.step,
            phase=culprit.phase,
            headline=f"HangError: {self.error.what}",
            blame=Blame.SIGNAL,
            monotonic=time.monotonic(),
        )

    def publish(self, incidents: Path) -> str:
        """Write the whole report to ``hang-N.txt`` and ``hang-N.json`` and return the block to print."""
        return _publish(str(self.error), self.witnesses, self.folder, incidents, "hang")


def _publish(headline: str, witnesses: list[Witness], folder: Path, incidents: Path, name: str) -> str:
    number = next(number for number in range(10**6) if not (incidents / f"{name}-{number}.json").exists())
    text = incidents / f"{name}-{number}.txt"
    rows = [HEADINGS, *(witness.row() for witness in witnesses)]
    lines = [headline, *(f"  {line}" for line in aligned(rows, left=None))]
    stacks: dict[tuple[str, ...], list[int]] = {}
    for witness in witnesses:
        stacks.setdefault(witness.frames(), []).append(witness.rank)
    for frames, ranks in stacks.items():
        lines += [f"stack of rank {', '.join(map(str, ranks))}, most recent call first:", *frames]
    with contextlib.suppress(OSError):  # a full disk must not hide the report
        incidents.mkdir(parents=True, exist_ok=True)
        for witness in witnesses:
            dump = flight_path(folder, witness.rank)
            if dump.exists():
                shutil.copy(dump, incidents / f"{name}-{number}.{dump.name}")
        threads = [f"\nall threads of rank {witness.rank}\n{witness.threads}" for witness in witnesses]
        write_whole(text, "\n".join([*lines, *threads]) + "\n", is_private=True)
        write_json(incidents / f"{name}-{number}.json", [asdict(witness) for witness in witnesses])
    return "\n".join([*lines, f"report: {text} (all threads; the flight recorders are in the same folder)"])


class Watch:
    """Checks the heartbeats of one attempt.

    Args:
        config: the limits.
        started: start of the attempt, in seconds of ``time.monotonic``.
    """

    def __init__(self, config: WatchdogConfig, started: float) -> None:
        self._config = config
        self._from = self._looked = started
        self._was_late = False

    def is_late(self, beats: Mapping[int, Heartbeat], now: float) -> bool:
        """Whether a rank was past the limit of its phase at this call and the last one. Call it at each poll."""
        if now - self._looked > _PAUSE_SECONDS:
            self._from = now
        self._looked = now
        # twice, because a beat that is read while it is written means nothing
        was_late = self._was_late
        late = {rank for rank, beat in beats.items() if self._seconds(beat, now) > limit_seconds(beat, self._config)}
        works_alone = any(beat.phase in ALONE_PHASES for rank, beat in beats.items() if rank not in late)
        self._was_late = bool(late) and not works_alone
        return was_late and self._was_late

    def _seconds(self, beat: Heartbeat, now: float) -> float:
        return now - max(beat.since, self._from)

    def examine(
        self,
        pids: Mapping[int, int],
        folder: Path,
        beats: Mapping[int, Heartbeat],
        questions: Iterable[int] = QUESTIONS,
        *,
        wakes: bool = True,
    ) -> list[Witness]:
        """Ask all ranks where they are. Takes up to about 1.5 s.

        Args:
            pids: process ids of the live ranks.
            folder: folder of their answers.
            beats: their last heartbeats.
            questions: signals that ask them.
            wakes: whether to ask stopped ranks too. This wakes them, so the run may continue until it is ended.
        """
        now = time.monotonic()
        host = platform.node()
        states = {rank: _STATES.get(process_state(pid), "") for rank, pid in pids.items()}
        ask(pids, questions)
        wait_for_answers([rank for rank in pids if not states[rank]], folder, _ANSWER_SECONDS)
        stopped = [rank for rank in pids if wakes and states[rank] == _STATES["T"]]
        ask({rank: pids[rank] for rank in stopped}, (signal.SIGCONT,))  # it answers before it does anything else
        wait_for_answers(stopped, folder, _ANSWER_SECONDS / 2)
        return [
            Witness(
                rank=rank,
                host=host,
                pid=pid,
                step=beats[rank].step,
                phase=beats[rank].phase,
                seconds=self._seconds(beats[rank], now),
                limit_seconds=limit_seconds(beats[rank], self._config),
                waits_for=beats[rank].waits_for,
                state=states[rank],
                pending=None if states[rank] else pending_collective(flight_path(folder, rank)),
                stack=tuple(line for line in read(stack_path(folder, rank)).splitlines() if line.startswith(" ")),
                threads=read(threads_path(folder, rank)),
            )
            for rank, pid in sorted(pids.items())
        ]


def answer(witnesses: list[Witness], folder: Path, incidents: Path, name: str) -> None:
    """Print where the ranks are because a signal asked, and write it to ``NAME-N.txt`` and ``NAME-N.json``."""
    say(_publish("SIGUSR2 asks where the ranks are; they continue.", witnesses, folder, incidents, name))
    forget(folder, (witness.rank for witness in witnesses))


def hang_error(witnesses: list[Witness]) -> HangError:
    """The error of a run that hangs: the rank to look at, and the rank whose limit has passed."""
    culprit = choose_culprit(witnesses)
    late = max(witnesses, key=lambda witness: witness.seconds - witness.limit_seconds)
    state = f"{culprit.state} in" if culprit.state else "in"
    what = f"rank {culprit.rank} makes no progress: {state} {culprit.place} for {culprit.seconds:.1f} s."
    if culprit.waits_for is not None and all(witness.rank != culprit.waits_for for witness in witnesses):
        what = (
            f"rank {culprit.waits_for}, on another host, makes no progress: rank {culprit.rank} waits for it in "
            f"{culprit.place} for {culprit.seconds:.1f} s."
        )
    return HangError(
        what,
        where=f"host {culprit.host}, process {culprit.pid}",
        why=f"rank {late.rank} is in {late.place} for {late.seconds:.1f} s, "
        f"and the limit is {late.limit_seconds:.1f} s",
        fix="look at the stacks below; if the rank was working, raise --watchdog.limit_seconds or "
        "--watchdog.startup_seconds",
    )


_POLL_SECONDS = 0.2
_FOUND = "hang"  # the rank that creates it reports


@contextlib.contextmanager
def sentry(config: WatchdogConfig, placement: Placement, run_dir: Path) -> Iterator[None]:
    """Watch the ranks of this host while the context is open; the first rank that sees a hang reports it and ends all
    ranks.

    The ranks meet in a private folder of this host. If there cannot be one, a warning says that nobody watches. A
    process alone, or one that is not to be watched, only reports where it is when a signal asks.
    """
    try:
        folder = _private_folder(run_dir)
        pid_file = folder / f"rank-{placement.rank}.pid"
        record_stack(folder, placement.rank)
        status.mirror_to(mirror_path(folder, placement.rank))
        pid_file.write_text(str(os.getpid()))
    except OSError as error:
        sys.stderr.write(f"warning: rank {placement.rank} is not watched: {error}\n")
        yield
        return
    ended = threading.Event()
    args = (config, placement, run_dir, folder, ended)
    threading.Thread(target=_watch, args=args, name="crius-sentry", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        for path in folder.glob(f"rank-{placement.rank}.*"):
            path.unlink(missing_ok=True)
        if all(process_state(other) == "Z" for other in _pids(folder).values()):  # a killed rank leaves its files
            _remove(folder)


def _private_folder(run_dir: Path) -> Path:
    """A folder that the ranks of this host and this start share with nobody else.

    They have one parent: torchrun's agent, or Slurm's step daemon. The start time of the parent distinguishes it from
    an earlier process with the same number, and the counter distinguishes restarts.

    Raises:
        PermissionError: somebody else created it.
    """
    parent = os.getppid()
    start = (str(run_dir.absolute()), parent, process_start(parent), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    name = hashlib.sha256(repr(start).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"crius-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private_folder(folder):
        raise PermissionError(f"{folder} is not private to this user")
    return folder


def _watch(config: WatchdogConfig, placement: Placement, run_dir: Path, folder: Path, ended: threading.Event) -> None:
    watch = Watch(config, time.monotonic())
    own = {placement.rank: os.getpid()}
    incidents = run_dir / "incidents"
    while not ended.wait(_POLL_SECONDS):
        asked = is_asked(folder, own)
        if (folder / _FOUND).exists():  # checked after the search, because the rank that creates it asks the others
            write_flight(folder, placement.rank)
            return
        if asked:
            write_flight(folder, placement.rank)
            found = watch.examine(own, folder, {placement.rank: status}, (STACKS,), wakes=False)
            answer(found, folder, incidents, f"dump-rank-{placement.rank}")
        if not config.enable or placement.launcher == "single":
            continue
        pids = _pids(folder)
        beats = {rank: read_mirror(mirror_path(folder, rank)) for rank in pids}
        if watch.is_late(beats, time.monotonic()) and _is_first(folder):
            write_flight(folder, placement.rank)
            found = watch.examine(pids, folder, beats, (STACKS,), wakes=False)  # waking lets this process continue
            hang = Hang(hang_error(found), found, folder)
            say(hang.publish(incidents))
            report = report_of(hang.error, placement.rank)
            report_to_torchrun(report, os.environ)
            write_report(report, run_dir / "logs")
            for pid in pids.values():
                if pid != os.getpid():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            _remove(folder)
            leave(hang.error.exit_code)


def _is_first(folder: Path) -> bool:
    with contextlib.suppress(FileExistsError):
        (folder / _FOUND).touch(exist_ok=False)
        return True
    return False


def _pids(folder: Path) -> dict[int, int]:
    """Process ids of the live ranks of this host."""
    found = {}
    for path in folder.glob("rank-*.pid"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(read_named(path))
            os.kill(pid, 0)
            found[int(path.stem.removeprefix("rank-"))] = pid
    return found


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another rank may remove it too
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()

"""The error report of a rank, the choice of the root cause among ranks, and the end of a process."""

import contextlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

from crius.errors import CriusError
from crius.launch.status import status
from crius.redact import printable, redact
from crius.run_file import write_whole
from crius.untrusted import parse_json, read_named

_NUM_FRAMES = 10
_NUM_LINES = 10
_MESSAGE_LINES = 12  # errors of torch's C++ side have a page of stack after their first lines
_PEER_LOSS_TYPES = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "OSError")
_PEER_LOSS_WORDS = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|broken pipe|timed? ?out|gloo|nccl|socket|remote process exited",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """Contents of ``rank-N.error.json``, which a rank writes when an exception ends it."""

    rank: int
    step: int | None
    """Step that was being computed; None before the first step."""
    phase: str
    exception: str
    """Name of the exception's class."""
    message: str
    traceback: tuple[str, ...]
    """Lines of the last 10 frames."""
    monotonic: float
    """Time in seconds of ``time.monotonic``: comparable between the processes of one host."""
    wall: float
    """Time in seconds since 1970."""
    is_crius_error: bool
    exit_code: int
    rendered: str
    """The whole text of a CriusError; empty for other exceptions."""
    peer_loss: bool
    """Whether the end of another rank can cause such an error."""


def report_of(error: BaseException, rank: int) -> ErrorReport:
    """The report of ``error``, with the present step and phase of this process, without secrets."""
    frames = "".join(traceback.format_tb(error.__traceback__, limit=-_NUM_FRAMES)).splitlines()
    crius_error = error if isinstance(error, CriusError) else None
    return ErrorReport(
        rank=rank,
        step=status.step,
        phase=status.phase,
        exception=type(error).__name__,
        message=redact(crius_error.what if crius_error else str(error)),
        traceback=tuple(redact(line) for line in frames if line.strip(" ~^")),  # without the rows of ^^^^
        monotonic=time.monotonic(),
        wall=time.time(),
        is_crius_error=crius_error is not None,
        exit_code=crius_error.exit_code if crius_error else 1,
        rendered=redact(str(crius_error)) if crius_error else "",
        peer_loss=_is_peer_loss(error),
    )


def _is_peer_loss(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    names = {base.__name__ for base in type(error).__mro__[:2]}
    return bool(names.intersection(_PEER_LOSS_TYPES) and _PEER_LOSS_WORDS.search(str(error)))


def report_path(folder: Path, rank: int) -> Path:
    """Path of the report of ``rank`` in ``folder``."""
    return folder / f"rank-{rank}.error.json"


def log_path(folder: Path, rank: int) -> Path:
    """Path of the output of ``rank`` in ``folder``."""
    return folder / f"rank-{rank}.log"


def write_json(path: Path, record: object) -> None:
    """Write ``record`` so that a reader sees all of it or nothing. Errors of the disk are ignored."""
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(record, indent=1), is_private=True)


def write_report(report: ErrorReport, folder: Path) -> None:
    """Write ``report`` to its path in ``folder``."""
    write_json(report_path(folder, report.rank), asdict(report))


def read_report(folder: Path, rank: int) -> ErrorReport | None:
    """The report of ``rank`` in ``folder``; None if the rank left none."""
    try:
        record = parse_json(read_named(report_path(folder, rank)))
    except (OSError, ValueError):
        return None
    return ErrorReport(**record | {"traceback": tuple(record["traceback"])})


class Blame(IntEnum):
    """Likelihood of a failure to be the root cause; the likeliest has the smallest number."""

    SIGNAL = 0
    ERROR = 1
    ABORT = 2  # SIGABRT can be NCCL's watchdog, which ends a process because another process is gone
    PEER_LOSS = 3
    ENDED = 4  # by the launcher


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failed rank, as the launcher sees it."""

    rank: int
    step: int | None
    phase: str
    headline: str
    blame: Blame
    monotonic: float
    traceback: tuple[str, ...] = ()
    rendered: str = ""
    exit_code: int = 1


def failure_of_report(report: ErrorReport) -> Failure:
    """The failure that ``report`` describes."""
    lines = (f"{report.exception}: {report.message}" if report.message else report.exception).splitlines()
    if len(lines) > _MESSAGE_LINES:
        lines = [*lines[:_MESSAGE_LINES], f"... {len(lines) - _MESSAGE_LINES} more lines in the log"]
    return Failure(
        rank=report.rank,
        step=report.step,
        phase=report.phase,
        headline="\n".join(lines),
        blame=Blame.PEER_LOSS if report.peer_loss else Blame.ERROR,
        monotonic=report.monotonic,
        traceback=report.traceback[-_NUM_LINES:],
        rendered=report.rendered,
        exit_code=report.exit_code,
    )


def failure_of_exit(rank: int, exit_code: int, when: tuple[int | None, str], monotonic: float) -> Failure:
    """The failure of a rank that left no report; ``exit_code`` is minus the signal that ended it."""
    step, phase = when
    headline = f"exited with status {exit_code} and left no report"
    blame = Blame.ERROR
    if exit_code < 0:
        blame = Blame.ABORT if -exit_code == signal.SIGABRT else Blame.SIGNAL
        headline = f"killed by {_signal_name(-exit_code)}"
        if -exit_code == signal.SIGKILL:
            headline += " (out of memory killer?)"
    return Failure(rank=rank, step=step, phase=phase, headline=headline, blame=blame, monotonic=monotonic)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that most likely caused the others."""
    return min(failures, key=lambda failure: (failure.blame, failure.monotonic, failure.rank))


def render(failures: Sequence[Failure], log_dir: Path, *, tries: str = "") -> str:
    """The text block about the rank that failed, where and why; its last line has the other ranks.

    Args:
        failures: failures of one attempt.
        log_dir: log folder of the run.
        tries: number of starts, and why there is no further one; empty if there is nothing to report.
    """
    root = root_cause(failures)
    twins = [failure for failure in failures if _same(failure, root)]
    others = [failure for failure in failures if not _same(failure, root)]
    place = f"rank {root.rank} step {root.step}" if root.step is not None else f"rank {root.rank} before step 1"
    if root.rendered:
        lines = [root.rendered, f"  {'rank':<6} {_ranks(twins)}" + ("" if root.step is None else f", step {root.step}")]
    else:
        lines = [f"FAILED {place}: {root.headline}", *root.traceback, f"  {'phase':<6} {root.phase}"]
    if (root.step is not None or not root.rendered) and log_path(log_dir, root.rank).exists():
        lines.append(f"  {'log':<6} {log_path(log_dir, root.rank)}")
    if tries:
        lines.append(f"  {'tries':<6} {tries}")
    if not root.rendered:
        others += [failure for failure in twins if failure is not root]
    if others:
        lines.append("also failed: " + _folded(others, root))
    return "\n".join(lines)


def _same(failure: Failure, root: Failure) -> bool:
    return (failure.headline, failure.rendered, failure.blame) == (root.headline, root.rendered, root.blame)


def _ranks(failures: Sequence[Failure]) -> str:
    return ", ".join(str(rank) for rank in sorted(failure.rank for failure in failures))


def _folded(others: Sequence[Failure], root: Failure) -> str:
    groups: dict[str, list[Failure]] = {}
    for failure in sorted(others, key=lambda failure: failure.rank):
        groups.setdefault(_reason(failure, root), []).append(failure)
    return ", ".join(f"rank {_ranks(group)} ({reason})" for reason, group in groups.items())


def _reason(failure: Failure, root: Failure) -> str:
    if _same(failure, root):
        return "the same"
    if failure.blame is Blame.PEER_LOSS:
        return "lost their peer"
    if failure.blame is Blame.ENDED:
        at = "before step 1" if failure.step is None else f"at step {failure.step}"
        return f"ended by the launcher {at}, {failure.phase}"
    return failure.headline.splitlines()[0][:100]


def report_to_torchrun(report: ErrorReport, environ: Mapping[str, str]) -> None:
    """Write the file that torchrun reads the error from, in the form of its ``record`` decorator."""
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": "\n".join(report.traceback), "timestamp": str(int(report.wall))}
        text = report.rendered or f"{report.exception}: {report.message}"
        write_json(Path(path), {"message": {"message": text, "extraInfo": extra}})


def say(text: str) -> None:
    """Print a block to stderr."""
    with contextlib.suppress(OSError):  # the reader of a pipe is gone
        sys.stderr.write(f"\n{printable(redact(text))}\n")
        sys.stderr.flush()


def leave(code: int) -> NoReturn:
    """End this process at once with ``code``: output is flushed, but ``atexit``, threads and destructors do not run.

    Those can wait for ever for a peer that is gone, and then the launcher would never see the failure.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)

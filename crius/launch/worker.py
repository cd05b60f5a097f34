"""The inside of a worker process: what it sets up, how it reports an error, and how it leaves."""

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from crius.launch.environment import Placement
from crius.launch.report import ErrorReport, log_path, report_of, write_report
from crius.launch.status import mirror_path, status
from crius.launch.stop import heeded_signals
from crius.launch.witness import testify
from crius.redact import printable, redact
from crius.signals import STOP_SIGNALS

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PARENT_POLL_SECONDS = 0.5


def worker_main(
    target: Callable[[Placement], None],
    placement: Placement,
    exports: Mapping[str, str],
    folder: Path,
    parent: int,
    is_watched: bool,
    takes_signals: bool,
) -> NoReturn:
    """Run ``target`` as one local worker and end the process.

    Args:
        target: the job; what it opens it closes itself, nothing (``atexit``, threads) runs after it.
        placement: the place of this worker; ``log_dir`` is set.
        exports: environment variables to set.
        folder: private folder of this attempt: the mirrored status and a second copy of the error report, which the
            launcher reads even when the disk of the run is full.
        parent: process id of the launcher.
        is_watched: the launcher may ask where this process hangs.
        takes_signals: ``target`` says what the stop signals do; they wait until it does.
    """
    code = 1
    try:
        _end_with(parent)
        _reset_signals(takes_signals)
        gc.freeze()  # a collection writes to all that it looks at: it would copy the launcher's memory, page by page
        _redirect(placement)
        os.environ.update(exports)
        if is_watched:
            testify(folder, placement.rank)
        status.mirror_to(mirror_path(folder, placement.rank))
        code, report = attempt(target, placement)
        if report is not None:
            write_report(report, folder)
    except BaseException:  # an error in these lines themselves; the launcher then says that no report was left
        sys.stderr.write(printable(redact(traceback.format_exc())))
    finally:
        leave(code)


def attempt(target: Callable[[Placement], None], placement: Placement) -> tuple[int, ErrorReport | None]:
    """Call ``target`` and turn its end into an exit code.

    An exception is reported in ``placement.log_dir``: ``rank-N.error.json``, and the whole traceback in ``rank-N.log``.
    The exit code is 0, that of a SystemExit or CriusError, 130 for KeyboardInterrupt, else 1.
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
    except BaseException as raised:  # torch's CheckpointException is no Exception
        error = raised
    else:
        return 0, None
    report = report_of(error, placement.rank)
    write_report(report, placement.log_dir)
    with contextlib.suppress(OSError), log_path(placement.log_dir, placement.rank).open("a", encoding="utf-8") as log:
        log.write(printable(redact("".join(traceback.format_exception(error)))))
    return report.exit_code, report


def leave(code: int) -> NoReturn:
    """End this process at once with ``code``: flushed, but without ``atexit``, threads and destructors.

    Those can wait for ever on a peer that is gone, and then the launcher above would never see the failure.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _end_with(parent: int) -> None:
    """Never outlive the launcher, not even when it is killed with SIGKILL."""
    asked_kernel = sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
    if not asked_kernel:
        threading.Thread(target=_watch, args=(parent,), name="crius-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    os._exit(1)


def _reset_signals(takes_signals: bool) -> None:
    for number in heeded_signals():  # the launcher's handlers are no use here
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the launcher hands it on
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
        # what stood here may write somewhere else than to 1 and 2 (a test runner's capture does)
        sys.stdout, sys.stderr = (
            open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
            for number in (1, 2)
        )
    elif isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # `crius train | tee` shows a step when it is done
    faulthandler.enable(file=2)  # a crash in C code leaves a Python traceback

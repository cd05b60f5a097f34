"""Requests to stop a run: a signal that the launcher records and passes on, and that a worker records for its loop."""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from crius.signals import STACKS, STOP_SIGNALS
from crius.untrusted import read_below

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MESSENGERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

PREEMPTED = 75
"""Exit code of a process that was asked to stop and saved first; not a failure."""

STOPPED = (PREEMPTED, *(128 + number for number in STOP_SIGNALS))
"""Exit codes of a run that was asked to stop."""

ECHO_SECONDS = 1.0
"""Seconds in which a second signal is an echo: a signal to a whole process group comes again from the launcher, which
got it too and passes it on."""

LAUNCHER_ECHO_SECONDS = 0.25
"""Seconds in which two signals are one request: ``timeout`` sends its signal to its child and then to the whole
group."""

_UNWIND_SECONDS = 2.0


@dataclass(frozen=True)
class Stop:
    """A signal that the launcher caught, with its time in seconds of ``time.monotonic``."""

    signal: signal.Signals
    monotonic: float


def ask_for_signal(number: signal.Signals) -> bool:
    """Have the kernel send ``number`` to this process when its parent ends, also by SIGKILL. False: it cannot."""
    return sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) == 0


class StopRequest:
    """The stop signals of this process so far.

    Attributes:
        number: number of the first signal; None before it came.
        monotonic: time of it, in seconds of ``time.monotonic``; 0.0 before it came.
        ends: whether a signal ends this process at once, by SystemExit: nothing can be lost yet, and no peer waits.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.monotonic = 0.0
        self.ends = False

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """While this is open, a signal ends this process, also one that came before."""
        self.ends = True
        try:
            self.heed()
            yield
        finally:
            self.ends = False

    @contextlib.contextmanager
    def ending_soon(self) -> Iterator[None]:
        """As ``ending``, and within 2 s where C++ code waits, so that no handler of Python's runs. Nothing may fork.

        Python writes each signal to a socket at once, and a thread reads it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        is_over = threading.Event()
        reader, writer = socket.socketpair()
        writer.setblocking(False)

        def watch() -> None:
            with reader:
                while numbers := reader.recv(1):
                    if numbers[0] in STOP_SIGNALS and not is_over.wait(_UNWIND_SECONDS):
                        os._exit(_code_of_early_stop(numbers[0]))

        threading.Thread(target=watch, daemon=True).start()
        before = signal.set_wakeup_fd(writer.fileno())
        try:
            with self.ending():
                yield
        finally:
            is_over.set()
            signal.set_wakeup_fd(before)
            writer.close()

    def heed(self) -> None:
        """End this process if it should end and a signal came."""
        if self.ends and self.number is not None:
            raise SystemExit(_code_of_early_stop(self.number))


def heeded_signals() -> list[signal.Signals]:
    """The stop signals that this process does not ignore: ``nohup``, or a shell's background job, may ignore some."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def messenger() -> signal.Signals:
    """The signal that passes a stop signal on to workers, which ignore the same signals as this process."""
    heeded = heeded_signals()
    return next((number for number in _MESSENGERS if number in heeded), signal.SIGTERM)


@contextlib.contextmanager
def caught_signals(clock: Callable[[], float] = time.monotonic) -> Iterator[list[Stop]]:
    """Collect the stop signals to this process in the list instead of ending it. An ignored signal stays ignored."""
    stops: list[Stop] = []

    def note(number: int, frame: FrameType | None) -> None:
        now = clock()
        if not stops or now - stops[-1].monotonic > LAUNCHER_ECHO_SECONDS:
            stops.append(Stop(signal.Signals(number), now))

    before = {number: signal.signal(number, note) for number in heeded_signals()}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def catch_stop_signals(*, has_launcher: bool = False, scratch: Path | None = None) -> StopRequest:
    """Record the first stop signal in the returned object instead of ending by it. Call it before anything slow.

    A second signal, more than ``ECHO_SECONDS`` later, ends this process at once with ``128 + number``. Ignored signals,
    such as SIGINT in a local worker or in a background job, stay ignored. Only the main thread can catch signals: in
    another thread none is caught.

    Args:
        has_launcher: whether Crius's own launcher started this process. It passes signals on and kills after a second
            signal, so this process only ever records the first.
        scratch: folder where that launcher says which signal it passes on, see ``tell_stop_signal``.
    """
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if request.number is None:
            request.number = _told(scratch) or number
            request.monotonic = now
            request.heed()
        elif not has_launcher and now - request.monotonic > ECHO_SECONDS:
            os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        return request
    for number in heeded_signals():
        signal.signal(number, note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # they are blocked when a worker is forked
    return request


def tell_stop_signal(scratch: Path, number: signal.Signals) -> None:
    """Write to ``scratch`` which signal the one of ``messenger`` stands for."""
    with contextlib.suppress(OSError):
        (scratch / "stop").write_text(str(int(number)))


def _told(scratch: Path | None) -> int:
    try:
        return int(read_below(scratch, "stop")) if scratch else 0
    except (OSError, ValueError):
        return 0


def _code_of_early_stop(number: int, before: str = "the ranks had met") -> int:
    """Say that nothing is lost, since the signal came early. Returns the exit code."""
    name = signal.Signals(number).name
    with contextlib.suppress(OSError, RuntimeError):  # the terminal is gone, or a line is being written
        sys.stderr.write(f"\nstopped by {name} before {before}; nothing that was saved has changed\n")
        sys.stderr.flush()
    return 128 + number if number == signal.SIGINT else PREEMPTED


def leave_on_stop_signals() -> None:
    """Let stop signals end this process as if it had saved: nothing can be lost yet.

    The exit code is ``PREEMPTED``, after SIGINT 130. Ignored signals stay ignored. Call it in the main thread.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        os._exit(_code_of_early_stop(number, "anything was started"))  # an import may swallow an exception

    for number in heeded_signals():
        signal.signal(number, leave)
    signal.signal(STACKS, signal.SIG_IGN)  # it asks what a run does, but the run has not begun


def ignore_stop_signals() -> None:
    """Ignore stop signals once the exit code is known: a process with torch takes seconds to leave."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)

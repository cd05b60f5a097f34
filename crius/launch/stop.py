"""The wish that a run ends: a signal that the launcher notes and hands on, and that a worker notes for its loop."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from crius.signals import STACKS, STOP_SIGNALS

_MESSENGERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

PREEMPTED = 75
"""Exit code of a process that was asked to stop and saved first: no failure."""

STOPPED = (PREEMPTED, *(128 + number for number in STOP_SIGNALS))
"""Exit codes of a run that was asked to stop."""

ECHO_SECONDS = 1.0
"""A signal to a whole process group comes a second time from the launcher, which got it too and hands it on."""

LAUNCHER_ECHO_SECONDS = 0.25
"""``timeout`` sends its signal to its child and then to the whole group: two signals, but one wish."""


@dataclass(frozen=True)
class Stop:
    """A signal that the launcher caught, and when in seconds of ``time.monotonic``."""

    signal: signal.Signals
    monotonic: float


class StopRequest:
    """What the stop signals of this process said so far.

    Attributes:
        number: the first signal; None while there was none.
        monotonic: when it came, in seconds of ``time.monotonic``; 0.0 while there was none.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.monotonic = 0.0


def heeded_signals() -> list[signal.Signals]:
    """The stop signals that this process does not ignore: ``nohup``, or a shell for a background job, may say so."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def messenger() -> signal.Signals:
    """The signal that hands a stop signal on to workers, which ignore what this process ignores."""
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
    """Note the first of the stop signals in the returned object instead of dying of it.

    A second one, more than ``ECHO_SECONDS`` later, ends this process at once with ``128 + number``. What is ignored,
    such as SIGINT in a local worker or in a background job, stays ignored. Only the main thread can catch signals: in
    another one nothing is caught.

    Args:
        has_launcher: Crius' own launcher started this process. It hands signals on, and it is the one that kills
            after a second signal, so that this process only ever notes the first.
        scratch: where that launcher says which signal it hands on, see ``tell_stop_signal``.
    """
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if request.number is None:
            request.number, request.monotonic = _told(scratch) or number, now
        elif not has_launcher and now - request.monotonic > ECHO_SECONDS:
            os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        return request
    for number in heeded_signals():
        signal.signal(number, note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # a worker is forked with them blocked
    return request


def tell_stop_signal(scratch: Path, number: signal.Signals) -> None:
    """Say in ``scratch`` which signal the one that ``messenger`` names stands for."""
    with contextlib.suppress(OSError):
        (scratch / "stop").write_text(str(int(number)))


def _told(scratch: Path | None) -> int:
    try:
        return int((scratch / "stop").read_text()) if scratch else 0
    except (OSError, ValueError):
        return 0


def leave_on_stop_signals() -> None:
    """Let the stop signals end this process as one that saved: there is nothing yet that could be lost.

    With ``PREEMPTED``, after SIGINT with 130. What is ignored stays ignored. Call it in the main thread.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        name = signal.Signals(number).name
        with contextlib.suppress(OSError, RuntimeError):  # a terminal that is gone, a line that is being written
            sys.stderr.write(f"\nstopped by {name} before anything was started; all that was saved is as it was\n")
            sys.stderr.flush()
        os._exit(128 + number if number == signal.SIGINT else PREEMPTED)  # an import may swallow an exception

    for number in heeded_signals():
        signal.signal(number, leave)
    signal.signal(STACKS, signal.SIG_IGN)  # it asks what a run is doing: nothing yet


def ignore_stop_signals() -> None:
    """Let no stop signal change the exit code that is known already: a process with torch takes seconds to leave."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)

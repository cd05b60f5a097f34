"""A folder that appears whole or not at all, whatever ends its writer. No torch."""

import contextlib
import fcntl
import glob
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

PARTIAL = ".partial-"
"""Between the name of what is written and a word that makes the name unique."""


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder next to ``out`` to write into, which becomes ``out`` at the end, durably.

    An exception removes it, and so do SIGHUP and SIGTERM, which end the process with 128 + their number. What a killed
    process left behind for ``out`` is removed first. The folder is locked while it is open, and the kernel releases
    the lock of a process that dies: so it differs from one that is being written.

    Args:
        out: absent, or an empty folder.

    Raises:
        OSError: the disk cannot be written.
    """
    absent = [folder for folder in out.parents if not folder.exists()]
    collect(out.parent, glob.escape(out.name))
    partial = out.with_name(f"{out.name}{PARTIAL}{uuid.uuid4().hex}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ending_signals())
        stack.callback(_remove_empty, absent)
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        while not partial.exists():  # another process may remove it before it is locked
            partial.mkdir(parents=True)
            with contextlib.suppress(FileNotFoundError):
                stack.enter_context(_locked(partial))
        yield partial
        for path in (partial, *partial.rglob("*")):
            sync(path)
        partial.rename(out)
        sync(out.parent)


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, the innermost first, up to the first one that has anything."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def collect(folder: Path, name: str = "*") -> None:
    """Remove folders and files in ``folder`` that killed writers left, and whose names match the pattern ``name``."""
    for left in folder.glob(f"{name}{PARTIAL}*"):
        with contextlib.suppress(OSError), _locked(left, fcntl.LOCK_NB):
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()


def sync(path: Path) -> None:
    """Make a file, or the entries of a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _locked(path: Path, flag: int = 0) -> Iterator[None]:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # it may be a FIFO
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | flag)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _ending_signals() -> Iterator[None]:
    """Signals that would end this process at once end it by an exception, which lets everything be removed."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    numbers = [number for number in (signal.SIGHUP, signal.SIGTERM) if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)

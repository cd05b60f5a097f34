"""A lock on an entry of a cache, among the processes of a machine. No torch."""

import contextlib
import fcntl
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger("crius.data")
_SAY_SECONDS = 5.0
_POLL_SECONDS = 0.1
_MAX_BYTES = 300


@contextmanager
def locked(entry: Path, doing: str) -> Iterator[None]:
    """Hold the lock of an entry. The kernel releases it when its holder dies, so it is never stale.

    Args:
        entry: entry that is written; the lock file, which names its holder, is in the same folder.
        doing: what the holder does, for the log of waiting processes.

    Raises:
        OSError: the folder cannot be written.
    """
    lock = entry.with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not os.access(lock.parent, os.W_OK):
            raise PermissionError(13, "Permission denied", str(lock.parent))
        say_at = time.monotonic() + _SAY_SECONDS
        while not _take(handle):
            if time.monotonic() > say_at:
                say_at = float("inf")
                holder = os.pread(handle, _MAX_BYTES, 0).decode(errors="replace") or "the process"
                _log.warning("cache: waiting for %s that %s %s", holder, doing, entry)
            time.sleep(_POLL_SECONDS)
        with contextlib.suppress(OSError):  # with a full disk the holder is unknown
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on host {platform.node()}".encode(), 0)
        yield
    finally:
        os.close(handle)


def _take(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

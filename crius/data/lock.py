"""A lock on an entry of a cache, among the processes of a machine. No torch."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger("crius.data")


@contextmanager
def locked(entry: Path, doing: str) -> Iterator[None]:
    """Hold the lock of an entry. The kernel releases it when its holder dies, so it is never stale.

    Args:
        entry: entry that is written; the lock file is in the same folder.
        doing: what the holder does, for the log of waiting processes.

    Raises:
        OSError: the folder cannot be written.
    """
    lock = entry.with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not os.access(lock.parent, os.W_OK):
            raise PermissionError(13, "Permission denied", str(lock.parent))
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("cache: waiting for the process that %s %s", doing, entry)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)

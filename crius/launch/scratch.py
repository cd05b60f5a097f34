"""The private folder of a launcher: it goes with it, or with the next one where that was killed."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "crius-"
_OWNER = "owner"  # locked by the launcher as long as it lives, and empty until it is


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new private folder below ``TMPDIR`` while the context is open. Removes those of launchers that were killed."""
    _collect()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    owner = os.open(folder / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks, or a full one: then nobody collects it
            fcntl.flock(owner, fcntl.LOCK_EX)
            os.write(owner, str(os.getpid()).encode())
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(owner)


def _collect() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if _is_ours(folder) and _is_orphan(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _is_orphan(folder: Path) -> bool:
    """Whether a launcher made ``folder`` and is gone. Raises OSError where it lives, or where no launcher made it."""
    owner = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(owner).st_size > 0
    finally:
        os.close(owner)

"""The lock of a run folder: one run writes to it at a time, and the one that comes second learns who that is."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import platform
import stat
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from crius.errors import ConfigError, EnvironmentError

NAME = "run.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MAX_BYTES = 4096


@dataclass(frozen=True)
class Holder:
    """The process that has a run folder.

    Attributes:
        pid: its process id.
        host: its host.
        started: when it took the folder, ISO 8601 with the offset from UTC.
        command: its verb, such as ``train``.
    """

    pid: int
    host: str
    started: str
    command: str

    def __str__(self) -> str:
        place = "this host" if self.host == platform.node() else f"host {self.host}"
        return f"crius {self.command}, process {self.pid} on {place}, since {self.started}"


@contextlib.contextmanager
def run_lock(run_dir: Path, command: str) -> Iterator[None]:
    """Have ``run_dir`` for this process alone while the context is open.

    The lock is ``flock``'s on ``run.lock``: the kernel, and over NFS the server, frees it when this process ends,
    however that happens. A process that is forked from this one does not keep it.

    Args:
        run_dir: folder of the run; it exists.
        command: the verb that takes it.

    Raises:
        ConfigError: another process has it.
        EnvironmentError: ``run.lock`` cannot be opened, or is no plain file.
    """
    file = _open(run_dir / NAME)
    try:
        if not _take(file):
            raise _taken(run_dir, file)
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(asdict(Holder(os.getpid(), platform.node(), now, command))).encode(), 0)
        _OURS.add(file)
        yield
        os.ftruncate(file, 0)  # the file stays: who removes it may remove the one that another process just locked
    finally:
        _OURS.discard(file)
        os.close(file)


_OURS: set[int] = set()


def _close_in_child() -> None:
    """A copy of the descriptor would keep the folder locked when this process is gone and its child is not."""
    for file in _OURS:
        os.close(file)
    _OURS.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _open(path: Path) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise EnvironmentError(
            f"the lock {path} cannot be opened: {why}.", where="--job.run_dir", fix="give another folder"
        ) from error
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise EnvironmentError(f"the lock {path} is no plain file.", where="--job.run_dir", fix=f"remove {path}")


def _take(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        sys.stderr.write(f"warning: this file system has no locks ({error.strerror}): start one run in a folder only\n")
    return True


def _taken(run_dir: Path, file: int) -> ConfigError:
    holder = _holder(file)
    return ConfigError(
        f"another run writes to {run_dir}: {holder or 'a process that has not said who it is'}.",
        where="--job.run_dir",
        why="two runs in one folder would mix their checkpoints and metrics",
        fix="wait for it, stop it" + (f" (kill {holder.pid} there)" if holder else "") + ", or give another folder",
    )


def _holder(file: int) -> Holder | None:
    try:
        record = json.loads(os.pread(file, _MAX_BYTES, 0))
        return Holder(int(record["pid"]), str(record["host"]), str(record["started"]), str(record["command"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None

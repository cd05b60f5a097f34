"""The lock of a run folder: one run at a time writes to it, and a second run is told who has it."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import platform
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from crius.errors import ConfigError, EnvironmentError
from crius.launch.report import leave, say
from crius.untrusted import parse_json

NAME = "run.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MAX_BYTES = 4096
_LOOK_SECONDS = 1.0
_MAX_TAKEN = 3  # a second run that is refused for another reason unlocks the folder at once


class RunLock:
    """A run folder that belongs to this process alone; see ``run_lock``.

    Args:
        run_dir: folder of the run; it exists.
        command: verb that takes the folder.

    Raises:
        ConfigError: another process has the folder.
        EnvironmentError: ``run.lock`` cannot be opened, or is not a regular file.
    """

    def __init__(self, run_dir: Path, command: str) -> None:
        self._run_dir = run_dir
        self._command = command
        self._looked = time.monotonic()
        self._num_taken = 0
        self._file = self._taken_file()

    def _taken_file(self) -> int:
        file = _open(self._run_dir / NAME)
        if not _take(file):
            error = _taken(self._run_dir, file)
            os.close(file)
            raise error
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        holder = {"pid": os.getpid(), "host": platform.node(), "started": now, "command": self._command}
        with contextlib.suppress(OSError):  # with a full disk the holder is unknown
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(holder).encode(), 0)
        _OURS.add(file)
        return file

    def keep(self) -> None:
        """Take the folder again if it was removed meanwhile. Call this often: it checks once per second.

        Raises:
            ConfigError: another run has taken the folder since, and kept it for several checks.
        """
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        try:
            if os.path.samestat(os.lstat(self._run_dir / NAME), os.fstat(self._file)):
                return
        except FileNotFoundError:
            pass
        except OSError:
            return  # a file server that does not answer is not evidence
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            file = self._taken_file()
        except ConfigError:
            self._num_taken += 1
            if self._num_taken == _MAX_TAKEN:
                raise
        except (OSError, EnvironmentError) as error:
            self._warn(f"it cannot be created again ({str(error).splitlines()[0]})")
        else:
            self._warn("it is created again, but its files are lost")
            self.release()
            self._file = file
            self._num_taken = 0

    def _warn(self, what: str) -> None:
        say(f"warning: the run folder {self._run_dir} was removed, or renamed, while this run writes to it: {what}")

    def release(self) -> None:
        """Unlock the folder."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)  # not removed: another process may just have locked it
        _OURS.discard(self._file)
        os.close(self._file)


def holder_of(run_dir: Path) -> dict[str, Any] | None:
    """The process that writes to ``run_dir`` now: ``pid``, ``host``, ``started`` and ``command``; None without one.

    A folder that no process claims is not locked here: a run that starts at this moment must not be refused.
    """
    try:
        file = os.open(run_dir / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        holder = parse_json(os.pread(file, _MAX_BYTES, 0))  # empty since the last run released it
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # its writer may have been killed
    except BlockingIOError:
        return holder if isinstance(holder, dict) else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
    return None


@contextlib.contextmanager
def run_lock(run_dir: Path, command: str) -> Iterator[RunLock]:
    """Give ``run_dir`` to this process alone while the context is open.

    The lock is ``flock``'s on ``run.lock``. The kernel, and over NFS the server, releases it when this process ends, in
    any way. A process that is forked from this one does not keep it. If the folder is removed, the lock is gone too:
    ``RunLock.keep`` takes it again.

    Raises:
        ConfigError, EnvironmentError: as ``RunLock``.
    """
    lock = RunLock(run_dir, command)
    try:
        yield lock
    finally:
        lock.release()


def remove_unused(run_dir: Path) -> None:
    """Remove the folder of a run that was refused: it holds nothing but empty folders and the lock of this process."""
    with contextlib.suppress(OSError):  # a folder that is not empty
        if (run_dir / "run.toml").exists():
            return
        for folder in [path for path in run_dir.iterdir() if path.is_dir()]:
            folder.rmdir()
        if os.listdir(run_dir) == [NAME]:
            (run_dir / NAME).unlink()
            run_dir.rmdir()


def keep_all(locks: Sequence[RunLock]) -> None:
    """``RunLock.keep`` of each."""
    for lock in locks:
        lock.keep()


@contextlib.contextmanager
def kept(locks: Sequence[RunLock], poll: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Keep ``locks`` from a thread while the context is open; losing a folder to another run ends this process.

    For a process that does not fork; the launcher keeps its locks while it supervises its workers.

    Args:
        locks: locks of this process.
        poll: called once per second from the thread.
    """
    ended = threading.Event()

    def keep() -> None:
        while not ended.wait(_LOOK_SECONDS):
            poll()
            try:
                keep_all(locks)
            except ConfigError as error:
                say(str(error))
                leave(error.exit_code)

    thread = threading.Thread(target=keep, name="crius-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


_OURS: set[int] = set()


def _close_in_child() -> None:
    """Close the copy of the descriptor: a living child would keep the folder locked after this process ended."""
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
    raise EnvironmentError(f"the lock {path} is not a regular file.", where="--job.run_dir", fix=f"remove {path}")


def _take(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        sys.stderr.write(f"warning: this file system has no locks ({error.strerror}): start only one run in a folder\n")
    return True


def _taken(run_dir: Path, file: int) -> ConfigError:
    who = "an unknown process"
    kill = ""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        holder = parse_json(os.pread(file, _MAX_BYTES, 0))
        pid = int(holder["pid"])
        place = "this host" if holder["host"] == platform.node() else f"host {holder['host']}"
        who = f"crius {holder['command']}, process {pid} on {place}, since {holder['started']}"
        kill = f" (kill {pid} there)"
    return ConfigError(
        f"another run writes to {run_dir}: {who}.",
        where="--job.run_dir",
        why="two runs in one folder would mix their checkpoints and metrics",
        fix=f"wait for it, stop it{kill}, or give another folder",
    )

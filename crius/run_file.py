"""Files of a run folder that matter less than the run: if they cannot be written, the run continues without them."""

import contextlib
import fcntl
import glob
import json
import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from crius.new_folder import PARTIAL, collect, sync

REHEARSALS = "rehearsals.jsonl"
"""File of a run folder with a line for each rehearsed restore."""


class RunFile:
    """A file that lines are appended to. A full disk costs lines and a warning; a file that was removed is started
    again.

    Args:
        path: path of the file; its folder is created.
        warn: receives, once, the sentence that says that lines are lost.
        loss: end of that sentence: what the reader of the file will miss.
        head: text that the file gets whenever it is opened.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], loss: str, head: str = "") -> None:
        self._path = path
        self._warn = warn
        self._loss = loss
        self._head = head
        self._file: int | None = None
        self._has_warned = False
        self.append("")

    def append(self, text: str) -> None:
        """Write complete lines at once, so that a process that is killed loses none."""
        try:
            if not self._is_there():
                self._open()
            self._write(text)
        except OSError as error:
            self._complain(f"cannot be written ({error.strerror or error})")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _is_there(self) -> bool:
        """Whether the open file is still the file at the path."""
        if self._file is None:
            return False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self._path.lstat(), os.fstat(self._file)):
                return True
        self._complain("was removed or replaced, and is started again")
        self.close()
        return False

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o644)
        size = os.fstat(self._file).st_size
        is_cut_off = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"  # by a kill of its process
        try:
            self._write(("\n" if is_cut_off else "") + self._head)
        except OSError:
            self.close()
            raise

    def _write(self, text: str) -> None:
        assert self._file is not None
        data = text.encode("utf-8", "backslashreplace")
        if not data:
            return
        size = os.fstat(self._file).st_size
        written = os.write(self._file, data)
        if written != len(data):
            os.ftruncate(self._file, size)  # no half lines
            raise OSError(f"{written} of {len(data)} bytes written")

    def _complain(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"{self._path} {what}: {self._loss}")


def open_log(path: Path) -> TextIO:
    """Open a text file to append lines to. A link is not followed.

    Raises:
        OSError: it cannot be opened.
    """
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o644), "a", buffering=1, encoding="utf-8", errors="backslashreplace")


class Mirror:
    """A small file with the newest JSON record of a process, readable even if the process cannot answer.

    One ``pwrite`` per record takes a few microseconds. A full disk must not end a working run.

    Args:
        path: path of the file; only the owner may read it.
        num_bytes: length of the file; no record is longer.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self._num_bytes = num_bytes

    def write(self, record: object) -> None:
        """Replace the last record by ``record``."""
        with contextlib.suppress(OSError):
            os.pwrite(self._file, json.dumps(record).encode().ljust(self._num_bytes), 0)


def write_whole(path: Path, text: str, *, is_private: bool = False, is_durable: bool = False) -> None:
    """Write ``text`` so that a reader sees all of it or nothing. What a killed writer of the file left is removed.

    Args:
        path: path of the file; its folder is created.
        text: content of the file.
        is_private: whether only the owner may read it (mode 0600), for a report with stacks, settings or samples of a
            run.
        is_durable: whether it is on the disk when this returns, and never half of it, even if the machine loses power.
            A disk that hangs then blocks.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_name(f"{path.name}{PARTIAL}{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        collect(path.parent, glob.escape(path.name))
        with contextlib.ExitStack() as stack:
            while not partial.exists():  # another process may remove it before it is locked
                new = os.open(
                    partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if is_private else 0o666
                )
                file = stack.enter_context(os.fdopen(new, "w", encoding="utf-8"))
                with contextlib.suppress(OSError):  # without locks, nothing is collected
                    fcntl.flock(file, fcntl.LOCK_EX)
            file.write(text)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
            partial.replace(path)
        if is_durable:
            sync(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_run_file(
    path: Path, text: str, warn: Callable[[str], None], *, is_private: bool = False, is_durable: bool = False
) -> None:
    """Like ``write_whole``, but if the file cannot be written, ``warn`` gets a sentence."""
    try:
        write_whole(path, text, is_private=is_private, is_durable=is_durable)
    except OSError as error:
        warn(f"{path} cannot be written ({error.strerror or error})")


def is_private_folder(path: Path) -> bool:
    """Whether ``path`` is a folder (not a link to one) of this user that nobody else may read."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077

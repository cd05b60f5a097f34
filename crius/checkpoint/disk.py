"""One folder of checkpoints, on a local file system or behind an fsspec URL. No torch."""

import errno
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from crius.checkpoint.names import check_name, parse_folder, parse_step, step_name
from crius.errors import CheckpointError

if TYPE_CHECKING:
    from crius.checkpoint.remote_disk import FsspecDisk

MOST_WHOLE = 1 << 28
"""Most bytes of a file that is read whole: a manifest, a state or a tokenizer. Tensors are read in parts."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# a file may be replaced by a FIFO, on which open would block without O_NONBLOCK
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DiskSink:
    """A local file that is being written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes | bytearray | memoryview, /) -> None:
        """Append all of ``data``."""
        view = memoryview(data)
        while view.nbytes:
            view = view[os.write(self._descriptor, view) :]


class LocalDisk:
    """A folder of checkpoints on a local file system.

    ``folder`` is the name of a folder in it, ``path`` is ``folder/file``. Both consist of plain names
    (``crius.checkpoint.names.check_name``). No symbolic link below the folder of checkpoints is followed: every name is
    resolved from the open folder, never as a path. Every method raises CheckpointError if the disk fails or the name is
    not allowed.

    Attributes:
        where: the folder of checkpoints, for messages; a URL is shown without user, password and query.
        is_local: whether a rename commits a checkpoint; else its manifest commits it, which is written last.
    """

    is_local = True

    def __init__(self, folder: str | Path) -> None:
        self.where = str(folder)
        self._root = Path(folder)

    def stage(self, step: int, attempt: str) -> str:
        """The name of the folder that a save of ``step`` writes into."""
        return check_name(f"{step_name(step)}.tmp-{attempt}", self.where)

    def file_name(self, stem: str, attempt: str) -> str:
        """``stem`` without extension; on disks where several attempts share a folder, with the attempt in the name."""
        return stem

    def prepare(self, folder: str) -> None:
        """Create the folder if it does not exist."""
        name = check_name(folder, self.where)
        with self._said("cannot be created", folder):
            self._root.mkdir(parents=True, exist_ok=True)
            with (  # also if another part of the run made the folder
                suppress(PermissionError),
                _descriptor(os.open(self._root.absolute().parent, _FOLDER_FLAGS)) as parent,
            ):
                _sync(parent)
            with self._open_root() as root, suppress(FileExistsError):
                os.mkdir(name, dir_fd=root)
            with self._open_folder(name):  # an entry that existed may be a file or a link, which fails here
                pass

    @contextmanager
    def create(self, path: str) -> Iterator[DiskSink]:
        """Write a new file. Leaving the context makes it durable; an exception removes it."""
        folder, name = self._parts(path)
        with self._said("cannot be written", path), self._open_folder(folder) as parent:
            descriptor = os.open(name, _CREATE_FLAGS, 0o666, dir_fd=parent)
            try:
                try:
                    yield DiskSink(descriptor)
                    os.fsync(descriptor)
                    if hasattr(os, "posix_fadvise"):  # verification should read the disk, not the page cache
                        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)
            except BaseException:
                with suppress(OSError):
                    os.unlink(name, dir_fd=parent)
                raise

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """The bytes from ``begin`` to ``end`` (None: the end of the file). Fewer bytes are an error."""
        with self._said("cannot be read", path), self.open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if end is None and size > MOST_WHOLE:
                what = f"{path} has {size:,} bytes, but at most {MOST_WHOLE:,} are read."
                raise CheckpointError(what, where=self.where)
            stop = size if end is None else end
            if not 0 <= begin <= stop <= size:
                raise CheckpointError(f"{path} has no bytes {begin:,} to {stop:,}, it has {size:,}.", where=self.where)
            file.seek(begin)
            data = file.read(stop - begin)
        if len(data) != stop - begin:
            raise CheckpointError(f"{path} became shorter while it was read.", where=self.where)
        return data

    def open(self, path: str) -> BinaryIO:
        """Open the file for reading and seeking."""
        folder, name = self._parts(path)
        with self._said("cannot be opened", path), self._open_folder(folder) as parent:
            descriptor = os.open(name, _READ_FLAGS, dir_fd=parent)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise CheckpointError(f"{path} is not a regular file.", where=self.where)
            return os.fdopen(descriptor, "rb")

    def size(self, path: str) -> int:
        """Size of a file in bytes."""
        return self._status(path).st_size

    def age_seconds(self, path: str) -> float | None:
        """Seconds since a file was written; None if unknown."""
        return time.time() - self._status(path).st_mtime

    def files(self, folder: str) -> list[str]:
        """Names of all entries of a folder, including links and folders, sorted; empty if the folder does not exist."""
        name = check_name(folder, self.where)
        with self._said("cannot be listed", folder):
            try:
                with self._open_folder(name) as opened:
                    return sorted(os.listdir(opened))
            except FileNotFoundError:
                return []

    def folders(self) -> list[str]:
        """Names of the folders in the folder of checkpoints, sorted; links are left out."""
        return sorted(name for name, is_folder in self._entries() if is_folder)

    def committed(self) -> list[int]:
        """Steps of the committed checkpoints, ascending, intact or not.

        On a local disk the name is the commit: every entry with the name of a checkpoint counts, even a link, a file or
        a folder that lost its manifest. On other disks a folder without a manifest is an unfinished save.
        """
        return sorted(step for name, _ in self._entries() if (step := parse_step(name)) is not None)

    def sync(self, folder: str) -> None:
        """Make the entries of a folder durable."""
        with self._said("cannot be written", folder), self._open_folder(check_name(folder, self.where)) as opened:
            _sync(opened)

    def commit(self, folder: str, step: int) -> None:
        """Turn the written folder into the checkpoint of ``step``. An existing checkpoint of the step is replaced."""
        name = step_name(step)
        self.sync(folder)
        with self._said("cannot be committed", folder):
            with self._open_root() as root:
                if name in os.listdir(root):
                    # after a kill between the two renames, put_back restores the folder
                    self._rename(root, name, f"{name}.replaced-{_tag()}")
                self._rename(root, folder, name)
                _sync(root)

    def set_aside(self, folder: str) -> str:
        """Keep a checkpoint, or one that a save replaced, under a name that is not loaded. Returns that name."""
        found = parse_folder(folder)
        if not found:
            raise CheckpointError(f"{folder} is not a checkpoint and cannot be set aside.", where=self.where)
        kept = f"{step_name(found.step)}.aside-{_tag()}"
        self._move(folder, kept)
        return kept

    def put_back(self, name: str) -> None:
        """Make ``name`` the checkpoint again: a name from ``set_aside``, or one that a killed save was replacing."""
        found = parse_folder(name)
        if not found or found.step in self.committed():
            raise CheckpointError(f"{name} cannot be put back: there is a checkpoint of this step.", where=self.where)
        self._move(name, step_name(found.step))

    def sweep(self, folder: str, attempt: str = "") -> list[str]:
        """Remove files of failed saves. Returns the removed names.

        Files that a manifest of a committed or set-aside checkpoint names are kept, and all files of ``attempt``.
        """
        found = parse_folder(folder)
        if not found or found.kind != "tmp" or found.tag == attempt:
            return []
        self.remove(folder)
        return [folder]

    def remove(self, folder: str) -> None:
        """Remove a folder that was not set aside. A kill at any moment leaves either a whole checkpoint or none.

        For files of a failed save, see ``sweep``.
        """
        found = parse_folder(folder)
        name = check_name(folder, self.where)
        if found and found.kind != "tmp":
            name = f"{step_name(found.step)}.tmp-removed-{_tag()}"
            self._move(folder, name)
        with self._said("cannot be removed", folder), self._open_root() as root:
            shutil.rmtree(name, dir_fd=root)

    def free_bytes(self) -> int | None:
        """Free bytes on the disk; None if unknown."""
        place = self._root.absolute()
        while not place.exists():
            place = place.parent
        with self._said("does not report its free space", ""):
            found = os.statvfs(place)
        return found.f_bavail * found.f_frsize

    def _parts(self, path: str) -> tuple[str, str]:
        folder, _, name = path.partition("/")
        return check_name(folder, self.where), check_name(name, f"{self.where}/{folder}")

    def _entries(self) -> list[tuple[str, bool]]:
        """Names of all entries of the folder of checkpoints, and whether each is a folder; a link is not."""
        with self._said("cannot be listed", ""):
            try:
                with os.scandir(self._root) as entries:
                    return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            except FileNotFoundError:
                return []

    def _status(self, path: str) -> os.stat_result:
        with self.open(path) as file:
            return os.fstat(file.fileno())

    def _open_root(self) -> AbstractContextManager[int]:
        return _descriptor(os.open(self._root, _FOLDER_FLAGS))

    @contextmanager
    def _open_folder(self, name: str) -> Iterator[int]:
        with (
            self._open_root() as root,
            _descriptor(os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=root)) as opened,
        ):
            yield opened

    def _move(self, source: str, target: str) -> None:
        check_name(source, self.where)
        with self._said("cannot be renamed", source), self._open_root() as root:
            self._rename(root, source, target)
            _sync(root)

    def _rename(self, root: int, source: str, target: str) -> None:
        os.rename(source, target, src_dir_fd=root, dst_dir_fd=root)

    @contextmanager
    def _said(self, what: str, path: str) -> Iterator[None]:
        """Turn an OSError into an error with the path and the failed operation."""
        try:
            yield
        except OSError as error:
            is_link = error.errno in (errno.ELOOP, errno.ENOTDIR)
            raise CheckpointError(
                f"{f'{self.where}/{path}' if path else self.where} {what}: {error.strerror or error}.",
                why="symbolic links in a folder of checkpoints are not followed" if is_link else "",
                fix="free some space, or give another folder" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "",
            ) from error


@contextmanager
def _descriptor(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sync(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync folders, and need not
            raise


def _tag() -> str:
    return uuid.uuid4().hex[:12]


Disk: TypeAlias = "LocalDisk | FsspecDisk"
"""A folder of checkpoints on any file system; see ``LocalDisk``."""


def open_disk(folder: str) -> Disk:
    """The folder of checkpoints at a path or an fsspec URL such as ``s3://bucket/run``. It need not exist.

    Raises:
        EnvironmentError: the package for this kind of URL is not installed.
        ConfigError: the kind of URL is unknown.
    """
    if not _URL.match(folder):
        return LocalDisk(folder)
    from crius.checkpoint.remote_disk import FsspecDisk  # noqa: PLC0415

    return FsspecDisk(folder)

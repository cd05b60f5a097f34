"""One folder of checkpoints, on a local file system or behind an fsspec URL. No torch."""

import re
from contextlib import AbstractContextManager
from typing import BinaryIO, Protocol

from crius.checkpoint.local_disk import LocalDisk
from crius.checkpoint.remote_disk import FsspecDisk

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class Sink(Protocol):
    """A file that is being written."""

    def write(self, data: bytes | bytearray | memoryview, /) -> None:
        """Append all of ``data``."""


class Disk(Protocol):
    """One folder of checkpoints.

    ``folder`` is the name of a folder in it, ``path`` is ``folder/file``; both are made of plain names
    (``crius.checkpoint.names.check_name``), and no symbolic link below the folder of checkpoints is followed.
    Everything raises CheckpointError where the disk or the name does not allow it.

    Attributes:
        where: the folder of checkpoints, for messages: without user, password and query of a URL.
        is_local: whether a checkpoint is committed by one rename; else by its manifest, which is written last.
    """

    where: str
    is_local: bool

    def stage(self, step: int, attempt: str) -> str:
        """The folder that a save of ``step`` writes into."""

    def file_name(self, stem: str, attempt: str) -> str:
        """``stem``, with the attempt in it where the files of several attempts lie in one folder. No extension."""

    def prepare(self, folder: str) -> None:
        """Make the folder, if it is not there."""

    def create(self, path: str) -> AbstractContextManager[Sink]:
        """Write a new file. Leaving the context makes it durable; an exception removes it again."""

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """The bytes from ``begin`` up to ``end`` (None: the end of the file); fewer are an error."""

    def open(self, path: str) -> BinaryIO:
        """The file, to read from its start or to seek in."""

    def size(self, path: str) -> int:
        """Bytes of a file."""

    def age_seconds(self, path: str) -> float | None:
        """Seconds since a file was written; None where that is not known."""

    def files(self, folder: str) -> list[str]:
        """Names of all that is in a folder, sorted; none where there is no such folder."""

    def folders(self) -> list[str]:
        """Names of the folders in the folder of checkpoints, sorted; none where there is no such folder."""

    def committed(self) -> list[int]:
        """Steps of the checkpoints that are committed, ascending, whether they are whole or not.

        On a local disk the name is the commit: whatever has the name of a checkpoint counts, also a link, a file or a
        folder that lost its manifest. Elsewhere a folder without a manifest is a save that never ended.
        """

    def commit(self, folder: str, step: int) -> None:
        """Make what a save wrote the checkpoint of ``step``, in place of one that there is."""

    def set_aside(self, folder: str) -> str:
        """Keep a checkpoint, or what a save replaced, under a name that is none of a checkpoint; returns that name."""

    def put_back(self, name: str) -> None:
        """Make what ``set_aside`` named, or what a save was to replace when it was killed, the checkpoint again."""

    def sweep(self, folder: str, attempt: str = "") -> list[str]:
        """Remove what is left of saves that failed; returns what was removed.

        Nothing that a manifest of a committed or set aside checkpoint names goes, and nothing of ``attempt``.
        """

    def remove(self, folder: str) -> None:
        """Remove a folder, but nothing that was set aside. Killed at any moment, it leaves a whole checkpoint or none.

        It is not for what a failed save left: see ``sweep``.
        """

    def free_bytes(self) -> int | None:
        """Bytes that can still be written; None where that is not known."""


def open_disk(folder: str) -> Disk:
    """The folder of checkpoints at a path or an fsspec URL such as ``s3://bucket/run``; it need not exist.

    Raises:
        EnvironmentError: the package for such URLs is not installed.
        ConfigError: there is no such kind of URL.
    """
    return FsspecDisk(folder) if _URL.match(folder) else LocalDisk(folder)

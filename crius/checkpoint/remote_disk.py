"""Checkpoints behind an fsspec URL, which cannot rename: a checkpoint counts as soon as its manifest exists.

The files of every attempt have their own names, so that no file of a committed checkpoint is ever overwritten.
"""

import io
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC
from typing import Any, BinaryIO, TypeVar

import fsspec

from crius.checkpoint.manifest import Manifest
from crius.checkpoint.names import MANIFEST, check_name, is_plain, is_set_aside, parse_step, step_name
from crius.errors import CheckpointError, ConfigError, EnvironmentError
from crius.plugins import install_line

PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), ("s3fs",)),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs",)),
    **dict.fromkeys(("az", "abfs", "abfss"), ("adlfs",)),
    **dict.fromkeys(("http", "https"), ("aiohttp", "requests")),
    **dict.fromkeys(("sftp", "ssh"), ("paramiko",)),
    **dict.fromkeys(("hdfs", "arrow_hdfs"), ("pyarrow",)),
    "smb": ("smbprotocol",),
    "webhdfs": ("requests",),
    "webdav": ("webdav4",),
    "hf": ("huggingface_hub",),
    "oss": ("ossfs",),
    "oci": ("ocifs",),
}
"""Packages to install for a kind of URL. They differ from the kind's name, which on PyPI is an unrelated package."""

PAUSES = (0.2, 1.0, 5.0)
"""Seconds between the attempts of an operation that failed in a way that a network or a server may recover from."""

_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_SECRETS = re.compile(r"(?<=://)[^/@\s]*@|\?[^\s'\"]*")
_READ_BYTES = 8 << 20  # read ahead for small reads
_RANGE_BYTES = 64 << 20  # most bytes per request

Result = TypeVar("Result")


class _RemoteReader(io.RawIOBase):
    """A file that is read in ranges. A failed read is tried again."""

    def __init__(self, disk: "FsspecDisk", path: str) -> None:
        self._disk = disk
        self._path = path
        self._size = disk.size(path)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        end = max(self._at, min(self._at + min(len(buffer), _RANGE_BYTES), self._size))
        data = self._disk.read(self._path, self._at, end)
        buffer[: len(data)] = data
        self._at = end
        return len(data)


class FsspecDisk:
    """See ``LocalDisk``.

    Listing, reading, removing and writing a manifest are tried four times. A file that is sent in parts is not sent
    again here: fsspec's file systems repeat parts themselves, and the next save writes the whole file again.
    """

    is_local = False

    def __init__(self, url: str) -> None:
        self.where = _redacted(url).rstrip("/")
        self._fs, root = _file_system(url)
        self._root = root.rstrip("/")
        self._has_links = "file" in self._fs.protocol

    def stage(self, step: int, attempt: str) -> str:
        """The name of the step's folder itself."""
        return step_name(step)

    def file_name(self, stem: str, attempt: str) -> str:
        """``stem-attempt``."""
        return check_name(f"{stem}-{attempt}", self.where)

    def prepare(self, folder: str) -> None:
        """Create the folder, if the file system has folders."""
        place = self._place(folder)
        self._tried("cannot be created", folder, lambda: self._fs.makedirs(place, exist_ok=True))

    @contextmanager
    def create(self, path: str) -> Iterator[Any]:
        """Write a new file. A manifest may replace an existing one, and is written in one piece."""
        place = self._place(path)
        if not path.endswith(f"/{MANIFEST}") and self._tried("cannot be read", path, lambda: self._fs.exists(place)):
            raise CheckpointError(f"{self.where}/{path} exists already.", why="no file is written twice")
        if path.endswith(".json"):
            whole = io.BytesIO()
            yield whole
            self._tried("cannot be written", path, lambda: self._fs.pipe_file(place, whole.getvalue()))
            return
        with self._said("cannot be written", path):
            file = self._fs.open(place, "wb")
            try:
                yield file
                file.close()
            except BaseException:
                with suppress(Exception):
                    _abort(file)
                with suppress(Exception):
                    self._fs.rm_file(place)
                raise

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """The bytes from ``begin`` to ``end``."""
        place = self._place(path)
        stop = self.size(path) if end is None else end
        if begin == stop:
            return b""
        data = self._tried("cannot be read", path, lambda: self._fs.cat_file(place, start=begin, end=stop))
        if len(data) != stop - begin:
            raise CheckpointError(f"{path} has no bytes {begin:,} to {stop:,}.", where=self.where)
        return bytes(data)

    def open(self, path: str) -> BinaryIO:
        """Open the file for reading and seeking."""
        return io.BufferedReader(_RemoteReader(self, path), _READ_BYTES)

    def size(self, path: str) -> int:
        """Size of a file in bytes."""
        place = self._place(path)
        info = self._tried("cannot be read", path, lambda: self._fs.info(place))
        if info["type"] != "file":
            raise CheckpointError(f"{path} is not a regular file.", where=self.where)
        return int(info["size"])

    def age_seconds(self, path: str) -> float | None:
        """Seconds since a file was written; None if unknown."""
        place = self._place(path)
        try:
            written = self._fs.modified(place)
            return time.time() - written.replace(tzinfo=written.tzinfo or UTC).timestamp()
        except Exception:  # many file systems do not know, and raise errors of their own
            return None

    def files(self, folder: str) -> list[str]:
        """Names of all entries of a folder."""
        return sorted(name for name, _ in self._list(folder))

    def folders(self) -> list[str]:
        """Names of the folders; links are left out."""
        return sorted(name for name, info in self._list("") if info["type"] == "directory")

    def committed(self) -> list[int]:
        """Steps of the folders that have a manifest."""
        steps = ((parse_step(name), name) for name in self.folders())
        return sorted(step for step, name in steps if step is not None and MANIFEST in self.files(name))

    def sync(self, folder: str) -> None:
        """Does nothing: a file that was sent is durable."""

    def commit(self, folder: str, step: int) -> None:
        """Remove all files that the existing manifest of the step does not name."""
        if folder != step_name(step) or MANIFEST not in self.files(folder):
            raise CheckpointError(f"{self.where}/{folder} has no manifest of step {step}.")
        self.sweep(folder)

    def set_aside(self, folder: str) -> str:
        """Rename the manifest."""
        kept = f"{folder}/manifest-aside-{uuid.uuid4().hex[:12]}.json"
        self._move(f"{folder}/{MANIFEST}", kept)
        return kept

    def put_back(self, name: str) -> None:
        """Rename the manifest back."""
        folder, _, file = name.partition("/")
        if not is_set_aside(file) or MANIFEST in self.files(folder):
            raise CheckpointError(f"{name} cannot be put back: there is a checkpoint of this step.", where=self.where)
        self._move(name, f"{folder}/{MANIFEST}")

    def sweep(self, folder: str, attempt: str = "") -> list[str]:
        """Remove files of other attempts that no manifest names."""
        files = self.files(folder)
        manifests = [file for file in files if file == MANIFEST or is_set_aside(file)]
        named = set(manifests)
        for manifest in manifests:
            path = f"{folder}/{manifest}"
            try:
                named.update(Manifest.decode(self.read(path), f"{self.where}/{path}").files)
            except CheckpointError:
                return []  # unknown which files belong to it
        own = f"-{attempt}" if attempt else "/"  # end of a stem; no name contains a slash
        saved = [file for file in files if is_plain(file) and file.endswith((".safetensors", ".json"))]
        gone = [file for file in saved if file not in named and not file.rpartition(".")[0].endswith(own)]
        for file in gone:
            self._unlink(f"{folder}/{file}")
        if not manifests and len(gone) == len(files):
            self._remove_empty(folder)
        return [f"{folder}/{file}" for file in gone]

    def remove(self, folder: str) -> None:
        """Remove the manifest, then all other files except files that were set aside."""
        files = self.files(folder)
        if MANIFEST in files:
            self._unlink(f"{folder}/{MANIFEST}")
        if any(map(is_set_aside, files)):
            self.sweep(folder)
            return
        for file in files:
            self._unlink(f"{folder}/{file}")
        self._remove_empty(folder)

    def free_bytes(self) -> int | None:
        """None, since object stores do not report it."""
        return None

    def _place(self, path: str, *, may_be_link: bool = False) -> str:
        """The path for the file system. Links are refused, except at its end if ``may_be_link``."""
        parts = path.split("/")
        if len(parts) > 2:
            raise CheckpointError(f"{path!r} is neither a folder nor a file in a folder.", where=self.where)
        place = self._root
        for number, part in enumerate(parts, start=1):
            place = f"{place}/{check_name(part, self.where)}"
            if self._has_links and os.path.islink(place) and not (may_be_link and number == len(parts)):
                raise CheckpointError(f"{self.where}/{path} is a symbolic link, which is not followed.")
        return place

    def _list(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        place = self._place(folder) if folder else self._root

        def listed() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()  # other hosts write too
            try:
                return list(self._fs.ls(place, detail=True))
            except FileNotFoundError:
                return []

        found = [(str(info["name"]).rstrip("/"), info) for info in self._tried("cannot be listed", folder, listed)]
        # object stores may list an entry for the folder itself
        return [(name.rpartition("/")[2], info) for name, info in found if name.strip("/") != place.strip("/")]

    def _move(self, source: str, target: str) -> None:
        data = self.read(source)
        self._tried("cannot be written", target, lambda: self._fs.pipe_file(self._place(target), data))
        self._unlink(source)

    def _unlink(self, path: str) -> None:
        place = self._place(path, may_be_link=True)

        def unlink() -> None:
            with suppress(FileNotFoundError):  # an attempt that seemed to fail may have worked
                self._fs.rm_file(place)

        self._tried("cannot be removed", path, unlink)

    def _remove_empty(self, folder: str) -> None:
        with suppress(Exception):  # most object stores have no folders
            self._fs.rmdir(self._place(folder))

    def _tried(self, what: str, path: str, operation: Callable[[], Result]) -> Result:
        """Run an operation, and run it again after a pause if the failure may be temporary."""
        with self._said(what, path):
            for pause in PAUSES:
                try:
                    return operation()
                except _FINAL:
                    raise
                except OSError:
                    time.sleep(pause)
            return operation()

    @contextmanager
    def _said(self, what: str, path: str) -> Iterator[None]:
        """Turn any exception into an error with the path and the failed operation: packages raise their own types."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            place = f"{self.where}/{path}" if path else self.where
            reason = f"{type(error).__name__}: {_redacted(str(error))}".rstrip(": ")
            raise CheckpointError(f"{place} {what}: {reason}.") from error


def _file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for ``url``, and the path in it."""
    kind = url.partition("://")[0]
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        packages = PACKAGES.get(kind.lower(), ())
        raise EnvironmentError(
            f"{kind}:// needs a package that is not installed: {error}.",
            where=_redacted(url),
            fix=install_line(*packages) if packages else "",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"fsspec does not know the URL scheme {kind}://.",
            where=_redacted(url),
            fix="give a path, or a URL such as s3://bucket/run",
        ) from error
    return fs, str(root)


def _abort(file: Any) -> None:
    """Discard a partly sent file. Closing it would turn the sent part into a file."""
    try:
        file.closed = True  # also stops the garbage collector, which closes open files
    except AttributeError:  # this kind of file sends nothing before it is closed, or writes in place
        file.close()
    else:
        file.discard()


def _redacted(text: str) -> str:
    """``text`` without user, password and query of URLs in it."""
    return _SECRETS.sub("", text)

"""The one reader of files. What a stranger may have made is opened below a folder that the user named, never through a
link, regular files only; and of any file at most so many bytes are read. No torch."""

import contextlib
import errno
import io
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

SMALL = 1 << 20
"""Most bytes of a line, or of a file with settings."""
LARGE = 1 << 24
"""Most bytes of a file that is read whole."""
HUGE = 1 << 40
"""Most bytes of a file of lines whose reader keeps little of each."""
_LONG = 1 << 30
_OF_A_SHELL = ("/dev/fd/", "/proc/self/fd/")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# open would wait for the writer of a FIFO without O_NONBLOCK
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_below(folder: str | Path, name: str) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        folder: folder that the user named; its own path may have links.
        name: path below it, of plain names; a name from a file must have been checked.

    Raises:
        OSError: there is no such file, a part of ``name`` is a link, or it is no regular file.
    """
    with _folder_of(folder, name) as (at, last):
        number = _open(last, _FILE, at, f"{folder}/{name}")
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is not a regular file", f"{folder}/{name}")
    return _not_of_holes(os.fdopen(number, "rb"), f"{folder}/{name}")


@contextlib.contextmanager
def _folder_of(folder: str | Path, name: str) -> Iterator[tuple[int, str]]:
    """The open folder that ``name`` is in, and its last part."""
    *folders, last = name.split("/")
    assert not {".", ".."} & {*folders, last}
    at = os.open(folder, _FOLDER)
    try:
        for part in folders:
            below = _open(part, _FOLDER | os.O_NOFOLLOW, at, f"{folder}/{name}")
            os.close(at)
            at = below
        yield at, last
    finally:
        os.close(at)


def _open(name: str, flags: int, folder: int, where: str) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        why = error.strerror
        with contextlib.suppress(OSError):
            if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                why = "it is a link; cp -rL copies its target"
        raise OSError(error.errno, why, where) from None


def open_named(path: str | Path) -> io.BufferedReader:
    """Open a file that the user named for reading, also through links. Of pipes only those of a shell's ``<(...)`` are
    opened.

    Raises:
        OSError: it cannot be opened, or is another pipe, which would be waited for.
    """
    if stat.S_ISFIFO(os.stat(path).st_mode) and not str(path).startswith(_OF_A_SHELL):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return _not_of_holes(open(path, "rb"), str(path))


def _not_of_holes(file: io.BufferedReader, where: str) -> io.BufferedReader:
    """Refuse a long file without a thousandth of data, which has no size on the disk and takes hours to read."""
    size = os.fstat(file.fileno()).st_size
    if size < _LONG:
        return file
    end = 0
    data = 0
    try:
        while data <= size / 1000:
            begin = os.lseek(file.fileno(), end, os.SEEK_DATA)
            end = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
            data += end - begin
    except OSError as error:
        if error.errno == errno.ENXIO:  # no more data
            file.close()
            raise OSError(errno.EINVAL, f"it has {size:,} bytes, of which {data:,} are not holes", where) from None
    file.seek(0)
    return file


def read_named(path: str | Path, most: int = LARGE) -> bytes:
    """The bytes of a file that the user named.

    Raises:
        OSError: see ``open_named``; or the file has more than ``most`` bytes.
    """
    content = bytearray()
    with open_named(path) as file:
        while part := file.read(SMALL):
            content += part
            if len(content) > most:
                raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return bytes(content)


def text_named(path: str | Path, most: int = LARGE) -> str:
    """The text of a file that the user named, in UTF-8, with or without a byte order mark; lines end with a newline.

    Raises:
        OSError: see ``read_named``.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_named(path, most).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str | bytes, constant: Callable[[str], Any] | None = None) -> Any:
    """The value of JSON.

    Args:
        text: the JSON.
        constant: gives what NaN and the infinities stand for; None: floats.

    Raises:
        ValueError: it is not JSON, or is nested too deeply.
    """
    return _parsed(partial(json.loads, parse_constant=constant), text)


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of TOML.

    Raises:
        ValueError: it is not TOML, or is nested too deeply.
    """
    table: dict[str, Any] = _parsed(tomllib.loads, text)
    return table


def _parsed(parse: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_below(folder: str | Path, name: str, most: int = LARGE) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: see ``open_below``; or the file has more than ``most`` bytes.
    """
    with open_below(folder, name) as file:
        return file.read(_size(file, most, f"{folder}/{name}"))


def read_linked(folder: Path, name: str, most: int = LARGE) -> bytes:
    """``read_below``, where a snapshot in a cache of the hub may have links to its blobs."""
    return read_below(*without_cache_link(folder, name), most)


def without_cache_link(folder: Path, name: str) -> tuple[Path, str]:
    """The real place of a file. In a cache of the hub, a snapshot has links to blobs; only such links are followed."""
    if folder.parent.name == "snapshots" and (folder / name).is_symlink():
        if blob := re.fullmatch(r"\.\./\.\./blobs/([0-9a-f]{40,64})", os.readlink(folder / name)):
            return folder.parent.parent / "blobs", blob[1]
    return folder, name


def _size(file: BinaryIO, most: int, where: str) -> int:
    size = os.fstat(file.fileno()).st_size
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, but at most {most:,} are allowed", where)
    return size


def text_below(folder: str | Path, name: str, most: int = LARGE) -> str:
    """The text of a file; what is not UTF-8 is replaced.

    Raises:
        OSError: see ``read_below``.
    """
    return read_below(folder, name, most).decode(errors="replace")


def names_below(folder: str | Path, name: str) -> list[str]:
    """Names in a folder below ``folder``, sorted, of whatever kind. A folder that is missing has none.

    Raises:
        OSError: it cannot be listed, or is a link.
    """
    with contextlib.suppress(FileNotFoundError), _folder_of(folder, f"{name}/") as (at, _):
        return sorted(os.listdir(at))
    return []


def object_below(folder: str | Path, name: str) -> dict[str, Any] | None:
    """The JSON object in a file; None if the file cannot be read or has no object."""
    try:
        found = parse_json(read_below(folder, name))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def records_below(folder: str | Path, name: str, most: int = LARGE) -> Iterator[dict[str, Any] | None]:
    """The JSON objects of a file of lines, and None for each damaged line; the last line may be incomplete.

    A file that is missing has no lines.

    Raises:
        OSError: see ``read_below``.
    """
    with contextlib.suppress(FileNotFoundError), open_below(folder, name) as file:
        _size(file, most, f"{folder}/{name}")
        while line := file.readline(SMALL):
            is_whole = line.endswith(b"\n")
            if not is_whole and len(line) == SMALL:
                _skip_line(file)
                yield None
                continue
            try:
                record = parse_json(line)
            except ValueError:
                record = None if is_whole else {}
            yield record if isinstance(record, dict) else None


def _skip_line(file: BinaryIO) -> None:
    while (rest := file.readline(SMALL)) and not rest.endswith(b"\n"):
        pass


def check_entries(folder: Path, links: Collection[str], others: Collection[str]) -> list[str]:
    """Refuse a folder to write into, in which something, or something in one of its folders, may lead elsewhere.

    Args:
        folder: it may be absent.
        links: entries that may be links that this user made; they are not looked into.
        others: entries that may be anything.

    Returns:
        Those of ``links`` that are links.

    Raises:
        OSError: names what is neither a file nor a folder.
    """
    own: list[str] = []
    strange: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        for name, entry in _entries(folder, 2, {*links, *others}):
            if name in others or entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False):
                continue
            is_own = entry.is_symlink() and entry.stat(follow_symlinks=False).st_uid == os.getuid()
            (own if is_own and name in links else strange).append(name)
    if strange:
        shown = ", ".join(sorted(strange)[:5])
        raise OSError(errno.ELOOP, f"{shown} in it: neither a file nor a folder, and may lead elsewhere", str(folder))
    return own


def _entries(folder: str | Path, depth: int, skipped: Collection[str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Entries of a folder, and of its folders down to a depth, by their path in it; not those in ``skipped``."""
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry.name, entry
            if depth > 1 and entry.name not in skipped and entry.is_dir(follow_symlinks=False):
                for name, below in _entries(entry.path, depth - 1, ()):
                    yield f"{entry.name}/{name}", below

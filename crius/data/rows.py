"""Reads rows of files: lines of JSON, plain or compressed, and rows of parquet, with one clear error for
each problem.
"""

import contextlib
import gzip
import io
import json
import shlex
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from crius.errors import DataError, EnvironmentError
from crius.plugins import REQUIREMENTS, install_line

MAX_LINE_BYTES = 256 << 20
"""Longest line of a jsonl file, 256 MiB: a file without newlines must not fill the memory."""

COMPRESSED = (".gz", ".zst")
"""Suffixes of files that are decompressed while they are read."""

_ROWS = 256
"""Rows of a parquet file that are in memory as Python objects at a time."""

_BLOCK = 4096
"""Bytes that are decompressed at a time: zstd expands them to at most 32,768 times as many."""


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn an OSError, or an error of damaged compressed data, into an error that names the file."""
    try:
        yield
    except EOFError as error:
        what = f"{file} ends in the middle of its compressed data."
        raise DataError(what, where=str(file), fix="download the file again: it is incomplete") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        what = f"{file} cannot be decompressed: {error}."
        raise DataError(what, where=str(file), fix="download the file again, or rename it if it is not gzip") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.", where=str(file)) from error


def decode(content: bytes, file: Path, line: int, offset: int) -> str:
    """Decode ``content``, which starts at this line (from 1) and byte offset (from 0) of the file.

    Raises:
        DataError: the content is not UTF-8.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        compressed = content.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")) and offset == 0
        encoding = "UTF-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) and offset == 0 else "LATIN1"
        name = shlex.quote(str(file))
        raise DataError(
            f"byte {offset + error.start} of {file} is 0x{content[error.start]:02x}, which is not UTF-8.",
            where=f"{file}:{line}",
            fix="the file looks compressed: unpack it first"
            if compressed
            else f"iconv -f {encoding} -t UTF-8 {name} > {name}.utf8 if it is {encoding}, and give that file",
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


def json_lines(file: Path) -> Iterator[tuple[object, int]]:
    """The JSON value of each line that is not blank, with the number of the line, from 1.

    Args:
        file: path of a plain file, or of a compressed one if its suffix is in ``COMPRESSED``.

    Raises:
        DataError: the file cannot be read or decompressed, is not UTF-8, or a line is too long or not JSON.
        EnvironmentError: the package that decompresses it is missing.
    """
    offset = 0
    number = 0
    with reading(file), _open(file) as opened:
        while content := opened.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{file}:{number}"
            if len(content) > MAX_LINE_BYTES:
                raise DataError(
                    f"line {number} is longer than {MAX_LINE_BYTES >> 20} MiB.",
                    where=where,
                    why="jsonl has one JSON object per line, and a line is held in memory",
                    fix="jq -c . FILE writes one object per line; for plain text --data.source text",
                )
            line = decode(content, file, number, offset)
            offset += len(content)
            if line.strip():
                yield _json(line, where), number


def parquet_rows(file: Path, choose: Callable[[list[str]], Sequence[str]]) -> Iterator[tuple[dict[str, Any], int]]:
    """Some columns of the rows of a parquet file, with the number of each row, from 1.

    Args:
        file: path of the file.
        choose: function from the existing columns to the columns to read; it raises if a column is missing.

    Raises:
        DataError: the file is damaged, or not parquet, or has a time that Python lacks.
        EnvironmentError: pyarrow is missing.
    """
    try:
        import pyarrow  # noqa: PLC0415  optional package
        import pyarrow.parquet  # noqa: PLC0415  optional package
    except ImportError as error:
        raise _missing("pyarrow", file) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            columns = list(choose(opened.schema_arrow.names))
            for batch in opened.iter_batches(batch_size=_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield row, number
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"{file} cannot be read as parquet: {error}.",
            where=f"{file}, row {number + 1}",
            why=f"the {number:,} rows before it were read" if number else "no row was read",
            fix="download the file again if it is damaged, or write its dates and durations as text",
        ) from error


def checked_text(text: object, what: str, where: str) -> str:
    """Return ``text`` if it is valid Unicode text.

    Raises:
        DataError: it is not text, or has a lone surrogate.
    """
    if not isinstance(text, str):
        raise DataError(f"{what} is {json_kind(text)}, not text.", where=where)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise DataError(
            f"{what} is not Unicode text: lone surrogate \\u{ord(text[error.start]):04x} at character {error.start}.",
            where=where,
        ) from error
    return text


def json_kind(value: object) -> str:
    """A name of the kind of a JSON value, for messages."""
    kinds = {"dict": "an object", "list": "a list", "str": "text", "NoneType": "null", "bool": "true or false"}
    return kinds.get(type(value).__name__, f"a number ({value})" if isinstance(value, int | float) else "no JSON value")


def _json(line: str, where: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"the line is not JSON: {error.msg} at column {error.colno}.",
            where=where,
            fix="jsonl has one JSON object per line; for plain text --data.source text",
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise DataError(f"the line is not JSON that can be read: {error}.", where=where) from error


def _open(file: Path) -> BinaryIO:
    if file.suffix == ".gz":
        return cast(BinaryIO, gzip.open(file, "rb"))
    if file.suffix != ".zst":
        return file.open("rb")
    try:
        import zstandard  # noqa: PLC0415  optional package
    except ImportError as error:
        raise _missing("zstandard", file) from error
    return io.BufferedReader(_Zstd(file.open("rb"), zstandard))


def _missing(package: str, file: Path) -> EnvironmentError:
    return EnvironmentError(
        f"{file} needs the package {package}, which is not installed.",
        where=str(file),
        fix=install_line(REQUIREMENTS[package]),
    )


class _Zstd(io.RawIOBase):
    """The content of a zstd file. zstandard's own reader accepts a truncated file as complete."""

    def __init__(self, file: BinaryIO, zstandard: Any) -> None:
        super().__init__()
        self._file = file
        self._zstandard = zstandard
        self._frame: Any = None
        self._rest = b""  # compressed bytes of the next frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._rest or self._file.read(_BLOCK)
            self._rest = b""
            if not block:
                if self._frame is not None:
                    raise EOFError
                return 0
            try:
                self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
                self._ready = memoryview(self._frame.decompress(block))
            except self._zstandard.ZstdError as error:
                raise OSError(f"it cannot be decompressed: {error}") from error
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame = None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

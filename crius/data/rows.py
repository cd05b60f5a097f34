"""Reads rows of files: JSON in lines or in one array, CSV and parquet, with one clear error for each problem. An error
of a single row takes the place of the row.
"""

import contextlib
import csv
import gzip
import io
import itertools
import json
import re
import shlex
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from crius.errors import DataError, EnvironmentError
from crius.plugins import REQUIREMENTS, install_line
from crius.untrusted import HUGE, open_named, text_below

MAX_LINE_BYTES = 256 << 20
"""Longest line of a jsonl file, 256 MiB: a file without newlines must not fill the memory."""

COMPRESSED = (".gz", ".zst")
"""Suffixes of files that are decompressed while they are read."""

_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"PK\x03\x04")
"""First bytes of gzip, zstd, bzip2, xz and zip."""

_DELIMITERS = ",;\t|"
_BETWEEN = re.compile(r"[\s,]*")
"""What is between the items of an array; a comma behind the last one is no harm."""

T = TypeVar("T")

_ROWS = 256
"""Rows of a parquet file that are in memory as Python objects at a time."""

_BLOCK = 4096
"""Bytes that are decompressed at a time: zstd expands them to at most 32,768 times as many."""


BAD_ROWS = "bad_rows.txt"
"""File of a token folder that lists the rows that are not in it. Lines with ``# `` count them by reason."""


class Refusals:
    """Rows that cannot be used. The first one is an error, unless such rows are left out, counted and listed.

    Args:
        bad_rows: refuse, or skip to leave out such rows, up to 1 % of all rows, or up to 1 row.
    """

    def __init__(self, bad_rows: str) -> None:
        self._skips = bad_rows == "skip"
        self._num_rows = 0
        self._errors: list[DataError] = []

    def accepted(self, rows: Iterable[T | DataError]) -> Iterator[T]:
        """The rows that can be used.

        Raises:
            DataError: a row cannot be used, and such rows are not left out.
        """
        for row in rows:
            if isinstance(row, DataError):
                self.refuse(row)
            else:
                yield row
            self._num_rows += 1

    def refuse(self, error: DataError) -> None:
        """Leave out the row that ``error`` is about.

        Raises:
            DataError: such rows are not left out.
        """
        if self._skips:
            self._errors.append(error)
        elif self._num_rows:
            fix = f"{error.fix or 'correct the row'}, or leave out such rows, at most 1 %: --data.bad_rows skip"
            raise DataError(error.what, where=error.where, why=error.why, fix=fix) from error
        else:  # most likely all rows are like the first one
            raise error

    def text(self) -> str:
        """The content of ``BAD_ROWS``; empty if no row was left out.

        Raises:
            DataError: too many rows were left out.
        """
        if not self._errors:
            return ""
        reasons = Counter(re.sub(r"[\d,]*\d", "N", error.what) for error in self._errors)
        counted = [f"{count:,}: {reason}" for reason, count in reasons.most_common(10)]
        share = f"{len(self._errors):,} of {self._num_rows:,} rows"
        first = self._errors[0]
        if len(self._errors) > max(1, self._num_rows // 100):
            raise DataError(
                f"{share} cannot be used; at most 1 % of the rows, or one row, can be left out.",
                where=first.where,
                why="; ".join(counted),
                fix=first.fix or "correct these rows",
            )
        head = [f"# {line}" for line in (f"{share} are left out, listed in {BAD_ROWS}", *counted)]
        return "\n".join([*head, *(f"{error.where}\t{error.what}" for error in self._errors)]) + "\n"


def left_out(folder: Path) -> str:
    """The content of ``BAD_ROWS`` in a token folder; empty if it lacks no row."""
    try:
        return text_below(folder, BAD_ROWS, HUGE)
    except FileNotFoundError:
        return ""


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
        compressed = content.startswith(_PACKED) and offset == 0
        encoding = "UTF-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) and offset == 0 else "LATIN1"
        name = shlex.quote(str(file))
        converted = shlex.quote(str(file.with_suffix(f".utf8{file.suffix}")))
        raise DataError(
            f"byte {offset + error.start} of {file} is 0x{content[error.start]:02x}, which is not UTF-8.",
            where=f"{file}:{line}",
            fix="the file looks compressed: unpack it first"
            if compressed
            else f"iconv -f {encoding} -t UTF-8 {name} > {converted} if it is {encoding}, and give that file"
            "; pdftotext or pandoc if it is no text",
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


class Line(NamedTuple):
    """A line of a file: its bytes, its number from 1, and the bytes before it."""

    content: bytes
    number: int
    offset: int


def read_rows(
    source: str, file: Path, choose: Callable[[list[str]], Sequence[str]], convert: Callable[[Any, str], T | None]
) -> Iterator[T | DataError]:
    """What ``convert`` makes of each row of a file, in order, or why the row cannot be used.

    Args:
        source: jsonl, csv or parquet.
        file: path of the file.
        choose: as for ``parquet_rows``.
        convert: function of a row and its place, such as ``FILE:LINE``; None leaves the row out. It raises DataError.

    Raises:
        DataError: the file cannot be read further.
        EnvironmentError: a package is missing.
    """
    place = f"{file}:"
    if source == "parquet":
        place = f"{file}, row "
        rows: Iterator[tuple[object, int]] = parquet_rows(file, choose)
    elif source == "csv":
        rows = csv_rows(file)
    else:
        rows = json_rows(file)
    for row, number in rows:
        try:
            if isinstance(row, DataError):
                raise row
            converted = convert(row, f"{place}{number}")
        except DataError as error:
            yield error
            continue
        if converted is not None:
            yield converted


def json_rows(file: Path) -> Iterator[tuple[object, int]]:
    """The JSON value of each line that is not blank, or of each item if the file is one array, with its line from 1.

    In place of a line that is not UTF-8 or not JSON it yields a DataError.

    Args:
        file: path of a plain file, or of a compressed one if its suffix is in ``COMPRESSED``.

    Raises:
        DataError: the file cannot be read or decompressed, a line is too long, or an array is damaged.
        EnvironmentError: the package that decompresses it is missing.
    """
    with reading(file), _open(file) as opened:
        lines = (line for line in _lines(file, opened) if line.content.strip())
        head = list(itertools.islice(lines, 2))
        if head and head[0].content.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
            is_broken = isinstance(_json_line(file, head[0]), DataError)
            if is_broken or len(head) == 1:
                between = b"\n" * (head[-1].number - head[0].number - 1)
                content = between.join(line.content for line in head) + opened.read(MAX_LINE_BYTES)
                yield from _array(file, Line(content, head[0].number, head[0].offset))
                return
        for line in itertools.chain(head, lines):
            yield _json_line(file, line), line.number


def csv_rows(file: Path) -> Iterator[tuple[object, int]]:
    """The fields of each row of a CSV or TSV file by the names in its first row, with the line where the row begins.

    The delimiter is the tab in ``.tsv``, else the one of comma, semicolon, tab and bar that the first row has most of.
    In place of a row that does not fit the first one it yields a DataError. Arguments and errors: see ``json_rows``.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    with reading(file), _open(file) as opened:
        lines = (decode(line.content, file, line.number, line.offset) for line in _lines(file, opened))
        first = next(lines, "")
        delimiter = "\t" if ".tsv" in file.suffixes else max(_DELIMITERS, key=first.count)
        reader = csv.reader(itertools.chain([first], lines), delimiter=delimiter, strict=True)
        names: list[str] = []
        while True:
            number = reader.line_num + 1
            where = f"{file}:{number}"
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                what = f"the row is not CSV: {error}."
                yield DataError(what, where=where, fix='write a " in a quoted field as ""'), number
                continue
            if not names:
                names = [name.strip() for name in fields]
                if twice := [name for name in names if names.count(name) > 1]:
                    raise DataError(f"two columns are called {twice[0]!r}.", where=where, fix="rename one of them")
            elif len(fields) == len(names):
                yield dict(zip(names, fields, strict=True)), number
            elif fields:
                what = f"the row has {len(fields)} fields, but the first row of the file names {len(names)}."
                fix = f"quote fields that contain {delimiter!r} or a line break"
                yield DataError(what, where=where, fix=fix), number


def _lines(file: Path, opened: BinaryIO) -> Iterator[Line]:
    offset = 0
    for number in itertools.count(1):
        content = opened.readline(MAX_LINE_BYTES + 1)
        if not content:
            return
        if len(content) > MAX_LINE_BYTES:
            raise DataError(
                f"line {number} is longer than {MAX_LINE_BYTES >> 20} MiB.",
                where=f"{file}:{number}",
                why="jsonl has one JSON object per line, and a line is held in memory",
                fix="jq -c . FILE writes one object per line; for plain text --data.source text",
            )
        yield Line(content, number, offset)
        offset += len(content)


def _json_line(file: Path, line: Line) -> object:
    """The value of a line, or the DataError that says why it has none."""
    try:
        return _json(decode(line.content, file, line.number, line.offset), f"{file}:{line.number}")
    except DataError as error:
        return error


def _array(file: Path, whole: Line) -> Iterator[tuple[object, int]]:
    """The items of the JSON array that begins in this line, to the end of the file."""
    if len(whole.content) > MAX_LINE_BYTES:
        raise DataError(
            f"the array is longer than {MAX_LINE_BYTES >> 20} MiB.",
            where=str(file),
            why="it is held in memory",
            fix=f"jq -c '.[]' {shlex.quote(str(file))} > {shlex.quote(f'{file}l')}, and give that file",
        )
    text = decode(whole.content, file, whole.number, whole.offset)
    decoder = json.JSONDecoder()
    number = whole.number
    place = text.index("[") + 1
    counted = 0
    try:
        while True:
            start = place + len(_BETWEEN.match(text, place)[0])  # type: ignore[index]  # it matches everywhere
            number += text.count("\n", counted, start)
            counted = start
            if text.startswith("]", start):
                break
            value, place = decoder.raw_decode(text, start)
            yield value, number
        if text[start + 1 :].strip():
            raise json.JSONDecodeError("Extra data", text, start + 1)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"the array is not JSON: {error}.",
            where=f"{file}:{number}",
            fix="download the file again if it is cut; jsonl has one JSON object per line, or one array",
        ) from error


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
            _check_cells(file, opened.metadata)
            for batch in opened.iter_batches(batch_size=_ROWS, columns=columns):
                is_large = batch.nbytes > MAX_LINE_BYTES
                for part in map(batch.slice, range(len(batch)), itertools.repeat(1)) if is_large else [batch]:
                    if is_large and _decoded_bytes(part) > MAX_LINE_BYTES:
                        raise _too_long(file, f"row {number + 1}")
                    for row in part.to_pylist():
                        number += 1
                        yield row, number
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"{file} cannot be read as parquet: {str(error).rstrip('.')}.",
            where=f"{file}, row {number + 1}",
            why=f"the {number:,} rows before it were read" if number else "no row was read",
            fix="download the file again if it is damaged, or write its dates and durations as text",
        ) from error


def _check_cells(file: Path, metadata: Any) -> None:
    """Refuse a file whose cells cannot all be short, before any is read: packed, they may be short themselves."""
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        for place in range(group.num_columns):
            if group.column(place).total_uncompressed_size > MAX_LINE_BYTES * max(1, group.num_rows):
                raise _too_long(file, f"row group {index + 1}")


def _decoded_bytes(row: Any) -> int:
    """Bytes of a batch of one row, of whose dictionaries only its own values count."""
    columns = (column.dictionary_decode() if hasattr(column, "dictionary") else column for column in row.columns)
    return sum(column.nbytes for column in columns)


def _too_long(file: Path, where: str) -> DataError:
    return DataError(
        f"a row is longer than {MAX_LINE_BYTES >> 20} MiB.",
        where=f"{file}, {where}",
        why="a row is held in memory",
        fix="split its text into several rows",
    )


def checked_text(text: object, what: str, where: str) -> str:
    """Return ``text``, decoded if it is bytes in UTF-8.

    Raises:
        DataError: it is not text, or has a lone surrogate.
    """
    if isinstance(text, bytes):
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            what = f"{what} is bytes that are not UTF-8: 0x{text[error.start]:02x} at byte {error.start}."
            raise DataError(what, where=where, fix="write the column as text") from error
    if not isinstance(text, str):
        raise DataError(
            f"{what} is {json_kind(text)}, not text.", where=where, fix="write text there, or remove the row"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise DataError(
            f"{what} is not Unicode text: lone surrogate \\u{ord(text[error.start]):04x} at character {error.start}.",
            where=where,
            fix="remove the row",
        ) from error
    return text


def json_kind(value: object) -> str:
    """A name of the kind of a JSON value, for messages."""
    kinds = {"dict": "an object", "list": "a list", "str": "text", "NoneType": "null", "bool": "true or false"}
    return kinds.get(type(value).__name__, f"a number ({value})" if isinstance(value, int | float) else "no JSON value")


def value_of(row: Mapping[Any, Any], name: str) -> Any:
    """The value of a key of a row. If there is no such key, the dots of ``name`` lead into objects.

    Raises:
        KeyError: there is no such value.
    """
    if name in row:
        return row[name]
    first, _, rest = name.partition(".")
    inner = row[first]
    if not rest or not isinstance(inner, Mapping):
        raise KeyError(name)
    return value_of(inner, rest)


def _json(line: str, where: str) -> object:
    try:
        return json.loads(line.rstrip("\r\n\t ,"))  # a comma behind an object is no harm
    except json.JSONDecodeError as error:
        fix = "jsonl has one JSON object per line (jq -c . FILE writes them); for plain text --data.source text"
        if line.startswith("{'"):
            fix = "write json.dumps(row), not str(row), which writes Python"
        what = f"the line is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}."
        raise DataError(what, where=where, fix=fix) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise DataError(f"the line is not JSON that can be read: {error}.", where=where) from error


def _open(file: Path) -> BinaryIO:
    if file.suffix == ".gz":
        return cast(BinaryIO, gzip.open(open_named(file)))
    if file.suffix != ".zst":
        return open_named(file)
    try:
        import zstandard  # noqa: PLC0415  optional package
    except ImportError as error:
        raise _missing("zstandard", file) from error
    return io.BufferedReader(_Zstd(open_named(file), zstandard))


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

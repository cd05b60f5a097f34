"""Reads documents of local corpora, with one clear error for each way in which they can be bad."""

import difflib
import functools
import glob
import hashlib
import mimetypes
import os
import platform
import re
import shlex
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from crius import plugins
from crius.config.data import DataConfig, check_source
from crius.data.chat.conversations import LISTS, PAIRS, check_is_row
from crius.data.rows import COMPRESSED, checked_text, decode, json_kind, read_rows, reading, value_of
from crius.errors import ConfigError, CriusError, DataError, MissingPathError
from crius.untrusted import open_named, read_named


def matches(pattern: Path) -> list[Path]:
    """Files and folders that match ``pattern``, in which ``**`` stands for any number of folders.

    Links are followed. With ``**``, a file counts once for each of its names in a folder, even if several links to
    folders lead there; the shortest path is used. If a file itself has several names, by hard or symbolic links to the
    file, each name counts.
    """
    if "**" not in pattern.parts:
        return [Path(name) for name in glob.glob(str(pattern))]
    found: dict[tuple[int, int, str], Path] = {}
    for path in sorted(_walked(pattern), key=lambda path: (len(path.parts), path)):
        status = path.parent.stat()
        found.setdefault((status.st_dev, status.st_ino, path.name), path)
    return list(found.values())


def _walked(pattern: Path) -> list[Path]:
    """As ``matches``, but with duplicates from links to folders; each folder is searched once per ``**``."""
    parts = pattern.parts
    if "**" not in parts:
        return [Path(name) for name in glob.glob(str(pattern))]
    place = parts.index("**")
    top = Path(*parts[:place])
    rest = Path(*parts[place + 1 :])
    found: dict[Path, None] = {}
    for base in glob.glob(str(top)) if place else ["."]:
        for folder in _folders(base):
            below = Path(glob.escape(folder)) / (rest if rest.parts else "*")
            found |= dict.fromkeys([*([] if rest.parts else [Path(folder)]), *_walked(below)])
    return list(found)


def is_utf8(name: str) -> bool:
    """Whether the name of a file can be written: Python reads bytes that are not UTF-8 as lone surrogates."""
    return name.encode("utf-8", "replace").decode() == name


def _folders(top: str) -> Iterator[str]:
    """``top`` and all folders below it except hidden ones, each once."""
    seen: set[tuple[int, int]] = set()
    waiting = [top]
    while waiting:
        links = []
        for start in waiting:
            for folder, names, _ in os.walk(start):
                status = os.stat(folder)
                if (status.st_dev, status.st_ino) in seen:
                    names.clear()
                    continue
                seen.add((status.st_dev, status.st_ino))
                names[:] = sorted(name for name in names if not name.startswith("."))
                links += [path for name in names if os.path.islink(path := os.path.join(folder, name))]
                yield folder
        waiting = links


PIECE_BYTES = 16 << 20
"""A text file is read and tokenised 16 MiB at a time."""

_NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Piece(NamedTuple):
    """A document, or a part of a long document. A document is never empty."""

    text: str
    ends_document: bool


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """A kind of files with documents, which ``data.source`` names.

    An installed package can add a kind as an entry point of the group ``crius.data``. Its files are found, tokenised
    once, held out, shuffled and resumed like those of any kind.

    Attributes:
        suffix: suffix, with its dot, of the files that are taken from a folder.
        read: function of ``(file, data.text_field)`` that yields the documents of one file, in order. It may yield a
            long document as several pieces. It raises DataError if the file is bad, and may yield one for a bad row.
        version: must change when ``read`` gives other documents for the same file, so that they are tokenised again.
    """

    suffix: str
    read: Callable[[Path, str], Iterator[Piece | DataError]]
    version: str = ""

    def __post_init__(self) -> None:
        if not (isinstance(self.suffix, str) and isinstance(self.version, str) and callable(self.read)):
            raise TypeError("suffix and version of a FileKind must be text, and read must be a function")


def kind_of(source: str) -> FileKind:
    """The kind that ``data.source`` names, of this module or of an installed package.

    Raises:
        ConfigError: the kind does not exist, or cannot be used.
    """
    check_source(source, "--data.source")
    kind = KINDS.get(source) or plugins.load(plugins.DATA, source, FileKind)
    assert kind is not None, f"{source} is not a kind of files"
    return kind


def find_files(data: DataConfig, flag: str = "--data.path") -> tuple[Path, ...]:
    """The files of a local corpus, in the order in which they are read; each file once.

    Args:
        data: the section; ``kind_of`` must know ``source``.
        flag: flag that ``data.path`` came from, for messages.

    Raises:
        ConfigError: the source does not exist.
        DataError: there is no path, a path does not exist, a pattern matches nothing, or a folder has no such files.
    """
    if data.source == "stdlib":
        if data.path:
            raise ConfigError(
                f"source stdlib takes no path, but got {data.path[0]}.", where=flag, fix="--data.source text, or jsonl"
            )
        return _stdlib_files()
    suffixes: tuple[str, ...] = _SUFFIXES.get(data.source) or (kind_of(data.source).suffix,)
    if data.source in _SUFFIXES:
        suffixes += tuple(suffix + end for suffix in suffixes for end in COMPRESSED)
    if not data.path:
        raise DataError(f"source {data.source} needs files.", where=flag, fix=f"{flag} FILE (repeat it for more)")
    found = {file for pattern in data.path for file in _matches(pattern, suffixes, flag)}
    twice = sorted(file for file in found if file.suffix in COMPRESSED and file.with_suffix("") in found)
    if twice:
        raise DataError(
            f"{twice[0].with_suffix('')} and {twice[0]} are the same file twice.",
            where=flag,
            fix=f"remove one of them, or name the files: {flag} FILE (repeat it for more)",
        )
    return tuple(sorted(found))


def read_pieces(data: DataConfig, files: tuple[Path, ...]) -> Iterator[Piece | DataError]:
    """Read the documents of ``files``, in order, in bounded memory. Empty documents are left out.

    A row without the text is given as a DataError that names file and line.

    Raises:
        DataError: a file cannot be read, or is not UTF-8.
    """
    read = kind_of(data.source).read
    if data.source not in KINDS:
        read = functools.partial(_foreign_pieces, read, data.source)
    for file in files:
        yield from read(file, data.text_field)


def _foreign_pieces(
    read: Callable[[Path, str], Iterator[Piece | DataError]], source: str, file: Path, text_field: str
) -> Iterator[Piece | DataError]:
    """Read the documents of ``file`` by a package. Any problem with them, or with the package's code, is one error."""
    is_open = False
    try:
        for piece in read(file, text_field):
            if isinstance(piece, DataError):
                yield piece
                continue
            text, ends_document = piece
            text.encode()  # fails for a lone surrogate
            if text or (is_open and ends_document):
                yield Piece(text, ends_document)
            is_open = not ends_document and (is_open or bool(text))
        if is_open:
            yield Piece("", True)
    except CriusError:
        raise
    except Exception as error:  # from code that is not ours
        raise DataError(
            f"data.source {source} failed on {file}: {type(error).__name__}: {error}",
            where=f"{plugins.DATA} {source}",
            why="the package that reads such files raised it; it must yield crius.data.documents.Piece",
        ) from error


def describe(data: DataConfig, files: tuple[Path, ...]) -> str:
    """A short description of the corpus, for the log and for meta.json."""
    if data.source == "stdlib":
        return f"stdlib of Python {platform.python_version()}, {len(files):,} files"
    names = ", ".join(data.path[:3]) + (", ..." if len(data.path) > 3 else "")
    noun = "file" if len(files) == 1 else "files"
    return f"{data.source} {names}, {len(files):,} {noun}"


def document_text(row: object, field: str, where: str) -> str:
    """The text of one record.

    Args:
        row: a decoded JSON line, or a row of a dataset.
        field: key of the text; its dots may lead into objects.
        where: file and line, or dataset and document, for messages.

    Raises:
        DataError: the key is missing, or its value is not text.
    """
    if not isinstance(row, Mapping):
        what = f"the record is {json_kind(row)}, not an object with a key {field!r}."
        raise DataError(what, where=where, fix=f'write each row as an object, such as {{"{field}": "Once"}}')
    try:
        text = value_of(row, field)
    except KeyError:
        check_is_row(row, where)
        names = list(_names_of_texts(row))
        by_length = sorted(names, key=lambda name: -len(value_of(row, name)))
        near = difflib.get_close_matches(field, names, n=1)
        choice = near or by_length
        fix = (
            f"--data.text_field {shlex.quote(choice[0])}"
            if choice
            else "--data.text_field KEY, with the key of the text"
        )
        if len(names) > 1 and not near:
            pair = " ".join(f"--data.columns {shlex.quote(name)}" for name in names if name in by_length[:2])
            fix = f"{pair} if these are a question and its answer, else {fix}"
        lists = [key for key, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
        if any({*keys} <= {*row} for keys in (*zip(LISTS), *PAIRS)):
            fix = f"--data.format chat if these are conversations, in files with rows; else {fix}"
        elif lists:
            fix = f"--data.columns {shlex.quote(lists[0])} if these are conversations"
        raise DataError(
            f"the record has no key {field!r}; its keys: {', '.join(map(str, row)) or 'none'}.", where=where, fix=fix
        ) from None
    return checked_text(text, f"the value of {field!r}", where)


def _names_of_texts(row: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """Keys of the texts in a row and in its objects."""
    for key, value in row.items():
        if isinstance(value, str):
            yield f"{prefix}{key}"
        elif isinstance(value, Mapping) and not prefix:
            yield from _names_of_texts(value, f"{key}.")


def _stdlib_files() -> tuple[Path, ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    kept: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]  # site-packages may hold 100,000 files
        # _sysconfigdata_*.py has the paths of the machine that built this Python
        wanted = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        kept += [Path(folder, name).relative_to(root) for name in wanted]
    # sorted by hash, so that the end of the corpus, which is held out, is a random sample of the modules
    return tuple(
        root / name for name in sorted(kept, key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    )


def _matches(pattern: str, suffixes: Sequence[str], flag: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        return _files_of_folder(path, suffixes, flag)
    if path.exists():
        if not path.is_file():
            raise DataError(f"{pattern} is not a regular file.", where=flag)
        return [path]
    found = matches(path)
    files = [file for file in found if file.is_file()]
    for file in files:
        if not is_utf8(str(file)):
            raise DataError(
                f"the name {ascii(str(file))} of a file that matches {pattern} is not UTF-8.",
                where=flag,
                fix="rename the file",
            )
    if files:
        return files
    if not glob.has_magic(pattern):
        near = difflib.get_close_matches(path.name, glob.glob("*", root_dir=path.parent), n=1, cutoff=0.8)
        meant = path.with_name(near[0]) if near else "with a file, folder or pattern; no URL is read"
        raise MissingPathError(
            f"{pattern} does not exist.",
            where=flag,
            why="" if path.is_absolute() else f"looked in {Path.cwd()}",
            fix=f"{flag} {meant}" if flag.startswith("-") else f"write {meant} in place of {pattern}",
        )
    raise MissingPathError(
        f"no file matches {pattern}" + (f" ({len(found)} folders do)." if found else "."),
        where=flag,
        fix=f"ls {pattern}; ** goes into subfolders",
    )


def _files_of_folder(folder: Path, suffixes: Sequence[str], flag: str) -> list[Path]:
    suffix = suffixes[0]
    patterns = [f"{glob.escape(str(folder))}/**/*{ending}" for ending in (*suffixes, ".json")]
    there = [pattern for pattern in patterns if any(file.is_file() for file in matches(Path(pattern)))]
    if suffix != ".jsonl" or len(there) > 1:
        there = [pattern for pattern in there if pattern != patterns[-1]]  # others describe the data, if there is any
    try:
        return [file for pattern in there or patterns[:1] for file in _matches(pattern, suffixes, flag)]
    except DataError:
        others = sorted({file.suffix for file in folder.glob("?*.*") if file.is_file()})
        texts = [other for other in others if "text" in (mimetypes.guess_type(f"a{other}")[0] or "text")]
        raise MissingPathError(
            f"folder {folder} and its subfolders have no {suffix} file.",
            where=flag,
            why=f"it has {', '.join(others)} files" if others else "",
            fix=f"{flag} '{folder}/*{texts[0]}'" if texts else f"give another {flag}, or put {suffix} files there",
        ) from None


def _stdlib_pieces(file: Path, _: str) -> Iterator[Piece]:
    with reading(file):
        content = read_named(file)
    try:
        text = content.decode()
    except UnicodeDecodeError:  # a few modules declare another encoding
        return
    if text:
        yield Piece(text, True)


def _text_pieces(file: Path, _: str) -> Iterator[Piece]:
    line = 1
    offset = 0
    rest = b""
    started = False
    with reading(file), open_named(file) as opened:
        while block := opened.read(PIECE_BYTES):
            content = rest + block
            cut = 0
            if len(content) >= PIECE_BYTES:
                cut = _cut(content)
                yield Piece(decode(content[:cut], file, line, offset), False)
                started = True
                line = line + content.count(b"\n", 0, cut)
                offset = offset + cut
            rest = content[cut:]
        text = decode(rest, file, line, offset)
        if text or started:
            yield Piece(text, True)


def _cut(content: bytes) -> int:
    """The place to split text without changing tokens: byte-level BPE never joins a newline and a visible character.

    Text without such a place is split before its last character.
    """
    if found := re.match(rb"(?s).*\n(?=\S)", content):
        return found.end()
    last = len(content) - 1
    while last > len(content) - 4 and last > 0 and content[last] & 0xC0 == 0x80:
        last -= 1
    return last


def _row_pieces(source: str, file: Path, field: str) -> Iterator[Piece | DataError]:
    def choose(names: list[str]) -> list[str]:
        top = field.partition(".")[0]
        if field not in names and top in names:
            return [top]
        document_text(dict.fromkeys(names, ""), field, str(file))  # raises if the column is missing
        return [field]

    def convert(row: object, where: str) -> Piece | None:
        text = document_text(row, field, where)
        return Piece(text, True) if text else None

    yield from read_rows(source, file, choose, convert)


_SUFFIXES = {"jsonl": (".jsonl", ".ndjson"), "csv": (".csv", ".tsv")}
"""Suffixes of sources whose files may be compressed. If a folder has none of jsonl, its .json files are taken."""

KINDS = {
    "stdlib": FileKind(suffix=".py", read=_stdlib_pieces),
    "text": FileKind(suffix=".txt", read=_text_pieces),
    "jsonl": FileKind(suffix=".jsonl", read=functools.partial(_row_pieces, "jsonl")),
    "csv": FileKind(suffix=".csv", read=functools.partial(_row_pieces, "csv")),
    "parquet": FileKind(suffix=".parquet", read=functools.partial(_row_pieces, "parquet")),
}

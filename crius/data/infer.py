"""Infers what data is from its path and its first rows: the source, the format of a row, and the mask that it needs."""

import glob
import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from crius.config.data import DataConfig
from crius.data.chat.conversations import LISTS, PAIRS
from crius.data.documents import KINDS, find_files, matches, suffixes_of
from crius.data.meta import META, TokenMeta
from crius.data.rows import COMPRESSED, read_rows
from crius.errors import ConfigError, CriusError, DataError

_ROWS = 20
"""First rows that are looked at."""

_SOURCES = {suffix: source for source in KINDS for suffix in suffixes_of(source) if source != "stdlib"} | {
    ".json": "jsonl",
    **{f".json{end}": "jsonl" for end in COMPRESSED},
}


def infer(given: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Values of data.source, data.format and model.attention_mask that are not given, as far as they are clear.

    Args:
        given: values of the settings that are given, as text, by dotted name.

    Raises:
        ConfigError: the paths are files of several kinds, or of none.
    """
    paths = given.get("data.path", ())
    source = next(iter(given.get("data.source", ())), "")
    row_format = next(iter(given.get("data.format", ())), "")
    inferred: dict[str, Any] = {}
    if paths and not source:
        source = _source_of(paths)
        inferred["data.source"] = source
    if paths and not row_format:
        row_format = _format_of(source.lower(), paths, given)
        if row_format:
            inferred["data.format"] = row_format
    is_packed = next(iter(given.get("data.packing", ())), "").lower() != "false"
    if row_format.lower() == "chat" and is_packed and "model.attention_mask" not in given:
        inferred["model.attention_mask"] = "document"
    return inferred


def _source_of(paths: Sequence[str]) -> str:
    kinds = {path: _kind_of(path) for path in paths}
    (path, kind), *others = kinds.items()
    if other := next((other for other in others if other[1] != kind), None):
        raise ConfigError(
            f"{path} is {kind} data, and {other[0]} is {other[1]} data.",
            where="--data.path",
            why="one run reads files of one kind",
            fix="give files of one kind, or --data.source",
        )
    return kind


def _kind_of(pattern: str) -> str:
    path = Path(pattern).expanduser()
    if not path.exists() and glob.has_magic(pattern):
        path = min((file for file in matches(path) if file.is_file()), default=path)
    if path.is_dir():
        return _kind_of_folder(path)
    if source := _SOURCES.get(_suffix(path), ""):
        return source
    try:
        with path.open("rb") as file:
            start = file.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError:  # the code that reads it says why it cannot be read
        return "text"
    if start.startswith(b"PAR1"):
        return "parquet"
    return "jsonl" if start.startswith((b'{"', b"[{")) else "text"


def _suffix(file: Path) -> str:
    """The suffix of a file, and the one before it if the file is compressed."""
    return "".join(file.suffixes[-2:] if file.suffix in COMPRESSED else file.suffixes[-1:]).lower()


def _kind_of_folder(folder: Path) -> str:
    if (folder / META).is_file():
        return "tokens"
    suffixes = {_suffix(file) for file in matches(Path(glob.escape(str(folder)), "**", "*"))}
    if len(suffixes & _SOURCES.keys()) > 1 or ".arrow" in suffixes:
        suffixes -= {".json", ".txt"}  # they describe the other files
    kinds = sorted({_SOURCES[suffix] for suffix in suffixes & _SOURCES.keys()})
    if len(kinds) > 1:
        raise ConfigError(
            f"folder {folder} has files of several kinds: {', '.join(kinds)}.",
            where="--data.path",
            fix=" or ".join(f"--data.source {kind}" for kind in kinds),
        )
    if not kinds and ".arrow" in suffixes:
        code = f"import datasets; datasets.load_from_disk({str(folder)!r}).to_parquet('data.parquet')"
        raise ConfigError(
            f"folder {folder} has Arrow files, as the package datasets saves them.",
            where="--data.path",
            fix=f"python -c {shlex.quote(code)}, and --data.path data.parquet",
        )
    return next(iter(kinds), "text")


def _format_of(source: str, paths: Sequence[str], given: Mapping[str, Sequence[str]]) -> str:
    """The format that the first rows agree with; empty if none of them tells."""
    if given.get("data.columns"):
        return "chat"
    if given.get("data.text_field"):
        return "documents"
    try:
        if source == "tokens":
            return "chat" if TokenMeta.from_file(Path(paths[0]).expanduser() / META).is_chat else "documents"
        if source not in ("jsonl", "csv", "parquet"):
            return ""
        return next(filter(None, map(_format_of_row, _first_rows(source, paths))), "")
    except CriusError:  # the code that reads the data says what is wrong
        return ""


def _first_rows(source: str, paths: Sequence[str]) -> Iterator[Any]:
    file = find_files(DataConfig(source=source, path=tuple(paths)))[0]
    rows = read_rows(source, file, lambda names: names, lambda row, where: row)
    return (row for row in itertools.islice(rows, _ROWS) if not isinstance(row, DataError))


def _format_of_row(row: Any) -> str:
    if not isinstance(row, dict):
        return ""
    if any(row.get(name) for name in LISTS):
        return "chat"
    if isinstance(row.get("text"), str | bytes):
        return "documents"
    return "chat" if any({*pair} <= {*row} for pair in PAIRS) else ""

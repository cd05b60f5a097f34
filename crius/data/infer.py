"""Infers what data is from its path and its first rows: the source, the format of a row, and the mask that it needs."""

import glob
import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crius.config.data import DataConfig, read_entry, table_text, tables_of
from crius.data.chat.conversations import LISTS, PAIRS
from crius.data.documents import find_files, matches
from crius.data.meta import META, TokenMeta
from crius.data.rows import COMPRESSED, read_rows
from crius.errors import ConfigError, CriusError
from crius.untrusted import open_named

_ROWS = 20
"""First rows that are looked at."""

_SOURCES = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}


def infer(given: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Values of data.source, data.format and model.attention_mask that are not given, as far as they are clear.

    Args:
        given: values of the settings that are given, as text, by dotted name.

    Raises:
        ConfigError: the paths are files of several kinds, or of none.
    """
    if mix := given.get("data.mix"):
        is_chat = "chat" in [one.get("format") for one in tables_of(list(map(completed, mix))) if isinstance(one, dict)]
        return {"model.attention_mask": "document"} if is_chat and _is_packed(given) else {}
    paths = given.get("data.path", ())
    source = "".join(given.get("data.source", ())).lower()
    row_format = "".join(given.get("data.format", ())).lower()
    inferred: dict[str, Any] = {}
    if paths and not source:
        source = _source_of(paths)
        inferred["data.source"] = source
    if paths and not row_format:
        row_format = _format_of(source, paths, given)
        if row_format:
            inferred["data.format"] = row_format
    if row_format == "chat" and _is_packed(given):
        inferred["model.attention_mask"] = "document"
    return inferred


def _is_packed(given: Mapping[str, Sequence[str]]) -> bool:
    return "".join(given.get("data.packing", ())).lower() != "false"


def completed(text: str) -> str:
    """An entry of ``data.mix`` with the source and the format that its files look like, as far as it lacks them."""
    try:
        entry = read_entry(text)
        if entry.source and entry.format:
            return text
        given = {"data.path": entry.path, "data.source": entry.source, "data.format": entry.format}
        given |= {"data.columns": entry.columns, "data.text_field": entry.field}
        inferred = infer(given) if entry.path else {}
    except (ValueError, CriusError):  # a rule, or the code that reads the files, says why
        return text
    found = {name.removeprefix("data."): value for name, value in inferred.items() if name.startswith("data.")}
    return table_text({**tables_of([text])[0], **found})


def _source_of(paths: Sequence[str]) -> str:
    first = _kind_of(paths[0])
    for path in paths[1:]:
        if (kind := _kind_of(path)) != first:
            raise ConfigError(
                f"{paths[0]} is {first} data, and {path} is {kind} data.",
                where="--data.path",
                why="one run reads files of one kind",
                fix="give files of one kind, or --data.source",
            )
    return first


def _kind_of(pattern: str) -> str:
    path = Path(pattern).expanduser()
    if not os.path.exists(path) and glob.has_magic(pattern):
        path = min((file for file in matches(path) if file.is_file()), default=path)
    if os.path.isdir(path):
        return _kind_of_folder(path)
    if source := _SOURCES.get(_suffix(path), ""):
        return source
    try:
        with open_named(path) as file:
            start = file.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError:  # the code that reads it says why it cannot be read
        return "text"
    if start.startswith(b"PAR1"):
        return "parquet"
    return "jsonl" if start.startswith((b'{"', b"[{")) else "text"


def _suffix(file: Path) -> str:
    """The suffix of a file, or of what a compressed file contains."""
    return (file.with_suffix("") if file.suffix in COMPRESSED else file).suffix.lower()


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
        file = find_files(DataConfig(source=source, path=tuple(paths)))[0]
        rows = read_rows(source, file, lambda names: names, lambda row, where: row)
        return next(filter(None, map(_format_of_row, itertools.islice(rows, _ROWS))), "")
    except CriusError:  # the code that reads the data says what is wrong
        return ""


def _format_of_row(row: Any) -> str:
    if not isinstance(row, dict):
        return "chat" if isinstance(row, list) else ""
    if any(row.get(name) for name in LISTS):
        return "chat"
    if isinstance(row.get("text"), str | bytes):
        return "documents"
    return "chat" if any({*pair} <= {*row} for pair in PAIRS) else ""

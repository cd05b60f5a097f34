"""Rows of local files, one by one: what each became, or why a run refuses it; and what the files are."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from crius.config.data import DataConfig
from crius.data import rows
from crius.data.chat.conversations import Conversation, read_conversations
from crius.data.documents import Piece, document_text, find_files, read_pieces
from crius.data.infer import infer
from crius.errors import ConfigError, DataError


class Row(NamedTuple):
    """A row of a file, or a piece of a document.

    Attributes:
        where: file and line.
        became: result; an empty document is a piece without text, and a refused row is an error.
        unused: its keys that nothing uses.
        file: index of its file.
        is_end: whether the rest of the file cannot be read.
    """

    where: str
    became: Conversation | Piece | DataError
    unused: Sequence[str] = ()
    file: int = 0
    is_end: bool = False


def found_data(data: DataConfig, given: Collection[str]) -> tuple[DataConfig, tuple[Path, ...]]:
    """The section with the source and the format that the files have, and the files.

    Args:
        data: the section.
        given: names of its settings that are not to be inferred.

    Raises:
        ConfigError: there is no such file, or the source has no local files.
    """
    texts = {f"data.{name}": getattr(data, name) for name in given}
    values = {name: value if isinstance(value, tuple) else (str(value),) for name, value in texts.items()}
    inferred = infer(values | {"data.path": data.path})
    fields = {name.removeprefix("data."): value for name, value in inferred.items() if name.startswith("data.")}
    data = replace(data, **fields)
    return data, local_files(data, "PATH")


def local_files(data: DataConfig, flag: str) -> tuple[Path, ...]:
    """The files of the section.

    Raises:
        ConfigError: there is no such file, or the source has no local files.
    """
    if data.source in ("huggingface", "tokens"):
        what = f"source {data.source} has no files with rows."
        raise ConfigError(what, where="--data.source", fix="give files: text, jsonl, csv or parquet")
    return find_files(data, flag)


def read_rows(data: DataConfig, files: Sequence[Path]) -> Iterator[Row]:
    """Every row of ``files``, in order, in bounded memory; a file is left at damage that hides the rest of it."""
    for index, file in enumerate(files):
        try:
            for row in _rows(data, file):
                yield row._replace(file=index)
        except DataError as error:
            yield Row(error.where or str(file), error, file=index, is_end=True)


def _rows(data: DataConfig, file: Path) -> Iterator[Row]:
    if data.format == "chat":
        for chat in read_conversations(data, [file]):
            yield Row(chat.where, chat, chat.unused if isinstance(chat, Conversation) else ())
    elif data.source in ("jsonl", "csv", "parquet"):
        key = data.text_field.partition(".")[0]

        def convert(value: Any, where: str) -> Row:
            text = document_text(value, data.text_field, where)
            return Row(where, Piece(text, True), [name for name in value if name != key])

        for row in rows.read_rows(data.source, file, list, convert):
            yield Row(row.where, row) if isinstance(row, DataError) else row
    else:
        for piece in read_pieces(data, (file,)):
            yield Row(piece.where if isinstance(piece, DataError) else f"{file}:1", piece)

"""A file with what was scored, one text a line, from which the same command continues. No torch."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

from crius.errors import ConfigError, DataError
from crius.tools.evaluate.metrics import Score

_WRITER = "written by"


class Key(NamedTuple):
    """A text to score: its task, its document there, and its number in the document."""

    task: str
    document: int
    request: int


class Record:
    """The file; without a path nothing is kept.

    Args:
        path: of it; empty: none.
        header: what has to be equal for scores to be taken over, where a record has it already.

    Attributes:
        scores: that were in the file.

    Raises:
        ConfigError: the file is not a record, or one of another model, task or setting.
        DataError: it cannot be read or written.
    """

    def __init__(self, path: str, header: Mapping[str, Any]) -> None:
        self.scores: dict[Key, Score] = {}
        self._file: IO[bytes] | None = None
        self._is_new = True
        header = {_WRITER: "crius evaluate", **header}
        if not path:
            return
        place = Path(path).expanduser()
        try:
            lines = place.read_bytes().split(b"\n")[:-1] if place.exists() else []  # the last line may be cut
            if lines:
                self._is_new = False
                self._take(lines, header, place)
            place.parent.mkdir(parents=True, exist_ok=True)
            self._file = place.open("r+b" if lines else "wb")
            self._file.seek(sum(len(line) + 1 for line in lines))
            self._file.truncate()
            if self._is_new:
                self._write([header])
        except OSError as error:
            raise DataError(f"{path} cannot be used: {error.strerror or error}.", where="--out") from None

    def __enter__(self) -> "Record":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()

    def add(self, scores: Iterable[tuple[Key, Score]]) -> None:
        """Write scores, whole lines each, before anything else is computed."""
        self._write([key._asdict() | score._asdict() for key, score in scores])

    def _write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        if self._file:
            self._file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
            self._file.flush()
            os.fsync(self._file.fileno())

    def _take(self, lines: list[bytes], header: Mapping[str, Any], place: Path) -> None:
        found: dict[str, Any] = {}
        try:
            for row in map(json.loads, lines):
                if "log_prob" in row:
                    key = Key(*(row[name] for name in Key._fields))
                    self.scores[key] = Score(*(row[name] for name in Score._fields))
                else:
                    found |= row
        except (ValueError, KeyError, TypeError):
            found = {}
        if found.get(_WRITER) != header[_WRITER]:
            what = f"{place} is there, and is not a record of crius evaluate."
            raise ConfigError(what, where="--out", fix="name another file")
        differing = sorted(key for key in header.keys() & found.keys() if header[key] != found[key])
        if differing:
            raise ConfigError(
                f"{place} is a record of another evaluation:"
                + "".join(f"\n  {key} {header[key]}, there {found[key]}" for key in differing),
                where="--out",
                fix="name another file, or remove this one",
            )
        if not header.items() <= found.items():  # with tasks that are new
            self._is_new = True

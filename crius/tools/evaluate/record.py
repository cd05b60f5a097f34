"""A file of scores, one text per line, from which the same command continues. No torch."""

import fcntl
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

from crius.errors import ConfigError, DataError
from crius.tools.evaluate.metrics import Score

_FIRST = b'{"written by": "crius evaluate"'


class Key(NamedTuple):
    """A text to score: its task, the document in the task, and its number in the document."""

    task: str
    document: int
    request: int


class ScoreRecord:
    """The file of scores; without a path no scores are kept.

    Args:
        path: path of the file; empty: none.
        header: facts that must be equal for scores to be used again.
        tasks: hashes by the names of tasks; tasks of a record with another hash are refused.

    Attributes:
        scores: scores that were in the file.

    Raises:
        ConfigError: the file is not a record, or is of another model, task or setting.
        DataError: it cannot be read or written, or another command is writing it.
    """

    def __init__(self, path: str, header: Mapping[str, Any], tasks: Mapping[str, str]) -> None:
        self.scores: dict[Key, Score] = {}
        self._path = path
        self._file: IO[bytes] | None = None
        if not path:
            return
        try:
            place = Path(path).expanduser()
            if place.exists() and not place.is_file():
                raise ConfigError(f"{path} is not a regular file.", where="--out", fix="give a file")
            place.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.fdopen(os.open(place, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
            self._begin(dict(header), dict(tasks))
        except BlockingIOError:
            raise DataError(f"another command writes {path}.", where="--out", fix="give another file") from None
        except (OSError, RuntimeError) as error:
            raise self._unusable(error) from None

    def __enter__(self) -> "ScoreRecord":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()

    def add(self, scores: Iterable[tuple[Key, Score]]) -> None:
        """Write scores, whole lines each, before anything else is computed.

        Raises:
            DataError: the disk cannot be written.
        """
        self._write([key._asdict() | score._asdict() for key, score in scores])

    def _write(self, rows: list[dict[str, Any]]) -> None:
        if self._file and rows:
            try:
                self._file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise self._unusable(error) from None

    def _unusable(self, error: Exception) -> DataError:
        why = getattr(error, "strerror", None) or error
        return DataError(f"{self._path} cannot be used: {why}.", where="--out", fix="give a file on another disk")

    def _begin(self, header: dict[str, Any], tasks: dict[str, str]) -> None:
        """Read the scores in the file, and move to the end of its last complete line."""
        assert self._file is not None
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        start = self._file.read(len(_FIRST))
        if not _FIRST.startswith(start):  # a command that was killed at its first line leaves part of it
            raise self._foreign()
        rest = self._file.read() if start == _FIRST else b""
        whole, _, cut = (start + rest).rpartition(b"\n")
        found = self._take(whole) if whole else {}
        differing = {key: value for key, value in header.items() if found and found["settings"].get(key) != value}
        told = [f"{key} {value}, in the file {found['settings'].get(key)}" for key, value in differing.items()]
        told += [
            f"task {name} of {digest}, in the file of {found['tasks'][name]}"
            for name, digest in tasks.items()
            if found and found["tasks"].get(name, digest) != digest
        ]
        if told:
            raise ConfigError(
                f"{self._path} is a record of another evaluation:" + "".join(f"\n  {line}" for line in told),
                where="--out",
                fix="give another file, or remove this one",
            )
        self._file.seek(len(whole) + 1 if whole else 0)
        self._file.truncate()
        if not found or not tasks.keys() <= found["tasks"].keys():
            self._write([{"written by": "crius evaluate", "settings": header, "tasks": tasks}])

    def _take(self, whole: bytes) -> dict[str, Any]:
        """Settings and tasks of a record; its scores are kept."""
        found: dict[str, Any] = {"settings": {}, "tasks": {}}
        try:
            for row in map(json.loads, whole.split(b"\n")):
                if "log_prob" not in row:
                    found["settings"] |= row["settings"]
                    found["tasks"] |= row["tasks"]
                    continue
                score = Score(float(row["log_prob"]), bool(row["is_greedy"]), int(row["tokens"]))
                if not math.isfinite(score.log_prob):
                    raise ValueError
                self.scores[Key(str(row["task"]), int(row["document"]), int(row["request"]))] = score
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._foreign() from None
        return found

    def _foreign(self) -> ConfigError:
        what = f"{self._path} exists, but is not a record of crius evaluate."
        return ConfigError(what, where="--out", fix="give another file")

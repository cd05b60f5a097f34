"""The files of a run folder, read into one object. No torch."""

import errno
import operator
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crius.config.toml_file import settings_of_run
from crius.errors import ConfigError, EnvironmentError
from crius.launch.lock import NAME as LOCK
from crius.redact import redact_value
from crius.untrusted import SMALL, names_below, object_below, parse_json, read_below, records_below, text_below

MARKS = ("run.toml", "metrics.jsonl", LOCK)
"""A folder with one of these files is a run folder."""

_MOST_BYTES = 1 << 30
_MOST_COLUMNS = 1000
_MOST_VALUES = 30_000_000
"""Most bytes of ``metrics.jsonl``, of the fields of its records, and of their values: about 1 GB in memory."""

Columns = dict[str, list[Any]]
"""From the name of a field to its values, one per record, in the order of ``step``; None: the record lacks it."""


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """A run, read from its folder.

    Attributes:
        path: the run folder.
        settings: dotted names and values of ``run.toml``; empty if the run ended before it wrote the file.
        starts: one mapping per start of the run, in order of time; see ``crius.train.setup.note_start``.
        steps: columns of the records of steps; see ``crius.metrics.record.StepMetrics``.
        validations: columns of each validation set, by its name; see ``crius.metrics.record.ValidationMetrics``. "" is
            the set without a name.
        summary: ``summary.json``; None before the run has ended.
        plan: ``plan.json``; None if the file is missing.
        incidents: names and contents of the files in ``incidents/``, JSON or text.
        recoveries: one mapping per restart after a failure; see ``crius.train.reports.Recovery``.
        samples: one mapping per text that a model of this run generated, in order of time; see
            ``crius.tools.generate.samples``.
        num_damaged: number of lines of ``metrics.jsonl`` that cannot be read.
    """

    path: Path
    settings: Mapping[str, Any]
    starts: list[dict[str, Any]]
    steps: Columns
    validations: dict[str, Columns]
    summary: dict[str, Any] | None
    plan: dict[str, Any] | None
    incidents: dict[str, Any]
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    num_damaged: int = 0

    @property
    def name(self) -> str:
        """The name of the run, which is the name of its folder."""
        return self.path.resolve().name

    @property
    def lacks(self) -> str:
        """Why the run has no record of a step; empty if it has one."""
        if self.steps:
            return ""
        return "metrics.jsonl has damaged lines only" if self.num_damaged else "no step has been reported yet"


def read_run(path: Path) -> RunHistory:
    """The run in folder ``path``. It may still be running.

    Raises:
        ConfigError: ``path`` is not a run folder.
        EnvironmentError: its files cannot be read. A file of ``incidents/`` that cannot be read says so in its content.
    """
    try:
        return _read(path)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        fix = "give this user the right to read it" if isinstance(error, PermissionError) else ""
        raise EnvironmentError(f"{error.filename or path} cannot be read: {why}.", fix=fix) from None


def _read(path: Path) -> RunHistory:
    if not any((path / mark).exists() for mark in MARKS):
        what = "does not exist" if not path.exists() else f"is not a run folder: it has no {' and no '.join(MARKS)}"
        raise ConfigError(f"{path} {what}.", where="command line", fix="give the folder of a run, e.g. runs/NAME")
    steps = _Rows()
    sets = dict[str, _Rows]()
    num_damaged = 0
    for record in records_below(path, "metrics.jsonl", _MOST_BYTES):
        num_damaged += record is None
        if record and "loss" in record:
            steps.add(record)
        if record and "val_loss" in record:
            sets.setdefault(str(record.get("val_set") or ""), _Rows()).add(record)
    starts = [start for start in records_below(path, "starts.jsonl") if start]
    first = max((number for number, start in enumerate(starts) if not start.get("step")), default=0)
    began = finite(starts[first].get("time")) if starts else None
    return RunHistory(
        path=path,
        settings=_settings(path),
        starts=starts[first:],
        steps=steps.columns(),
        validations={name: rows.columns() for name, rows in sets.items()},
        summary=object_below(path, "summary.json"),
        plan=object_below(path, "plan.json"),
        incidents=dict(_incidents(path)),
        recoveries=[recovery for recovery in records_below(path, "logs/recoveries.jsonl") if recovery],
        samples=list(_samples(path, began or 0.0)),
        num_damaged=num_damaged,
    )


def _samples(path: Path, began: float) -> Iterator[dict[str, Any]]:
    """The samples since ``began``: a folder may have been used by an earlier run."""
    for sample in records_below(path, "samples.jsonl"):
        is_whole = sample and isinstance(sample.get("prompt"), str) and isinstance(sample.get("text"), str)
        if sample and is_whole and (finite(sample.get("time")) or 0.0) >= began:
            yield sample


class _Rows:
    """Records as columns, which take a third of the memory. The later of two records of one step counts."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._columns: Columns = {}

    def add(self, record: dict[str, Any]) -> None:
        """Add one record. A record without a step is left out."""
        step = record.get("step")
        if not isinstance(step, int):
            return
        count = len(self._places)
        place = self._places.setdefault(step, count)
        for name in record:
            if name not in self._columns and len(self._columns) < _MOST_COLUMNS:
                self._columns[name] = [None] * count
        if count * len(self._columns) > _MOST_VALUES:
            raise OSError(errno.EFBIG, f"metrics.jsonl has more than {_MOST_VALUES:,} values")
        for name, column in self._columns.items():
            if place == count:
                column.append(record.get(name))
            else:
                column[place] = record.get(name)

    def columns(self) -> Columns:
        """The columns, in the order of steps."""
        places = [self._places[step] for step in sorted(self._places)]
        if all(map(operator.eq, places, range(len(places)))):
            return self._columns
        return {name: [column[place] for place in places] for name, column in self._columns.items()}


def _settings(path: Path) -> dict[str, Any]:
    try:
        return dict(_dotted(settings_of_run(path)))
    except (FileNotFoundError, ValueError):
        return {}


def _dotted(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", redact_value(f"{prefix}{name}", value)


def finite(value: Any) -> float | None:
    """``value`` if it is a finite number, else None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) <= sys.float_info.max else None


def _incidents(run: Path) -> Iterator[tuple[str, Any]]:
    """Names and contents; None for JSON that is damaged, or that this user may not read."""
    for name in names_below(run, "incidents"):
        place = f"incidents/{name}"
        try:
            if name.endswith(".json"):
                yield name, parse_json(read_below(run, place, SMALL))
            elif name.endswith(".txt"):
                yield name, text_below(run, place, SMALL)
        except OSError as error:
            yield name, None if name.endswith(".json") else f"This file cannot be read: {error.strerror}."
        except ValueError:
            yield name, None

"""The files of a run folder, read into one object. No torch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crius.config.toml_file import toml_table
from crius.errors import ConfigError

Columns = dict[str, list[Any]]
"""Name of a field to its values, one for each record, in the order of ``step``; None where a record lacks it."""


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """A run as its folder tells it.

    Attributes:
        path: the run folder.
        settings: dotted names and values of ``run.toml``; empty where the run has not come so far.
        starts: one mapping for each start of the run, the first one first, see ``crius.train.setup.note_start``.
        steps: columns of the records of steps, see ``crius.metrics.record.StepMetrics``.
        validations: for each validation set its columns, see ``crius.metrics.record.ValidationMetrics``; the set
            without a name is "".
        summary: ``summary.json``; None before the run has ended.
        plan: ``plan.json``; None where there is none.
        incidents: names and contents of the files in ``incidents/``, JSON or text.
        num_damaged: number of lines of ``metrics.jsonl`` that could not be read.
    """

    path: Path
    settings: Mapping[str, Any]
    starts: list[dict[str, Any]]
    steps: Columns
    validations: dict[str, Columns]
    summary: dict[str, Any] | None
    plan: dict[str, Any] | None
    incidents: dict[str, Any]
    num_damaged: int = 0

    @property
    def name(self) -> str:
        """The name of the run: that of its folder."""
        return self.path.resolve().name


def read_run(path: Path) -> RunHistory:
    """The run in folder ``path``, also while it runs.

    Raises:
        ConfigError: ``path`` is not a run folder.
    """
    if not (path / "run.toml").exists() and not (path / "metrics.jsonl").exists():
        what = "does not exist" if not path.exists() else "is not a run folder: it has no run.toml and no metrics.jsonl"
        raise ConfigError(f"{path} {what}.", where="command line", fix="give the folder of a run, e.g. runs/NAME")
    records, num_damaged = _records(path / "metrics.jsonl")
    starts, _ = _records(path / "starts.jsonl")
    first = max((number for number, start in enumerate(starts) if not start.get("step")), default=0)
    steps = [record for record in records if "loss" in record]
    sets: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if "val_loss" in record:
            sets.setdefault(record.get("val_set") or "", []).append(record)
    return RunHistory(
        path=path,
        settings=_settings(path / "run.toml"),
        starts=starts[first:],
        steps=_columns(steps),
        validations={name: _columns(found) for name, found in sets.items()},
        summary=read_json(path / "summary.json"),
        plan=read_json(path / "plan.json"),
        incidents=dict(_incidents(path / "incidents")),
        num_damaged=num_damaged,
    )


def _records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The JSON objects of a file of lines, and how many lines are damaged; the last line may still be being written."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return [], 0
    records, num_damaged = [], 0
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            num_damaged += line.endswith(b"\n")
            continue
        if isinstance(record, dict):
            records.append(record)
    return records, num_damaged


def _columns(records: list[dict[str, Any]]) -> Columns:
    """Records as columns; of two records of one step the later one counts."""
    latest = {record["step"]: record for record in records if isinstance(record.get("step"), int)}
    ordered = [latest[step] for step in sorted(latest)]
    names = dict.fromkeys(name for record in ordered for name in record)
    return {name: [record.get(name) for record in ordered] for name in names}


def _settings(path: Path) -> dict[str, Any]:
    try:
        return dict(_dotted(toml_table(path)))
    except (OSError, ValueError):
        return {}


def _dotted(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _incidents(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(folder.glob("*")) if folder.is_dir() else []:
        if path.suffix == ".json":
            try:
                yield path.name, json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError):
                yield path.name, None
        elif path.suffix == ".txt":
            yield path.name, path.read_text(encoding="utf-8", errors="replace")

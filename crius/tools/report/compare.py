"""Comparison of runs: differences of settings, machines, curves and results. No torch."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from crius.errors import ConfigError
from crius.table import aligned
from crius.tools.report.curves import TOLERANCE, Point, common_points
from crius.tools.report.history import Columns, RunHistory, finite
from crius.tools.report.runs import LEGEND, history_state, in_words, rank, run_row
from crius.untrusted import parse_json

STARTS = (
    "crius",
    "torch",
    "python",
    "host",
    "device",
    "ranks",
    "layout",
    "model",
    "parameters",
    "active_parameters",
    "data_hash",
    "tokenizer",
    "tokenizer_hash",
)
"""Fields of ``starts.jsonl`` that are compared; see ``crius.train.setup.note_start``."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """One curve of a run, compared with that of the first run.

    Attributes:
        num_steps: number of steps at which both runs have a record.
        range: first and last of these steps; None: no such step.
        only_first: number of steps that only the first run has.
        only_other: number of steps that only the other run has.
        parts: first step with a difference above the tolerance; None: no such step.
        largest: step with the largest difference; None without a common step.
    """

    num_steps: int
    range: tuple[int, int] | None
    only_first: int
    only_other: int
    parts: Point | None
    largest: Point | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs, compared with the first one.

    Attributes:
        names: names of the runs, in the order of the command line.
        tolerance: largest relative difference of two losses that counts as equal.
        settings: dotted names of the settings that differ, with the value of each run; None: not set.
        starts: versions, machines and layouts that differ, with the value of each run; all values if it started often.
        losses: curves of the loss of each run but the first.
        validations: curves of each run but the first, by validation set.
        results: names of results, with the value of each run; the last ones are the validation losses.
        best: name of the run with the lowest validation loss; None: no run has one, or they cannot be compared.
        not_compared: why they cannot be compared; empty if they can.
    """

    names: list[str]
    tolerance: float
    settings: dict[str, list[Any]]
    starts: dict[str, list[str]]
    losses: list[Curves]
    validations: list[dict[str, Curves]]
    results: dict[str, list[Any]]
    best: str | None
    not_compared: str

    @property
    def are_equal(self) -> bool:
        """Whether all runs have a step in common with the first one, and all losses are within the tolerance."""
        return not any(curves.parts or not curves.num_steps for curves in self.losses)

    def as_dict(self) -> dict[str, Any]:
        """The comparison for JSON; a number that is not finite is null."""
        told: dict[str, Any] = parse_json(json.dumps(asdict(self)), lambda name: None)
        return told | {"equal": self.are_equal}

    def lines(self) -> list[str]:
        """The comparison as text."""
        parts = (
            _table("settings", self.names, self.settings),
            _table("versions, machine and layout", self.names, self.starts),
            self._curve_lines(),
            self._result_lines(),
        )
        return [line for part in parts for line in (*part, "")][:-1]

    def _result_lines(self) -> list[str]:
        rows = dict(self.results)
        first = next((name for name in rows if name.startswith(_VALIDATION)), "")
        if self.best is not None:
            cells = zip(self.names, rows[first], strict=True)
            rows[first] = [_cell(first, value) + (" *" if name == self.best else "") for name, value in cells]
        note = self.not_compared if self.best is None else LEGEND
        return [*_table("results", self.names, rows), *([note] if note else [])]

    def _curve_lines(self) -> list[str]:
        head = ["compared", "part at", "values", "difference", "largest", "at"]
        rows = [[f"curves against {self.names[0]}, tolerance {self.tolerance:g}:", *head]]
        notes = []
        for name, losses, sets in zip(self.names[1:], self.losses, self.validations, strict=True):
            labels = {"loss": losses} | {f"validation {label}".strip(): found for label, found in sets.items()}
            rows += [[f"  {name}: {label}", *_told(curves)] for label, curves in labels.items()]
            if losses.only_first or losses.only_other:
                lone = f"{losses.only_first} steps of {self.names[0]} and {losses.only_other} of {name}"
                notes.append(f"  not compared, because the other run has no record of them: {lone}")
        return [*aligned(rows, left=None), *notes]


def compare(runs: Sequence[RunHistory], tolerance: float = TOLERANCE) -> Comparison:
    """Compare ``runs`` with the first of them.

    Raises:
        ConfigError: there are fewer than two runs, the tolerance is not a number of at least 0, or no run has a step
            in common with the first one.
    """
    if len(runs) < 2:
        fix = "crius compare A B with the folders of two runs"
        noun = "run" if runs else "runs"
        raise ConfigError(f"{len(runs)} {noun} cannot be compared.", where="command line", fix=fix)
    if not 0 <= tolerance < math.inf:
        raise ConfigError(
            f"--tolerance {tolerance} is out of range.", where="command line", fix="give a number of at least 0"
        )
    first, *others = runs
    losses = [_curves(first.steps, other.steps, "loss", tolerance) for other in others]
    if not any(curves.num_steps for curves in losses):
        told = "; ".join(f"{run.path} has {_steps_of(run)}" for run in runs)
        raise ConfigError(
            f"no step is reported by both runs: {told}.",
            where="metrics.jsonl",
            why="losses are compared at the steps that both runs have reported",
            fix="train further, or with the same --metrics.log_interval",
        )
    labels = [run.name for run in runs]
    if len(set(labels)) < len({run.path.resolve() for run in runs}):
        labels = [str(run.path) for run in runs]
    ranking = rank([run_row(run.path) for run in runs])
    return Comparison(
        names=labels,
        tolerance=tolerance,
        settings=differing([run.settings for run in runs]),
        starts=differing([_starts(run) for run in runs], STARTS),
        losses=losses,
        validations=[
            {
                name: _curves(first.validations.get(name, {}), other.validations.get(name, {}), "val_loss", tolerance)
                for name in first.validations | other.validations
            }
            for other in others
        ],
        results=_results(runs),
        best=None if ranking.best is None else labels[ranking.best],
        not_compared=ranking.why,
    )


def _curves(first: Columns, other: Columns, name: str, tolerance: float) -> Curves:
    points = common_points(first, other, name)
    return Curves(
        num_steps=len(points),
        range=(points[0].step, points[-1].step) if points else None,
        only_first=len(first.get("step", ())) - len(points),
        only_other=len(other.get("step", ())) - len(points),
        parts=next((point for point in points if point.relative > tolerance), None),
        largest=max(points, key=lambda point: point.relative, default=None),
    )


def _steps_of(run: RunHistory) -> str:
    steps = run.steps.get("step") or []
    return f"{len(steps)} of {steps[0]} to {steps[-1]}" if steps else f"none ({run.lacks})"


def differing(runs: Sequence[Mapping[str, Any]], names: Iterable[str] = ()) -> dict[str, list[Any]]:
    """The ``names`` whose values are not the same in all ``runs``, with the value of each run; all names if none."""
    names = names or dict.fromkeys(name for run in runs for name in run)
    rows = {name: [run.get(name) for run in runs] for name in names}
    return {name: values for name, values in rows.items() if any(value != values[0] for value in values)}


def _starts(run: RunHistory) -> dict[str, str]:
    """Each field of the starts. Different values of one run keep their order."""
    values = {name: dict.fromkeys(str(start[name]) for start in run.starts if name in start) for name in STARTS}
    return {name: ", then ".join(found) for name, found in values.items() if found}


OF_SOURCES = ("loss/", "share/", "epochs/")
"""Begin the names of columns of a source of a mixture."""


def results_of(run: RunHistory) -> dict[str, Any]:
    """The results of a run; None: the run lacks this result.

    ``validations`` has the last loss of each validation set, ``sources`` the last ``loss/NAME``, ``share/NAME`` and
    ``epochs/NAME`` of each source of a mixture. ``wall_seconds`` is the wall time of the last command.
    """
    summary = whole_summary(run)
    return {
        "state": str(history_state(run)),
        "step": _last(run.steps, "step"),
        "loss": _last(run.steps, "loss"),
        "sources": {name: _last(run.steps, name) for name in run.steps if name.startswith(OF_SOURCES)},
        "tokens_per_second": _median(run.steps, "tokens_per_second"),
        "mfu": _median(run.steps, "mfu"),
        "memory_gib": max(_numbers(run.steps, "memory_gib"), default=None),
        "goodput": _last(run.steps, "goodput"),
        "wall_seconds": summary.get("wall_seconds") if summary else None,
        "restarts": max(0, len(run.starts) - 1),
        "skipped_steps": _last(run.steps, "skipped_steps"),
        "incidents": len(run.incidents),
        "damaged_lines": run.num_damaged,
        "validations": {name: _last(columns, "val_loss") for name, columns in run.validations.items()},
    }


def whole_summary(run: RunHistory) -> dict[str, Any] | None:
    """``summary.json``; None if the file is missing, or if the run continued after it was written."""
    last = max(run.steps.get("step", []), default=0)
    return run.summary if run.summary and (finite(run.summary.get("steps")) or 0) >= last else None


def _results(runs: Sequence[RunHistory]) -> dict[str, list[Any]]:
    """``results_of`` by name, with the value of each run; a validation set is a result of its own."""
    table: dict[str, list[Any]] = {}
    found = [results_of(run) for run in runs]
    sets = dict.fromkeys(name for results in found for name in results["validations"])
    of_sources = dict.fromkeys(name for results in found for name in results["sources"])
    for name in found[0]:
        if name == "validations":
            for label in sets:
                table[f"{_VALIDATION} {label}".strip()] = [results[name].get(label) for results in found]
        elif name == "sources":
            table |= {label: [results[name].get(label) for results in found] for label in of_sources}
        else:
            table[name] = [results[name] for results in found]
    return table


def _last(columns: Columns, name: str) -> Any:
    """The last value, even if it is not a number."""
    return (columns.get(name) or [None])[-1]


def _numbers(columns: Columns, name: str) -> list[float]:
    return [value for value in columns.get(name, ()) if finite(value) is not None]


def _median(columns: Columns, name: str) -> float | None:
    """The median without the first record, in which a run warms up."""
    values = _numbers(columns, name)
    return statistics.median(values[1:] or values) if values else None


_VALIDATION = "val_loss"
_FORMS = {
    "tokens_per_second": "{:,.0f}",
    "memory_gib": "{:.2f}",
    "wall_seconds": "{:,.1f}",
    **dict.fromkeys(("mfu", "goodput"), "{:.1%}"),
}
_ALWAYS = {"state", "step", "loss", "tokens_per_second", "memory_gib", "goodput"}
"""Results that are shown even if no run has a value."""
_UNITS = {
    "tokens_per_second": "tokens/s, median",
    "memory_gib": "memory, GiB",
    "val_loss": "validation loss",
    "wall_seconds": "wall seconds, last command",
}


def _table(title: str, names: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> list[str]:
    """A table of values by run. Settings and starts have only rows that differ; results have all rows."""
    if not rows:
        return [f"{title}: no difference"]
    cells = [
        [
            "  " + _UNITS.get(name, name).replace("_", " " if title == "results" else "_"),
            *(_cell(name, value) for value in values),
        ]
        for name, values in rows.items()
        if title != "results" or name in _ALWAYS or any(values)
    ]
    return aligned([[f"{title}:", *names], *cells], left=None)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "nan" if name == "loss" else "-"
    if name in _FORMS:
        return _FORMS[name].format(value)
    if isinstance(value, float) and "loss" in name and "." not in name:
        return f"{value:.6f}"
    return in_words(value)


def _told(curves: Curves) -> list[str]:
    """The cells of a row of two curves."""
    if not curves.largest or not curves.range:
        return ["no common step", *"-----"]
    start, end = curves.range
    compared = f"{curves.num_steps} steps, {start} to {end}" if start < end else f"step {start}"
    parts = ["never", "-", "-"]
    largest = [_amount(curves.largest), f"step {curves.largest.step}"]
    if point := curves.parts:
        parts = [f"step {point.step}", f"{_loss(point.first)} and {_loss(point.other)}", _amount(point)]
    return [compared, *parts, *largest]


def _loss(value: Any) -> str:
    return f"{value:.9g}" if finite(value) is not None else "not finite"


def _amount(point: Point) -> str:
    if not point.relative:
        return "0"
    return f"{point.relative:.1e}" if 0 < point.relative < math.inf else "not finite"

"""Data of a report, as JSON. Torch-free."""

import json
import math
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from crius import __version__
from crius.config.run import RunConfig
from crius.config.toml_file import flatten, imports_of
from crius.tools.plan.compare import measured_of
from crius.tools.report.compare import differing, results_of, whole_summary
from crius.tools.report.curves import TOLERANCE, Curve, common_points, curve, thinned
from crius.tools.report.history import RunHistory, finite
from crius.tools.report.runs import rank, run_row
from crius.untrusted import parse_json

SHOWN = (
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "mfu",
    "memory_gib",
    "load_max_over_mean",
    "load_entropy",
    "dead_experts",
    "aux_loss",
    "goodput",
)
"""Fields of a record of steps that have a curve."""

MOST_POINTS = 2_000
ALL_POINTS = 60_000
"""Most points of one curve, and of all curves of a report: together 1 MB."""

MOST_RESTARTS = 200
"""Most restarts of one run; the newest restarts are shown."""

MOST_INCIDENTS = 40
INCIDENT_CHARACTERS = 12_000
MOST_ROWS = 8
"""Most incidents of a report, characters of an incident's text, and rows of an incident's table."""

MOST_SAMPLES = 24
"""Most samples of a report; the newest samples are shown."""

_MEASURED = {"tokens_per_second_per_rank", "step", "memory_gib"}


def payload(runs: Sequence[RunHistory], origins: Mapping[str, str] | None = None) -> dict[str, Any]:
    """All data of a report. Strings are as the run wrote them.

    Args:
        runs: one run or more; all are compared with the first one.
        origins: origin of each value, by the name of the setting, in a report of one run; None: unknown.
    """
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    num_curves = sum(len(run.steps.keys() & {*SHOWN}) + len(run.validations) + 1 for run in runs)
    most = max(40, min(MOST_POINTS, ALL_POINTS // max(1, num_curves)))
    rows = [run_row(run.path) for run in runs]
    shown: dict[str, Any] = {
        "version": __version__,
        "written": time.time(),
        "runs": [_run(run, name, most, len(runs)) for run, name in zip(runs, names, strict=True)],
        "tolerance": TOLERANCE,
        "ranking": vars(rank(rows)) | {"losses": [row.val_loss for row in rows]},
        "apart": [_apart(runs[0], run, most) for run in runs[1:]],
        "settings": [
            {"name": name, "values": values} for name, values in differing([run.settings for run in runs]).items()
        ],
    }
    for row in shown["runs"][0]["settings"] if len(runs) == 1 else []:
        row["origin"] = (origins or {}).get(row["name"])
    return dict(clean(shown))


def clean(value: Any) -> Any:
    """``value`` with None in place of numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _run(run: RunHistory, name: str, most: int, num_runs: int) -> dict[str, Any]:
    steps = run.steps.get("step", [])
    numbers = len(run.steps.get("step", []))
    curves = {key: curve(steps, run.steps[key]) for key in SHOWN if key in run.steps}
    curves = {key: found for key, found in curves.items() if any(value is not None for value in found[1])}
    sets = {key: curve(found["step"], found["val_loss"]) for key, found in run.validations.items()}
    incidents = list(_incidents(run.incidents))
    most_incidents = max(1, MOST_INCIDENTS // num_runs)
    summary = whole_summary(run)
    return {
        "name": name,
        "path": str(run.path),
        "repeat": _command(run),
        "steps": steps[-1] if steps else 0,
        "of_steps": run.settings.get("training.steps"),
        "records": numbers,
        "points": most if numbers > most else None,
        "damaged": run.num_damaged,
        "not_finite": _not_finite(run),
        "summary": summary,
        "last_record": _modified(run),
        "started": run.starts[0].get("time") if run.starts else None,
        "start": run.starts[-1] if run.starts else {},
        "restarts": _restarts(run)[-MOST_RESTARTS:],
        "settings": _changed(run),
        "curves": {key: _shown(found, most) for key, found in curves.items()},
        "validations": {key: _shown(found, most) for key, found in sets.items()},
        "results": results_of(run),
        "incidents": incidents[:most_incidents],
        "more_incidents": max(0, len(incidents) - most_incidents),
        "plan": _plan(run, summary),
        "samples": _samples(run, max(1, MOST_SAMPLES // num_runs)),
    }


def _command(run: RunHistory) -> str:
    """The command that trains the same run again."""
    file = run.path.resolve() / "run.toml"
    if file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    ranks = run.starts[-1].get("ranks") if run.starts else None
    is_open = run.settings.get("parallelism.data_parallel_shard_degree") == -1
    nproc = f"--nproc {ranks}" if is_open and type(ranks) is int and ranks > 1 else ""
    words = ("crius train --config", shlex.quote(str(file)), nproc, imports_of(str(file)))
    return " ".join(filter(None, words)) if file.exists() else ""


def _not_finite(run: RunHistory) -> dict[str, Any]:
    """Number of records whose loss is not finite, and the first step of them."""
    losses = zip(run.steps.get("step", []), run.steps.get("loss", []), strict=False)
    steps = [step for step, loss in losses if finite(loss) is None]
    return {"number": len(steps), "first": steps[0] if steps else None}


def _apart(first: RunHistory, other: RunHistory, most: int) -> dict[str, Any]:
    """Relative difference of the losses of two runs, at the steps that both have."""
    points = common_points(first.steps, other.steps, "loss")
    known = [point for point in points if math.isfinite(point.relative)]
    strange = [point.step for point in points if not math.isfinite(point.relative)]
    largest = max(known, key=lambda point: point.relative, default=None)
    return {
        "num_steps": len(points),
        "num_not_finite": len(strange),
        "first_not_finite": strange[0] if strange else None,
        "largest": largest.relative if largest else 0.0,
        "step": largest.step if largest else None,
        "parts": next((point.step for point in points if point.relative > TOLERANCE), None),
        "curve": _shown(([point.step for point in known], [point.relative for point in known]), most),
    }


def _shown(whole: Curve, most: int) -> Curve:
    """A curve for drawing, with 7 digits."""
    steps, values = thinned(whole, most)
    return steps, [None if value is None else float(f"{value:.7g}") for value in values]


def _modified(run: RunHistory) -> float | None:
    try:
        return os.stat(run.path / "metrics.jsonl").st_mtime
    except OSError:
        return None


def _changed(run: RunHistory) -> list[dict[str, Any]]:
    """The settings that differ from the defaults. A setting that this version does not know has no default."""
    defaults = parse_json(json.dumps(flatten(RunConfig())))
    return [
        {"name": name, "value": value, "default": defaults.get(name)}
        for name, value in run.settings.items()
        if value != defaults.get(name)
    ]


def _restarts(run: RunHistory) -> list[dict[str, Any]]:
    """The starts after the first one. A start after a failure has the costs of its recovery."""
    left = list(run.recoveries)
    found = []
    for start in run.starts[1:]:
        row = {key: start.get(key) for key in ("time", "step", "layout", "host", "device")}
        for recovery in left:
            done = finite(recovery.get("step"))
            again = finite(recovery.get("steps_again"))
            if done is not None and again is not None and start.get("step") == done - 1 - again:
                row |= {"failed_step": done, "steps_again": again, "seconds": finite(recovery.get("seconds"))}
                left.remove(recovery)
                break
        found.append(row)
    return found


def _samples(run: RunHistory, most: int) -> list[dict[str, Any]]:
    """The newest samples, those of one prompt one after the other, by step."""
    newest = run.samples[-most:]
    places = {sample["prompt"]: place for place, sample in reversed(list(enumerate(newest)))}
    return sorted(newest, key=lambda sample: (places[sample["prompt"]], finite(sample.get("step")) or 0))


def _plan(run: RunHistory, summary: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The plan and the measurements, as ``crius.tools.plan.compare.PlanComparison`` has them."""
    if run.plan is None:
        return None
    whole = summary.get("plan") if summary else None
    if isinstance(whole, dict) and isinstance(whole.get("measured"), dict):
        return {"plan": run.plan, "measured": whole["measured"]}
    columns = [[finite(value) for value in run.steps.get(key, [])] for key in sorted(_MEASURED)]
    rows = (dict(zip(sorted(_MEASURED), row, strict=True)) for row in zip(*columns, strict=False) if None not in row)
    return {"plan": run.plan, "measured": _measured(rows)}


def _measured(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    found = measured_of(rows)
    return {"tokens_per_second_per_rank": found.tokens_per_second, "memory_bytes": found.memory_bytes}


def _incidents(files: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One entry per incident, by step. A hang has a JSON file and a text file."""
    found: dict[str, dict[str, Any]] = {}
    for name, content in files.items():
        if name.endswith(".flight.json"):  # data of torch's flight recorder for one rank; the text names its last call
            continue
        found.setdefault(name.rpartition(".")[0], {})[name.rpartition(".")[2]] = content
    entries = [_incident(name, parts.get("json"), parts.get("txt", "")) for name, parts in found.items()]
    yield from sorted(entries, key=lambda entry: (entry["step"] is None, entry["step"], entry["name"]))


def _incident(name: str, data: Any, text: str) -> dict[str, Any]:
    """An incident for the page: a title, its values, its tables, its text.

    Files of incidents are written by ``crius.train.stability``, ``crius.launch.watchdog`` and
    ``crius.tools.plan.out_of_memory``.
    """
    witnesses = data if isinstance(data, list) else []
    values = data if isinstance(data, dict) else {}
    ranks = [witness for witness in witnesses if isinstance(witness, dict)]
    steps = [values.get("step"), *(witness.get("step") for witness in ranks)]
    kind, action = (str(values[key]) if values.get(key) else "" for key in ("kind", "action"))
    tables = {key: value for key, value in {**values, "ranks": ranks}.items() if _is_table(value)}
    text = text or ("" if data is not None else "This file cannot be read.")
    return {
        "name": name,
        "step": max((step for step in steps if isinstance(step, int)), default=None),
        "title": ": ".join(part for part in (kind, action) if part) or text.partition("\n")[0][:200] or name,
        "values": [
            [key, _short(value)] for key, value in values.items() if value not in (None, []) and key not in tables
        ],
        "tables": [_table(key, rows) for key, rows in tables.items()],
        "text": text[:INCIDENT_CHARACTERS],
        "cut": max(0, len(text) - INCIDENT_CHARACTERS),
    }


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _table(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The first rows, without columns whose text is too long for a cell."""
    columns = [key for key, value in rows[0].items() if key not in ("stack", "threads", "pid") and value != []]
    shown = [[_short(row.get(key)) for key in columns] for row in rows[:MOST_ROWS]]
    return {"name": name, "columns": columns, "rows": shown, "more": max(0, len(rows) - MOST_ROWS)}


def _short(value: Any) -> str | float | None:
    """A value as a cell: a number, or a text of at most 200 characters."""
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    if isinstance(value, dict):
        value = [f"{key} {item:.4g}" if isinstance(item, float) else f"{key} {item}" for key, item in value.items()]
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 200 else text[:197] + "..."

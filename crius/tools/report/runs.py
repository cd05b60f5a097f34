"""The runs in a folder, their states, and the best one, from the ends of their files: hundreds per second. No torch."""

import contextlib
import functools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from crius.config.run import RunConfig
from crius.config.toml_file import flatten
from crius.errors import ConfigError
from crius.launch.lock import holder_of
from crius.redact import redact_value
from crius.run_file import REHEARSALS
from crius.table import aligned
from crius.tools.report.history import MARKS, RunHistory, finite
from crius.untrusted import SMALL, names_below, object_below, open_below, parse_json, parse_toml, text_below

_TAIL = 1 << 16
_LONG_TAIL = 1 << 20
_MOST_CHARACTERS = 24  # of a setting in the table
_FAR = 1e12  # seconds: unknown; files from the future have an age of 0


MOST_SETTINGS = 4
"""Most settings in a table of runs."""

LEGEND = "* lowest validation loss"

_PLACES = re.compile(r"checkpoint\.folder|.*\.cache_dir|job\..*")
_SCORED = re.compile(r"data\.(?!prefetch|shuffle).*|tokenizer\..*|validation\.(?!interval).*|training\.seq_len")
"""Settings that only say where files are, and settings that decide what a validation scores."""


@dataclass(frozen=True)
class RunState:
    """The state of a run.

    Attributes:
        word: ``running``; ``finished``; ``stopped`` by a signal; ``preempted``: stopped by a signal other than Ctrl-C,
            with everything saved; ``failed``: ended without a summary; ``unreadable``; ``not started``.
        reason: name of the signal or of the error; empty if unknown.
    """

    word: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.word} ({self.reason})" if self.reason else self.word


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run of a list.

    Attributes:
        name: path of the run below the folder that was listed.
        state: state of the run.
        step: last step with a record; None before the first record.
        steps: steps of the whole run; None if it ends by epochs or the number is unknown.
        loss: loss of ``step``, in nats; None if it is not finite or missing.
        val_loss: loss of the first validation set in the last validation, in nats.
        tokens_per_second: speed of all ranks together in the last record.
        goodput: share of the time, in [0, 1], that went into steps that count.
        age_seconds: seconds since the last record, or since the run folder was claimed.
        rehearsed: the last step whose restore was rehearsed, with FAILED if it failed; empty if there is none.
        tables: names and texts of the tables of ``run.toml``; empty if the file is missing.
        start: last line of ``starts.jsonl``; empty if there is no line.
    """

    name: str
    state: RunState
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    goodput: float | None = None
    age_seconds: float = _FAR
    rehearsed: str = ""
    tables: Mapping[str, str] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The row for JSON, without the files."""
        known = self.age_seconds if self.age_seconds < _FAR else None
        found = vars(self) | {"state": self.state.word, "reason": self.state.reason, "age_seconds": known}
        return {name: value for name, value in found.items() if name not in ("tables", "start")}


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Runs by validation loss.

    Attributes:
        settings: dotted names of the settings that differ, with the value of each run. Places do not count.
        order: numbers of the runs, from 0: the lowest validation loss first, runs without one last.
        best: number of the run with the lowest validation loss; None: no run has one, or they cannot be compared.
        why: why they cannot be compared; empty if they can.
    """

    settings: dict[str, list[Any]]
    order: list[int]
    best: int | None
    why: str

    @property
    def note(self) -> list[str]:
        """The line below a table of the runs, if there is one."""
        text = self.why if self.best is None else LEGEND
        return [text] if text else []


def find_runs(folder: Path) -> list[RunRow]:
    """The runs in ``folder`` and in its subfolders with runs, such as sweeps; the newest run first.

    Raises:
        ConfigError: ``folder`` is not a folder.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}.", where="command line", fix="give a folder with runs; the default is runs")
    rows = [run_row(path, name) for path, name in _run_folders(folder)]
    return sorted(rows, key=lambda row: (row.age_seconds, row.name))


def _run_folders(folder: Path) -> Iterator[tuple[Path, str]]:
    if is_run(folder):
        yield folder, folder.resolve().name
    for path in _folders(folder):
        if is_run(path):
            yield path, path.name
        yield from ((below, f"{path.name}/{below.name}") for below in _folders(path) if is_run(below))


def expanded(paths: Iterable[Path]) -> list[Path]:
    """``paths`` with the runs in a folder, by name, in place of a folder that is not a run, such as that of a sweep."""
    found = list[Path]()
    for path in paths:
        below = [] if is_run(path) else sorted(below for below in _folders(path) if is_run(below))
        found += below or [path]
    return found


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run folder."""
    return any(os.path.isfile(path / mark) for mark in MARKS)


def _folders(path: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(path) if os.path.isdir(entry)]
    except OSError:  # a folder of another user
        return []


def run_row(path: Path, name: str = "") -> RunRow:
    """The state of the run in the folder ``path``. A folder that cannot be read is ``unreadable``."""
    try:
        return _row(path, name or path.name)
    except OSError as error:
        return RunRow(name=name or path.name, state=RunState("unreadable", error.strerror or str(error)))


def _row(path: Path, name: str) -> RunRow:
    if not is_run(path):
        return RunRow(name=name, state=RunState("not started"))
    metrics = path / "metrics.jsonl"
    tables = _tables_of(_text(path))

    def setting(name: str) -> Any:
        table = name.partition(".")[0]
        return _settings_in(table, tables.get(table, "")).get(name)

    lines = tail(path, "metrics.jsonl", _TAIL)
    last = _last(lines, "loss")
    summary = object_below(path, "summary.json") or {}
    validation = _first_set(lines)
    if validation is None and setting("validation.interval"):
        validation = _first_set(tail(path, "metrics.jsonl", _LONG_TAIL))
    found = last or {}
    step = _whole(found.get("step"))
    start = _last_start(path)
    state = state_of(path, summary, step, start, saves=setting("checkpoint.enable") is not False)
    written = next(file.stat().st_mtime for file in (metrics, *(path / mark for mark in MARKS)) if file.exists())
    return RunRow(
        name=name,
        state=state,
        step=step,
        steps=max(_whole(setting("training.steps")) or 0, step or 0 if state.word == "finished" else 0) or None,
        loss=finite(found.get("loss")),
        val_loss=finite((validation or summary).get("val_loss")),
        tokens_per_second=finite(found.get("tokens_per_second")),
        goodput=finite(found.get("goodput")),
        age_seconds=max(0.0, time.time() - written),
        rehearsed=_rehearsed(path),
        tables=tables,
        start=start,
    )


def _rehearsed(path: Path) -> str:
    found = _last(tail(path, REHEARSALS, _TAIL), "problem")
    step = _whole((found or {}).get("step"))
    if found is None or step is None:
        return ""
    return f"{step:,} FAILED" if found["problem"] else f"{step:,}"


def history_state(run: RunHistory) -> RunState:
    """The state of a run whose files have been read."""
    steps = run.steps.get("step")
    starts = run.starts
    saves = run.settings.get("checkpoint.enable") is not False
    last = steps[-1] if steps else None
    return state_of(run.path, run.summary or {}, last, starts[-1] if starts else {}, saves=saves)


def state_of(
    path: Path, summary: Mapping[str, Any], step: int | None, start: Mapping[str, Any], *, saves: bool
) -> RunState:
    """The state of a run.

    Args:
        path: the run folder.
        summary: contents of ``summary.json``; empty if the file is missing.
        step: last step with a record; None before the first record.
        start: last line of ``starts.jsonl``; empty if there is no line.
        saves: whether the run saves before it stops.
    """
    if (holder_of(path) or {}).get("command") == "train":
        return RunState("running")
    done = _whole(summary.get("steps"))
    begun = finite(start.get("time"))
    names = [name for name in names_below(path, "logs") if fnmatch(name, "rank-*.error.json")]
    errors = {path / "logs" / name: object_below(path, f"logs/{name}") or {} for name in names}
    if done is not None and done >= (step or 0):
        # a run that resumed and then failed still has its old summary
        ended = (path / "summary.json").stat().st_mtime
        # errors before the last start are over; their files may be newer in a copy of the folder
        recent = [file for file, told in errors.items() if (finite(told.get("wall")) or _FAR) >= (begun or 0)]
        if (begun is None or ended >= begun) and all(file.stat().st_mtime <= ended for file in recent):
            signal = summary.get("stopped_by")
            if not signal:
                return RunState("finished")
            return RunState("preempted" if saves and signal != "SIGINT" else "stopped", str(signal))
    first = min(
        errors.values(), key=lambda told: (bool(told.get("peer_loss")), finite(told.get("wall")) or 0), default={}
    )
    return RunState("failed", str(first.get("exception", "")))


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _text(run: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return text_below(run, "run.toml", SMALL)
    return ""


def _tables_of(text: str) -> dict[str, str]:
    """Names and texts of the tables of a ``run.toml``. Parsing the whole file would take milliseconds."""
    parts = re.split(r"^\[([\w.]+)\]\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@functools.lru_cache(maxsize=1000)
def _settings_in(table: str, text: str) -> Mapping[str, Any]:
    """Dotted names and values of one table; none if it is damaged."""
    try:
        found = parse_toml(text)
    except ValueError:
        return {}
    return {f"{table}.{name}": redact_value(f"{table}.{name}", value) for name, value in found.items()}


def _last_start(path: Path) -> dict[str, Any]:
    return _last(tail(path, "starts.jsonl", _TAIL), "time") or {}


def tail(run: Path, name: str, num_bytes: int) -> list[bytes]:
    """The complete lines among the last bytes of a file; a file that is missing has none."""
    with contextlib.suppress(FileNotFoundError), open_below(run, name) as file:
        start = max(0, file.seek(0, os.SEEK_END) - num_bytes)
        file.seek(start)
        return file.read(num_bytes).splitlines()[bool(start) :]
    return []


def _last(lines: Sequence[bytes], name: str) -> dict[str, Any] | None:
    """The last JSON object with a field called ``name``."""
    return next(_newest(lines, name), None)


def _first_set(lines: Sequence[bytes]) -> dict[str, Any] | None:
    """The record of the first validation set in the last step that was validated, as in ``summary.json``."""
    records = list(_newest(lines, "val_loss"))
    return next((record for record in reversed(records) if record.get("step") == records[0].get("step")), None)


def _newest(lines: Sequence[bytes], name: str) -> Iterator[dict[str, Any]]:
    """The JSON objects with a field called ``name``, from the last one on."""
    key = f'"{name}"'.encode()
    for line in (line for line in reversed(lines) if key in line):
        try:
            record = parse_json(line)
        except ValueError:
            continue  # damaged, or still being written
        if isinstance(record, dict) and name in record:
            yield record


def rank(rows: Sequence[RunRow]) -> Ranking:
    """Rank runs by validation loss, if they validated on the same data."""
    runs = _settings(rows)
    settings = {name: values for name, values in _differing(runs).items() if not _PLACES.fullmatch(name)}
    scored = [number for number, row in enumerate(rows) if row.val_loss is not None]
    why = _difference([runs[number] for number in scored], [rows[number].start for number in scored])
    key = [float("inf") if row.val_loss is None else row.val_loss for row in rows]
    order = sorted(range(len(rows)), key=lambda number: key[number])
    return Ranking(settings=settings, order=order, best=order[0] if scored and not why else None, why=why)


def _settings(rows: Sequence[RunRow]) -> list[Mapping[str, Any]]:
    """The settings of each run, without most tables that all runs share; empty for a run without ``run.toml``."""
    names = dict.fromkeys(name for row in rows for name in row.tables)
    shared = [name for name in names if len({row.tables.get(name) for row in rows if row.tables}) == 1]
    return [
        {
            key: value
            for name, text in row.tables.items()
            if name == "validation" or name not in shared
            for key, value in _settings_in(name, text).items()
        }
        for row in rows
    ]


@functools.cache
def _defaults() -> Mapping[str, Any]:
    defaults: Mapping[str, Any] = parse_json(json.dumps(flatten(RunConfig())))
    return defaults


def _differing(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Values by setting. A setting that a run lacks has its default; a run without settings has no value."""
    names = dict.fromkeys(name for run in runs for name in run)
    values = {name: [run.get(name, _defaults().get(name)) if run else None for run in runs] for name in names}
    known = [number for number, run in enumerate(runs) if run]
    return {name: row for name, row in values.items() if any(row[number] != row[known[0]] for number in known)}


def _difference(runs: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]) -> str:
    """Why the validation losses of ``runs`` cannot be compared; empty if they can."""
    differing = _differing(runs)
    found = [name for name in differing if _SCORED.fullmatch(name)]
    hashes = ["tokenizer_hash"]
    if any(run.get("validation.path") for run in runs):
        found = [name for name in found if name != "data.path"]
    elif "debug.seed" not in differing:  # which decides the order of the training data, and so its hash
        hashes.append("data_hash")
    found += [name for name in hashes if len({start.get(name) for start in starts}) > 1]
    return f"no run is best: the validation data differ ({', '.join(found)})" if found else ""


def short_names(names: Collection[str]) -> list[str]:
    """The last part of each dotted name, if no other setting ends in it."""
    last = {name: name.rpartition(".")[2] for name in {*names, *_defaults()}}
    counts = Counter(last.values())
    return [last[name] if counts[last[name]] == 1 else name for name in names]


def in_words(value: Any) -> str:
    """A value of a setting as text."""
    if value is None:
        return "-"
    return value if isinstance(value, str) and value else json.dumps(value)


def run_lines(rows: Sequence[RunRow]) -> list[str]:
    """The table of runs: how they stand, the first settings that differ, and the best run marked."""
    ranking = rank(rows)
    best = rows[ranking.best] if ranking.best is not None and len(rows) > 1 else None
    head = ["run", "state", "step", "loss", "val loss", "tokens/s", "goodput", "last record"]
    columns = [*zip(head, *(_cells(row, is_best=row is best) for row in rows), strict=True)]
    if any(row.rehearsed for row in rows):
        columns.append(("rehearsed", *(row.rehearsed or "-" for row in rows)))
    names = list(ranking.settings)
    for name, label in zip(names[:MOST_SETTINGS], short_names(names), strict=False):
        columns.append((label, *(in_words(value)[:_MOST_CHARACTERS] for value in ranking.settings[name])))
    num_more = len(names) - MOST_SETTINGS
    more = [f"{num_more} more settings differ: crius compare lists them"] if num_more > 0 else []
    return [*aligned([*zip(*columns, strict=True)], left=(0, 1)), *more, *(ranking.note if best or ranking.why else [])]


def _cells(row: RunRow, *, is_best: bool) -> list[str]:
    known = row.step is not None
    return [
        row.name,
        str(row.state),
        ("-" if row.step is None else f"{row.step:,}") + (f"/{row.steps:,}" if row.steps else ""),
        shown(row.loss, "{:.4f}", "nan" if known else "-"),
        shown(row.val_loss, "*{:.4f}" if is_best else "{:.4f}"),
        shown(row.tokens_per_second, "{:,.0f}"),
        shown(row.goodput, "{:.1%}"),
        f"{age(row.age_seconds)} ago" if row.age_seconds < _FAR else "-",
    ]


def shown(value: float | None, form: str, missing: str = "-") -> str:
    """A number in the format ``form``; ``missing`` if there is no number."""
    return missing if value is None else form.format(value)


def age(seconds: float) -> str:
    """A time in its largest unit."""
    units = ((86400, "d"), (3600, "h"), (60, "min"))
    return next((f"{seconds / size:.0f} {unit}" for size, unit in units if seconds >= size), f"{seconds:.0f} s")

"""The runs in a folder and their states, from the ends of their files: hundreds per second. No torch."""

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from crius.errors import ConfigError
from crius.launch.lock import holder_of
from crius.run_file import REHEARSALS
from crius.table import aligned
from crius.tools.report.history import MARKS, RunHistory, finite
from crius.untrusted import SMALL, names_below, object_below, open_below, parse_json, parse_toml, text_below

_TAIL = 1 << 16
_LONG_TAIL = 1 << 20
_FAR = 1e12  # seconds: unknown; files from the future have an age of 0


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

    def as_dict(self) -> dict[str, Any]:
        """The row for JSON."""
        known = self.age_seconds if self.age_seconds < _FAR else None
        return vars(self) | {"state": self.state.word, "reason": self.state.reason, "age_seconds": known}


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
    text = _text(path)
    training = _section(text, "training")
    checkpoint = _section(text, "checkpoint")
    lines = _tail(path, "metrics.jsonl", _TAIL)
    last = _last(lines, "loss")
    summary = object_below(path, "summary.json") or {}
    validation = _first_set(lines)
    if validation is None and _section(text, "validation").get("interval"):
        validation = _first_set(_tail(path, "metrics.jsonl", _LONG_TAIL))
    found = last or {}
    step = _whole(found.get("step"))
    state = state_of(path, summary, step, _last_start(path), saves=checkpoint.get("enable") is not False)
    written = next(file.stat().st_mtime for file in (metrics, *(path / mark for mark in MARKS)) if file.exists())
    return RunRow(
        name=name,
        state=state,
        step=step,
        steps=max(_whole(training.get("steps")) or 0, step or 0 if state.word == "finished" else 0) or None,
        loss=finite(found.get("loss")),
        val_loss=finite((validation or summary).get("val_loss")),
        tokens_per_second=finite(found.get("tokens_per_second")),
        goodput=finite(found.get("goodput")),
        age_seconds=max(0.0, time.time() - written),
        rehearsed=_rehearsed(path),
    )


def _rehearsed(path: Path) -> str:
    found = _last(_tail(path, REHEARSALS, _TAIL), "problem")
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


def _section(text: str, name: str) -> dict[str, Any]:
    """One table of a run.toml. Reading the whole file would take milliseconds."""
    found = re.search(rf"^\[{name}\]\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    try:
        return parse_toml(found[1]) if found else {}
    except ValueError:
        return {}


def _last_start(path: Path) -> dict[str, Any]:
    return _last(_tail(path, "starts.jsonl", _TAIL), "time") or {}


def _tail(run: Path, name: str, num_bytes: int) -> list[bytes]:
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


def run_lines(rows: Sequence[RunRow]) -> list[str]:
    """The table of runs."""
    head = ("run", "state", "step", "loss", "val loss", "tokens/s", "goodput", "last record", "rehearsed")
    shows_rehearsed = any(row.rehearsed for row in rows)
    width = len(head) if shows_rehearsed else len(head) - 1
    return aligned([cells[:width] for cells in (head, *map(_cells, rows))], left=(0, 1))


def _cells(row: RunRow) -> tuple[str, ...]:
    known = row.step is not None
    return (
        row.name,
        str(row.state),
        ("-" if row.step is None else f"{row.step:,}") + (f"/{row.steps:,}" if row.steps else ""),
        shown(row.loss, "{:.4f}", "nan" if known else "-"),
        shown(row.val_loss, "{:.4f}"),
        shown(row.tokens_per_second, "{:,.0f}"),
        shown(row.goodput, "{:.1%}"),
        f"{age(row.age_seconds)} ago" if row.age_seconds < _FAR else "-",
        row.rehearsed or "-",
    )


def shown(value: float | None, form: str, missing: str = "-") -> str:
    """A number in the format ``form``; ``missing`` if there is no number."""
    return missing if value is None else form.format(value)


def age(seconds: float) -> str:
    """A time in its largest unit."""
    units = ((86400, "d"), (3600, "h"), (60, "min"))
    return next((f"{seconds / size:.0f} {unit}" for size, unit in units if seconds >= size), f"{seconds:.0f} s")

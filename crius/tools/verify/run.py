"""The rows of a verb. Each is a task in workers of its own, so that a crash or a hang is a row and not the end."""

import contextlib
import dataclasses
import functools
import io
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from crius.config.run import RunConfig
from crius.launch.environment import Placement
from crius.launch.local import run_workers
from crius.launch.report import log_path
from crius.run_file import open_log
from crius.signals import STOP_SIGNALS
from crius.tools.verify.matrix import LayoutCase
from crius.tools.verify.worker import RESULT, WorkerTask
from crius.untrusted import HUGE, parse_json, read_below

STOPPED = tuple(sorted(128 + number for number in STOP_SIGNALS))
"""Exit codes after a signal to this process."""

Work = Callable[[WorkerTask, Placement], None]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a task.

    Attributes:
        result: result that rank 0 wrote; None if the task failed.
        seconds: wall time.
        note: why it failed, and where to read more.
    """

    result: dict[str, Any] | None
    seconds: float
    note: str = ""


def run(work: Work, task: WorkerTask, num_ranks: int) -> Outcome:
    """Run ``work`` on ``num_ranks`` workers; output of the workers and of the launcher stays in the logs.

    Raises:
        SystemExit: a signal to this process ended it.
    """
    begin = time.monotonic()
    (task.run_dir / RESULT).unlink(missing_ok=True)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = run_workers(functools.partial(work, task), num_ranks, task.run_dir)
    seconds = time.monotonic() - begin
    if code in STOPPED:
        raise SystemExit(code)
    if code == 0:
        return Outcome(parse_json(read_below(task.run_dir, RESULT, HUGE)), seconds)
    log = log_path(task.run_dir / "logs", 0)
    report = said.getvalue().strip()
    with open_log(log) as file:
        file.write(report + "\n")
    headline = report.splitlines()[0] if report else f"exit code {code}"
    if seconds >= task.seconds:
        headline = f"nothing after {task.seconds} s"
    return Outcome(None, seconds, f"{headline}; see {log}")


@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """Result of one layout.

    Attributes:
        values: values by column; empty if it did not reach its end.
        seconds: wall time.
        note: error or remark.
    """

    layout: str
    ranks: int
    status: Literal["reference", "ok", "FAIL", "refused"]
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    note: str = ""


Judge = Callable[[dict[str, Any]], tuple[Mapping[str, Any], str, bool]]
"""Judgement of the result of a task: its values by column, a remark, and whether it is wrong."""


def row_of(
    name: str,
    case: LayoutCase,
    work: Work,
    task_of: Callable[[RunConfig], WorkerTask],
    judge: Judge,
    *,
    is_reference: bool = False,
    lacks_reference: bool = False,
) -> tuple[LayoutRow, dict[str, Any] | None]:
    """The row of ``case``, and the result of its task; None if it did not reach its end.

    Args:
        name: text of the first column.
        case: case to run.
        work: work of each rank.
        task_of: gives the task for the config of ``case``.
        judge: judges the result.
        is_reference: whether the others are compared with this one.
        lacks_reference: whether its reference failed; then it is not run.

    Raises:
        SystemExit: a signal to this process ended it.
    """
    ranks = case.layout.num_ranks
    failed = LayoutRow(layout=name, ranks=ranks, status="FAIL", note="there is no reference to compare it with")
    if case.config is None:
        return dataclasses.replace(failed, status="refused", note=case.refusal), None
    if lacks_reference:
        return failed, None
    outcome = run(work, task_of(case.config), ranks)
    if outcome.result is None:
        return dataclasses.replace(failed, seconds=outcome.seconds, note=outcome.note), None
    values, note, is_wrong = judge(outcome.result)
    status: Any = "reference" if is_reference else "ok"
    if is_wrong:
        status = "FAIL"
    row = LayoutRow(layout=name, ranks=ranks, status=status, values=values, seconds=outcome.seconds, note=note)
    return row, outcome.result


class LayoutTable:
    """Rows that are printed as they come, or all together as JSON.

    Args:
        columns: names of the values of a row.
        layouts: texts that the first column must fit.
        as_json: whether to print nothing until ``close``.
        label: name of the first column, also in the JSON, if the rows are not layouts.
    """

    def __init__(self, columns: Sequence[str], layouts: Sequence[str], as_json: bool, label: str = "layout") -> None:
        self._columns = list(columns)
        self._width = max(map(len, [label, *layouts]))
        self._as_json = as_json
        self._label = label
        self.rows: list[LayoutRow] = []
        self._say(self._line(label, "ranks", self._columns, "seconds", ""))

    def add(self, row: LayoutRow) -> None:
        """Print one row."""
        self.rows.append(row)
        seconds = f"{row.seconds:.1f}" if row.seconds else "-"
        values = [_shown(row.values.get(column)) for column in self._columns]
        status = f"{row.status}: {row.note}" if row.note else row.status
        self._say(self._line(row.layout, str(row.ranks), values, seconds, status))

    def close(self, legend: Sequence[str], **findings: Any) -> None:
        """Print the meaning of the columns; or the JSON, with ``findings`` next to the rows."""
        if self._as_json:
            sys.stdout.write(self.document(**findings))
        for line in legend:
            self._say(line)

    def document(self, **findings: Any) -> str:
        """The JSON: ``findings``, and the rows."""
        rows = [
            {self._label if key == "layout" else key: value for key, value in dataclasses.asdict(row).items()}
            for row in self.rows
        ]
        return json.dumps(_plain({**findings, "rows": rows}), indent=2) + "\n"

    def counts(self) -> dict[str, int]:
        """Number of rows by status, without references."""
        statuses = Counter(row.status for row in self.rows)
        return {status: statuses[status] for status in ("ok", "FAIL", "refused")}

    def exit_code(self, is_asked: bool) -> int:
        """Exit code: 1 if a row fails, 2 if a requested layout is refused, else 0."""
        counts = self.counts()
        if counts["FAIL"]:
            return 1
        return 2 if is_asked and counts["refused"] else 0

    def _line(self, layout: str, ranks: str, values: Sequence[str], seconds: str, status: str) -> str:
        widths = [16 if name == "hash" else max(9, len(name)) for name in self._columns]
        cells = "".join(f"  {value:>{width}}" for width, value in zip(widths, values, strict=True))
        return f"{layout:<{self._width}}  {ranks:>5}{cells}  {seconds:>7}  {status}".rstrip()

    def _say(self, line: str) -> None:
        if not self._as_json:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return "0" if value == 0 else f"{value:.1e}"


def _plain(value: Any) -> Any:
    """``value`` for JSON, which has neither infinities nor NaN: they become text."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

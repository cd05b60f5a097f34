"""The table that a verb prints while it runs, or its JSON."""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """What one layout showed.

    Attributes:
        values: by column; none where it was not run to its end.
        seconds: wall time.
        note: what is wrong, or worth a word.
    """

    layout: str
    ranks: int
    status: Literal["reference", "ok", "FAIL", "refused"]
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    note: str = ""


class Table:
    """Rows that are printed as they come, or all together as JSON.

    Args:
        columns: names of the values of a row.
        layouts: what the first column has to hold.
        as_json: print nothing until ``close``.
        label: what the first column is, also in the JSON, where the rows are not layouts.
    """

    def __init__(self, columns: Sequence[str], layouts: Sequence[str], as_json: bool, label: str = "layout") -> None:
        self._columns = list(columns)
        self._width = max(map(len, [label, *layouts]))
        self._as_json, self._label = as_json, label
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
        """Print what the columns mean; or the JSON, with ``findings`` beside the rows."""
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

    def exit_code(self, is_asked: bool) -> int:
        """1 where a row fails, 2 where a layout is refused that was asked for, else 0."""
        found = {row.status for row in self.rows}
        return 1 if "FAIL" in found else 2 if is_asked and "refused" in found else 0

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
    return value if isinstance(value, str) else "0" if value == 0 else f"{value:.1e}"


def _plain(value: Any) -> Any:
    """JSON has no infinities and no NaN: they become text."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

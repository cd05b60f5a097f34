"""The results of a command on disk: rows, a table of them, and the output of what ran. All is whole at any time."""

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

WORDS = {True: "ok", False: "FAIL", None: "n/a"}
MOST_LOG_BYTES = 12 << 20
WIDTH = 150
"""Characters of a row of the table; a failed row has ``WIDTH_OF_FAILURE``."""
WIDTH_OF_FAILURE = 230

Row = dict[str, Any]


class Record:
    """Rows of one command.

    Args:
        name: name of the command; the files are ``name.jsonl``, ``name.txt`` and ``name.log``, numbered if they exist.
        folder: where they are written.
        environment: facts about the machine, the first line of the rows.
    """

    def __init__(self, name: str, folder: Path, environment: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        stem = name
        number = 2
        while (folder / f"{stem}.jsonl").exists():
            stem = f"{name}-{number}"
            number += 1
        self.rows: list[Row] = []
        self.environment = dict(environment)
        self._rows_file = folder / f"{stem}.jsonl"
        self._table_file = folder / f"{stem}.txt"
        self._log_file = folder / f"{stem}.log"
        self._begin = time.monotonic()
        self._log_left = MOST_LOG_BYTES
        self._lock = Lock()
        self._write()

    @property
    def folder(self) -> Path:
        """Folder of the files."""
        return self._rows_file.parent

    def row(
        self,
        step: str,
        check: str,
        ok: bool | None,
        detail: str = "",
        seconds: float = 0.0,
        figures: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a row, and print it.

        Args:
            step: step of the command.
            check: what was looked at.
            ok: whether it is right; None if this machine cannot tell.
            detail: text for people.
            seconds: its wall time.
            figures: numbers for tables, by name.
        """
        row = {
            "step": step,
            "check": check,
            "ok": ok,
            "seconds": round(seconds, 1),
            "detail": detail,
            "figures": dict(figures or {}),
        }
        with self._lock:
            self.rows.append(row)
            self._write()
            print(line_of(row, WIDTH), flush=True)

    def log(self, title: str, text: str, lines: int) -> None:
        """Keep the last ``lines`` lines of an output; later ones are dropped when the log is full."""
        tail = "\n".join(text.splitlines()[-lines:])[-60_000:]
        entry = f"\n##### {title}\n{tail}\n".encode(errors="replace")
        with self._lock:
            if len(entry) <= self._log_left:
                self._log_left -= len(entry)
                with self._log_file.open("ab") as file:
                    file.write(entry)

    def table(self, most: int = 10**7) -> str:
        """The rows as text of at most ``most`` characters: how many failed, those, then the others."""
        failed = [row for row in self.rows if row["ok"] is False]
        others = [row for row in self.rows if row["ok"] is not False]
        count_ok = sum(row["ok"] is True for row in self.rows)
        seconds = time.monotonic() - self._begin
        head = f"{len(failed)} failed, {count_ok} ok, {len(others) - count_ok} n/a, {seconds:.0f} s"
        lines = [head, *(line_of(row, WIDTH_OF_FAILURE) for row in failed), *(line_of(row, WIDTH) for row in others)]
        text = "\n".join(lines)
        return text if len(text) < most else text[: most - 4] + "\n..."

    def _write(self) -> None:
        lines = [self.environment, *self.rows]
        _replace(self._rows_file, "".join(json.dumps(line) + "\n" for line in lines))
        _replace(self._table_file, self.table() + "\n")


def _replace(path: Path, text: str) -> None:
    """Write a file of which a reader never sees half."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def line_of(row: Row, width: int) -> str:
    """One line of the table."""
    detail = re.sub(r"\s+", " ", row["detail"])
    name = f"{row['step']}: {row['check']}"
    return f"{WORDS[row['ok']]:<4} {name:<40} {row['seconds']:6.1f} s  {detail}"[:width].rstrip()


def error_in(output: str) -> str:
    """What a failed program said last: its error and the line behind it."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for index in reversed(range(len(lines))):
        if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|Interrupt|Incompatibility)\b", lines[index]):
            return " | ".join(lines[index : index + 2])[:300]
    return lines[-1][:300] if lines else "it said nothing"

"""``crius report``, and the report that a run writes while it trains and at its end."""

import contextlib
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from crius.cli.app import SOURCES, app, emit
from crius.config.run import RunConfig
from crius.errors import ConfigError, CriusError
from crius.redact import printable, redact
from crius.tools.report.history import read_run
from crius.tools.report.page import REPORT, is_report, write_report
from crius.tools.report.runs import expanded

_SECONDS = 60.0
_TIMES = 100
"""Seconds between two reports of a run that trains, and at least this many times the seconds that one takes."""


@app.verb
def report(
    *runs: Annotated[Path, "Run folders, or folders of runs. The curves of several runs are drawn over each other."],
    out: Annotated[Path | None, "The file. Default: report.html in the run folder, or here for several runs."] = None,
) -> int:
    """Write a report of runs as one HTML file that needs no network: curves, time, incidents, settings.

    Several runs are compared with the first one: settings that differ, results, and differences of the losses.
    """
    if not runs:
        raise ConfigError(
            "no run folder is given.", where="command line", fix="give a run folder: crius report runs/NAME"
        )
    histories = [read_run(path) for path in {path.resolve(): path for path in reversed(expanded(runs))}.values()][::-1]
    target = out or (histories[0].path / REPORT if len(histories) == 1 else Path(REPORT))
    target = out.resolve() if out and out.is_symlink() else target
    _check(target)
    write_report(histories, target)
    for history in histories:
        if history.lacks:
            sys.stderr.write(printable(f"{history.path}: {history.lacks}\n"))
    emit(f"report: {target}")
    return 0


def _check(out: Path) -> None:
    if out.is_symlink():
        raise ConfigError(f"{out} is a link.", why="it is not followed", fix=f"--out {REPORT}")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder.", where="--out", fix=f"--out {out / REPORT}")
    if out.exists() and not is_report(out):
        raise ConfigError(
            f"{out} exists and is not a report.", where="--out", why="it would be lost", fix="--out another.html"
        )


class LiveReport:
    """The report of a run that trains, written again each minute by a process of its own.

    Steps never wait for it. A report that takes long is written more rarely, so that it takes at most 1 % of the time.

    Args:
        folder: the run folder.
        is_on: whether the report is written at all.
    """

    def __init__(self, folder: Path, *, is_on: bool) -> None:
        self._command = [sys.executable, "-m", "crius", "report", str(folder)]
        self._due = time.monotonic() + _SECONDS if is_on else math.inf
        self._process: subprocess.Popen[bytes] | None = None

    def poll(self) -> None:
        """Start the process if it is time. Call this about once per second."""
        now = time.monotonic()
        if self._process and self._process.poll() is not None:
            self._process = None
            self._due += max(_SECONDS, _TIMES * (now - self._due))
        elif not self._process and now >= self._due:
            self._due = now
            with contextlib.suppress(OSError):
                quiet = subprocess.DEVNULL
                self._process = subprocess.Popen(self._command, stdout=quiet, stderr=quiet)

    def close(self) -> None:
        """Wait for the process, so that the last report is the newest."""
        if self._process:
            self._process.wait()


def write_last_report(run: RunConfig, folder: Path) -> None:
    """Write the report of a run that has ended, unless reports are off. An error here is only a warning.

    Args:
        run: the run.
        folder: its run folder. Without a record, no report is written.
    """
    if not run.metrics.enable_report or not (folder / "metrics.jsonl").exists():
        return
    report_or_warn([folder], folder / REPORT)


def report_or_warn(folders: Sequence[Path], out: Path) -> None:
    """Write the report of the runs in ``folders`` that have a record. An error here is only a warning."""
    try:
        histories = [history for history in map(read_run, folders) if history.steps]
        if histories:
            write_report(histories, out, SOURCES.origins)
    except Exception as error:  # a failed report does not change the exit code of the run
        why = error.what if isinstance(error, CriusError) else f"{type(error).__name__}: {error}"
        sys.stderr.write(printable(redact(f"warning: no report of this run: {why}\n")))

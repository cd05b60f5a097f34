"""``crius runs`` and ``crius compare``."""

import json
import sys
from pathlib import Path
from typing import Annotated

from crius.cli.app import Json, app, emit, emit_result
from crius.redact import printable
from crius.tools.report.compare import compare as compare_runs
from crius.tools.report.curves import TOLERANCE
from crius.tools.report.history import read_run
from crius.tools.report.runs import expanded, find_runs, rank, run_lines

RUNS = Path("runs")


@app.verb
def runs(
    folder: Annotated[Path, "Folder with run folders, or with folders of run folders."] = RUNS,
    /,
    *,
    as_json: Json = False,
) -> int:
    """List runs, the newest first: state, step, loss, speed, time since the last record, settings that differ.

    The lowest validation loss has a star, if all runs validated on the same data.
    The state is running, finished, stopped or preempted (with the signal), or failed (with the error).
    """
    rows = find_runs(folder) if folder != RUNS or folder.exists() else []
    if as_json:
        ranking = rank(rows)
        best = None if ranking.best is None else rows[ranking.best].name
        found = {"folder": str(folder), "runs": [row.as_dict() for row in rows], "settings": ranking.settings}
        emit(json.dumps(found | {"best": best, "not_compared": ranking.why}, indent=2))
    elif rows:
        emit("\n".join(run_lines(rows)))
    else:
        emit(f"no run in {folder}; crius train starts a run")
    return 0


@app.verb
def compare(
    *folders: Annotated[
        Path,
        "Run folders, or folders of runs, such as that of a sweep. Each is compared with the first.",
    ],
    tolerance: Annotated[float, "Relative difference of two losses up to which they count as equal."] = TOLERANCE,
    as_json: Json = False,
) -> int:
    """Compare runs: settings that differ, the first step with different losses, results.

    Exit code 1 if a loss differs by more than the tolerance at a step that both runs report, or if a run cannot be
    compared.
    """
    histories = [read_run(folder) for folder in expanded(folders)]
    reported = [run for run in histories if run.steps]
    left_out = [run for run in histories if run.lacks] if len(reported) > 1 else []
    for run in left_out:
        sys.stderr.write(printable(f"{run.path} is left out: {run.lacks}\n"))
    found = compare_runs(reported if left_out else histories, tolerance)
    emit_result(found.as_dict(), found.lines(), as_json=as_json)
    return 0 if found.are_equal and not left_out else 1

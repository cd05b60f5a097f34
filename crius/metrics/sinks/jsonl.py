"""``metrics.jsonl``: one JSON object a record, at full precision, flushed at once."""

import dataclasses
import json
import logging
import math
from pathlib import Path

from crius.metrics.record import Record
from crius.run_file import RunFile

log = logging.getLogger("crius.metrics")


class JsonlSink:
    """Writes ``metrics.jsonl`` of a run folder; that of another run is kept as ``metrics.N.jsonl``.

    Args:
        run_dir: folder of the run.
        resumed_step: the file goes on after this step; records of later ones, which come again, are moved to
            ``metrics.lost.jsonl``. 0: a new run.
    """

    def __init__(self, run_dir: Path, resumed_step: int = 0) -> None:
        path = run_dir / "metrics.jsonl"
        if resumed_step and path.exists():
            try:
                _go_back(path, resumed_step)
            except OSError as error:
                log.warning("%s keeps steps that come again: it cannot be written (%s)", path, error.strerror)
        elif path.exists():
            number = 1
            while (kept := run_dir / f"metrics.{number}.jsonl").exists():
                number += 1
            path.rename(kept)
        self._file = RunFile(path, log.warning, "its records are lost, and the run goes on")

    def write(self, record: Record) -> None:
        """Write one line."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in dataclasses.asdict(record).items()  # JSON has no NaN
        }
        self._file.append(json.dumps(finite) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _go_back(path: Path, step: int) -> None:
    """Leave the records up to ``step`` in a file; a line that a crash cut off goes with the later ones."""
    kept: list[str] = []
    lost: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            is_kept = line.endswith("\n") and json.loads(line)["step"] <= step
        except (ValueError, KeyError):
            is_kept = False
        (kept if is_kept else lost).append(line)
    if not lost:
        return
    with path.with_name("metrics.lost.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(line if line.endswith("\n") else f"{line}\n" for line in lost)
    partial = path.with_name("metrics.jsonl.partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(path)

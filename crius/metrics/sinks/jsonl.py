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
        resumed_step: the file goes on after this step; records of later ones, which come again, and lines that cannot
            be read are moved to ``metrics.lost.jsonl``. 0: a new run.
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
    """Leave the records up to ``step`` in a file; later ones are moved away, and so is what cannot be read.

    The end of a last line that a crash cut off is normal; a damaged one that was whole is reported.
    """
    kept: list[bytes] = []
    lost: list[bytes] = []
    damaged = mended = 0
    with path.open("rb") as lines:
        for line in lines:
            whole = line.rstrip() + b"\n"  # also where its end is another character than that of a line
            at = _step_of(whole)
            (kept if at is not None and at <= step else lost).append(whole)
            mended += whole != line
            damaged += at is None and (line.endswith(b"\n") or b"}" in line)
    if not (lost or mended):
        return
    aside = path.with_name("metrics.lost.jsonl")
    if damaged:
        what = "1 damaged line was" if damaged == 1 else f"{damaged} damaged lines were"
        log.warning("%s: %s moved to %s, whose records are missing", path, what, aside.name)
    if lost:
        with aside.open("ab") as file:
            file.writelines(lost)
    partial = path.with_name("metrics.jsonl.partial")
    partial.write_bytes(b"".join(kept))
    partial.replace(path)


def _step_of(line: bytes) -> int | None:
    """The step of a record; None where the line is not a whole one."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if type(step) is int and line.endswith(b"\n") else None

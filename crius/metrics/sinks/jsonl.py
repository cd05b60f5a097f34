"""``metrics.jsonl``: one JSON object a record, at full precision, flushed at once."""

import dataclasses
import json
import math
from pathlib import Path

from crius.metrics.record import Record


class JsonlSink:
    """Appends to ``metrics.jsonl`` of a run folder; one that is there already is kept as ``metrics.N.jsonl``."""

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / "metrics.jsonl"
        if path.exists():
            number = 1
            while (kept := run_dir / f"metrics.{number}.jsonl").exists():
                number += 1
            path.rename(kept)
        self._file = path.open("w", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Write one line."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in dataclasses.asdict(record).items()  # JSON has no NaN
        }
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

"""Results of a benchmark, with the facts that are needed to repeat it. No torch."""

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import crius
from crius.errors import ConfigError, CriusError, EnvironmentError

_ROOT = Path(crius.__file__).parent.parent


@dataclass
class Samples:
    """Seconds of the same work, measured in turns with other work."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median; 0 with fewer than two samples."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median

    def as_dict(self) -> dict[str, object]:
        """For the JSON, in milliseconds."""
        return {
            "milliseconds": 1e3 * self.median,
            "spread": self.spread,
            "samples_ms": [1e3 * seconds for seconds in self.seconds],
        }


def show(as_json: bool, record: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Print a result: ``record`` as JSON, or ``lines`` for people."""
    sys.stdout.write((json.dumps(record, indent=2) if as_json else "\n".join(lines)) + "\n")


def receipt(verb: str) -> dict[str, Any]:
    """Verb, time, command and versions; the contestants report the machine and torch."""
    return {
        "verb": verb,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": {"crius": crius.__version__, "python": platform.python_version()},
        "git": _commit(),
    }


def _commit() -> str | None:
    """The commit of the checkout that Crius runs from, followed by ``+`` if files differ; None without a checkout."""
    if not (_ROOT / ".git").exists():
        return None
    describe = ["git", "-C", str(_ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def check_result_file(file: Path) -> None:
    """Check before any measurement that ``write_result`` can write; existing text stays.

    Raises:
        ConfigError: the file cannot be written.
    """
    is_new = not file.exists()
    _write(file, "a", "", ConfigError)
    if is_new:
        file.unlink()


def write_result(file: Path, result: Mapping[str, Any]) -> None:
    """Write ``result`` as JSON, and create the folders above it.

    Raises:
        EnvironmentError: the file cannot be written.
    """
    _write(file, "w", json.dumps(result, indent=2) + "\n", EnvironmentError)


def _write(file: Path, mode: str, text: str, kind: type[CriusError]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open(mode, encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise kind(
            f"the result cannot be written to {file}: {error.strerror}.",
            where="--out",
            fix="give a file in a writable folder: --out FILE",
        ) from None

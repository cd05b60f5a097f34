"""What ``crius tune`` keeps in its run folder for its next start: command, data, first answers, results. No torch."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crius.errors import ConfigError
from crius.untrusted import object_below

FILE = "tune.json"


def read_record(folder: Path) -> dict[str, Any]:
    """What an earlier start wrote; empty if there was none, or if it cannot be read."""
    return object_below(folder, FILE) or {}


def check_is_new(folder: Path, known: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``folder`` has the record of another command, which is ``known``."""
    if (folder / FILE).exists():
        before = f": crius tune {shlex.join(known['asked'])}" if known.get("asked") else ""
        raise _other(f"{folder} belongs to another tune{before}.", folder)


def check_data(folder: Path, known: Mapping[str, Any], identity: str) -> None:
    """Raise ConfigError if ``identity`` is not that of the data which an earlier start began with."""
    if known.get("data", identity) != identity:
        raise _other(f"the conversations differ from those that {folder} was begun with.", folder)


def write_record(folder: Path, known: Mapping[str, Any]) -> None:
    """Write what ``read_record`` reads."""
    (folder / FILE).write_text(json.dumps(known, indent=1))


def another(folder: Path) -> Path:
    """A folder for another command."""
    return Path(f"{folder}-2")


def _other(what: str, folder: Path) -> ConfigError:
    return ConfigError(what, where=str(folder / FILE), fix=f"--job.run_dir {another(folder)}")

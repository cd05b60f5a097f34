"""Known GPUs (``gpus.toml``): one table, used by a run for its MFU and by the planner for its hardware. No torch."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crius.untrusted import parse_toml, text_named

_TABLES = parse_toml(text_named(Path(__file__).with_name("gpus.toml")))


def _filled() -> dict[str, dict[str, Any]]:
    filled: dict[str, dict[str, Any]] = {}
    for name, table in _TABLES.items():
        own = {key: value for key, value in table.items() if key not in ("like", "aliases", "driver")}
        filled[name] = filled.get(table.get("like", ""), {}) | own
    return filled


GPUS: Mapping[str, Mapping[str, Any]] = _filled()
"""Fields of ``crius.tools.plan.hardware.Hardware`` by the name of each entry. An entry without ``memory_bytes`` has
only its peak: its links or its memory are not known."""
ALIASES = {alias: name for name, table in _TABLES.items() for alias in table.get("aliases", ())}
_DRIVEN = [(name, table) for name, table in _TABLES.items() if "driver" in table]


def find_gpu(device: str) -> str | None:
    """Name of the entry of a GPU that its driver calls ``device``; the longest match counts. None: not known."""
    found = [(re.search(rf"\b(?:{table['driver']})\b", device), name) for name, table in _DRIVEN]
    return max(((len(match[0]), name) for match, name in found if match), default=(0, None), key=lambda one: one[0])[1]

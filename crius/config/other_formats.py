"""Settings in a file of JSON or YAML, as flags: such a file is refused, and the flags are the way out."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_LINE = re.compile(
    r"""(?P<indent> *)(?P<item>- +)?((?P<key>[A-Za-z_][\w.-]*):(?= |$))? *(?P<value>"[^"]*"|'[^']*'|[^#]*)"""
)


def other_format(file: Path) -> tuple[str, list[str]]:
    """JSON or YAML, and the settings of ``file`` as flags; no flags if it is neither.

    Raises:
        OSError: the file cannot be read.
    """
    text = file.read_text(encoding="utf-8-sig", errors="replace")
    with contextlib.suppress(ValueError, RecursionError):
        table = json.loads(text)
        return "JSON", list(_flags_of(table)) if isinstance(table, dict) else []
    if file.suffix in (".yaml", ".yml") or re.search(r"^\s*[\w.-]+:( |$)", text, re.MULTILINE):
        return "YAML", list(_flags_of_yaml(text))
    return "", []


def _flags_of(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flags_of(value, f"{name}.")
            continue
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                yield f"--{name}={str(item).lower() if isinstance(item, bool) else item}"


def _flags_of_yaml(text: str) -> Iterator[str]:
    """The flags of lines such as ``key: value`` and ``- value``, with the names of the sections around them."""
    sections: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if not match or not line.strip() or line.lstrip().startswith(("#", "---")):
            continue
        indent = len(match["indent"]) + len(match["item"] or "")
        value = (match["value"] or "").strip().strip("\"'")
        if match["key"]:
            sections = [*(outer for outer in sections if outer[0] < indent), (indent, match["key"])]
        name = ".".join(key for _, key in sections)
        if value not in ("", "null", "~") and name:
            yield f"--{name}={value}"

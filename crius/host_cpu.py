"""What the CPU of this host can do."""

import os
import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")

BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16")
"""Flags, as Linux names them, of instructions that multiply bfloat16; the fastest first."""


def cpu_name() -> str:
    """The model of this CPU, as Linux says it; elsewhere its architecture."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", _CPUINFO.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def cpu_with_cores() -> str:
    """``cpu_name`` and the number of cores: machines that share a home folder can differ in that alone."""
    return f"{cpu_name()}, {os.cpu_count() or 1} cores"


def bfloat16_instructions() -> str:
    """The fastest instructions of this CPU that multiply bfloat16, by their flag; empty where it has none.

    Linux tells; elsewhere the answer is empty. Every core of a machine has the same ones.
    """
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    flags = found[1].split() if found else []
    return next((flag for flag in BFLOAT16_FLAGS if flag in flags), "")

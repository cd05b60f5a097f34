"""How much memory this host, or the container that this process is in, can still give."""

import os
import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_host_bytes() -> int:
    """What programs can have without swapping, or a container's limit where that is less."""
    free = _of_host()
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)$", (_CGROUP / "memory.stat").read_text(), re.MULTILINE)
    except OSError:  # no container
        return free
    return free if limit == "max" else min(free, int(limit) - used + (int(cached[1]) if cached else 0))


def _of_host() -> int:
    """What the system calls available; all of its memory where it does not say."""
    try:
        text = _MEMINFO.read_text(encoding="utf-8")
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

"""Facts about this host: instructions of its CPU, its memory, its limits, and the ranks of a run. No torch."""

import contextlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from crius.errors import EnvironmentError
from crius.untrusted import text_named

_CPUINFO = Path("/proc/cpuinfo")

BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16")
"""Flags, as Linux names them, of instructions that multiply bfloat16; the fastest first."""

ATTENTION_BLOCK = 32
"""Queries of a sequence whose scores are computed together, so that they stay in the caches: docs/kernels.md."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Machine of a run.

    Attributes:
        device: ``cuda`` or ``cpu``.
        name: name of the GPU or the CPU; empty if it does not matter.
        ranks: ranks of the run.
        local_ranks: ranks per host.
        threads: threads of a rank on a CPU.
        cannot_compile: why torch.compile makes no kernels for its GPUs; empty if it does.
    """

    device: str
    name: str = ""
    ranks: int = 1
    local_ranks: int = 1
    threads: int = 1
    cannot_compile: str = ""

    @property
    def on_gpu(self) -> bool:
        """Whether the run is on GPUs."""
        return self.device == "cuda"


COMPILE_SWITCHES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
"""Environment variables: if one of them is 1, torch compiles nothing."""


def missing_for_compile(environ: Mapping[str, str]) -> str:
    """Part that torch.compile needs for GPU kernels and this host lacks; empty if none is known to be missing."""
    switch = next((name for name in COMPILE_SWITCHES if environ.get(name) == "1"), "")
    if switch:
        return f"{switch} is set"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    compilers = [environ["CC"]] if "CC" in environ else ["gcc", "clang", "cc"]
    if not any(shutil.which(name, path=environ.get("PATH")) for name in compilers):
        return f"Triton needs a C compiler, but there is no {' or '.join(compilers)}"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"Triton needs the headers of Python, but there is no {header}"


SHARE_GPU = "CRIUS_SHARE_GPU"
"""Variable that lets the ranks of a test share one GPU: docs/gpu.md."""
NCCL_SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's own variable, from 2.30 on: 1 lets several ranks have the same GPU."""
MOST_SHARING = 4
"""Most ranks of a run that share a GPU."""


def gpu_sharing(environ: Mapping[str, str]) -> Literal["", "nccl", "gloo"]:
    """Library by which ranks on one GPU communicate; empty: each rank needs a GPU of its own.

    Raises:
        EnvironmentError: ``CRIUS_SHARE_GPU`` is none of 0, 1, nccl and gloo.
    """
    value = environ.get(SHARE_GPU, "")
    if value in ("", "0"):
        return ""
    if value == "gloo" or (value == "1" and environ.get(NCCL_SHARES) != "1"):
        return "gloo"
    if value in ("1", "nccl"):
        return "nccl"
    raise EnvironmentError(
        f"{SHARE_GPU}={value} is none of 0, 1, nccl and gloo.",
        where="the environment",
        why=f"1 is nccl if {NCCL_SHARES} is 1, else gloo",
        fix=f"export {SHARE_GPU}=1, or unset {SHARE_GPU}",
    )


def cpu_name() -> str:
    """The model of this CPU, as Linux reports it; elsewhere its architecture."""
    return _entry("model name") or platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may use; Slurm and containers may leave it fewer than the host has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_with_cores() -> str:
    """``cpu_name`` and the number of cores: machines that share a home folder can differ in the number alone."""
    return f"{cpu_name()}, {os.cpu_count() or 1} cores"


def bfloat16_instructions() -> str:
    """Flag of the fastest instructions of this CPU that multiply bfloat16; empty if it has none.

    Only Linux reports them; elsewhere the answer is empty. Every core of a machine has the same ones.
    """
    flags = _entry("flags").split()
    return next((flag for flag in BFLOAT16_FLAGS if flag in flags), "")


def is_wide_amd_cpu() -> bool:
    """Whether the CPU is AMD's and has AVX-512 (Zen 4 and later), as far as Linux reports it."""
    return _entry("vendor_id") == "AuthenticAMD" and "avx512f" in _entry("flags").split()


def _entry(name: str) -> str:
    """Value in ``/proc/cpuinfo`` for the first core; empty if there is no value or no such file."""
    try:
        text = text_named(_CPUINFO)
    except OSError:
        return ""
    line = re.search(rf"^{name}\s*:(.*)$", text, re.MULTILINE)
    return line[1].strip() if line else ""


_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def user_cache() -> Path:
    """Folder for files that Crius can create again: ``crius`` in ``XDG_CACHE_HOME``, else ~/.cache/crius."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "crius"


def python_path() -> str:
    """PYTHONPATH for ``python -P -m crius...``: the folder of this package, then the present value.

    Without -P such a process would look for each module in the current folder first, which may be a stranger's.
    """
    return os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]))


def free_host_bytes() -> int:
    """Bytes that programs can use without swapping; in a container its limit, if that is less."""
    free = _of_host()
    try:
        limit = text_named(_CGROUP / "memory.max").strip()
        used = int(text_named(_CGROUP / "memory.current"))
        cached = re.search(r"^inactive_file (\d+)$", text_named(_CGROUP / "memory.stat"), re.MULTILINE)
    except OSError:  # not in a container
        return free
    if limit == "max":
        return free
    cache = int(cached[1]) if cached else 0
    return min(free, int(limit) - used + cache)


def _of_host() -> int:
    """Bytes that the system reports as available; all of its memory if it reports none."""
    try:
        text = text_named(_MEMINFO)
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    line = re.search(r"^MemAvailable:\s*(\d+) kB$", text, re.MULTILINE)
    return int(line[1]) * 1024 if line else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_MOST_FILES = 2**20
"""Largest limit to set: programs that a rank starts may visit each number up to the limit, which in a container can be
a billion."""


def most_open_files() -> int:
    """Highest limit of files and connections that a process of this host may set."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)


def raise_open_files() -> None:
    """Raise this process's limit of files and connections as far as allowed: shells start it with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most_open_files()), hard))

"""The machine of a benchmark: its memory, its clock and its peak memory."""

import ctypes
import dataclasses
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from crius.host import cpu_name
from crius.tools.bench.contestant import resident_bytes


@dataclass(frozen=True)
class Machine:
    """The machine that the numbers of a benchmark depend on.

    Attributes:
        device: ``cpu`` or ``cuda``.
        name: name of the GPU or of the CPU.
        threads: threads that torch uses on the CPU.
        cores: cores of the host.
        torch_version: version of torch.
    """

    device: str
    name: str
    threads: int
    cores: int
    torch_version: str

    @classmethod
    def of(cls, device: torch.device) -> "Machine":
        """The machine that ``device`` is in."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
        return cls(device.type, name, torch.get_num_threads(), os.cpu_count() or 1, torch.__version__)

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        return f"{self.device} ({self.name}), {threads} on {self.cores} cores, torch {self.torch_version}"

    def as_dict(self) -> dict[str, object]:
        """For the JSON."""
        return dataclasses.asdict(self)


class PeakMemory:
    """Memory that is taken after this object was created.

    On a GPU it is memory that torch's allocator handed out, without its cache. On Linux it is the resident set of this
    process, whose peak the kernel resets on request. It includes everything that the process does, so a few MiB mean
    nothing.

    Args:
        device: device of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        _give_back()
        try:
            Path("/proc/self/clear_refs").write_text(
                "5"
            )  # proc_pid_clear_refs(5): the peak becomes the present resident set
            self._before = resident_bytes("VmRSS")
        except OSError:
            self._before = None

    def read(self) -> int | None:
        """Peak bytes so far; None if they cannot be known."""
        if self._before is None:
            return None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return max(0, resident_bytes("VmHWM") - self._before)


def _give_back() -> None:
    """Return the free heap to the system, because memory taken from it would not grow the resident set."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim:
        trim(0)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Wall time of one of ``repeats`` calls of ``work``, from an idle device to an idle device."""
    wait_for(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    wait_for(device)
    return (time.perf_counter() - begin) / repeats


def wait_for(device: torch.device) -> None:
    """Wait until ``device`` has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

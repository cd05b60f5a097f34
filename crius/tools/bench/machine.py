"""The machine of a benchmark, and its clock."""

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from crius.host import cpu_name
from crius.units import counted


@dataclass(frozen=True)
class BenchMachine:
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
    def of(cls, device: torch.device) -> "BenchMachine":
        """The machine that ``device`` is in."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
        return cls(device.type, name, torch.get_num_threads(), os.cpu_count() or 1, torch.__version__)

    def __str__(self) -> str:
        threads = counted(self.threads, "thread")
        return f"{self.device} ({self.name}), {threads} on {self.cores} cores, torch {self.torch_version}"

    def as_dict(self) -> dict[str, object]:
        """For the JSON."""
        return dataclasses.asdict(self)


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

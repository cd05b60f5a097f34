"""Facts about devices: peak speed and memory."""

import resource
import sys
from typing import Any

import torch

from crius.host import Machine, cpu_with_cores
from crius.metrics.gpus import GPUS, find_gpu
from crius.units import GIB


def machine_of(device: torch.device, ranks: int, local_ranks: int) -> Machine:
    """Machine of this process: its device, the number of ``ranks``, and the number of ``local_ranks`` on this host."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_with_cores()
    return Machine(device=device.type, name=name, ranks=ranks, local_ranks=local_ranks, threads=torch.get_num_threads())


def peak_tflops(device: torch.device) -> float | None:
    """Dense bf16 peak of ``device`` in TFLOP/s; None if it is not known, as for all CPUs."""
    if device.type != "cuda":
        return None
    name = find_gpu(torch.cuda.get_device_name(device))
    return None if name is None else float(GPUS[name]["bfloat16_flops"]) / 1e12


def peak_memory(device: torch.device) -> dict[str, Any]:
    """The fields of ``StepMetrics`` about memory, by name.

    For a GPU: peaks since the last call, and counts since the process began. For a CPU: the largest resident set.
    """
    if device.type != "cuda":
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss: bytes on macOS, KiB on Linux
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
        return dict.fromkeys(("memory_gib", "max_active_gib", "max_reserved_gib"), resident)
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    kinds = {"memory_gib": "allocated", "max_active_gib": "active", "max_reserved_gib": "reserved"}
    peaks = {name: stats.get(f"{kind}_bytes.all.peak", 0) / GIB for name, kind in kinds.items()}
    return peaks | {name: stats.get(name, 0) for name in ("num_alloc_retries", "num_ooms")}


def total_memory_gib(device: torch.device) -> float | None:
    """Memory of a GPU in GiB; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else None

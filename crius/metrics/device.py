"""What is known of devices: peak speed and memory."""

import resource
import sys

import torch

# Dense bf16 peak in TFLOP/s, without sparsity, from the vendors' data sheets. The first name that fits counts.
PEAK_TFLOPS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H200", 989.4),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("A10G", 70.0),
    ("A6000", 154.8),
    ("L40S", 362.0),
    ("RTX 4090", 165.2),
    ("MI300X", 1307.4),
    ("MI250X", 191.5),  # one of its two dies, which is what torch calls a device
)

GIB = 1 << 30


def peak_tflops(device: torch.device) -> float | None:
    """Dense bf16 peak of ``device`` in TFLOP/s; None where it is not known, as on every CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_TFLOPS if known in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory in GiB since the last call: allocated on a GPU, the largest resident set so far on a CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss: bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def total_memory_gib(device: torch.device) -> float | None:
    """Memory of a GPU in GiB; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else None

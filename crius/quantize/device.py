"""Which low-precision matmuls a device has."""

from typing import Literal

import torch

FLOAT8_CAPABILITY = (8, 9)  # Ada; torch._scaled_mm refuses older ones
MXFP8_CAPABILITY = (10, 0)  # Blackwell, whose tensor cores apply scales of 32 elements
_ROCM_FLOAT8 = ("gfx94", "gfx95", "gfx12")  # MI300, MI350, RDNA 4


def missing_matmuls(kind: Literal["float8", "mxfp8"], device_type: str) -> str:
    """What keeps the device of this process from matmuls of ``kind``; empty where nothing does.

    Args:
        kind: of number.
        device_type: ``cpu`` or ``cuda``, which ROCm calls itself too.
    """
    words = {"float8": "float8", "mxfp8": "MXFP8"}[kind]
    if device_type != "cuda":
        return f"this device has no {words} matmuls"
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties().gcnArchName.split(":")[0]
        # torchao's MXFP8 casts for AMD need a package of their own, which it does not choose by itself
        return "" if kind == "float8" and name.startswith(_ROCM_FLOAT8) else f"{name} has no {words} matmuls"
    capability = torch.cuda.get_device_capability()
    needed = FLOAT8_CAPABILITY if kind == "float8" else MXFP8_CAPABILITY
    if capability < needed:
        return f"{words} matmuls need compute capability {_dotted(needed)}, this GPU has {_dotted(capability)}"
    return ""


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))

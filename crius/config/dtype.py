"""What ``training.mixed_precision_param auto`` means on a device. Torch-free."""

from typing import Literal

from crius.host_cpu import BFLOAT16_FLAGS, bfloat16_instructions

ITEMSIZE = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""


def auto_dtype(*, on_gpu: bool) -> tuple[Literal["float32", "bfloat16"], str]:
    """The dtype, and why: docs/training.md has the measurement.

    Args:
        on_gpu: where a run computes; else on the CPU of this host.
    """
    if on_gpu:
        return "bfloat16", "a GPU"
    instructions = bfloat16_instructions()
    if instructions:
        return "bfloat16", f"a CPU with {instructions}"
    return "float32", f"a CPU without {' or '.join(BFLOAT16_FLAGS)}"

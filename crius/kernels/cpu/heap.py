"""Settings of glibc's malloc for the memory of freed tensors."""

import ctypes
import os

# from glibc's malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_TRIM_BYTES = 1 << 30
# size from which a block is mapped alone: glibc's default and maximum
_LARGE_BYTES = 128 << 10
_MOST_BYTES = 32 << 20
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_tensors_apart() -> bool:
    """Make glibc map each tensor separately, for the first step of a run.

    Optimizer states and compiled code are allocated in that step and stay. They then do not lie between activations.
    Otherwise freed activations would leave holes that the activations of later steps do not fit into.

    Returns:
        As ``keep_freed_memory``, which must be called after the step.
    """
    return _mallopt({_M_MMAP_THRESHOLD: _LARGE_BYTES})


def keep_freed_memory() -> bool:
    """Make glibc keep up to 1 GiB of freed memory for the next tensors, instead of returning it in every step.

    Otherwise the system clears the pages of activations and gradients each time they are touched again: a tenth of
    the step of a small model (docs/LOG.md). Blocks above 32 MiB are still mapped from the system.

    Returns:
        Whether it took effect. It does not with another C library, or if the user set glibc's variables (mallopt(3)).
    """
    return _mallopt({_M_TRIM_THRESHOLD: _TRIM_BYTES, _M_MMAP_THRESHOLD: _MOST_BYTES})


def _mallopt(values: dict[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _SET_BY_USER):
        return False
    return all(mallopt(parameter, value) for parameter, value in values.items())

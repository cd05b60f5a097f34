"""What glibc's malloc does with the memory of tensors that are freed."""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_TRIM_BYTES = 1 << 30
_LARGE_BYTES, _MOST_BYTES = 128 << 10, 32 << 20  # from where on a block is apart: glibc's first choice, and its most
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_tensors_apart() -> bool:
    """Have glibc take each tensor from the system by itself, for the first step of a run.

    What stays from then on, optimizer states and what a compiler makes, does not lie between the activations of that
    step. Else these leave holes, which those of later steps do not fit into.

    Returns:
        As ``keep_freed_memory``, which is to follow.
    """
    return _mallopt({_M_MMAP_THRESHOLD: _LARGE_BYTES})


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, up to 1 GiB, for the next tensors, instead of giving it back in every step.

    Otherwise the system clears the pages of activations and gradients anew each time they are touched: a tenth of the
    step of a small model (docs/LOG.md). Blocks above 32 MiB come from the system as before.

    Returns:
        Whether it does: not with another C library, and not where the user set glibc's own variables (mallopt(3)).
    """
    return _mallopt({_M_TRIM_THRESHOLD: _TRIM_BYTES, _M_MMAP_THRESHOLD: _MOST_BYTES})


def _mallopt(values: dict[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _SET_BY_USER):
        return False
    return all(mallopt(parameter, value) for parameter, value in values.items())

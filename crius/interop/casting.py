"""Converts numbers between dtypes with torch's rounding: to nearest, ties to even. No torch."""

from typing import Any

import numpy as np

from crius.checkpoint.manifest import ITEM_BYTES

FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""Dtypes that ``cast`` supports, and numpy's dtypes for them; numpy lacks bfloat16."""

_BLOCK = 1 << 18


def cast(data: memoryview, source: str, target: str) -> memoryview:
    """Convert bytes of dtype ``source`` to bytes of dtype ``target``, in blocks; both must be in ``FLOATS``.

    Raises:
        OverflowError: a finite number becomes infinite.
    """
    if source == target:
        return data
    numbers = np.frombuffer(data, dtype=FLOATS[source])
    result = np.empty(len(numbers), dtype=FLOATS[target])
    for begin in range(0, len(numbers), _BLOCK):
        block = numbers[begin : begin + _BLOCK]
        wide = (block.astype(np.uint32) << 16).view(np.float32) if source == "BF16" else block
        with np.errstate(over="ignore", invalid="ignore"):
            single: Any = wide.astype(np.float32 if target == "BF16" else FLOATS[target])
        rounded: Any = _bfloat16(single) if target == "BF16" else single
        infinite = (rounded & 0x7FFF) == 0x7F80 if target == "BF16" else np.isinf(rounded)
        if np.count_nonzero(infinite) > np.count_nonzero(np.isinf(wide)):
            raise OverflowError
        result[begin : begin + _BLOCK] = rounded
    assert result.nbytes == len(numbers) * ITEM_BYTES[target]
    return result.view(np.uint8).data


def _bfloat16(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The rounded upper halves of float32 numbers; NaN stays NaN."""
    bits = numbers.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)

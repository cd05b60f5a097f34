"""Parameters that cannot be right: numbers that are not finite, and dtypes that are not floating-point. No torch."""

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from crius.checkpoint.manifest import BLOCK_BYTES, ITEM_BYTES
from crius.checkpoint.pieces import TensorSource, shortened
from crius.errors import CheckpointError

_LIMITS = {
    "F64": 0x7FF << 52,
    "F32": 0xFF << 23,
    "F16": 0x1F << 10,
    "BF16": 0xFF << 7,
    "F8_E5M2": 0x1F << 2,
    "F8_E4M3": 0x7F,
}
"""The smallest bits, without a sign, of a number that is not finite."""


def is_finite(data: memoryview, dtype: str) -> bool:
    """Whether all numbers are finite; the numbers of a dtype that is not floating-point are.

    Such a number has the highest bit of its exponent, which numbers below 2 lack. Only a block with a larger number is
    looked at closely: a positive number that is not finite is then the largest as a signed integer, a negative one as
    an unsigned integer. This needs no memory, and a fraction of the time of a hash.
    """
    if dtype not in _LIMITS:
        return True
    size = ITEM_BYTES[dtype]
    limit = _LIMITS[dtype]
    sign = 1 << (8 * size - 1)
    blocks = np.array_split(np.frombuffer(data, f"i{size}"), 1 + len(data) // BLOCK_BYTES)
    return all(
        not np.bitwise_or.reduce(block) & sign >> 1
        or (block.max() < limit and block.view(f"u{size}").max() < sign + limit)
        for block in blocks
    )


def check_dtypes(tensors: Mapping[str, TensorSource], parameters: Iterable[str], source: str) -> None:
    """Check that parameters have floating-point dtypes.

    Raises:
        CheckpointError: some have another dtype; names them.
    """
    wrong = [name for name in parameters if tensors[name].dtype not in _LIMITS]
    if wrong:
        raise CheckpointError(
            f"{source} has parameters that are not floating-point: {', '.join(shortened(wrong))}.",
            why="they are quantised, and their scales are not read",
            fix="give the model's folder with weights in bfloat16, float16 or float32",
        )


def check_finite(name: str, source: str, dtype: str, data: memoryview) -> None:
    """Check numbers of a parameter.

    Raises:
        CheckpointError: some are not finite; names ``name`` and its ``source``, the path of a model.
    """
    if not is_finite(data, dtype):
        raise CheckpointError(
            f"{name} of {source} has numbers that are not finite.",
            why="a model that computes with NaN or infinity answers NaN",
            fix=f"crius import {shlex.quote(source)} DIR --allow_nonfinite, then give DIR; or another checkpoint",
        )


def finite(tensors: Mapping[str, TensorSource], parameters: Collection[str], source: str) -> dict[str, TensorSource]:
    """The tensors of a source. Reading numbers of a parameter that are not finite raises a ``CheckpointError``.

    Args:
        tensors: tensors by our names.
        parameters: names of parameters; other tensors are buffers, which may have any numbers.
        source: path of the source, for messages.
    """
    return {
        name: _guarded(tensor, partial(check_finite, name, source, tensor.dtype)) if name in parameters else tensor
        for name, tensor in tensors.items()
    }


def _guarded(tensor: TensorSource, check: Callable[[memoryview], None]) -> TensorSource:
    pieces = [
        piece._replace(
            read=partial(_checked, piece.read, check),
            read_rows=piece.read_rows and partial(_checked, piece.read_rows, check),
        )
        for piece in tensor.pieces
    ]
    return replace(tensor, pieces=tuple(pieces))


def _checked(read: Callable[..., memoryview], check: Callable[[memoryview], None], *rows: int) -> memoryview:
    data = read(*rows)
    check(data)
    return data

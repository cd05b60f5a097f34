"""Loads a model that one process holds whole. It does not use torch's DCP, whose import takes half a second."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from crius.checkpoint.manifest import TORCH_NAMES
from crius.checkpoint.pieces import TensorSource

NAMES: dict[torch.dtype, str] = {getattr(torch, name): code for name, code in TORCH_NAMES.items()}
"""Names in safetensors files of torch's dtypes."""
DTYPES = {code: dtype for dtype, code in NAMES.items()}


def as_tensor(data: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Bytes as a tensor, without a copy."""
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8)).view(dtype).reshape(shape)


def load_whole(sources: Mapping[str, TensorSource], tensors: Mapping[str, Tensor]) -> None:
    """Fill whole ``tensors`` in place; ``crius.checkpoint.load.load_tensors`` fills tensors of any layout.

    Args:
        sources: sources to read, by name.
        tensors: tensors by name; ``sources`` has all of them, with the same shape.

    Raises:
        CheckpointError: a piece differs from the written bytes.
        OSError: reading fails.
    """
    needed = [(piece, name) for name in tensors for piece in sources[name].pieces]
    for piece, name in sorted(needed, key=lambda one: one[0].place):
        part = tensors[name].detach()
        for dim, (start, size) in enumerate(zip(piece.offset, piece.shape, strict=True)):
            part = part.narrow(dim, start, size)
        part.copy_(as_tensor(piece.read(), DTYPES[sources[name].dtype], piece.shape))

"""Squared L2 norms of many tensors, of which the order of sums shows as little as that of float64 does.

PyTorch's norm of float32 numbers in float64 first writes a copy of them in float64 on a CPU, and adds that up with one
thread.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from crius.kernels.choice import takes_fused

MAX_ROW = 65536
"""Numbers of a row that are added up in float32, whose error grows with the logarithm of their count."""


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """``(len(tensors),)`` in float64. The fused path sums rows of matrices in float32, and these sums in float64.

    Ranks that have whole rows of a matrix add up the same numbers as one rank that has all rows. A row whose norm is
    above 1.8e19 counts as infinite, as its square is in float32.
    """
    return reference([torch.linalg.vector_norm(x, dim=-1) if when(x) else x for x in tensors])


def when(x: Tensor) -> bool:
    """Whether the rows of ``x`` are summed first."""
    return x.dim() > 1 and 0 < x.shape[-1] <= MAX_ROW and takes_fused(x)


def reference(tensors: Sequence[Tensor]) -> Tensor:
    """All sums in float64."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square()

"""Hashes of the bits of tensors, computed where the tensors are, and of the gradients that a rank brings to a sum."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

CHUNK = {"cpu": 1 << 16}
"""Numbers hashed at a time: on a CPU their places and products stay in its cache (2.7 GB/s on a core; 0.3 without)."""

_CHUNK = 1 << 24  # on a GPU: few launches, 0.4 GiB of temporaries

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP = -0x61C8864680B583EB  # splitmix64's odd step, as a signed number


def hash_bits(values: Tensor) -> Tensor:
    """A hash of the bits of ``values`` in their order, int64 ``(2,)``; the host does not wait for a GPU.

    The first number is the sum of the bits of each value, so that no change of a single value goes unseen; the second
    weighs each with a multiplier of its place, in 64 bits that wrap. It is no protection against someone who wants two
    tensors to have one hash.
    """
    flat = values.detach().reshape(-1)
    bits = flat.view(_INTS[flat.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=values.device)
    chunk = CHUNK.get(values.device.type, _CHUNK)
    places = torch.arange(min(chunk, bits.numel()), device=values.device) * 2 + 1
    for index, part in enumerate(bits.split(chunk) if bits.numel() else ()):
        wide = part.to(torch.int64)
        weighted = (wide * places[: wide.numel()]).sum()
        sums[0] += wide.sum()
        sums[1] += weighted * (2 * index + 1) * _STEP
    return sums


class PlainReduceScatter(ReduceScatter):
    """FSDP's own, which is not part of its interface."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of FSDP's."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """``output_tensor``: this rank's part of the sum of all ranks' ``input_tensor``."""
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch before 2.13
        work: dist.Work | None = scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work


class HashedReduceScatter(ReduceScatter):
    """Another reduce-scatter, that while it is on hashes what this rank brings: its own gradient, before any sum.

    It belongs to one FSDP unit. FSDP asks for two buffers in each backward pass: one for the gradient of this rank,
    which is in it when FSDP asks for the other, for the result. Where the axis has one rank it asks for both, too, and
    calls nothing.

    Args:
        inner: what sums.
    """

    def __init__(self, inner: ReduceScatter) -> None:
        self._inner = inner
        self._brought: Tensor | None = None
        self.is_on = False
        self.hashes: list[Tensor] = []
        """One a backward pass while it is on, from ``hash_bits``."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of FSDP's."""
        buffer = self._inner.allocate(size, dtype=dtype, device=device)
        if self.is_on:
            if self._brought is None:
                self._brought = buffer
            else:
                self.hashes.append(hash_bits(self._brought))
                self._brought = None
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        """See ``inner``."""
        return self._inner(*args, **kwargs)

"""Stochastic rounding to bfloat16 that no layout changes.

A number between two neighbours in bfloat16 becomes the upper one with the probability of its distance from the lower
one, so that the mean is the number itself and small updates add up (Zamirai et al. 2020, arXiv:2010.06192). The random
bits come from no generator, whose state would depend on what a rank holds: they are a hash of the seed, the name of
the parameter, its step and the place of the element in the whole parameter.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

NOISE_BITS = 16
"""Bits that bfloat16 drops from float32."""

# splitmix64 (Steele, Lea and Flood 2014), as signed numbers: the odd step of its counter, and its two multipliers
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def stream(seed: int, name: str) -> int:
    """Where the random bits of a parameter begin: 64 bits, signed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little", signed=True)


def random_bits(first: int, step: Tensor, places: Tensor) -> Tensor:
    """64 random bits for each of ``places``, the same on every device and rank.

    Args:
        first: from ``stream``.
        step: number of the step, a scalar of any dtype; it is not read by the host.
        places: int64 of any shape, of the elements in the whole parameter. Overwritten.
    """
    key = _mix((step.to(torch.int64) * _STEP).add_(first))
    return _mix(places.mul_(_STEP).add_(key.to(places.device, non_blocking=True)))


def _mix(bits: Tensor) -> Tensor:
    # the shifts of int64 repeat the sign; with that too each line can be undone, so that no two inputs meet
    bits.bitwise_xor_(bits >> 30).mul_(_FIRST)
    bits.bitwise_xor_(bits >> 27).mul_(_SECOND)
    return bits.bitwise_xor_(bits >> 31)


def round_to_bfloat16(values: Tensor, bits: Tensor, field: int) -> Tensor:
    """``values`` rounded up or down at random; what bfloat16 has stays, infinities and NaN too.

    Args:
        values: float32, contiguous.
        bits: from ``random_bits``, of the same shape.
        field: which 16 of the 64 bits, 0 to 3: tensors of one step that share ``bits`` take different ones.
    """
    noise = (bits >> NOISE_BITS * field).bitwise_and_((1 << NOISE_BITS) - 1).to(torch.int32)
    # the integers of a sign-and-magnitude format: a carry out of the dropped bits goes away from zero
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(-1 << NOISE_BITS).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def places_of(
    start: int, stop: int, shape: Sequence[int], offset: Sequence[int], whole: Sequence[int], device: torch.device
) -> Tensor:
    """Places in the flattened whole of the elements ``[start, stop)`` of a flattened shard, int64.

    Args:
        start: first element of the shard.
        stop: element after the last.
        shape: of the shard.
        offset: where the shard starts in the whole, for each dim.
        whole: shape of the whole.
        device: of the result.
    """
    index = torch.arange(start, stop, device=device)
    if tuple(shape[1:]) == tuple(whole[1:]):  # whole rows, which lie one after the other in the whole too
        return index.add_(offset[0] * math.prod(whole[1:]) if whole else 0)
    places = torch.zeros_like(index)
    for dim in reversed(range(len(shape))):
        places += (index % shape[dim] + offset[dim]) * math.prod(whole[dim + 1 :])
        index //= shape[dim]
    return places

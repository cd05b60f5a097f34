"""Storage of weights and moments between steps: float32, bfloat16 or 8 bits in blocks.

Steps are computed in float32, in place: ``load`` converts a range of stored numbers to float32, ``save`` stores them.
"""

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from crius.shards import local_shard, local_tensor
from crius.silence import quiet_torchao

NOISE_BITS = 16
"""Bits that bfloat16 drops from float32."""

# splitmix64 (Steele, Lea and Flood 2014), as signed numbers: the odd increment of its counter, and its two multipliers
_STEP = -0x61C8864680B583EB
_FIRST = -0x40A7B892E31B1A47
_SECOND = -0x6B2FB644ECCEEE15


def stream(seed: int, name: str) -> int:
    """The start of a parameter's stream of random bits: 64 bits, signed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little", signed=True)


def random_bits(first: int, step: Tensor, places: Tensor) -> Tensor:
    """64 random bits for each of ``places``, the same on every device and rank.

    Args:
        first: result of ``stream``.
        step: number of the step, a scalar of any dtype. The host does not read it.
        places: int64 of any shape: indices of the elements in the flattened whole parameter. Overwritten.
    """
    key = _mix((step.to(torch.int64) * _STEP).add_(first))
    return _mix(places.mul_(_STEP).add_(key.to(places.device, non_blocking=True)))


def _mix(bits: Tensor) -> Tensor:
    # int64 shifts repeat the sign bit; even so, each line is invertible, so different inputs give different outputs
    bits.bitwise_xor_(bits >> 30).mul_(_FIRST)
    bits.bitwise_xor_(bits >> 27).mul_(_SECOND)
    return bits.bitwise_xor_(bits >> 31)


def round_to_bfloat16(values: Tensor, bits: Tensor, field: int) -> Tensor:
    """``values`` rounded up or down at random. Values that bfloat16 has, infinities and NaN stay.

    Args:
        values: float32, contiguous.
        bits: result of ``random_bits``, of the same shape.
        field: number, 0 to 3, of the group of 16 bits to use. Tensors that share ``bits`` use different groups.
    """
    noise = (bits >> NOISE_BITS * field).bitwise_and_((1 << NOISE_BITS) - 1).to(torch.int32)
    # as integers of a sign-and-magnitude format: a carry out of the dropped bits rounds away from zero
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(-1 << NOISE_BITS).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def places_of(
    start: int, stop: int, shape: Sequence[int], offset: Sequence[int], whole: Sequence[int], device: torch.device
) -> Tensor:
    """Indices in the flattened whole of the elements ``[start, stop)`` of a flattened shard, int64.

    Args:
        start: first element of the shard.
        stop: element after the last.
        shape: shape of the shard.
        offset: start of the shard in the whole, for each dim.
        whole: shape of the whole.
        device: device of the result.
    """
    index = torch.arange(start, stop, device=device)
    if tuple(shape[1:]) == tuple(whole[1:]):  # whole rows, which are contiguous in the whole too
        return index.add_(offset[0] * math.prod(whole[1:]) if whole else 0)
    places = torch.zeros_like(index)
    for dim in reversed(range(len(shape))):
        places += (index % shape[dim] + offset[dim]) * math.prod(whole[dim + 1 :])
        index //= shape[dim]
    return places


StateDtype = Literal["float32", "bfloat16", "8bit"]

BLOCK = 256
"""Neighbouring numbers of a shard that share a scale in 8 bits. Dettmers et al. 2022 (arXiv:2110.02861) use 2048,
torchao and bitsandbytes use 256.
"""

MIN_QUANTIZED = 4096
"""A parameter with fewer numbers in all (not per rank) keeps float32 moments, as in bitsandbytes."""

CHUNK = 1 << 23  # numbers converted at a time, a multiple of BLOCK: about 0.3 GiB of temporary memory


@dataclass(frozen=True)
class Plain:
    """Stored numbers of one shard, flat, in float32 or bfloat16.

    Attributes:
        kept: the numbers.
        field: field of the random bits, see ``round_to_bfloat16``.
    """

    kept: Tensor
    field: int

    def load(self, part: slice) -> Tensor:
        """The numbers of ``part`` in float32; a view if they are stored in float32."""
        return self.kept[part].float()

    def save(self, part: slice, values: Tensor, bits: Tensor | None, skip: Tensor | None) -> None:
        """Store numbers that came from ``load`` and were changed in place by a step.

        Args:
            part: the same as for ``load``.
            values: the numbers; in a skipped step they are unchanged, and so stored unchanged.
            bits: random bits for stochastic rounding.
            skip: scalar that is not 0 in a skipped step.
        """
        if self.kept.dtype != torch.float32:
            rounded = values if bits is None else round_to_bfloat16(values, bits, self.field)
            self.kept[part].copy_(rounded)


@dataclass(frozen=True)
class EightBit:
    """Stored numbers of one shard, flat: codes into a table of 256 numbers, times one scale per block.

    Numbers are rounded to nearest.

    Attributes:
        codes: uint8, padded to whole blocks.
        scale: float32, one per block.
        signed: whether numbers may be negative.
        table: result of ``code_table``.
    """

    codes: Tensor
    scale: Tensor
    signed: bool
    table: Tensor

    def _blocks(self, part: slice) -> Any:
        first = part.start // BLOCK
        last = -(-part.stop // BLOCK)
        codes = self.codes[first * BLOCK : last * BLOCK]
        scale = self.scale[first:last]
        return _torchao()(codes, scale, self.table, self.signed)

    def load(self, part: slice) -> Tensor:
        """See ``Plain``."""
        values: Tensor = self._blocks(part).dequantize()
        return values[: part.stop - part.start]

    def save(self, part: slice, values: Tensor, bits: Tensor | None, skip: Tensor | None) -> None:
        """See ``Plain``."""
        blocks = self._blocks(part)
        before = blocks.codes.clone(), blocks.scale.clone()
        blocks.copy_(F.pad(values, (0, -values.numel() % BLOCK)))
        if skip is not None:  # a number may change when it is converted to a code a second time
            for kept, old in zip((blocks.codes, blocks.scale), before, strict=True):
                kept.copy_(torch.where(skip.bool(), old, kept))


Kept = Plain | EightBit


@functools.cache
def _torchao() -> Any:
    """torchao's 8-bit tensor."""
    with quiet_torchao():
        from torchao.optim.subclass_8bit import OptimState8bit  # noqa: PLC0415
    return OptimState8bit


@functools.cache
def _numbers(signed: bool) -> tuple[float, ...]:
    """The 256 numbers that codes stand for, ascending in [-1, 1] or [0, 1]."""
    with _disable_current_modes():  # fake tensors of a dry run have no numbers
        table: Tensor = _torchao().zeros((BLOCK,), signed, BLOCK, "cpu").qmap
        return tuple(table.tolist())


def code_table(signed: bool, device: torch.device) -> Tensor:
    """The numbers that codes stand for, float32 ``(256,)``. The host waits if they are copied to a GPU."""
    return torch.tensor(_numbers(signed), device=device)


class Storage:
    """Storage of the weights and moments of an optimizer.

    Args:
        names: names of the parameters in the whole model; random bits depend on them.
        state_dtype: dtype of the moments.
        stochastic: round to bfloat16 stochastically; else to nearest.
        seed: seed of the random bits.
    """

    def __init__(self, names: Mapping[nn.Parameter, str], state_dtype: StateDtype, stochastic: bool, seed: int) -> None:
        self._state_dtype = state_dtype
        self._stochastic = stochastic
        self._offsets: dict[nn.Parameter, tuple[int, ...]] = {}  # start of this rank's shard in the whole
        self._streams = {parameter: stream(seed, name) for parameter, name in names.items()}
        self._tables: dict[tuple[bool, torch.device], Tensor] = {}

    def is_quantized(self, parameter: Tensor) -> bool:
        """Whether the moments of a parameter are stored in 8 bits."""
        return self._state_dtype == "8bit" and parameter.numel() >= MIN_QUANTIZED

    def state_bytes(self, parameter: Tensor, num_moments: int) -> int:
        """Bytes of a parameter's moments and its step number on this rank."""
        numel = local_tensor(parameter).numel()
        blocks = -(-numel // BLOCK)
        moment = blocks * (BLOCK + 4) if self.is_quantized(parameter) else numel * self._moment_dtype.itemsize
        return num_moments * moment + 4

    @property
    def _moment_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._state_dtype == "bfloat16" else torch.float32

    def start(self, state: dict[str, Tensor], parameter: nn.Parameter, moments: tuple[str, ...]) -> None:
        """Make moments of 0. 8-bit moments are flat, for this rank's shard; others are laid out as the parameter."""
        for moment in moments:
            if self.is_quantized(parameter):
                local = local_tensor(parameter)
                blocks = -(-local.numel() // BLOCK)
                # a scale of 0 makes any code 0
                state[moment] = torch.zeros(blocks * BLOCK, dtype=torch.uint8, device=local.device)
                state[f"{moment}_scale"] = torch.zeros(blocks, device=local.device)
            else:
                state[moment] = torch.zeros_like(parameter, dtype=self._moment_dtype, requires_grad=False)

    def weight(self, parameter: nn.Parameter) -> Kept:
        """The stored numbers of the parameter itself."""
        return Plain(local_tensor(parameter).view(-1), field=0)

    def moment(self, state: Mapping[str, Tensor], name: str, *, field: int, signed: bool) -> Kept:
        """The stored numbers of a moment, from ``start``."""
        kept = state[name]
        if kept.dtype == torch.uint8:
            key = (signed, kept.device)
            if key not in self._tables:
                self._tables[key] = code_table(*key)
            return EightBit(kept, state[f"{name}_scale"], signed, self._tables[key])
        return Plain(local_tensor(kept).view(-1), field)

    def bits(self, parameter: nn.Parameter, step: Tensor, part: slice) -> Tensor | None:
        """Random bits for ``part`` of a parameter's shard in the step after ``step``; None if none are needed."""
        is_bfloat16 = parameter.dtype == torch.bfloat16 or self._state_dtype == "bfloat16"
        if not (self._stochastic and is_bfloat16):
            return None
        if parameter not in self._offsets:
            self._offsets[parameter] = local_shard(parameter)[1]
        local = local_tensor(parameter)
        offset = self._offsets[parameter]
        places = places_of(part.start, part.stop, local.shape, offset, parameter.shape, local.device)
        return random_bits(self._streams[parameter], step, places)


def chunks(numel: int) -> Iterator[slice]:
    """Ranges of a flat shard that are updated one after the other, to bound temporary memory."""
    return (slice(start, min(start + CHUNK, numel)) for start in range(0, numel, CHUNK))


def nbytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of ``tensors`` on this rank."""
    return sum(math.prod(local.shape) * local.element_size() for local in map(local_tensor, tensors))

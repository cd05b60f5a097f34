"""Comparison of the parameters of two layouts, shard by shard, and a checksum that no layout changes."""

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from crius.parallel.runtime import World
from crius.shards import local_shard, num_shards

Named = Sequence[tuple[str, Tensor]]
"""Parameters and buffers by their names in the whole model."""

BLOCK_NUMEL = 1 << 22  # numbers compared at a time


@dataclass(frozen=True)
class Shards:
    """Saved parameters of a run.

    Attributes:
        folder: folder with one file per rank and moment.
        is_whole: whether one rank wrote whole parameters, readable for any layout; otherwise each rank wrote its own
            shards, for the same layout.
    """

    folder: Path
    is_whole: bool

    def save(self, moment: str, parameters: Named, rank: int) -> None:
        """Write this rank's parameters at ``moment``: ``start`` or ``end``."""
        shards = {name: local_shard(parameter)[0].cpu().clone() for name, parameter in parameters}
        torch.save(shards, self._path(moment, rank))

    def load(self, moment: str, rank: int) -> dict[str, Tensor]:
        """Parameters that ``rank`` compares itself with, read from disk as they are used."""
        return torch.load(self._path(moment, 0 if self.is_whole else rank), mmap=True, weights_only=True)

    def _path(self, moment: str, rank: int) -> Path:
        return self.folder / f"{moment}-{rank}.pt"


@dataclass(frozen=True)
class Difference:
    """Distance of the final parameters of a run from those of the reference.

    Attributes:
        whole: L2 norm of the difference of all parameters, relative to the norm of the reference's.
        update: L2 norm of the difference of one parameter, relative to its change in training; the largest. A bias of
            keys does not count: it adds the same number to all scores of a query but for the rotation by positions, so
            that its gradient is little more than rounding, of which AdamW makes whole steps.
        worst: parameter with the largest update difference.
        moved: L2 norm of the change of the whole reference in training, relative to the norm of its end.
        missing: parameters that the ranks together do not have exactly once.
    """

    whole: float
    update: float
    worst: str
    moved: float
    missing: tuple[str, ...]


def compare(
    parameters: Named,
    all_names: Sequence[str],
    reference: Shards,
    num_holders: int,
    ranks: World,
    copied: Collection[str] = (),
) -> Difference:
    """Compare this rank's parameters with those of the reference; the same result on every rank.

    Args:
        parameters: parameters of this rank, by their names in the whole model.
        all_names: names of the whole model, in order.
        reference: its start and end.
        num_holders: ranks with a part of each parameter: all ranks of the run, or of one pipeline stage.
        ranks: all ranks.
        copied: names that two pipeline stages have a copy of.
    """
    start = reference.load("start", ranks.rank)
    end = reference.load("end", ranks.rank)
    sums = torch.zeros((len(all_names), 4), dtype=torch.float64)
    for name, parameter in parameters:
        local, offset = local_shard(parameter)
        share = num_shards(parameter) / num_holders / (2 if name in copied else 1)
        row = sums[all_names.index(name)]
        for block, place in _blocks(local, offset if reference.is_whole else (0,) * local.dim()):
            first, last = (_part(saved[name], block.shape, place) for saved in (start, end))
            apart = block.to(torch.float64) - last
            moved = last - first
            values = [*(part.square().sum().item() for part in (apart, last, moved)), block.numel() / parameter.numel()]
            row += torch.tensor(values, dtype=torch.float64) * share
    sums = ranks.sum(sums.to(ranks.device)).cpu()
    differences, ends, moves, held_shares = sums.unbind(dim=1)
    missing = [name for name, held in zip(all_names, held_shares.tolist(), strict=True) if abs(held - 1) > 1e-6]
    each = torch.where(differences > 0, differences / moves, 0.0).sqrt()  # infinite where only one of the two moved
    judged = torch.tensor([not name.endswith(".attention.wk.bias") for name in all_names])
    each = torch.where(judged, each, 0.0)
    worst = int(each.argmax())
    return Difference(
        whole=(differences.sum() / ends.sum()).sqrt().item(),
        update=each[worst].item(),
        worst=all_names[worst],
        moved=(moves.sum() / ends.sum()).sqrt().item(),
        missing=tuple(missing),
    )


def _blocks(local: Tensor, offset: Sequence[int]) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Rows of a shard, on the host, and their offset in the whole: few at a time, because they are copied."""
    rows = max(1, BLOCK_NUMEL // max(1, math.prod(local.shape[1:])))
    for start in range(0, local.shape[0] if local.numel() else 0, rows):
        yield local[start : start + rows].cpu(), (offset[0] + start, *offset[1:])


def _part(saved: Tensor, shape: torch.Size, offset: Sequence[int]) -> Tensor:
    """The part of a saved parameter that starts at ``offset``, float64."""
    for dim, size in enumerate(shape):
        saved = saved.narrow(dim, offset[dim], size)
    return saved.to(torch.float64)


def checksums(parameters: Named, all_names: Sequence[str], ranks: World) -> dict[str, str]:
    """A checksum of the bits of each parameter of the whole model, on every rank; empty if something is wrong.

    The checksum of a shard is a sum, in 64 bits that wrap, over a mix of each number's bits and its place in the whole
    parameter. So shards add up to the same number for any split of the parameter. It is wrong if two ranks have
    different bits of the same shard, or if the shards do not make up the whole.

    Args:
        parameters: parameters of this rank, by their names in the whole model.
        all_names: names of the whole model, in order.
        ranks: all ranks.
    """
    # place of the shard plus one, its size, its checksum, size of the whole; zeros if this rank has no part
    rows = torch.zeros((len(all_names), 4), dtype=torch.int64)
    for name, parameter in parameters:
        local, offset = local_shard(parameter)
        if local.numel():
            first = sum(at * math.prod(parameter.shape[dim + 1 :]) for dim, at in enumerate(offset))
            total = torch.zeros((), dtype=torch.int64)
            for block, place in _blocks(local, offset):
                total += _mixed(block, _places(block.shape, place, parameter.shape))
            values = [first + 1, local.numel(), int(total), parameter.numel()]
            row = torch.tensor(values, dtype=torch.int64)
            found = rows[all_names.index(name)]
            is_other = bool(found.any()) and not torch.equal(found, row)  # other bits than this rank's second copy
            found.copy_(torch.full_like(row, -1) if is_other else row)
    gathered = ranks.gather(rows.to(ranks.device)).cpu()  # (ranks, names, 4)
    sums = {}
    for index, name in enumerate(all_names):
        shards = {tuple(row) for row in gathered[:, index].tolist() if row[0]}
        is_one = len({row[:2] for row in shards}) == len(shards) and sum(row[1] for row in shards) == max(
            (row[3] for row in shards), default=-1
        )
        total = sum(row[2] for row in shards) % 2**64
        sums[name] = f"{total:016x}" if is_one else ""
    return sums


def one_hash(sums: dict[str, str]) -> str:
    """A hash of the checksums of all parameters and their names, 16 hexadecimal digits."""
    text = "\n".join(f"{name} {value}" for name, value in sums.items())
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _places(shape: torch.Size, offset: Sequence[int], whole: torch.Size) -> Tensor:
    """Index of each number of a shard in the flattened whole, int64 of ``shape``."""
    places = torch.zeros(shape, dtype=torch.int64)
    for dim, size in enumerate(shape):
        stride = math.prod(whole[dim + 1 :])
        along = (torch.arange(size) + offset[dim]) * stride
        places += along.view(-1, *[1] * (len(shape) - dim - 1))
    return places


def _mixed(values: Tensor, places: Tensor) -> Tensor:
    """Sum of a mix of bits and places, an int64 scalar, wrapped to 64 bits (multipliers of splitmix64, odd)."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = values.contiguous().view(kinds[values.element_size()]).to(torch.int64)
    mixed = (bits + 0x1E3779B97F4A7C15) * (2 * places + 1)
    mixed = (mixed ^ (mixed >> 31)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return (mixed ^ (mixed >> 30)).sum()

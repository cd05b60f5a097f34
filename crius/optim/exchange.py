"""Whole matrices out of shards, each on one rank, and their parts back."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from crius.shards import Place, mesh_ranks, places

_Parts = dict[int, Place]  # holder to its part of a matrix


class Holders:
    """The ranks that together hold some matrices, and which part of a matrix each has.

    Args:
        mesh: of the matrices; None where this process holds them alone.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        ranks = sorted(mesh_ranks(mesh)) if mesh else [0]
        self.size = len(ranks)
        self._me = ranks.index(dist.get_rank()) if mesh else 0
        self._group = _group(mesh, ranks) if mesh else None
        self._known: dict[int, list[Place]] = {}

    def _places(self, matrix: Tensor) -> list[Place]:
        """The part that each holder has of a matrix, the same on every holder."""
        return self._known.setdefault(id(matrix), places(matrix))

    def _sources(self, matrix: Tensor, owner: int) -> _Parts:
        """Holders whose parts make up the whole, each part once; the owner's own before its copies on others."""
        found: dict[Place, int] = {}
        known = self._places(matrix)
        for holder in (owner, *range(self.size)):
            if math.prod(known[holder].shape):
                found.setdefault(known[holder], holder)
        return {holder: place for place, holder in sorted(found.items(), key=lambda item: item[1])}

    def collect(self, matrices: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor | None:
        """One whole for each holder: the first gets that of the first matrix, and so on; None where none are left.

        Args:
            matrices: at most as many as there are holders, the same on each.
            parts: what this rank has to bring, one for each matrix, as large as its part of the matrix.
        """
        if self.size == 1:
            return parts[0]
        wanted = self._sources(matrices[self._me], self._me) if self._me < len(matrices) else {}
        sends = [self._me in self._sources(matrix, owner) for owner, matrix in enumerate(matrices)]
        given = [part.reshape(-1) if is_sent else part.new_empty(0) for part, is_sent in zip(parts, sends, strict=True)]
        sizes = [math.prod(wanted[holder].shape) if holder in wanted else 0 for holder in range(self.size)]
        received = self._exchange(given, sizes)
        if not wanted:
            return None
        whole = parts[0].new_empty(matrices[self._me].shape)
        for holder, place in wanted.items():
            place.of(whole).copy_(received[holder].view(place.shape))
        return whole

    def spread(self, matrices: Sequence[Tensor], whole: Tensor | None, like: Tensor) -> list[Tensor]:
        """This rank's part of each matrix, out of the whole that each holder has after ``collect``.

        Args:
            matrices: as for ``collect``.
            whole: of this holder's matrix; None where it has none.
            like: of the dtype and device of all of them.
        """
        if self.size == 1:
            assert whole is not None
            return [whole]
        given = [] if whole is None else [place.of(whole).reshape(-1) for place in self._places(matrices[self._me])]
        mine = [self._places(matrix)[self._me] for matrix in matrices]
        given += [like.new_empty(0)] * (self.size - len(given))
        sizes = [math.prod(place.shape) for place in mine] + [0] * (self.size - len(mine))
        received = self._exchange(given, sizes)
        return [part.view(place.shape) for part, place in zip(received, mine, strict=False)]

    def _exchange(self, given: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Entry ``j`` of ``given`` goes to holder ``j``; entry ``i`` of the result came from holder ``i``."""
        given += [given[0].new_empty(0)] * (self.size - len(given))
        received = given[0].new_empty(sum(sizes))
        dist.all_to_all_single(received, torch.cat(given), sizes, [part.numel() for part in given], group=self._group)
        return list(received.split(sizes))


def _group(mesh: DeviceMesh, ranks: list[int]) -> dist.ProcessGroup | None:
    """The process group of all ranks of a mesh; that of its one axis, where it has one that is longer than 1."""
    long = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    if len(long) <= 1:
        return mesh.get_group(long[0] if long else 0)
    # only these ranks make it: under pipeline parallelism the others know nothing of it
    return dist.new_group(ranks, use_local_synchronization=True)


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """The mesh that a tensor is laid out on; None for a plain tensor."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None

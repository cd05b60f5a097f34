"""This rank's part of a tensor and of a model, and its place in the whole."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.utils._python_dispatch import _disable_current_modes

from crius.named import all_parameters as all_parameters
from crius.named import all_state as all_state
from crius.named import is_persistent as is_persistent
from crius.named import named_buffers as named_buffers
from crius.named import named_parameters as named_parameters
from crius.named import named_state as named_state


def counters(parts: Sequence[nn.Module]) -> list[Tensor]:
    """The counters of this rank's stages, as this rank has them."""
    return [local_tensor(buffer) for _, buffer in named_buffers(parts, persistent=False)]


def zero(counted: Sequence[Tensor]) -> None:
    """Set ``counted`` to 0."""
    if counted:
        torch._foreach_zero_(list(counted))


def local_tensor(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, without a copy and without autograd; a plain tensor as it is.

    A weight that FSDP gathers in float8 has its numbers in a plain tensor inside (``crius.quantize``).
    """
    detached = tensor.detach()
    local = detached.to_local() if isinstance(detached, DTensor) else detached
    return getattr(local, "_tensor", local)


def laid_out(local: Tensor, like: Tensor) -> Tensor:
    """``local``, this rank's part, as a tensor laid out like ``like``; shares its memory, on any device."""
    if not isinstance(like, DTensor):
        return local
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    return DTensor(local, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False)


def plain(parameter: Tensor) -> Tensor:
    """A parameter or buffer as a tensor of plain numbers that shares its memory, in any format of its gathers."""
    return laid_out(local_tensor(parameter), parameter)


def num_shards(tensor: Tensor, axis: str | None = None) -> int:
    """Number of different parts that a tensor is split into, over all axes of its mesh or over the axis ``axis``."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    # not is_shard(): it is False for FSDP's strided shards under tensor parallelism
    split = [i for i, place in enumerate(tensor.placements) if not place.is_replicate()]
    return math.prod(mesh.size(i) for i in split if axis is None or names[i] == axis)


def is_first_holder(tensor: Tensor) -> bool:
    """Whether this rank is the first of a tensor's mesh with its part; for a plain tensor, the first of all ranks."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(at == 0 or not place.is_replicate() for at, place in zip(coordinate, tensor.placements, strict=True))


def local_shard(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a parameter, and its offset in the whole."""
    if not isinstance(parameter, DTensor):
        return local_tensor(parameter), (0,) * parameter.dim()
    with _disable_current_modes():  # torch computes with tensors here, and fake tensors have no numbers
        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return local_tensor(parameter), tuple(offset)


@dataclass(frozen=True)
class Place:
    """Place of a part of a tensor in the whole.

    Attributes:
        shape: shape of the part.
        offset: start of the part in each dim.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """The part of ``whole``, as a view."""
        for dim, (size, start) in enumerate(zip(self.shape, self.offset, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


def places(tensor: Tensor) -> list[Place]:
    """The part of each rank of a tensor's mesh, in the order of the ranks; one part for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return [Place(tuple(tensor.shape), (0,) * tensor.dim())]
    by_rank = {}
    for rank, coordinate in mesh_ranks(tensor.device_mesh).items():
        with _disable_current_modes():
            shape, offset = _compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh.shape, list(coordinate), tensor.placements
            )
        by_rank[rank] = Place(tuple(shape), tuple(offset))
    return [by_rank[rank] for rank in sorted(by_rank)]


def mesh_ranks(mesh: DeviceMesh) -> dict[int, tuple[int, ...]]:
    """The ranks of a mesh with their coordinates; ``mesh.mesh`` cannot be read under fake tensors."""
    me = dist.get_rank()
    # the ranks of every axis are equally spaced, so the ranks on the lines through this rank determine all others
    lines = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in range(mesh.ndim)]
    return {
        me + sum(line[at] - me for line, at in zip(lines, coordinate, strict=True)): coordinate
        for coordinate in itertools.product(*map(range, mesh.shape))
    }

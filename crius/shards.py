"""This rank's part of a tensor and of a model, and where in the whole it is."""

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
    """The counters of the stages that this rank holds, as it has them."""
    return [local_tensor(buffer) for _, buffer in named_buffers(parts, persistent=False)]


def zero(counted: Sequence[Tensor]) -> None:
    """Set ``counted`` to 0."""
    if counted:
        torch._foreach_zero_(list(counted))


def local_tensor(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, without a copy and cut off from autograd; a plain tensor as it is.

    A weight that FSDP gathers in float8 has its numbers in a plain tensor inside (``crius.quantize``).
    """
    detached = tensor.detach()
    local = detached.to_local() if isinstance(detached, DTensor) else detached
    return getattr(local, "_tensor", local)


def laid_out(local: Tensor, like: Tensor) -> Tensor:
    """``local``, this rank's part, as a tensor laid out as ``like``; shares its memory, wherever that is."""
    if not isinstance(like, DTensor):
        return local
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    return DTensor(local, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False)


def plain(parameter: Tensor) -> Tensor:
    """A parameter or buffer as a tensor of plain numbers that shares its memory, whatever it is gathered in."""
    return laid_out(local_tensor(parameter), parameter)


def num_shards(tensor: Tensor, axis: str | None = None) -> int:
    """Into how many different parts a tensor is split, over all axes of its mesh or over the one called ``axis``."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    # not is_shard(): FSDP's strided shards under tensor parallelism say no to that
    split = [i for i, place in enumerate(tensor.placements) if not place.is_replicate()]
    return math.prod(mesh.size(i) for i in split if axis is None or names[i] == axis)


def is_first_holder(tensor: Tensor) -> bool:
    """Whether this rank is the first one of a tensor's mesh that holds its part; of a plain tensor, of all ranks."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(at == 0 or not place.is_replicate() for at, place in zip(coordinate, tensor.placements, strict=True))


def local_shard(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a parameter and where it starts in the whole."""
    if not isinstance(parameter, DTensor):
        return local_tensor(parameter), (0,) * parameter.dim()
    with _disable_current_modes():  # torch computes with tensors, which under fake ones have no numbers
        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return local_tensor(parameter), tuple(offset)


@dataclass(frozen=True)
class Place:
    """Where a part of a tensor is in the whole.

    Attributes:
        shape: of the part.
        offset: where it starts, for each dim.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """The part, as a view."""
        for dim, (size, start) in enumerate(zip(self.shape, self.offset, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


def places(tensor: Tensor) -> list[Place]:
    """The part that each rank of a tensor's mesh has, in the order of the ranks; one for a plain tensor."""
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
    # the ranks of every axis are equally spaced, so those on the lines through this rank tell all others
    lines = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in range(mesh.ndim)]
    return {
        me + sum(line[at] - me for line, at in zip(lines, coordinate, strict=True)): coordinate
        for coordinate in itertools.product(*map(range, mesh.shape))
    }

"""This rank's part of a tensor and of a model."""

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, without a copy and cut off from autograd; a plain tensor as it is."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def num_shards(tensor: Tensor, axis: str | None = None) -> int:
    """Into how many different parts a tensor is split, over all axes of its mesh or over the one called ``axis``."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    # not is_shard(): FSDP's strided shards under tensor parallelism say no to that
    split = [i for i, place in enumerate(tensor.placements) if not place.is_replicate()]
    return math.prod(mesh.size(i) for i in split if axis is None or names[i] == axis)


def named_parameters(parts: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """The parameters of the stages that this rank holds, by their names in the whole model."""
    return [(name, parameter) for part in parts for name, parameter in part.named_parameters()]

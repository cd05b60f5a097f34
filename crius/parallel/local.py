"""This rank's part of a tensor."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, without a copy and cut off from autograd; a plain tensor as it is."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached

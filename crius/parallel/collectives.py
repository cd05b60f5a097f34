"""Collectives with a gradient, under the names that this torch has for them."""

import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 deprecates all_gather_tensor_autograd for a name that 2.11 does not have
_all_gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd


def all_gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The parts of all ranks of ``mesh``, one axis, joined along dim 0 in the order of the ranks.

    The gradient of a part is summed over the ranks (reduce-scatter). Integers may be gathered too; they have none.
    """
    gathered: Tensor = _all_gather(x.contiguous(), 0, mesh)
    return gathered


def all_to_all(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Entry ``j`` of dim 0 goes to rank ``j`` of ``mesh``, one axis; entry ``i`` of the result came from rank ``i``.

    The gradient takes the way back. Dim 0 is as long as the mesh.
    """
    exchanged: Tensor = functional.all_to_all_single_autograd(x.contiguous(), None, None, mesh)
    return exchanged

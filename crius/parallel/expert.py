"""Expert parallelism: each rank has some experts of every layer. An all-to-all sends rows to them and back.

The experts are divided over ``ep`` neighbouring ranks. An expert itself is not split: after FSDP's gather it is whole
on its rank. A rank routes its own tokens; under tensor and context parallelism these are its part of each sequence. The
gradient of an expert is the sum over all rows that it received, so nothing is scaled by ``ep``.

N tokens of this rank, K visited experts, M rows that its experts compute, D model dim, S ranks, E experts
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from crius.kernels.grouped_mm import permute
from crius.models.moe import Dispatch, Experts, MixtureOfExperts, SequenceCounts, by_expert
from crius.models.plan import ShardingPlan, match
from crius.parallel.mesh import Mesh
from crius.parallel.runtime import all_reduce, all_to_all, all_to_all_rows


def read_splits(splits: Tensor, rows: int) -> list[list[int]]:
    """Copy numbers of rows to the host. Only here does a layer wait for its device. A dry run replaces it.

    Args:
        splits: number of rows sent to each rank and received from it, int64 ``(2, S)``.
        rows: total number of sent rows.
    """
    found: list[list[int]] = splits.tolist()
    for counts in found:
        for count in counts:
            torch._check(count >= 0)
    return found


class AllToAllDispatch(Dispatch):
    """Sends each row to the rank of its expert, and the result back to the rank of its token.

    Args:
        mesh: ranks that share the experts of a layer; one axis.

    Attributes:
        read_splits: the function ``read_splits``, or its replacement in a dry run.
    """

    read_splits: Callable[[Tensor, int], list[list[int]]] = staticmethod(read_splits)

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.ranks = mesh.size()

    def forward(
        self, x_ND: Tensor, ids_NK: Tensor, counts_E: Tensor, experts: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """See ``Dispatch``; ``experts`` are those of this rank."""
        order, place = by_expert(ids_NK)
        sent_SE = counts_E.view(self.ranks, -1)
        received_SE = all_to_all(sent_SE, self.mesh)
        to, of = self.read_splits(torch.stack((sent_SE.sum(1), received_SE.sum(1))), ids_NK.numel())
        rows_MD = all_to_all_rows(permute(x_ND, order, place, ids_NK.shape[1]), to, of, self.mesh)
        # received order: source, expert, token; order for the experts: expert, source, token
        expert_M = torch.arange(received_SE.shape[1], device=ids_NK.device).repeat(self.ranks)
        expert_M = expert_M.repeat_interleave(received_SE.flatten(), output_size=rows_MD.shape[0])
        own_order, own_place = by_expert(expert_M)
        y_MD = experts(permute(rows_MD, own_order, own_place), received_SE.sum(0).cumsum(0).to(torch.int32))
        y_MD = all_to_all_rows(permute(y_MD, own_place, own_order), of, to, self.mesh)
        return permute(y_MD, place, order).view(*ids_NK.shape, -1)


class SharedSequenceCounts(SequenceCounts):
    """Sums counts over the ranks that have parts of the same sequences.

    Args:
        meshes: meshes of one axis each, which together span these ranks.
    """

    def __init__(self, *meshes: DeviceMesh) -> None:
        super().__init__()
        self.meshes = meshes
        self.ranks = torch.Size(mesh.size() for mesh in meshes).numel()

    def forward(self, counts_BE: Tensor) -> Tensor:
        """See ``SequenceCounts``."""
        for mesh in self.meshes:
            counts_BE = all_reduce(counts_BE, mesh)
        return counts_BE


def _own_experts(experts: Experts, x_MD: Tensor, ends_E: Tensor) -> Tensor:
    """Output of this rank's experts for the rows ``x``. Their weights are shards of the layer's weights."""
    own = (
        weight.to_local() if isinstance(weight, DTensor) else weight for weight in (experts.w1, experts.w2, experts.w3)
    )
    return experts.compute(x_MD, ends_E, *own)


def apply_expert_parallel(model: nn.Module, plan: ShardingPlan, mesh: Mesh) -> list[str]:
    """Keep only this rank's experts in each layer of ``model``, which is on the meta device. Returns log lines.

    Args:
        model: the whole model, or the modules of one pipeline stage.
        plan: sharding plan that names the experts.
        mesh: all ranks.
    """
    shared = [axis for axis in (mesh.cp, mesh.tp) if axis]
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    for layer in layers if shared else ():
        layer.router.sequence_counts = SharedSequenceCounts(*shared)
    if mesh.ep is None:
        return []
    for layer in layers:
        layer.dispatch = AllToAllDispatch(mesh.ep)
    for name, module in model.named_modules():
        if match(plan.experts, name):
            for key, parameter in list(module.named_parameters(recurse=False)):
                part = distribute_tensor(parameter, mesh.ep, [Shard(0)], src_data_rank=None)
                setattr(module, key, nn.Parameter(part))
            module.forward = MethodType(_own_experts, module)
    each = layers[0].router.weight.shape[0] // mesh.ep.size() if layers else 0
    return [f"expert parallel: {mesh.ep.size()} ranks, {each} experts of each of {len(layers)} layers per rank"]


def experts_of(model: nn.Module, plan: ShardingPlan) -> set[Any]:
    """The parameters of ``model`` whose first dim is the experts of a layer."""
    return {
        parameter
        for name, module in model.named_modules()
        if plan.experts and match(plan.experts, name)
        for parameter in module.parameters()
    }

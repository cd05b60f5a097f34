"""Tensor parallelism: the styles that rows of a ``ShardingPlan`` name. The one place that knows DTensor's classes.

Between blocks activations are plain tensors of this rank's part of the sequence, ``(B, T / tp, D)``. Inside attention
and feed-forward the sequence is whole and heads or hidden dims are split; the logits are split over the vocabulary.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from crius.models.plan import ShardingPlan, match


class VocabParallel(ParallelStyle):
    """An embedding whose rows are split; the partial lookups are summed and scattered over the sequence.

    Not RowwiseParallel: DTensor's gradient of a lookup is a partial sum of the whole weight on every rank, 7.8 GiB of
    float32 for Llama 405B; a rank's own rows are all that it can contribute to.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        module.weight = nn.Parameter(distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None))
        most_rows = -(-module.weight.shape[0] // device_mesh.size())
        module.forward = partial(_lookup, module, device_mesh, most_rows * device_mesh.get_local_rank())  # type: ignore[method-assign]
        return module


def _lookup(embedding: nn.Embedding, mesh: DeviceMesh, first_row: int, tokens_BT: Tensor) -> Tensor:
    """``(B, T / ranks, D)``: this rank's part of the sequence, summed over the rows of all ranks."""
    weight = embedding.weight
    assert isinstance(weight, DTensor)
    rows_VD = weight.to_local()
    places_BT = tokens_BT - first_row
    is_here_BT = (places_BT >= 0) & (places_BT < rows_VD.shape[0])
    found_BTD = F.embedding(places_BT * is_here_BT, rows_VD) * is_here_BT[..., None]
    split = DTensor.from_local(found_BTD, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(1)])
    return split.to_local().clone()  # FSDP warns of a module that returns a view


class GatherSequence(ParallelStyle):
    """The module's first input, split over the sequence, is gathered once for all linears in the module."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (inputs[0].redistribute(placements=[Replicate()], async_op=True), *inputs[1:])

        module.register_forward_pre_hook(gather)
        return module


class ReplicatedHeads(ParallelStyle):
    """A linear of fewer heads than ranks: each rank holds all rows and computes those of the one head it needs.

    The weight counts as replicated: its gradients are summed over the ranks, once, and norms and checkpoints see it
    once.

    Args:
        num_heads: heads that the rows of the weight make up; divides the number of ranks.
    """

    def __init__(self, num_heads: int) -> None:
        self._num_heads = num_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        module.weight = nn.Parameter(distribute_tensor(module.weight, device_mesh, [Replicate()], src_data_rank=None))
        head = device_mesh.get_local_rank() * self._num_heads // device_mesh.size()
        module.forward = partial(_one_head, module, head, self._num_heads)  # type: ignore[method-assign]
        return module


def _one_head(linear: nn.Linear, head: int, num_heads: int, x_BTD: DTensor) -> Tensor:
    """``(B, T, head dim)`` of one head."""
    x = x_BTD.to_local(grad_placements=[Partial()])
    weight = linear.weight
    assert isinstance(weight, DTensor)
    return F.linear(x, weight.to_local(grad_placements=[Partial()]).chunk(num_heads)[head])


StyleOf = Callable[[int, int], ParallelStyle]  # of the number of key/value heads and of ranks


STYLES: dict[str, StyleOf] = {
    "vocab": lambda heads, ranks: VocabParallel(),
    "sequence": lambda heads, ranks: SequenceParallel(),
    "gather_sequence": lambda heads, ranks: GatherSequence(),
    "colwise": lambda heads, ranks: ColwiseParallel(),
    "colwise_heads": lambda heads, ranks: ReplicatedHeads(heads) if heads < ranks else ColwiseParallel(),
    "rowwise": lambda heads, ranks: RowwiseParallel(output_layouts=Shard(1)),
    "logits": lambda heads, ranks: ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}


def apply_tensor_parallel(model: nn.Module, plan: ShardingPlan, num_kv_heads: int, mesh: DeviceMesh) -> list[str]:
    """Split ``model``, on the meta device, over ``mesh`` by the rows of ``plan``; returns what to log.

    Args:
        model: the whole model, or the modules of one pipeline stage.
        plan: its rows name ``STYLES``; it covers the whole model, of which this may be a stage.
        num_kv_heads: key/value heads of the whole model.
        mesh: one axis, the ranks that share a layer.
    """
    rows: dict[str, int] = {}
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        style = _style_of(name, plan.tensor_parallel)
        if style is not None and not isinstance(module, nn.Identity):  # which stands for a module of another stage
            styles[name] = STYLES[style](num_kv_heads, mesh.size())
            rows[style] = rows.get(style, 0) + 1
    tied = _tied_weights(model)
    # no communication: all ranks build the same meta tensors
    parallelize_module(model, mesh, styles, src_data_rank=None)
    for first, *others in tied:
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    lines = [f"tensor parallel: {mesh.size()} ranks, " + ", ".join(f"{n} {style}" for style, n in rows.items())]
    if num_kv_heads < mesh.size() and "colwise_heads" in rows:
        lines.append(
            f"tensor parallel: {num_kv_heads} key/value heads are fewer than {mesh.size()} ranks: "
            f"each is computed on {mesh.size() // num_kv_heads}"
        )
    return lines


def _style_of(name: str, rows: Mapping[str, str]) -> str | None:
    return next((style for pattern, style in rows.items() if match(pattern, name)), None)


def _tied_weights(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one tensor, grouped."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def whole_tensor(tensor: Tensor) -> Tensor:
    """A DTensor that is the same on every rank, as a plain tensor; a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

"""Tensor parallelism: the styles that rows of a ``ShardingPlan`` name. The one place that knows DTensor's classes.

Between blocks activations are plain tensors of this rank's part of the sequence, ``(B, T / tp, D)``. Inside attention
and feed-forward the sequence is whole and heads or hidden dims are split; the logits are split over the vocabulary.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
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

from crius.errors import PlanError
from crius.kernels.rms_norm import rms_norm
from crius.models.layers.linear import LowPrecisionLinear
from crius.models.layers.norm import RMSNorm
from crius.models.layers.output import Output
from crius.models.plan import ShardingPlan
from crius.parallel.runtime import all_gather
from crius.parallel.ties import keeping_ties


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
    """The module's first input, split over the sequence, is gathered once for all linears in the module.

    Args:
        rounding: one of the linears that read it, if all round it alike; then it is gathered as they multiply it.
    """

    def __init__(self, rounding: LowPrecisionLinear | None = None) -> None:
        self._rounding = rounding

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (inputs[0].redistribute(placements=[Replicate()], async_op=True), *inputs[1:])

        if self._rounding is None:
            module.register_forward_pre_hook(gather)
        else:  # in a tuple, or the linear would be a part of the module twice
            module._gather = (self._rounding, str(device_mesh.get_group().group_name), device_mesh.size())  # type: ignore[assignment]
            module.register_forward_pre_hook(_gather_rounded)
        return module


def _gather_rounded(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    linear, group_name, num_ranks = module._gather  # type: ignore[misc]
    return (linear.gather_rounded(inputs[0].to_local(), group_name, num_ranks), *inputs[1:])


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
        module._head = (head, self._num_heads)  # type: ignore[assignment]
        module.forward = MethodType(_one_head, module)  # type: ignore[method-assign]
        return module


def _whole(x_BTD: Tensor) -> Tensor:
    """An input that every rank has whole, of whose gradient each rank has a summand; a DTensor unless it is rounded."""
    return x_BTD.to_local(grad_placements=[Partial()]) if isinstance(x_BTD, DTensor) else x_BTD


# methods, not partial functions: torch.compile shares one graph among blocks whose attributes are alike


def _one_head(linear: nn.Linear, x_BTD: Tensor) -> Tensor:
    """``(B, T, head dim)`` of one head."""
    head, num_heads = linear._head  # type: ignore[misc]
    x = _whole(x_BTD)
    weight = linear.weight
    assert isinstance(weight, DTensor)
    rows = weight.to_local(grad_placements=[Partial()]).chunk(num_heads)[head]
    return linear.multiply(x, rows) if isinstance(linear, LowPrecisionLinear) else F.linear(x, rows)


class LocalColumns(ParallelStyle):
    """ColwiseParallel for a low-precision linear, which multiplies plain tensors.

    Args:
        keeps_split: the output stays a DTensor, split over its last dim, for the loss.
    """

    def __init__(self, *, keeps_split: bool = False) -> None:
        self._keeps_split = keeps_split

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, LowPrecisionLinear)
        module.weight = nn.Parameter(distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None))
        module._keeps_split = self._keeps_split  # type: ignore[assignment]
        module.forward = MethodType(_columns, module)  # type: ignore[method-assign]
        return module


def _columns(linear: LowPrecisionLinear, x_BTD: Tensor) -> Tensor:
    """``(B, T, out / ranks)`` of an input that is whole or split over the sequence."""
    weight = linear.weight
    assert isinstance(weight, DTensor)
    # not where it is whole: the way back would sum here what is scattered later
    if isinstance(x_BTD, DTensor) and not x_BTD.placements[0].is_replicate():
        x_BTD = x_BTD.redistribute(placements=[Replicate()])
    y = linear.multiply(_whole(x_BTD), weight.to_local())
    if not linear._keeps_split:
        return y
    shape = torch.Size((*x_BTD.shape[:-1], weight.shape[0]))  # told, since the last ranks' parts may be smaller
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, weight.device_mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)


class LocalRows(ParallelStyle):
    """RowwiseParallel for a low-precision linear, which multiplies plain tensors; its output's sequence is split."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, LowPrecisionLinear)
        module.weight = nn.Parameter(distribute_tensor(module.weight, device_mesh, [Shard(1)], src_data_rank=None))
        module.forward = MethodType(_rows, module)  # type: ignore[method-assign]
        return module


def _rows(linear: LowPrecisionLinear, x_BTD: Tensor) -> Tensor:
    """``(B, T / ranks, out)`` of an input that is split over its last dim."""
    weight = linear.weight
    assert isinstance(weight, DTensor)
    summands = DTensor.from_local(
        linear.multiply(x_BTD, weight.to_local()), weight.device_mesh, [Partial()], run_check=False
    )
    return summands.redistribute(placements=[Shard(1)], async_op=True).to_local()


class SplitVocabulary(ParallelStyle):
    """An output layer whose rows are split, for a sequence that is split: logits are split over the vocabulary.

    What borrows the weight gets this rank's rows.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Output)
        module.weight = nn.Parameter(distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None))
        module.forward = MethodType(_vocabulary, module)  # type: ignore[method-assign]
        return module


def _vocabulary(output: Output, x_BTD: Tensor, use: Callable[..., Tensor] | None = None) -> Tensor:
    """``(B, T, V)`` as a DTensor, or what ``use`` makes of the whole sequence and this rank's rows."""
    weight = output.weight
    assert isinstance(weight, DTensor) and isinstance(x_BTD, DTensor)
    mesh = weight.device_mesh
    whole = x_BTD.redistribute(placements=[Replicate()], async_op=True)
    if use is None:
        return F.linear(whole, weight)
    most_rows = -(-weight.shape[0] // mesh.size())

    def gather(numbers: Tensor) -> Tensor:
        return all_gather(numbers[None], mesh)

    return use(_whole(whole), weight.to_local(), first_row=most_rows * mesh.get_local_rank(), gather=gather)


class HeadNorm(ParallelStyle):
    """A norm of each head: every rank has its weight and norms the heads that it computes.

    The weight counts as replicated, and its gradients are summed over the ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, RMSNorm)
        module.weight = nn.Parameter(distribute_tensor(module.weight, device_mesh, [Replicate()], src_data_rank=None))
        module.forward = MethodType(_head_norm, module)  # type: ignore[method-assign]
        return module


def _head_norm(norm: RMSNorm, x_BTNH: Tensor) -> Tensor:
    weight = norm.weight
    assert isinstance(weight, DTensor)
    return rms_norm(x_BTNH, weight.to_local(grad_placements=[Partial()]), norm.eps)


StyleOf = Callable[[int, int], ParallelStyle]  # of the number of key/value heads and of ranks


STYLES: dict[str, StyleOf] = {
    "vocab": lambda heads, ranks: VocabParallel(),
    "sequence": lambda heads, ranks: SequenceParallel(),
    "gather_sequence": lambda heads, ranks: GatherSequence(),
    "head_norm": lambda heads, ranks: HeadNorm(),
    "colwise": lambda heads, ranks: ColwiseParallel(),
    "colwise_heads": lambda heads, ranks: ReplicatedHeads(heads) if heads < ranks else ColwiseParallel(),
    "rowwise": lambda heads, ranks: RowwiseParallel(output_layouts=Shard(1)),
    "logits": lambda heads, ranks: SplitVocabulary(),
}

_COLUMNS = ("colwise", "colwise_heads")  # what reads a sequence that was gathered for it
LOW_PRECISION_STYLES: dict[str, StyleOf] = {
    **STYLES,
    "colwise": lambda heads, ranks: LocalColumns(),
    "colwise_heads": lambda heads, ranks: ReplicatedHeads(heads) if heads < ranks else LocalColumns(),
    "rowwise": lambda heads, ranks: LocalRows(),
    "logits": lambda heads, ranks: LocalColumns(keeps_split=True),
}


def apply_tensor_parallel(
    model: nn.Module, plan: ShardingPlan, num_kv_heads: int, mesh: DeviceMesh, *, gathers_rounded: bool = True
) -> list[str]:
    """Split ``model``, on the meta device, over ``mesh`` by the rows of ``plan``; returns what to log.

    Args:
        model: the whole model, or the modules of one pipeline stage.
        plan: its rows name ``STYLES``; it covers the whole model, of which this may be a stage.
        num_kv_heads: key/value heads of the whole model.
        mesh: one axis, the ranks that share a layer.
        gathers_rounded: gather a sequence in float8 where all linears that read it round it with one scale; the numbers
            stay the same. Async tensor parallelism fuses no such gather.
    """
    rows: dict[str, int] = {}
    styles: dict[str, ParallelStyle] = {}
    rounded = 0
    for name, module in model.named_modules():
        style = plan.style_of(name)
        if style and not isinstance(module, nn.Identity):  # which stands for a module of another stage
            table = LOW_PRECISION_STYLES if isinstance(module, LowPrecisionLinear) else STYLES
            if style not in table:
                raise PlanError(
                    f"{name} has the tensor-parallel style {style}, which there is not: {', '.join(table)}."
                )
            styles[name] = table[style](num_kv_heads, mesh.size())
            rounding = _rounding(name, module, plan) if gathers_rounded and style == "gather_sequence" else None
            if rounding is not None:
                styles[name] = GatherSequence(rounding)
                rounded += 1
            rows[style] = rows.get(style, 0) + 1
    with keeping_ties(model):
        # no communication: all ranks build the same meta tensors
        parallelize_module(model, mesh, styles, src_data_rank=None)
    lines = [f"tensor parallel: {mesh.size()} ranks, " + ", ".join(f"{n} {style}" for style, n in rows.items())]
    if num_kv_heads < mesh.size() and "colwise_heads" in rows:
        lines.append(
            f"tensor parallel: {num_kv_heads} key/value heads are fewer than {mesh.size()} ranks: "
            f"each is computed on {mesh.size() // num_kv_heads}"
        )
    if rounded:
        lines.append(f"tensor parallel: {rounded} of {rows['gather_sequence']} gathers of a sequence are in float8")
    return lines


def _rounding(name: str, module: nn.Module, plan: ShardingPlan) -> LowPrecisionLinear | None:
    """One of the linears that read the gathered input of ``module``, if all of them round it with one scale."""
    inner = {f"{name}.{child}": linear for child, linear in module.named_modules() if isinstance(linear, nn.Linear)}
    readers = [linear for path, linear in inner.items() if plan.style_of(path) in _COLUMNS]
    alike = [linear for linear in readers if isinstance(linear, LowPrecisionLinear) and linear.rounds_whole_input]
    return alike[0] if alike and len(alike) == len(readers) else None

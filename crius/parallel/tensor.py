"""Tensor parallelism: the styles that rows of a ``ShardingPlan`` name. Only this file uses DTensor's classes.

Weights are DTensors. Activations are plain tensors of a rank, in every precision. Between blocks a rank has its part of
the sequence, ``(B, T / tp, D)``. Inside attention and feed-forward it has the whole sequence, for some heads or hidden
dims. Only the logits, split over the vocabulary, are a DTensor, from which PyTorch computes the loss.

Async: collectives are cut into pieces that overlap with the pieces of a matmul. Inductor's micro-pipeline pass works on
symmetric memory. It replaces an all-gather and the matmuls that read it by one op, and a matmul and the reduce-scatter
that reads it by one op. It silently skips everything that does not match, so its replacements are counted.
"""

import re
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.codecache import PyCodeCache
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from crius.errors import PlanError
from crius.kernels.cpu.pointwise import rms_norm, rms_norm_reference
from crius.models.layers import Linear, Loss, Output, RMSNorm, plus
from crius.models.moe import Router
from crius.models.plan import GATHER, ShardingPlan
from crius.parallel.allocate import keeping_ties
from crius.parallel.runtime import all_gather
from crius.untrusted import text_named

_FUSED = re.compile(r"torch\.ops\.symm_mem\.fused_\w+\.default\(")
_PLAIN = re.compile(r"torch\.ops\._c10d_functional\.(?:all_gather|reduce_scatter)_\w+\.default\(")
_BACKWARD = re.compile(r"^# AOT ID: \['\d+_backward'\]", re.MULTILINE)

# Forwards are methods, not partial functions: torch.compile shares one graph among blocks with equal attributes.


def _weight(module: nn.Module) -> DTensor:
    weight = module.weight
    assert isinstance(weight, DTensor)
    return weight


def _replica(weight: DTensor) -> Tensor:
    """A weight that every rank has whole, while each rank has a summand of its gradient. The gradients are summed over
    the ranks once. Norms and checkpoints count the weight once, as a replicated one.
    """
    return weight.to_local(grad_placements=[Partial()])


def _bias(linear: nn.Module) -> Tensor | None:
    """The part of the layer's bias that this rank adds."""
    bias = linear.bias
    if not isinstance(bias, DTensor):
        return None
    return _replica(bias) if bias.placements[0].is_replicate() else bias.to_local()


def _first_row(weight: DTensor) -> int:
    """The index of this rank's first row in the whole weight."""
    return -(-weight.shape[0] // weight.device_mesh.size()) * weight.device_mesh.get_local_rank()


def _gather_sequence(x_BTD: Tensor, mesh: DeviceMesh) -> Tensor:
    """``(B, T / ranks, D)`` to ``(B, T, D)``. The gradients of all ranks are summed, and each rank gets its part."""
    return torch.cat(all_gather(x_BTD, mesh).chunk(mesh.size()), dim=1)


def _scatter_sequence(summand_BTD: Tensor, mesh: DeviceMesh) -> Tensor:
    """``(B, T, D)`` to ``(B, T / ranks, D)``, summed over the ranks. The gradients of all ranks are gathered."""
    scattered_BTD: Tensor = _ScatterSequence.apply(summand_BTD, mesh.get_group().group_name, mesh.size())
    return scattered_BTD


@torch._dynamo.allow_in_graph
class _ScatterSequence(torch.autograd.Function):
    """Its gradient is written as ``_gather_sequence`` is.

    Autograd would slice what the gradient of ``chunk`` joins, and the micro-pipeline pass of torch 2.11 does not match
    that.
    """

    @staticmethod
    def forward(ctx: Any, summand_BTD: Tensor, group_name: str, num_ranks: int) -> Tensor:
        ctx.group = (num_ranks, group_name)
        ops = torch.ops._c10d_functional
        parts = torch.cat(summand_BTD.chunk(num_ranks, dim=1))
        scattered_BTD: Tensor = ops.wait_tensor(ops.reduce_scatter_tensor(parts, "sum", num_ranks, group_name))
        return scattered_BTD

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None, None]:
        num_ranks, group_name = ctx.group
        ops = torch.ops._c10d_functional
        parts = ops.wait_tensor(ops.all_gather_into_tensor(grad_BTD.contiguous(), num_ranks, group_name))
        return torch.cat(parts.chunk(num_ranks), dim=1), None, None


def _lookup(embedding: nn.Embedding, tokens_BT: Tensor) -> Tensor:
    """``(B, T / ranks, D)``: lookups in this rank's rows, summed over the rows of all ranks.

    Not by DTensor: its gradient of a lookup is a partial sum of the whole weight on every rank, 7.8 GiB of float32 for
    Llama 405B. A rank can only contribute to its own rows.
    """
    weight = _weight(embedding)
    rows_VD = weight.to_local()
    places_BT = tokens_BT - _first_row(weight)
    is_here_BT = (places_BT >= 0) & (places_BT < rows_VD.shape[0])
    found_BTD = F.embedding(places_BT * is_here_BT, rows_VD) * is_here_BT[..., None]
    return _scatter_sequence(found_BTD, weight.device_mesh)


def _columns(linear: Linear, x_BTD: Tensor) -> Tensor:
    """``(B, T, out / ranks)`` of a whole sequence."""
    return plus(linear.multiply(x_BTD, _weight(linear).to_local()), _bias(linear))


def _one_head(linear: Linear, x_BTD: Tensor) -> Tensor:
    """``(B, T, head dim)`` of the only head that this rank needs, where there are fewer heads than ranks."""
    head, num_heads = linear._head  # type: ignore[misc]
    bias = _bias(linear)
    product = linear.multiply(x_BTD, _replica(_weight(linear)).chunk(num_heads)[head])
    return plus(product, None if bias is None else bias.chunk(num_heads)[head])


def _rows(linear: Linear, x_BTD: Tensor) -> Tensor:
    """``(B, T / ranks, out)`` of an input that is split along its last dim."""
    weight = _weight(linear)
    y_BTD = _scatter_sequence(linear.multiply(x_BTD, weight.to_local()), weight.device_mesh)
    return plus(y_BTD, _bias(linear))  # after the sum over ranks, so that it is added once


def _vocabulary(output: Output, x_BTD: Tensor, use: Callable[..., Tensor] | None = None) -> Tensor:
    """``(B, T, V)`` as a DTensor, or the result of ``use`` for the whole sequence and this rank's rows."""
    weight = _weight(output)
    mesh = weight.device_mesh
    rows_VD = weight.to_local()
    whole_BTD = _gather_sequence(x_BTD, mesh)
    if use is not None:

        def gather(numbers: Tensor) -> Tensor:
            return all_gather(numbers[None], mesh)

        return use(whole_BTD, rows_VD, first_row=_first_row(weight), gather=gather)
    shape = torch.Size((*whole_BTD.shape[:-1], weight.shape[0]))  # given, since the last ranks' parts may be smaller
    stride = torch.empty(shape, device="meta").stride()
    logits = output.multiply(whole_BTD, rows_VD)
    return DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)


def _head_norm(norm: RMSNorm, x_BTNH: Tensor) -> Tensor:
    """Normalise each of the heads that this rank computes."""
    return norm.normalize(x_BTNH, _replica(_weight(norm)), rms_norm)


def _heads_norm(norm: RMSNorm, x_BTE: Tensor) -> Tensor:
    """Normalise all heads together, of which this rank computes some: the sums of squares are summed over the ranks."""
    weight = _weight(norm)
    mesh = weight.device_mesh
    wide_BTE = x_BTE.to(torch.promote_types(x_BTE.dtype, torch.float32))
    squares_BT1 = wide_BTE.square().sum(-1, keepdim=True)
    copies = mesh.size() * x_BTE.shape[-1] // weight.shape[0]  # ranks that compute the same head
    mean_BT1 = all_gather(squares_BT1[None], mesh).sum(0) / (copies * weight.shape[0])
    first = mesh.get_local_rank() // copies * x_BTE.shape[-1]
    rows_E = _replica(weight)[first : first + x_BTE.shape[-1]]
    normed_BTE = wide_BTE * torch.rsqrt(mean_BT1 + norm.eps)
    return (normed_BTE * norm.factor(rows_E, wide_BTE.dtype)).to(x_BTE.dtype)


def _route(router: Router, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts for this rank's part of the sequence."""
    return router.route(x_BTD, _replica(_weight(router)))


def _sequence_norm(norm: RMSNorm, x_BTD: Tensor) -> Tensor:
    """Normalise this rank's part of the sequence. The fused kernel is not used, since its last bits differ.

    The view makes autograd sum the norm's own gradients of its input before it adds the gradient of the residual. The
    order of a sum changes its bits.
    """
    return norm.normalize(x_BTD.view_as(x_BTD), _replica(_weight(norm)), rms_norm_reference)


def _own_norm(norm: nn.Module, x_BTD: Tensor) -> Tensor:
    """Normalise this rank's part of the sequence by a norm class of the model's own."""
    mesh = next(weight.device_mesh for weight in norm.parameters() if isinstance(weight, DTensor))
    y_BTD: DTensor = type(norm).forward(norm, DTensor.from_local(x_BTD, mesh, [Shard(1)], run_check=False))
    return y_BTD.to_local()


def _gather_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gather the module's first input once for all linears in the module; rounded if they all round it alike."""
    rounding, mesh, group_name, num_ranks = module._gather  # type: ignore[misc]
    if rounding is None:
        return (_gather_sequence(inputs[0], mesh), *inputs[1:])
    return (rounding.gather_rounded(inputs[0], group_name, num_ranks), *inputs[1:])


def _whole_loss(loss: nn.Module, inputs: tuple[Any, ...], result: Tensor) -> Tensor:
    """The loss, which is the same on every rank, as a plain tensor."""
    return result.full_tensor().clone() if isinstance(result, DTensor) else result  # FSDP warns of views


Style = tuple[type[nn.Module], Placement, Callable[..., Any]]
STYLES: dict[str, Style] = {
    "vocab": (nn.Embedding, Shard(0), _lookup),
    "sequence": (nn.Module, Replicate(), _sequence_norm),
    "head_norm": (RMSNorm, Replicate(), _head_norm),
    "heads_norm": (RMSNorm, Replicate(), _heads_norm),
    "colwise": (Linear, Shard(0), _columns),
    "colwise_heads": (Linear, Shard(0), _columns),
    "rowwise": (Linear, Shard(1), _rows),
    "logits": (Linear, Shard(0), _vocabulary),
    "router": (Router, Replicate(), _route),
}
"""By style: class of the module, placement of its weight, and the forward that replaces its own. A module of style
``GATHER`` keeps its forward, and its input is gathered."""

WHOLE = "experts"
"""The style of modules that tensor parallelism does not split: their ranks have other rows of the sequence."""

FEW_HEADS: Style = (Linear, Replicate(), _one_head)
"""``colwise_heads`` where there are fewer heads than ranks."""


def apply_tensor_parallel(model: nn.Module, plan: ShardingPlan, num_kv_heads: int, mesh: DeviceMesh) -> list[str]:
    """Split ``model``, on the meta device, over ``mesh`` by the rows of ``plan``. Returns log lines.

    Args:
        model: the whole model, or the modules of one pipeline stage.
        plan: sharding plan of the whole model, whose rows name ``STYLES``.
        num_kv_heads: key/value heads of the whole model, a divisor or a multiple of the number of ranks.
        mesh: ranks that share a layer, one axis.
    """
    rows: dict[str, int] = {}
    rounded = 0
    with keeping_ties(model):
        for name, module in model.named_modules():
            style = plan.style_of(name)
            if isinstance(module, Loss):
                module.register_forward_hook(_whole_loss)
            if not style or isinstance(module, nn.Identity):  # an Identity stands for a module of another stage
                continue
            rows[style] = rows.get(style, 0) + 1
            if style == GATHER:
                rounding = _rounding(name, module, plan)
                rounded += rounding is not None
                # in a tuple, since the module would otherwise register the linear a second time
                module._gather = (rounding, mesh, str(mesh.get_group().group_name), mesh.size())
                module.register_forward_pre_hook(_gather_input)
            elif style == WHOLE:
                continue
            elif style in STYLES:
                few_heads = style == "colwise_heads" and num_kv_heads < mesh.size()
                _split(name, module, mesh, *(FEW_HEADS if few_heads else STYLES[style]))
                if few_heads:
                    head = mesh.get_local_rank() * num_kv_heads // mesh.size()
                    module._head = (head, num_kv_heads)
            else:
                known = ", ".join([*STYLES, GATHER, WHOLE])
                raise PlanError(f"{name} has the unknown tensor-parallel style {style}. Known styles: {known}.")
    lines = [f"tensor parallel: {mesh.size()} ranks, " + ", ".join(f"{n} {style}" for style, n in rows.items())]
    if num_kv_heads < mesh.size() and "colwise_heads" in rows:
        lines.append(
            f"tensor parallel: {num_kv_heads} key/value heads are fewer than {mesh.size()} ranks: "
            f"each is computed on {mesh.size() // num_kv_heads}"
        )
    if rounded:
        lines.append(f"tensor parallel: {rounded} of {rows[GATHER]} gathers of a sequence are in float8")
    return lines


def _split(
    name: str,
    module: nn.Module,
    mesh: DeviceMesh,
    kind: type[nn.Module],
    placement: Placement,
    forward: Callable[..., Any],
) -> None:
    """Place the weights of ``module`` on ``mesh``, without communication: all ranks build the same meta tensors.

    Raises:
        PlanError: the module is not a ``kind``, the class that ``forward`` computes.
    """
    if forward is _sequence_norm and type(module).forward is not RMSNorm.forward:
        forward = _own_norm
    elif not isinstance(module, kind) or (kind is RMSNorm and type(module).forward is not RMSNorm.forward):
        what = f"{name} is a {type(module).__name__}, but its tensor-parallel style is for a {kind.__name__}."
        raise PlanError(what, fix="give the plan's row another style, or the module that class")
    for owner in module.modules():
        for key, parameter in list(owner.named_parameters(recurse=False)):
            place = placement if parameter.dim() > 1 or placement == Shard(0) else Replicate()  # a bias of rows
            weight = distribute_tensor(parameter, mesh, [place], src_data_rank=None)
            setattr(owner, key, nn.Parameter(weight))
    module.forward = MethodType(forward, module)
    if isinstance(module, Linear) and type(module).multiply is Linear.multiply:
        setattr(module, "multiply", F.linear)  # noqa: B010  not oneDNN, whose last bits differ


def split_adapters(linear: nn.Module) -> None:
    """Shard ``lora_A`` ``(rank, in)`` and ``lora_B`` ``(out, rank)`` to match the shards of the layer's weight."""
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, DTensor):
        return
    [placement] = weight.placements
    for name, dim in (("lora_A", 1), ("lora_B", 0)):
        place = placement if placement == Shard(dim) else Replicate()
        part = distribute_tensor(getattr(linear, name), weight.device_mesh, [place], src_data_rank=None)
        setattr(linear, name, nn.Parameter(part))


def local_adapters(linear: Any) -> tuple[Tensor, Tensor]:
    """``lora_A`` and ``lora_B`` of a layer as this rank multiplies them: its rows of B, or its columns of A."""
    parts = (linear.lora_A, linear.lora_B)
    if not isinstance(parts[0], DTensor):
        return parts[0], parts[1]
    a, b = (
        part.to_local(grad_placements=[Partial()]) if part.placements[0].is_replicate() else part.to_local()
        for part in parts
    )
    if hasattr(linear, "_head"):  # fewer heads than ranks
        head, num_heads = linear._head
        b = b.chunk(num_heads)[head]
    return a, b


def _rounding(name: str, module: nn.Module, plan: ShardingPlan) -> Linear | None:
    """A linear that reads the gathered input of ``module``, if all such linears round it with one scale."""
    inner = {f"{name}.{child}": linear for child, linear in module.named_modules() if isinstance(linear, Linear)}
    readers = [linear for path, linear in inner.items() if plan.style_of(path) in ("colwise", "colwise_heads")]
    return readers[0] if readers and all(getattr(linear, "rounds_whole_input", False) for linear in readers) else None


class AsyncTensorParallel:
    """Counts what the micro-pipeline pass did in this rank's compiled graphs.

    The counts are read from the generated code, not from the pass: a graph from the cache of compiled kernels passed it
    in an earlier run.

    Attributes:
        missing: why this device cannot use it, such as ``needs CUDA``; empty if it is on.
    """

    def __init__(self, missing: str = "") -> None:
        self.missing = missing
        self._loaded_before = len(PyCodeCache.modules)

    def count(self) -> dict[str, tuple[int, int]]:
        """Number of fused collectives, and of all all-gathers and reduce-scatters, in graphs compiled since the start.

        Each graph counts once, even if several blocks share it. Call after the first step, which compiles backwards.

        Returns:
            The two numbers of the ``forward`` and those of the ``backward``.
        """
        counts = {"forward": (0, 0), "backward": (0, 0)}
        if self.missing:
            return counts
        for file in {module.__file__ for module in PyCodeCache.modules[self._loaded_before :]}:
            code = text_named(file) if file else ""
            direction = "backward" if _BACKWARD.search(code) else "forward"
            fused, candidates = count_fused(code)
            counts[direction] = (counts[direction][0] + fused, counts[direction][1] + candidates)
        return counts

    def reason(self) -> str:
        """Why none or only some collectives are fused; empty if all are."""
        if self.missing:
            return self.missing
        fused, candidates = map(sum, zip(*self.count().values(), strict=True))
        if not candidates:
            return "no compiled graph has an all-gather or reduce-scatter"
        if not fused:
            return "no collective is next to a matmul that Inductor can fuse it with"
        return "" if fused == candidates else "the others are not next to a matmul that Inductor can fuse them with"


def enable_async_tensor_parallel(tp_mesh: DeviceMesh, device_type: str) -> AsyncTensorParallel:
    """Turn on async tensor parallelism for graphs compiled from now on. Changes nothing if the device lacks support.

    Args:
        tp_mesh: ranks that share matmuls, one axis.
        device_type: ``cuda``, or a device without symmetric memory.
    """
    if device_type != "cuda":
        return AsyncTensorParallel("needs CUDA")
    if not dist.is_nccl_available():
        return AsyncTensorParallel("needs NCCL")
    group = tp_mesh.get_group().group_name
    # torch deprecates this call, but below 2.15 the pass checks that it was made (pytorch/pytorch#193027). From 2.15 on
    # the pass checks for the accelerator and its symmetric memory.
    enable = getattr(symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is not None and not symmetric_memory.is_symm_mem_enabled_for_group(group):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable(group)
    if not symmetric_memory.is_symm_mem_enabled_for_group(group):
        return AsyncTensorParallel("needs symmetric memory, which torch lacks for this group of ranks")
    inductor_config._micro_pipeline_tp = True
    return AsyncTensorParallel()


def count_fused(code: str) -> tuple[int, int]:
    """Number of fused collectives, and of all all-gathers and reduce-scatters, in the Python code of a graph."""
    lines = [line for line in code.splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines)
    fused = len(_FUSED.findall(text))
    return fused, fused + len(_PLAIN.findall(text))

"""Tensor parallelism: the styles that rows of a ``ShardingPlan`` name. The one place that knows DTensor's classes.

Weights are DTensors. Activations are plain tensors of a rank, whatever the precision: between blocks its part of the
sequence, ``(B, T / tp, D)``; inside attention and feed-forward the whole sequence, for some heads or hidden dims. Only
the logits, split over the vocabulary, are a DTensor, from which PyTorch computes the loss.

Async: collectives are cut into pieces that hide behind the pieces of a matmul. Inductor's micro-pipeline pass replaces
an all-gather with the matmuls that read it, and a matmul with the reduce-scatter that reads it, by one op on symmetric
memory each. It skips what does not match in silence, so that what it did is counted.
"""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
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
from crius.models.layers import Linear, Loss, Output, RMSNorm
from crius.models.moe import Router
from crius.models.plan import ShardingPlan
from crius.parallel.allocate import keeping_ties
from crius.parallel.runtime import all_gather, reduce_scatter

_FUSED = re.compile(r"torch\.ops\.symm_mem\.fused_\w+\.default\(")
_PLAIN = re.compile(r"torch\.ops\._c10d_functional\.(?:all_gather|reduce_scatter)_\w+\.default\(")

# Forwards are methods, not partial functions: torch.compile shares one graph among blocks whose attributes are alike.


def _weight(module: nn.Module) -> DTensor:
    weight = module.weight
    assert isinstance(weight, DTensor)
    return weight


def _replica(module: nn.Module) -> Tensor:
    """A weight that every rank has whole, of whose gradient each rank has a summand. It counts as replicated: its
    gradients are summed over the ranks, once, and norms and checkpoints see it once.
    """
    return _weight(module).to_local(grad_placements=[Partial()])


def _first_row(weight: DTensor) -> int:
    """The row of the whole weight with which this rank's rows begin."""
    return -(-weight.shape[0] // weight.device_mesh.size()) * weight.device_mesh.get_local_rank()


def _gather_sequence(x_BTD: Tensor, mesh: DeviceMesh) -> Tensor:
    """``(B, T / ranks, D)`` to ``(B, T, D)``; the gradients of the ranks are summed, each gets its part."""
    return torch.cat(all_gather(x_BTD, mesh).chunk(mesh.size()), dim=1)


def _scatter_sequence(summand_BTD: Tensor, mesh: DeviceMesh) -> Tensor:
    """``(B, T, D)`` to ``(B, T / ranks, D)``, summed over the ranks."""
    return reduce_scatter(torch.cat(summand_BTD.chunk(mesh.size(), dim=1)), mesh)


def _lookup(embedding: nn.Embedding, tokens_BT: Tensor) -> Tensor:
    """``(B, T / ranks, D)``: lookups in this rank's rows, summed over the rows of all ranks.

    By hand: DTensor's gradient of a lookup is a partial sum of the whole weight on every rank, 7.8 GiB of float32 for
    Llama 405B; a rank's own rows are all that it can contribute to.
    """
    weight = _weight(embedding)
    rows_VD = weight.to_local()
    places_BT = tokens_BT - _first_row(weight)
    is_here_BT = (places_BT >= 0) & (places_BT < rows_VD.shape[0])
    found_BTD = F.embedding(places_BT * is_here_BT, rows_VD) * is_here_BT[..., None]
    # a copy is a plain tensor, as compiled blocks take it, where the result of a collective may be one to wait for
    return _scatter_sequence(found_BTD, weight.device_mesh).clone()


def _columns(linear: Linear, x_BTD: Tensor) -> Tensor:
    """``(B, T, out / ranks)`` of a whole sequence."""
    return linear.multiply(x_BTD, _weight(linear).to_local())


def _one_head(linear: Linear, x_BTD: Tensor) -> Tensor:
    """``(B, T, head dim)`` of the one head that this rank needs, where there are fewer heads than ranks."""
    head, num_heads = linear._head  # type: ignore[misc]
    return linear.multiply(x_BTD, _replica(linear).chunk(num_heads)[head])


def _rows(linear: Linear, x_BTD: Tensor) -> Tensor:
    """``(B, T / ranks, out)`` of an input that is split over its last dim."""
    weight = _weight(linear)
    return _scatter_sequence(linear.multiply(x_BTD, weight.to_local()), weight.device_mesh)


def _vocabulary(output: Output, x_BTD: Tensor, use: Callable[..., Tensor] | None = None) -> Tensor:
    """``(B, T, V)`` as a DTensor, or what ``use`` makes of the whole sequence and this rank's rows."""
    weight = _weight(output)
    mesh, rows_VD = weight.device_mesh, weight.to_local()
    whole_BTD = _gather_sequence(x_BTD, mesh)
    if use is not None:

        def gather(numbers: Tensor) -> Tensor:
            return all_gather(numbers[None], mesh)

        return use(whole_BTD, rows_VD, first_row=_first_row(weight), gather=gather)
    shape = torch.Size((*whole_BTD.shape[:-1], weight.shape[0]))  # told, since the last ranks' parts may be smaller
    stride = torch.empty(shape, device="meta").stride()
    logits = output.multiply(whole_BTD, rows_VD)
    return DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)


def _head_norm(norm: RMSNorm, x_BTNH: Tensor) -> Tensor:
    """The heads that this rank computes, each normalised."""
    return rms_norm(x_BTNH, _replica(norm), norm.eps)


def _route(router: Router, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The experts of this rank's part of the sequence."""
    return router.route(x_BTD, _replica(router))


def _sequence_norm(norm: RMSNorm, x_BTD: Tensor) -> Tensor:
    """This rank's part of the sequence, normalised; not by the fused kernel, whose last bits differ.

    The view has the norm's own gradients of its input summed before that of the residual is added: the order of a sum
    is part of its bits.
    """
    return rms_norm_reference(x_BTD.view_as(x_BTD), _replica(norm), norm.eps)


def _own_norm(norm: nn.Module, x_BTD: Tensor) -> Tensor:
    """This rank's part of the sequence, normalised as a norm of the model's own does it."""
    mesh = next(weight.device_mesh for weight in norm.parameters() if isinstance(weight, DTensor))
    y_BTD: DTensor = type(norm).forward(norm, DTensor.from_local(x_BTD, mesh, [Shard(1)], run_check=False))
    return y_BTD.to_local()


def _gather_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The module's first input, gathered once for all linears in the module; rounded, if they round it alike."""
    rounding, mesh, group_name, num_ranks = module._gather  # type: ignore[misc]
    if rounding is None:
        return (_gather_sequence(inputs[0], mesh), *inputs[1:])
    return (rounding.gather_rounded(inputs[0], group_name, num_ranks), *inputs[1:])


def _whole_loss(loss: nn.Module, inputs: tuple[Any, ...], result: Tensor) -> Tensor:
    """The loss, which is the same on every rank, as a plain tensor."""
    return result.full_tensor().clone() if isinstance(result, DTensor) else result  # FSDP warns of views


GATHER = "gather_sequence"
Style = tuple[type[nn.Module], Placement, Callable[..., Any]]
STYLES: dict[str, Style] = {
    "vocab": (nn.Embedding, Shard(0), _lookup),
    "sequence": (nn.Module, Replicate(), _sequence_norm),
    "head_norm": (RMSNorm, Replicate(), _head_norm),
    "colwise": (Linear, Shard(0), _columns),
    "colwise_heads": (Linear, Shard(0), _columns),
    "rowwise": (Linear, Shard(1), _rows),
    "logits": (Linear, Shard(0), _vocabulary),
    "router": (Router, Replicate(), _route),
}
"""Modules that have the style, how their weight is placed, and their forward in place of their own; a module of style
``GATHER`` has its input gathered instead."""

WHOLE = "experts"
"""The style of modules that tensor parallelism leaves alone: their ranks have other rows of the sequence."""

FEW_HEADS: Style = (Linear, Replicate(), _one_head)
"""``colwise_heads`` where there are fewer heads than ranks."""


def apply_tensor_parallel(model: nn.Module, plan: ShardingPlan, num_kv_heads: int, mesh: DeviceMesh) -> list[str]:
    """Split ``model``, on the meta device, over ``mesh`` by the rows of ``plan``; returns what to log.

    Args:
        model: the whole model, or the modules of one pipeline stage.
        plan: its rows name ``STYLES``; it covers the whole model, of which this may be a stage.
        num_kv_heads: key/value heads of the whole model, a divisor or a multiple of the number of ranks.
        mesh: one axis, the ranks that share a layer.
    """
    rows: dict[str, int] = {}
    rounded = 0
    with keeping_ties(model):
        for name, module in model.named_modules():
            style = plan.style_of(name)
            if isinstance(module, Loss):
                module.register_forward_hook(_whole_loss)
            if not style or isinstance(module, nn.Identity):  # which stands for a module of another stage
                continue
            rows[style] = rows.get(style, 0) + 1
            if style == GATHER:
                rounding = _rounding(name, module, plan)
                rounded += rounding is not None
                # in a tuple, or the linear would be a part of the module twice
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
                raise PlanError(f"{name} has the tensor-parallel style {style}, which there is not: {known}.")
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
        PlanError: the module is not of the ``kind`` whose computation ``forward`` is.
    """
    if forward is _sequence_norm and type(module).forward is not RMSNorm.forward:
        forward = _own_norm
    elif not isinstance(module, kind) or (kind is RMSNorm and type(module).forward is not RMSNorm.forward):
        what = f"{name} is a {type(module).__name__}, and its tensor-parallel style is for a {kind.__name__}."
        raise PlanError(what, fix="give the plan's row another style, or the module that class")
    for owner in module.modules():
        for key, parameter in list(owner.named_parameters(recurse=False)):
            weight = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            setattr(owner, key, nn.Parameter(weight))
    module.forward = MethodType(forward, module)
    if isinstance(module, Linear) and type(module).multiply is Linear.multiply:
        setattr(module, "multiply", F.linear)  # noqa: B010  not by oneDNN, whose last bits differ


def split_adapters(linear: nn.Module) -> None:
    """Place ``lora_A`` ``(rank, in)`` and ``lora_B`` ``(out, rank)`` as their layer's weight ``(out, in)`` is split."""
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
    if hasattr(linear, "_head"):  # of fewer heads than ranks
        head, num_heads = linear._head
        b = b.chunk(num_heads)[head]
    return a, b


def _rounding(name: str, module: nn.Module, plan: ShardingPlan) -> Linear | None:
    """One of the linears that read the gathered input of ``module``, if all of them round it with one scale."""
    inner = {f"{name}.{child}": linear for child, linear in module.named_modules() if isinstance(linear, Linear)}
    readers = [linear for path, linear in inner.items() if plan.style_of(path) in ("colwise", "colwise_heads")]
    return readers[0] if readers and all(getattr(linear, "rounds_whole_input", False) for linear in readers) else None


class AsyncTensorParallel:
    """What the micro-pipeline pass made of this rank's compiled graphs.

    The counts come from the generated code, not from the pass: a graph from the cache of compiled kernels has been
    through the pass in an earlier run.

    Attributes:
        missing: what keeps this device from it, such as ``needs CUDA``; empty where it is on.
    """

    def __init__(self, missing: str = "") -> None:
        self.missing = missing
        self._loaded_before = len(PyCodeCache.modules)

    def count(self) -> tuple[int, int]:
        """Fused collectives, and all all-gathers and reduce-scatters of the graphs compiled since it was enabled.

        Each graph counts once, however many blocks share it. Call after the first step: backwards compile then.
        """
        if self.missing:
            return 0, 0
        files = {module.__file__ for module in PyCodeCache.modules[self._loaded_before :]}
        counts = [count_fused(Path(file).read_text(encoding="utf-8")) for file in files if file]
        return sum(fused for fused, _ in counts), sum(candidates for _, candidates in counts)

    def reason(self) -> str:
        """Why nothing, or not all, is fused; empty when all is."""
        if self.missing:
            return self.missing
        fused, candidates = self.count()
        if not candidates:
            return "no compiled graph has an all-gather or reduce-scatter"
        if not fused:
            return "no collective stands next to a matmul that Inductor can fuse it with"
        return "" if fused == candidates else "the others stand next to no matmul that Inductor can fuse them with"


def enable_async_tensor_parallel(tp_mesh: DeviceMesh, device_type: str) -> AsyncTensorParallel:
    """Turn on async tensor parallelism for what is compiled from now on; where the device cannot, change nothing.

    Args:
        tp_mesh: the ranks that share matmuls, one axis.
        device_type: ``cuda``, or a device without symmetric memory.
    """
    if device_type != "cuda":
        return AsyncTensorParallel("needs CUDA")
    if not dist.is_nccl_available():
        return AsyncTensorParallel("needs NCCL")
    group = tp_mesh.get_group().group_name
    # torch says that this call is no longer needed, but below 2.15 the pass asks whether it was made
    # (pytorch/pytorch#193027). From there on it asks for the accelerator and its symmetric memory.
    enable = getattr(symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is not None and not symmetric_memory.is_symm_mem_enabled_for_group(group):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable(group)
    if not symmetric_memory.is_symm_mem_enabled_for_group(group):
        return AsyncTensorParallel("needs symmetric memory, which torch has not for this group of ranks")
    inductor_config._micro_pipeline_tp = True
    return AsyncTensorParallel()


def count_fused(code: str) -> tuple[int, int]:
    """Fused collectives, and all all-gathers and reduce-scatters, in the Python code of a graph."""
    lines = [line for line in code.splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines)
    fused = len(_FUSED.findall(text))
    return fused, fused + len(_PLAIN.findall(text))

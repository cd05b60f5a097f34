"""Products of groups of rows with one matrix per group: the linear layers of experts.

PyTorch's ``grouped_mm`` does not take float64, refuses float32 where shapes are inferred (torch 2.13: fake tensors,
meta, torch.compile), and needs gradients and rows in multiples of 16 bytes. It is used here for bfloat16 on a GPU.
Everything else is a loop over the groups. On a CPU the loop is as fast as ``grouped_mm`` and gives the same bits. The
operator is our own, so that torch.compile does not split it, and FLOP counts and checkpointing know it by name. On a
GPU the loop waits once for the ends of the groups; the bfloat16 path never waits.

If this process computes linear layers by oneDNN, oneDNN also computes the forward and the gradient of the rows. oneDNN
compiles a kernel for each number of rows, and groups have other numbers in every step. So it gets tiles of a few fixed
sizes. The first rows of a tile may belong to the group before; their results are discarded.

N rows, E groups
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from crius.kernels import choice

_TILE = 128  # most rows of a tile
_STEP = 16  # divides the number of rows of a tile

_library = torch.library.Library("crius", "FRAGMENT")
_library.define("grouped_mm(Tensor x, Tensor weight, Tensor ends) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    "grouped_mm_grad_weight(Tensor grad, Tensor x, Tensor ends) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows ``ends[e - 1]:ends[e]`` of ``x`` times ``weight[e]`` transposed: ``(N, out)``.

    Args:
        x: ``(N, in)``, the rows of a group next to each other; N may be 0.
        weight: ``(E, out, in)``, dtype and device of ``x``.
        ends: ends of the groups, int32 ``(E,)``, ascending. A repeated number is an empty group. The last one is N.
            ``ends`` has no gradient. The gradient of the weight of an empty group is 0.

    Raises:
        RuntimeError: shapes or dtypes do not match.
        ValueError: ``ends`` descends, or its last number is not N; not checked for bfloat16 on a GPU.
    """
    product: Tensor = _Grouped.apply(x, weight, ends)
    return product


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _product(x, weight, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()  # the gradient of a sum is expanded and has strides of 0
        grad_x = _product(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
        grad_weight = _grad_weight(grad, x, ends) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if _takes_torch(x, *weight.shape[1:]):
        return F.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)
    product: Tensor = torch.ops.crius.grouped_mm.default(x, weight, ends)
    return product


def _grad_weight(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    if _takes_torch(x, grad.shape[1], x.shape[1]):
        grad_weight = F.grouped_mm(grad.t(), x.contiguous(), offs=ends)
        is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0  # the kernel's result for an empty group is not documented
        return grad_weight.masked_fill(is_empty.view(-1, 1, 1), 0)
    product: Tensor = torch.ops.crius.grouped_mm_grad_weight.default(grad, x, ends)
    return product


def is_for_torch(device_type: str, dtype: torch.dtype) -> bool:
    """Whether torch's kernel multiplies rows of a multiple of 16 bytes; all else is a loop."""
    return device_type == "cuda" and dtype == torch.bfloat16


def _takes_torch(x: Tensor, *widths: int) -> bool:
    """Whether torch's kernel multiplies: bfloat16 on a GPU, and rows in multiples of 16 bytes."""
    is_aligned = all(width % 8 == 0 for width in widths)
    return is_for_torch(x.device.type, x.dtype) and is_aligned and not statically_known_true(x.shape[0] == 0)


def _groups(ends: Tensor, rows: int) -> Iterator[slice]:
    """The rows of each group. The host reads ``ends``, so on a GPU it waits.

    Raises:
        ValueError: see ``grouped_linear``.
    """
    stops = ends.tolist()
    starts = [0, *stops[:-1]]
    if (stops[-1] if stops else 0) != rows or any(start > stop for start, stop in zip(starts, stops, strict=False)):
        raise ValueError(f"ends of groups must ascend to the number of rows, {rows}, but are {stops}")
    return (slice(start, stop) for start, stop in zip(starts, stops, strict=False))


def _multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    y = _shape(x, weight, ends)
    by_onednn = choice.current().linear == "onednn" and choice.are_plain((torch.float32,), x, weight)
    x = x.contiguous()
    for rows, matrix in zip(_groups(ends, len(x)), weight.unbind(), strict=True):
        if by_onednn and weight.numel():
            _multiply_tiles(x, matrix, rows, y)
        elif rows.start < rows.stop:
            torch.mm(x[rows], matrix.t(), out=y[rows])
    return y


def _multiply_tiles(x: Tensor, matrix: Tensor, rows: slice, y: Tensor) -> None:
    multiply = torch.ops.mkldnn._linear_pointwise.default
    for start in range(rows.start, rows.stop, _TILE):
        stop = min(start + _TILE, rows.stop)
        size = -(-(stop - start) // _STEP) * _STEP
        first = max(stop - size, 0)
        tile = multiply(x[first : first + size], matrix, None, "none", [], "")
        y[start:stop] = tile[start - first : stop - first]


def _multiply_grad_weight(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    grad_weight = _grad_weight_shape(grad, x, ends)
    for rows, matrix in zip(_groups(ends, len(x)), grad_weight.unbind(), strict=True):
        torch.mm(grad[rows].t(), x[rows], out=matrix)  # 0 for a group without rows
    return grad_weight


for _device in ("CPU", "CUDA"):
    _library.impl("grouped_mm", _multiply, _device)
    _library.impl("grouped_mm_grad_weight", _multiply_grad_weight, _device)


@torch.library.register_fake("crius::grouped_mm", lib=_library)
def _shape(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    torch._check(
        x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[2] and ends.shape == weight.shape[:1],
        lambda: f"x (N, in), weight (E, out, in), ends (E,) have shapes {x.shape}, {weight.shape}, {ends.shape}",
    )
    torch._check(x.dtype == weight.dtype, lambda: f"x is {x.dtype}, weight {weight.dtype}")
    return x.new_empty((x.shape[0], weight.shape[1]))


@torch.library.register_fake("crius::grouped_mm_grad_weight", lib=_library)
def _grad_weight_shape(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((ends.shape[0], grad.shape[1], x.shape[1]))


@register_flop_formula(torch.ops.crius.grouped_mm)
def flops(x_shape: torch.Size, weight_shape: torch.Size, *args: object, **kwargs: object) -> int:
    """FLOPs of ``x`` ``(N, in)`` times ``weight`` ``(E, out, in)``: each row is multiplied with one matrix."""
    return 2 * x_shape.numel() * weight_shape[1]


@register_flop_formula(torch.ops.crius.grouped_mm_grad_weight)
def grad_weight_flops(grad_shape: torch.Size, x_shape: torch.Size, *args: object, **kwargs: object) -> int:
    """FLOPs of the gradients of all matrices from ``grad`` ``(N, out)`` and ``x`` ``(N, in)``."""
    return 2 * grad_shape.numel() * x_shape[1]


def permute(x: Tensor, index: Tensor, inverse: Tensor, copies: int = 1) -> Tensor:
    """Row ``index[m] // copies`` of ``x`` for each m: ``(N copies, D)``. The gradient is a gather too.

    So the gradient has the same bits on every device and in every run. The gradient of ``x[index]`` would add up in
    any order.

    Args:
        x: ``(N, D)``.
        index: a permutation of the numbers below ``N copies``, int64. Each row of ``x`` occurs ``copies`` times.
        inverse: its inverse, ``inverse[index[m]] == m``.
        copies: number of copies of each row.
    """
    permuted: Tensor = _Permute.apply(x, index, inverse, copies)
    return permuted


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, index if copies == 1 else index // copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = grad.index_select(0, inverse)
        return rows if ctx.copies == 1 else rows.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None

"""Products of rows with the matrix of their group, and the moves of rows to their groups and back.

The operator of a mixture of experts: rows lie group by group, and each group, which may be empty, has a matrix of its
own. An operator of our own: torch's has no float64, no shapes for float32, and leaves rows behind the last group
unwritten. On a CPU a loop over the groups, by the kernel that the process chose for linear layers; on a GPU torch's
grouped kernel for bfloat16, which asks the host for nothing. It wants rows of whole 16 bytes; else, and in another
dtype, a GPU has the loop too, which waits for the sizes of the groups.

E groups, N rows
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from crius.kernels import choice
from crius.kernels.cpu import linear

_library = torch.library.Library("crius", "FRAGMENT")
_library.define("grouped_mm(Tensor x, Tensor weight, Tensor ends) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.define("grouped_outer(Tensor grad, Tensor x, Tensor ends) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
MULTIPLY = torch.ops.crius.grouped_mm.default
"""Rows ``(N, in)`` and matrices ``(E, out, in)`` of which group e has the rows before ``ends[e]``: ``(N, out)``."""
OUTER = torch.ops.crius.grouped_outer.default
"""Of each group the gradient ``(N, out)``, transposed, times the rows ``(N, in)``: ``(E, out, in)``."""


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each row times the matrix of its group, transposed: ``(N, out)``, in the dtype of ``x``.

    Args:
        x: rows, group by group, ``(N, in)``.
        weight: a matrix for each group, ``(E, out, in)``.
        ends: the row behind the last one of each group, int32 ``(E,)``; the last is N.

    Raises:
        ValueError: the ends do not ascend to the number of rows; bfloat16 on a GPU does not look.
    """
    product: Tensor = _GroupedLinear.apply(x, weight, ends)
    return product


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        product: Tensor = MULTIPLY(x, weight, ends)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()  # of a sum it has no memory of its own
        grad_x = MULTIPLY(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
        grad_weight = OUTER(grad, x, ends) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def _groups(ends: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """The groups that have rows. The host reads where they end."""
    start = 0
    bounds: list[int] = ends.tolist()
    if bounds[-1] != rows or bounds != sorted(bounds):
        raise ValueError(f"groups end at {bounds}, which does not ascend to the number of rows, {rows}")
    for group, end in enumerate(bounds):
        if end > start:
            yield group, slice(start, end)
        start = end


def _multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    product = x.new_empty(x.shape[0], weight.shape[1])
    by_onednn = choice.current().linear == "onednn" and x.dtype == torch.float32 and x.device.type == "cpu"
    for group, rows in _groups(ends, x.shape[0]):
        if by_onednn:
            product[rows] = linear.multiply(x[rows], weight[group])
        else:
            torch.mm(x[rows], weight[group].t(), out=product[rows])
    return product


def _outer(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    product = x.new_zeros(ends.shape[0], grad.shape[1], x.shape[1])
    for group, rows in _groups(ends, x.shape[0]):
        torch.mm(grad[rows].t(), x[rows], out=product[group])
    return product


def _takes_torch(x: Tensor, *widths: int) -> bool:
    """Whether torch's grouped kernel multiplies rows of such ``widths``."""
    return x.dtype == torch.bfloat16 and x.shape[0] > 0 and all(width % 8 == 0 for width in widths)


def _multiply_on_gpu(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if not _takes_torch(x, *weight.shape[1:]):
        return _multiply(x, weight, ends)
    return F.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)


def _outer_on_gpu(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    if not _takes_torch(x, grad.shape[1], x.shape[1]):
        return _outer(grad, x, ends)
    product = F.grouped_mm(grad.t(), x.contiguous(), offs=ends)
    is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0  # nothing says what the kernel writes there
    return product.masked_fill_(is_empty[:, None, None], 0)


_library.impl("grouped_mm", _multiply, "CPU")
_library.impl("grouped_outer", _outer, "CPU")
_library.impl("grouped_mm", _multiply_on_gpu, "CUDA")
_library.impl("grouped_outer", _outer_on_gpu, "CUDA")


@torch.library.register_fake("crius::grouped_mm", lib=_library)
def _product_shape(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.register_fake("crius::grouped_outer", lib=_library)
def _outer_shape(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


@register_flop_formula(torch.ops.crius.grouped_mm)
def flops(x_shape: torch.Size, weight_shape: torch.Size, *args: object, **kwargs: object) -> int:
    """FLOPs of ``MULTIPLY``, whatever the sizes of the groups."""
    return 2 * x_shape.numel() * weight_shape[1]


@register_flop_formula(torch.ops.crius.grouped_outer)
def outer_flops(grad_shape: torch.Size, x_shape: torch.Size, *args: object, **kwargs: object) -> int:
    """FLOPs of ``OUTER``, whatever the sizes of the groups."""
    return 2 * grad_shape.numel() * x_shape[1]


def spread(x: Tensor, order: Tensor, place: Tensor, copies: int) -> Tensor:
    """Rows ``(N, D)``, each ``copies`` times, in another order: ``(N * copies, D)``.

    The gradients of the copies of a row are gathered and summed in their order: no atomic adds, on no device.

    Args:
        x: rows.
        order: which copy comes at each place, int64 ``(N * copies,)``; copy c of row n is number ``n * copies + c``.
        place: where each copy went.
        copies: of each row.
    """
    rows: Tensor = _Spread.apply(x, order, place, copies)
    return rows


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.copies = copies
        return x.index_select(0, order // copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place).view(-1, ctx.copies, grad.shape[1]).sum(1), None, None, None


def permute(x: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """Rows ``(N, D)`` in another order: row ``order[n]`` comes to n, and row n to ``place[n]``."""
    rows: Tensor = _Permute.apply(x, order, place)
    return rows


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place), None, None

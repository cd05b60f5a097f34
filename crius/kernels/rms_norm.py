"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) with a backward of a few passes.

PyTorch differentiates its own on a CPU operator by operator, about ten passes over the activations a norm.

D: the last dim, N: all others
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from crius.kernels.choice import takes_fused, takes_traced

_ROWS = 32  # of a dim of a few thousand, float32: half of a core's second cache


def rms_norm(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim.

    Args:
        x: ``(..., D)``.
        weight: ``(D,)``.
        eps: None: the machine epsilon of the dtype, as in torch.
    """
    if when(x, weight):
        fused: Tensor = _RMSNorm.apply(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)
        return fused
    if takes_traced(x, weight) and x.dtype == weight.dtype:
        scaled: Tensor = _TracedScale.apply(F.rms_norm(x, weight.shape, None, eps), weight)
        return scaled
    return reference(x, weight, eps)


def when(x: Tensor, weight: Tensor) -> bool:
    """Whether the fused path is taken."""
    return takes_fused(x, weight) and x.dtype == weight.dtype


def reference(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """As PyTorch computes and differentiates it."""
    return F.rms_norm(x, weight.shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """Keeps ``x``, which its maker keeps anyway, and the inverse root of each row."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        width = x.shape[-1]
        x_ND, grad_ND, inverse_N1 = x.reshape(-1, width), grad.reshape(-1, width), inverse.reshape(-1, 1)
        product_ND = grad_ND * x_ND
        grad_weight = torch.mv(product_ND.t(), inverse_N1[:, 0]) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        # grad * weight / rms, less its part along x: x * sum(grad * weight * x) / (D * rms^3)
        along_N1 = torch.mv(product_ND, weight)[:, None].mul_(inverse_N1**3).div_(width)
        grad_x = torch.mul(grad_ND, weight, out=product_ND).mul_(inverse_N1).addcmul_(x_ND, along_N1, value=-1)
        return grad_x.view(x.shape), grad_weight, None


class _TracedScale(torch.autograd.Function):
    """``x * weight`` for a compiler, which sums the gradient of the weight over all rows, a few columns at a time, and
    so reads one line of each page: here over few rows that stay in the cache, then over what these give.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows_ND = (grad * x).reshape(-1, x.shape[-1])
        if len(rows_ND) % _ROWS == 0:
            rows_ND = rows_ND.unflatten(0, (-1, _ROWS)).sum(1)
        return grad * weight, rows_ND.sum(0)

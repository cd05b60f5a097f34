"""The rotation of rotary position embedding (Su et al. 2021, arXiv:2104.09864), with its inverse as the backward.

B batch, T tokens, N heads, H head dim
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from crius.kernels.choice import takes_fused, takes_traced


def rotary(x_BTNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + H/2)`` of each head in the dtype of the tables or a finer one; dtype and shape stay.

    Args:
        x_BTNH: queries or keys, ``(B, T, N, H)``.
        cos: float32 ``(B, T, 1, H)``, the two halves of H alike.
        sin: as ``cos``, the first half negated. Tables get no gradient from the fused path.
    """
    if when(x_BTNH, cos, sin):
        fused: Tensor = _Rotary.apply(x_BTNH, cos, sin)
        return fused
    if takes_traced(x_BTNH, cos, sin):  # of a roll a compiler makes a gather
        x, cos, sin = (t.unflatten(-1, (2, -1)) for t in (x_BTNH, cos, sin))
        return (x * cos + x.flip(-2) * sin).flatten(-2).to(x_BTNH.dtype)
    return reference(x_BTNH, cos, sin)


def when(x_BTNH: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the fused path is taken."""
    return takes_fused(x_BTNH, cos, sin) and not (cos.requires_grad or sin.requires_grad)


def reference(x_BTNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As PyTorch differentiates it."""
    x = x_BTNH.to(torch.promote_types(x_BTNH.dtype, cos.dtype))
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x_BTNH.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """``x * cos + sign * roll(x) * sin`` without a copy of ``x`` in which the halves have changed places."""
    half = x.shape[-1] // 2
    y = torch.mul(x, cos)
    y[..., :half].addcmul_(x[..., half:], sin[..., :half], value=sign)
    y[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return y


class _Rotary(torch.autograd.Function):
    """Keeps the tables only, which all layers share."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None

"""RMSNorm, rotary positions, SwiGLU and squared norms in few passes over memory: ``kernels.pointwise``.

RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467): PyTorch differentiates its own on a CPU operator by operator, about
ten passes over the activations per norm.

Rotary positions (Su et al. 2021, arXiv:2104.09864): the backward is the inverse rotation.

SwiGLU (Shazeer 2020, arXiv:2002.05202): two tensors are kept for the backward, where PyTorch keeps three.
``silu(gate)`` is computed again from a tensor that is read anyway.

Squared L2 norms of many tensors: the order of sums has as little effect as in float64. PyTorch's norm of float32
numbers in float64 on a CPU first writes a float64 copy, and adds it up with one thread.

B batch, T tokens, N heads, H head dim; in RMSNorm D is the last dim, N the product of all others
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from crius.kernels.choice import takes_fused, takes_traced

_ROWS = 32  # float32 rows of a few thousand numbers fill half of a core's second-level cache


def rms_norm(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim.

    Args:
        x: ``(..., D)``.
        weight: ``(D,)``.
        eps: None: the machine epsilon of the dtype, as in torch.
    """
    if takes_fused(x, weight) and x.dtype == weight.dtype:
        fused: Tensor = _RMSNorm.apply(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)
        return fused
    if takes_traced(x, weight) and x.dtype == weight.dtype:
        scaled: Tensor = _TracedScale.apply(F.rms_norm(x, weight.shape, None, eps), weight)
        return scaled
    return rms_norm_reference(x, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """PyTorch's computation and gradient."""
    return F.rms_norm(x, weight.shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """Keeps ``x``, which the operator before it keeps anyway, and the inverse root of each row."""

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
        x_ND = x.reshape(-1, width)
        grad_ND = grad.reshape(-1, width)
        inverse_N1 = inverse.reshape(-1, 1)
        product_ND = grad_ND * x_ND
        grad_weight = torch.mv(product_ND.t(), inverse_N1[:, 0]) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        # grad * weight / rms, less its part along x: x * sum(grad * weight * x) / (D * rms^3)
        along_N1 = torch.mv(product_ND, weight)[:, None].mul_(inverse_N1**3).div_(width)
        grad_x = torch.mul(grad_ND, weight, out=product_ND).mul_(inverse_N1).addcmul_(x_ND, along_N1, value=-1)
        return grad_x.view(x.shape), grad_weight, None


class _TracedScale(torch.autograd.Function):
    """``x * weight``, for a compiler.

    The compiler would sum the gradient of the weight over all rows for a few columns at a time, and so read one cache
    line of each page. Here it is summed over few rows, which stay in the cache, and then over these sums.
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


def rotary(x_BTNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + H/2)`` of each head. Dtype and shape stay.

    The computation is in the dtype of the tables, or of ``x_BTNH`` if that is wider.

    Args:
        x_BTNH: queries or keys, ``(B, T, N, H)``.
        cos: float32 ``(B, T, 1, H)``; both halves of H are equal.
        sin: as ``cos``, with the first half negated. The fused path gives the tables no gradient.
    """
    if takes_fused(x_BTNH, cos, sin) and not (cos.requires_grad or sin.requires_grad):
        fused: Tensor = _Rotary.apply(x_BTNH, cos, sin)
        return fused
    if takes_traced(x_BTNH, cos, sin):  # a compiler would turn a roll into a gather
        x, cos, sin = (t.unflatten(-1, (2, -1)) for t in (x_BTNH, cos, sin))
        return (x * cos + x.flip(-2) * sin).flatten(-2).to(x_BTNH.dtype)
    return rotary_reference(x_BTNH, cos, sin)


def rotary_reference(x_BTNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """PyTorch's computation and gradient."""
    x = x_BTNH.to(torch.promote_types(x_BTNH.dtype, cos.dtype))
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x_BTNH.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """``x * cos + sign * roll(x) * sin``, without a copy of ``x`` with swapped halves."""
    half = x.shape[-1] // 2
    y = torch.mul(x, cos)
    y[..., :half].addcmul_(x[..., half:], sin[..., :half], value=sign)
    y[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return y


class _Rotary(torch.autograd.Function):
    """Keeps only the tables, which all layers share."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, tensors of one shape."""
    if takes_fused(gate, up) and gate.shape == up.shape and gate.dtype == up.dtype:
        fused: Tensor = _SwiGLU.apply(gate, up)
        return fused
    if takes_traced(gate, up):
        traced: Tensor = _TracedSwiGLU.apply(gate, up)
        return traced
    return swiglu_reference(gate, up)


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """PyTorch's computation and gradient."""
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    """Keeps only its inputs, which no other operator keeps."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grad) if ctx.needs_input_grad[1] else None
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate) if ctx.needs_input_grad[0] else None
        return grad_gate, grad_up


class _TracedSwiGLU(torch.autograd.Function):
    """SwiGLU for a compiler.

    In its backward, one loop makes both gradients and the product that was the input of ``w2``. The loop has one
    exponential and writes the gradient of ``gate`` into the memory of ``up``.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate * torch.sigmoid(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        product = gate * sigmoid * up  # written as in the forward, so that the compiler sees one expression
        return grad * (up * sigmoid + product * (1 - sigmoid)), grad * (gate * sigmoid)


MAX_ROW = 65536
"""Longest row that is added up in float32. The error grows with the logarithm of the length."""


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """``(len(tensors),)`` in float64. The fused path sums rows of matrices in float32, and the sums of rows in float64.

    Ranks that hold whole rows of a matrix add up the same numbers as one rank that holds all rows. A row whose norm is
    above 1.8e19 counts as infinite, since its square is infinite in float32.
    """
    return squared_norms_reference([torch.linalg.vector_norm(x, dim=-1) if sums_rows(x) else x for x in tensors])


def sums_rows(x: Tensor) -> bool:
    """Whether the rows of ``x`` are summed first, in float32."""
    return x.dim() > 1 and 0 < x.shape[-1] <= MAX_ROW and takes_fused(x)


def squared_norms_reference(tensors: Sequence[Tensor]) -> Tensor:
    """Reference: all sums are in float64."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square()

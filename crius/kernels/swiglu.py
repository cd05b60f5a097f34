"""The gate of SwiGLU (Shazeer 2020, arXiv:2002.05202), which keeps two tensors for its backward where PyTorch keeps
three: ``silu(gate)`` is computed again, from a tensor that is read anyway.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from crius.kernels.choice import takes_fused, takes_traced


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, tensors of one shape."""
    if when(gate, up):
        fused: Tensor = _SwiGLU.apply(gate, up)
        return fused
    if takes_traced(gate, up):
        traced: Tensor = _TracedSwiGLU.apply(gate, up)
        return traced
    return reference(gate, up)


def when(gate: Tensor, up: Tensor) -> bool:
    """Whether the fused path is taken."""
    return takes_fused(gate, up) and gate.shape == up.shape and gate.dtype == up.dtype


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """As PyTorch computes and differentiates it."""
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    """Keeps its inputs, which no other operator keeps, and nothing else."""

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
    """For a compiler, in whose backward one loop then makes both gradients and the product that ``w2`` had as its
    input: one exponential, and the gradient of ``gate`` in the memory of ``up``.
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
        product = gate * sigmoid * up  # as the forward has it, so that the compiler sees one
        return grad * (up * sigmoid + product * (1 - sigmoid)), grad * (gate * sigmoid)

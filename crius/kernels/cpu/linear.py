"""Linear layers without a bias by oneDNN, which multiplies float32 matrices faster than MKL on AMD CPUs with AVX-512.

oneDNN computes the forward and the gradient of the input. The gradient of the weight sums over tokens, for which oneDNN
needs the transposed input. A compiled block writes the transposed input where it computes the input. Uncompiled, the
copy would cost as much as oneDNN gains, so MKL multiplies. The operator is our own, so that torch.compile does not
split it, and FLOP counts and checkpointing know it by name.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from crius.kernels import choice

_library = torch.library.Library("crius", "DEF")
_library.define("mkldnn_linear(Tensor x, Tensor weight) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    rows = torch.ops.mkldnn._linear_pointwise.default(x.flatten(0, -2), weight, None, "none", [], "")
    # as F.linear ends: not by a view, since FSDP warns about views
    product: Tensor = torch.ops.aten._unsafe_view.default(rows, (*x.shape[:-1], weight.shape[0]))
    return product


_library.impl("mkldnn_linear", _multiply, "CPU")
OPERATOR = torch.ops.crius.mkldnn_linear.default
"""``x`` ``(..., in)`` and ``weight`` ``(out, in)``, float32 on a CPU."""


@torch.library.register_fake("crius::mkldnn_linear", lib=_library)
def _shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@register_flop_formula(torch.ops.crius.mkldnn_linear)
def flops(x_shape: torch.Size, weight_shape: torch.Size, *args: object, **kwargs: object) -> int:
    """FLOPs of ``x`` ``(..., in)`` times ``weight`` ``(out, in)`` transposed."""
    return 2 * x_shape.numel() * weight_shape[0]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` ``(..., in)`` times ``weight`` ``(out, in)`` transposed: ``(..., out)``."""
    if when(x, weight):
        # no gradient, compiler or counter needs the operator and its 50 us
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            return _multiply(x, weight) if x.numel() > weight.shape[1] else reference(x, weight)
        product: Tensor = _Linear.apply(x, weight)
        return product
    return reference(x, weight)


def when(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies: this process chose it, and both are plain float32 tensors and not empty."""
    if choice.current().linear != "onednn":
        return False
    return choice.are_plain((torch.float32,), x, weight) and x.dim() > 1 and x.numel() > 0 and weight.numel() > 0


@torch.no_grad()
def store_by_columns(weights: Iterable[Tensor]) -> None:
    """Store matrices ``(out, in)`` in column-major order, in place, where oneDNN multiplies.

    A product with one token or a few then reads a matrix sequentially: docs/LOG.md has the gain.
    """
    for weight in weights:
        if when(weight, weight):
            weight.data = weight.data.t().contiguous().t()


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's multiplication."""
    return F.linear(x, weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        product: Tensor = OPERATOR(x, weight)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = OPERATOR(grad, weight.t()) if ctx.needs_input_grad[0] else None
        grad_weight = _grad_weight(grad.flatten(0, -2), x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def _grad_weight(grad: Tensor, x: Tensor) -> Tensor:
    """``(out, in)`` from ``(tokens, out)`` and ``(tokens, in)``."""
    if not torch.compiler.is_compiling():
        return grad.t() @ x
    if x.shape[1] > 2 * grad.shape[1]:  # for a wide input, such as SwiGLU's product, the gradient is transposed instead
        return OPERATOR(grad.t().contiguous(), x.t())
    return OPERATOR(x.t().contiguous(), grad.t()).t().contiguous()

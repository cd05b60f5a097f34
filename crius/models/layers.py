"""The layers that models share.

Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245), rotary positions (Su et al. 2021, arXiv:2104.09864),
SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202), and the loss. The loss is summed, never averaged: the step divides
it once by the global number of tokens with a label.

B batch, T tokens, D model dim, N query heads, K key/value heads, H head dim, V vocabulary
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from crius.errors import PlanError
from crius.kernels.attention import Mask, causal_attention, document_mask, masked_attention
from crius.kernels.cpu.linear import linear
from crius.kernels.cpu.pointwise import rms_norm, rotary, swiglu
from crius.kernels.linear_cross_entropy import Chunks, linear_cross_entropy, token_losses
from crius.models.config import RopeScaling


class Linear(nn.Linear):
    """``nn.Linear`` without a bias. ``crius.quantize`` replaces it by subclasses that multiply in low precision.

    Tensor parallelism calls ``multiply`` with this rank's part of the input and of the weight, so that quantisation
    scales are those of the rank's own operands.
    """

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x`` ``(..., in)`` times ``weight`` ``(out, in)`` transposed: ``(..., out)``, in the dtype of ``x``.

        Computed in high precision by the kernel that this process chose.
        """
        return linear(x, weight)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in)`` to ``(..., out)``."""
        return self.multiply(x, self.weight)


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` over the last dim, computed by our kernel."""

    weight: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """``(..., D)`` to ``(..., D)``."""
        return rms_norm(x, self.weight, self.eps)


class FeedForward(nn.Module):
    """``w2(silu(w1 x) * w3 x)``, model dim D to hidden dim F and back."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, ffn_dim, bias=False)
        self.w2 = Linear(ffn_dim, dim, bias=False)
        self.w3 = Linear(dim, ffn_dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, D)`` to ``(B, T, D)``."""
        y: Tensor = self.w2(swiglu(self.w1(x_BTD), self.w3(x_BTD)))
        return y


def rotary_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """``head_dim / 2`` angular frequencies in radians per token, float64. Made on ``device`` without a copy."""
    return theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / -head_dim)


def stretched_frequencies(
    frequencies: Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> Tensor:
    """Llama 3.1's scaling: low frequencies are divided by ``factor``, high ones kept, with a linear blend between."""
    turns = original_context * frequencies / (2 * math.pi)  # turns of each frequency in the original context
    blend = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (blend + (1 - blend) / factor)


def float32_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """The stretched frequencies in radians per token, float32 on the CPU, with the bits that transformers 5.24 has.

    Operations in another order, or on another device, may change the last bit: at 131,072 tokens an angle of 8e-3.
    """
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if scaling is None:
        return plain
    context = scaling.original_context
    lengths = 2 * math.pi / plain  # tokens in a turn
    weight = context / lengths - scaling.low_freq_factor
    weight = weight / (scaling.high_freq_factor - scaling.low_freq_factor)
    divided = torch.where(
        lengths > context / scaling.low_freq_factor,
        plain / scaling.factor,
        (1 - weight) * plain / scaling.factor + weight * plain,
    )
    return torch.where(lengths < context / scaling.high_freq_factor, plain, divided)


def rotary_cos_sin(positions_BT: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles for ``crius.kernels.cpu.pointwise``, float32, each ``(B, T, 1, H)``.

    The two halves of H are equal, except that the first half of sin is negated.
    """
    angles = positions_BT[..., None, None].to(torch.float32) * frequencies.to(torch.float32)
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class DocumentMask(nn.Module):
    """Makes the mask of tokens that a token may attend to. A separate module, so that a layout can replace it."""

    def forward(self, positions_BT: Tensor, ends_BM: Tensor | None = None) -> Mask:
        """Mask of the tokens at ``positions_BT``, in documents that end at ``ends_BM``: see ``document_mask``."""
        return document_mask(positions_BT, ends_BM)


class CausalAttention(nn.Module):
    """Scaled dot-product attention over earlier tokens. A separate module, so that a layout can replace it."""

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Mask | None) -> Tensor:
        """``(B, T, N, H)``; ``mask`` is the result of ``document_mask``, or None for plain causal attention."""
        q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        y = causal_attention(q, k, v) if mask is None else masked_attention(q, k, v, mask)
        return y.transpose(1, 2)


def replaceable(model: nn.Module, kind: type[nn.Module], fix: str) -> list[str]:
    """Names of the modules of type ``kind``, which a cache or a layout replaces by its own.

    Args:
        model: the model, or a part of it.
        kind: ``CausalAttention`` or ``DocumentMask``.
        fix: what the user can do about a subclass.

    Raises:
        PlanError: a module is of a subclass: the replacement would not compute what it computes.
    """
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, kind)}
    for name, module in modules.items():
        found = type(module)
        if found is not kind:
            raise PlanError(
                f"{name} is a {found.__module__}.{found.__qualname__}, a subclass of {kind.__name__}.",
                why=f"it would be replaced by a module that computes what {kind.__name__} does",
                fix=fix,
            )
    return list(modules)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; query heads share key/value heads in groups."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = Linear(dim, num_heads * head_dim, bias=False)
        self.wk = Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wv = Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wo = Linear(num_heads * head_dim, dim, bias=False)
        self.inner = CausalAttention()

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None) -> Tensor:
        """Attention, ``(B, T, D)``; ``mask`` as ``CausalAttention`` takes it."""
        q_BTNH, k_BTKH, v_BTKH = self.project(x_BTD)
        q_BTNH = rotary(q_BTNH, *rope)
        k_BTKH = rotary(k_BTKH, *rope)
        y: Tensor = self.wo(self.inner(q_BTNH, k_BTKH, v_BTKH, mask).flatten(2))
        return y

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values before the rotation by positions: ``(B, T, N, H)`` and twice ``(B, T, K, H)``."""
        # -1 heads: the local count, so this line serves one device and a tensor-parallel shard alike
        q_BTNH, k_BTKH, v_BTKH = (w(x_BTD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        return q_BTNH, k_BTKH, v_BTKH


class Output(Linear):
    """A linear layer that can pass its weight, while it is gathered, to a function that computes more than logits."""

    def forward(self, x_BTD: Tensor, use: Callable[..., Tensor] | None = None) -> Tensor:
        """Logits ``(B, T, V)``, or the result of ``use(input, weight)``.

        Tensor parallelism calls ``use`` with this rank's rows of the weight, and with ``first_row`` and ``gather`` as
        ``linear_cross_entropy`` takes them.
        """
        return super().forward(x_BTD) if use is None else use(x_BTD, self.weight)


class Loss(nn.Module):
    """Sum of the token losses of hidden states. A separate module, so that hooks can find it.

    Attributes:
        chunks: chunks that logits and losses are computed in; None computes all logits, then all losses.
        token_losses: function of all logits and labels, used without chunks; it may be compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.chunks: Chunks | None = None
        self.token_losses: Callable[[Tensor, Tensor], Tensor] = token_losses

    def forward(self, hidden_BTD: Tensor, labels_BT: Tensor, output: nn.Module) -> Tensor:
        """A float64 scalar. In float64 the order of summation has no visible effect.

        Args:
            hidden_BTD: input of the output layer; under tensor parallelism, this rank's part of the sequence.
            labels_BT: labels of the whole sequence.
            output: the output layer; with chunks, an ``Output``. Where another pipeline stage has the output layer,
                this is an ``nn.Identity``, and the hidden states are returned.
        """
        if isinstance(output, nn.Identity):
            return hidden_BTD
        if self.chunks is not None:
            loss: Tensor = output(hidden_BTD, partial(linear_cross_entropy, labels_BT=labels_BT, chunks=self.chunks))
            return loss
        losses = self.token_losses(output(hidden_BTD), labels_BT)
        return losses.sum(dtype=torch.float64)


def loss_of(model: nn.Module) -> Loss:
    """The loss module of a model, or of a part of a model."""
    [loss] = (module for module in model.modules() if isinstance(module, Loss))
    return loss

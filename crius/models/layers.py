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
from torch.nn import functional as F

from crius.errors import PlanError
from crius.kernels.attention import Mask, causal_attention, document_mask, masked_attention, softcapped
from crius.kernels.cpu.linear import linear
from crius.kernels.cpu.pointwise import rms_norm, rotary, swiglu
from crius.kernels.linear_cross_entropy import Chunks, linear_cross_entropy, token_losses
from crius.models.config import DecoderConfig
from crius.models.description import Activation
from crius.models.description import Attention as Described
from crius.models.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling


class Linear(nn.Linear):
    """``nn.Linear``. ``crius.quantize`` replaces it by subclasses that multiply in low precision.

    Tensor parallelism calls ``multiply`` with this rank's part of the input and of the weight, so that quantisation
    scales are those of the rank's own operands. A bias is added afterwards, in the dtype of the product.
    """

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x`` ``(..., in)`` times ``weight`` ``(out, in)`` transposed: ``(..., out)``, in the dtype of ``x``.

        Computed in high precision by the kernel that this process chose.
        """
        return linear(x, weight)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in)`` to ``(..., out)``."""
        return plus(self.multiply(x, self.weight), self.bias)


def plus(product: Tensor, bias: Tensor | None) -> Tensor:
    """``product`` with the bias of its layer, if it has one."""
    return product if bias is None else product + bias


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` over the last dim, computed by our kernel.

    Attributes:
        plus_one: the factor is 1 + weight, computed in float32 at least, as Gemma has it.
    """

    weight: nn.Parameter
    eps: float

    def __init__(self, dim: int, eps: float, *, plus_one: bool = False) -> None:
        super().__init__(dim, eps=eps)
        self.plus_one = plus_one

    def forward(self, x: Tensor) -> Tensor:
        """``(..., D)`` to ``(..., D)``."""
        return self.normalize(x, self.weight, rms_norm)

    def normalize(self, x: Tensor, weight: Tensor, kernel: Callable[[Tensor, Tensor, float | None], Tensor]) -> Tensor:
        """``x`` normalised by ``kernel``, with ``weight`` as this rank holds it."""
        if not self.plus_one:
            return kernel(x, weight, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        return kernel(x.to(wide), self.factor(weight, wide), self.eps).to(x.dtype)

    def factor(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """What normalised numbers are multiplied by, computed in ``dtype``."""
        return 1 + weight.to(dtype) if self.plus_one else weight.to(dtype)


class FeedForward(nn.Module):
    """``w2(f(w1 x) * w3 x)`` with the activation f, model dim D to hidden dim F and back."""

    def __init__(self, dim: int, ffn_dim: int, *, bias: bool = False, activation: Activation = "silu") -> None:
        super().__init__()
        self.w1 = Linear(dim, ffn_dim, bias=bias)
        self.w2 = Linear(ffn_dim, dim, bias=bias)
        self.w3 = Linear(dim, ffn_dim, bias=bias)
        self.activation = activation

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, D)`` to ``(B, T, D)``."""
        y: Tensor = self.w2(gated(self.activation, self.w1(x_BTD), self.w3(x_BTD)))
        return y


def gated(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """``f(gate) * up``."""
    if activation == "silu":
        return swiglu(gate, up)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def rotary_frequencies(rope: Rope, device: torch.device) -> Tensor:
    """``rope.dim / 2`` angular frequencies in radians per token, ``(H / 2,)``, float64 or float32.

    In float32 they have the bits that transformers 5.24 computes on a CPU. Operations in another order, or on another
    device, may change the last bit: at 131,072 tokens an angle of 8e-3.
    """
    if rope.is_float32:
        device = torch.device("cpu")
    dtype = torch.float32 if rope.is_float32 else torch.float64
    exponents = torch.arange(0, rope.dim, 2, dtype=dtype, device=device) / rope.dim
    plain = 1.0 / rope.theta**exponents if rope.is_float32 else rope.theta**-exponents
    if isinstance(rope.scaling, LinearScaling):
        return plain / rope.scaling.factor
    if isinstance(rope.scaling, YarnScaling):
        return _yarn(plain, rope.theta**exponents, rope, rope.scaling)
    if isinstance(rope.scaling, Llama3Scaling):
        return _llama3_as_transformers(plain, rope.scaling) if rope.is_float32 else _llama3(plain, rope.scaling)
    return plain


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Low frequencies are divided by the factor, high ones kept, with a linear blend between."""
    turns = scaling.original_context * frequencies / (2 * math.pi)  # turns of each frequency in the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)


def _llama3_as_transformers(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
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


def _yarn(plain: Tensor, powers: Tensor, rope: Rope, scaling: YarnScaling) -> Tensor:
    """Frequencies with many turns in the original context are kept, those with few divided, with a blend between."""

    def place(turns: float) -> float:
        """The index of the frequency with so many turns in the original context."""
        return rope.dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = place(scaling.beta_fast)
    high = place(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    places = torch.arange(len(plain), dtype=torch.float32, device=plain.device).to(plain.dtype)
    kept = 1 - ((places - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + plain * kept


def rotary_cos_sin(positions_BT: Tensor, frequencies: Tensor, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles for ``crius.kernels.cpu.pointwise``, float32, each ``(B, T, 1, H)``.

    The two halves of H are equal, except that the first half of sin is negated. Both are multiplied by ``magnitude``.
    """
    angles = positions_BT[..., None, None].to(torch.float32) * frequencies.to(torch.float32)
    cos = angles.cos()
    sin = angles.sin()
    if magnitude != 1.0:
        cos = cos * magnitude
        sin = sin * magnitude
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class DocumentMask(nn.Module):
    """Makes the mask of tokens that a token may attend to. A separate module, so that a layout can replace it."""

    def forward(self, positions_BT: Tensor, ends_BM: Tensor | None = None, window: int = 0) -> Mask:
        """Mask of the tokens at ``positions_BT``, in documents that end at ``ends_BM``: see ``document_mask``."""
        return document_mask(positions_BT, ends_BM, window)


class CausalAttention(nn.Module):
    """Scaled dot-product attention over earlier tokens. A separate module, so that a layout can replace it.

    Args:
        scale: factor of the scores; None: ``H ** -0.5``.
        window: newest tokens that a token attends to, which the mask says too; 0: all.
        softcap: bound of the scores; 0: none.
    """

    def __init__(self, scale: float | None = None, window: int = 0, softcap: float = 0.0) -> None:
        super().__init__()
        self.scale = scale
        self.window = window
        self.softcap = softcap

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Mask | None) -> Tensor:
        """``(B, T, N, H)``; ``mask`` is the result of ``document_mask``, or None for plain causal attention without a
        bound of the scores.
        """
        q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        if mask is None:
            y = causal_attention(q, k, v, self.scale)
        else:
            y = masked_attention(q, k, v, mask, self.scale, self.softcap)
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
    """Causal self-attention with rotary positions; query heads share key/value heads in groups.

    Args:
        config: sizes of the decoder.
        facts: the description of this attention.
    """

    def __init__(self, config: DecoderConfig, facts: Described) -> None:
        super().__init__()
        self.head_dim = facts.head_dim
        self.rotary_dim = facts.rotary_dim
        self.rotary_pairs = config.rotary_pairs
        self.qk_norm = facts.qk_norm
        biased = {weight.name.removesuffix(".bias") for weight in facts.weights if weight.kind == "bias"}
        queries = facts.num_heads * facts.head_dim
        keys = facts.num_kv_heads * facts.head_dim
        self.wq = Linear(config.dim, queries, bias="wq" in biased)
        self.wk = Linear(config.dim, keys, bias="wk" in biased)
        self.wv = Linear(config.dim, keys, bias="wv" in biased)
        self.wo = Linear(queries, config.dim, bias="wo" in biased)
        if facts.qk_norm != "none":
            is_whole = facts.qk_norm == "all"
            widths = (queries, keys) if is_whole else (facts.head_dim, facts.head_dim)
            self.q_norm = RMSNorm(widths[0], config.norm_eps, plus_one=config.norm_plus_one)
            self.k_norm = RMSNorm(widths[1], config.norm_eps, plus_one=config.norm_plus_one)
        self.inner = CausalAttention(facts.scale, facts.window, facts.softcap)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Mask | None) -> Tensor:
        """``(B, T, D)``; arguments as in ``attend``."""
        y: Tensor = self.wo(self.attend(x_BTD, rope, mask))
        return y

    def attend(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Mask | None) -> Tensor:
        """What all heads found, ``(B, T, N * H)``.

        Args:
            x_BTD: input of the layer.
            rope: cos and sin of the rotary angles; None: the layer has no positions.
            mask: as ``CausalAttention`` takes it.
        """
        q_BTNH, k_BTKH, v_BTKH = self.project(x_BTD)
        if rope is not None:
            q_BTNH = self._rotated(q_BTNH, *rope)
            k_BTKH = self._rotated(k_BTKH, *rope)
        y_BTNH: Tensor = self.inner(q_BTNH, k_BTKH, v_BTKH, mask)
        return y_BTNH.flatten(2)

    def _rotated(self, x_BTNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.rotary_dim == self.head_dim:
            return rotary(self._in_halves(x_BTNH), cos, sin)
        leading, rest = x_BTNH.split((self.rotary_dim, self.head_dim - self.rotary_dim), dim=-1)
        return torch.cat((rotary(self._in_halves(leading), cos, sin), rest), dim=-1)

    def _in_halves(self, x_BTNH: Tensor) -> Tensor:
        """Queries or keys with the firsts of all pairs, then the seconds: their products stay the same."""
        return x_BTNH.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.rotary_pairs else x_BTNH

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values before the rotation by positions: ``(B, T, N, H)`` and twice ``(B, T, K, H)``."""
        queries = self.wq(x_BTD)
        keys = self.wk(x_BTD)
        values = self.wv(x_BTD)
        if self.qk_norm == "all":
            queries = self.q_norm(queries)
            keys = self.k_norm(keys)
        # -1 heads: the local count, so this line serves one device and a tensor-parallel shard alike
        q_BTNH, k_BTKH, v_BTKH = (x.unflatten(-1, (-1, self.head_dim)) for x in (queries, keys, values))
        if self.qk_norm == "head":
            q_BTNH = self.q_norm(q_BTNH)
            k_BTKH = self.k_norm(k_BTKH)
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

    Args:
        softcap: bound of the logits; 0: none.

    Attributes:
        chunks: chunks that logits and losses are computed in; None computes all logits, then all losses.
        token_losses: function of all logits and labels, used without chunks; it may be compiled.
        note: gets the loss of each token of a call with gradients; with chunks, theirs does.
    """

    def __init__(self, softcap: float = 0.0) -> None:
        super().__init__()
        self.softcap = softcap
        self.chunks: Chunks | None = None
        self.token_losses: Callable[[Tensor, Tensor], Tensor] = token_losses
        self.note: Callable[[Tensor], None] | None = None

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
        losses = self.token_losses(softcapped(output(hidden_BTD), self.softcap), labels_BT)
        if self.note and torch.is_grad_enabled():
            self.note(losses.detach())
        return losses.sum(dtype=torch.float64)


def loss_of(model: nn.Module) -> Loss:
    """The loss module of a model, or of a part of a model."""
    [loss] = (module for module in model.modules() if isinstance(module, Loss))
    return loss

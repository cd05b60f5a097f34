"""``DecoderConfig``: the sizes of a decoder, and the weights of its layers that follow from them. Torch-free."""

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from crius.models.description import Activation, Attention, Buffer, FeedForward, Layer, Norm, Placement, Weight
from crius.models.rope import Rope, Scaling

MOST_LAYERS = 1 << 17
"""Layers beyond these count as like the last of them. No model has as many, but a wrong number may be any."""
FFN_UNIT = 64
"""A feed-forward width that is computed from another width is rounded up to a multiple of this."""


def gqa(
    dim: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    rope: Rope | None,
    qk_norm: Norm = "none",
    qkv_bias: bool = False,
    o_bias: bool = False,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Attention:
    """Weights of grouped-query attention (arXiv:2305.13245), built as in ``crius.models.layers``.

    Args:
        dim: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: width of a head.
        rope: as in ``Attention``.
        qk_norm: as in ``Attention``.
        qkv_bias: queries, keys and values have biases.
        o_bias: the output layer has a bias.
        window: as in ``Attention``.
        scale: as in ``Attention``.
        softcap: as in ``Attention``.
    """
    queries = num_heads * head_dim
    keys = num_kv_heads * head_dim
    weights = [
        *_linear("wq", queries, dim, bias=qkv_bias),
        *_linear("wk", keys, dim, bias=qkv_bias),
        *_linear("wv", keys, dim, bias=qkv_bias),
        *_linear("wo", dim, queries, bias=o_bias, to_residual=True),
    ]
    if qk_norm != "none":
        is_whole = qk_norm == "all"
        weights.append(Weight("q_norm.weight", (queries if is_whole else head_dim,), "norm"))
        weights.append(Weight("k_norm.weight", (keys if is_whole else head_dim,), "norm"))
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        rope=rope,
        window=window,
        scale=scale,
        softcap=softcap,
        qk_norm=qk_norm,
        weights=tuple(weights),
    )


def _linear(name: str, out_features: int, in_features: int, *, bias: bool, to_residual: bool = False) -> list[Weight]:
    weight = Weight(f"{name}.weight", (out_features, in_features), "linear", to_residual=to_residual)
    return [weight, Weight(f"{name}.bias", (out_features,), "bias")] if bias else [weight]


def feed_forward(
    dim: int, width: int, *, gated: bool = True, bias: bool = False, activation: Activation = "silu"
) -> FeedForward:
    """Weights of a dense feed-forward, built as in ``crius.models.layers``; without a gate there is no ``w3``."""
    weights = [
        *_linear("w1", width, dim, bias=bias),
        *_linear("w2", dim, width, bias=bias, to_residual=True),
        *(_linear("w3", width, dim, bias=bias) if gated else ()),
    ]
    return FeedForward(width=width, gated=gated, activation=activation, weights=tuple(weights))


def routed_feed_forward(
    dim: int,
    *,
    num_experts: int,
    top_k: int,
    width: int,
    shared_width: int = 0,
    gated: bool = True,
    biases: bool = False,
) -> FeedForward:
    """Weights of a router and of experts, as in ``crius.models.moe``. Each token visits ``top_k`` experts.

    Args:
        dim: width of the residual stream.
        num_experts: routed experts.
        top_k: routed experts that a token visits.
        width: hidden width of one routed expert.
        shared_width: hidden width of all shared experts together, which every token visits; 0: no shared experts.
        gated: each expert has a gate (SwiGLU).
        biases: the router and the experts have biases.
    """
    weights = [Weight("router.weight", (num_experts, dim), "router")]
    for weight in feed_forward(dim, width, gated=gated).weights:
        name = f"experts.{weight.name.removesuffix('.weight')}"
        weights.append(Weight(name, (num_experts, *weight.shape), "expert", "", weight.to_residual))
        if biases:
            weights.append(Weight(f"{name}_bias", (num_experts, weight.shape[0]), "bias"))
    if biases:
        weights.append(Weight("router.bias", (num_experts,), "bias"))
    shared = feed_forward(dim, shared_width, gated=gated).weights if shared_width else ()
    return FeedForward(
        width=shared_width,
        gated=gated,
        num_experts=num_experts,
        top_k=top_k,
        expert_width=width,
        weights=(*weights, *(weight.within("shared") for weight in shared)),
    )


def decoder_layer(
    dim: int,
    attention: Attention,
    feed_forward: FeedForward,
    buffers: tuple[Buffer, ...] = (),
    *,
    norms: Placement = "pre",
) -> Layer:
    """The weights of ``crius.models.decoder.Block``, in its order.

    Args:
        dim: width of the residual stream.
        attention: of the layer.
        feed_forward: of the layer.
        buffers: with names relative to the feed-forward.
        norms: where the norms stand; see ``DecoderConfig``.
    """

    def part(norm: str, place: str, weights: tuple[Weight, ...]) -> list[Weight]:
        named = [weight.within(place) for weight in weights]
        if norms != "post":
            named.insert(0, Weight(f"{norm}_norm.weight", (dim,), "norm"))
        if norms != "pre":
            named.append(Weight(f"{norm}_post_norm.weight", (dim,), "norm"))
        return named

    return Layer(
        attention=attention,
        feed_forward=feed_forward,
        weights=(
            *part("attention", "attention", attention.weights),
            *part("ffn", "feed_forward", feed_forward.weights),
        ),
        buffers=tuple(buffer._replace(name=f"feed_forward.{buffer.name}") for buffer in buffers),
    )


class LayerKind(NamedTuple):
    """What may differ from layer to layer.

    Attributes:
        window: newest tokens that a token attends to, itself included; 0: all.
        rope_theta: base of the rotary frequencies; 0: the model's.
        stretched: the model's ``rope_scaling`` applies.
        positions: the layer has rotary positions.
    """

    window: int = 0
    rope_theta: float = 0.0
    stretched: bool = True
    positions: bool = True


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and words of one decoder. A model whose layers have other weights overrides ``layer``.

    Attributes:
        dim: width of the residual stream.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads. Several query heads share one.
        ffn_dim: hidden width of the feed-forward.
        vocab_size: rows of the embedding and of the output layer.
        head_dim: width of a head; -1: ``dim / num_heads``.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how the rotary frequencies are stretched for longer contexts.
        rope_float32: rotary frequencies are computed in float32 as transformers does, not in float64. Imported weights
            have learned with them. From about 8,000 tokens on the difference shows in the logits.
        norm_eps: number added to the mean square in every norm.
        tied_embeddings: the output layer shares the embedding's weight.
        attention_mask: tokens that a token attends to: all earlier ones, or the earlier ones of its document.
        pattern: kinds of the layers, repeated until every layer has one.
        rotary_share: share of a head's dims, the leading ones, that rotary positions rotate.
        rotary_pairs: a rotation turns neighbouring dims, not one of the first half with one of the second.
        qkv_bias: queries, keys and values have biases.
        o_bias: the output layer of attention has a bias.
        mlp_bias: the layers of the feed-forward have biases.
        qk_norm: queries and keys are normalised before they are rotated: not, each head alone, or all heads together.
        attention_scale: factor of the scores of attention; None: ``head_dim ** -0.5``.
        attention_softcap: bound c of the scores of attention: a score s becomes c tanh(s / c); 0: none.
        norms: RMSNorms before attention and feed-forward (``pre``), after them and before the residual is added
            (``post``), or ``both``.
        norm_plus_one: norms multiply by 1 + weight.
        activation: function of the feed-forward's gate: SiLU, or GELU, exact or by its tanh approximation.
        embedding_multiplier: factor of the embeddings.
        embedding_multiplier_rounded: this factor is rounded to the dtype of the embeddings, as Gemma has it.
        residual_multiplier: factor of what a layer adds to the residual stream.
        logits_divisor: divisor of the logits.
        logits_softcap: bound of the logits, as of the scores; 0: none.
    """

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int
    head_dim: int = -1
    rope_theta: float = 500_000.0
    rope_scaling: Scaling | None = None
    rope_float32: bool = False
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    attention_mask: Literal["causal", "document"] = "causal"
    pattern: tuple[LayerKind, ...] = (LayerKind(),)
    rotary_share: float = 1.0
    rotary_pairs: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Norm = "none"
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    norms: Placement = "pre"
    norm_plus_one: bool = False
    activation: Activation = "silu"
    embedding_multiplier: float = 1.0
    embedding_multiplier_rounded: bool = False
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.head_dim == -1:
            object.__setattr__(self, "head_dim", self.dim // max(1, self.num_heads))

    @property
    def ties(self) -> dict[str, str]:
        """Tied parameters: the name of each, and the name of the parameter whose tensor it shares."""
        return {"output.weight": "tok_embeddings.weight"} if self.tied_embeddings else {}

    def attention_of(self, index: int) -> Attention:
        """The attention of layer ``index``."""
        kind = self.pattern[index % len(self.pattern)]
        rope = Rope(
            theta=kind.rope_theta or self.rope_theta,
            dim=int(self.head_dim * self.rotary_share),
            scaling=self.rope_scaling if kind.stretched else None,
            is_float32=self.rope_float32,
        )
        return gqa(
            self.dim,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            rope=rope if kind.positions else None,
            qk_norm=self.qk_norm,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            window=kind.window,
            scale=self.attention_scale,
            softcap=self.attention_softcap,
        )

    def layer(self, index: int) -> Layer:
        """The description of layer ``index``. It depends on ``index`` by ``attention_of`` alone."""
        wide = feed_forward(self.dim, self.ffn_dim, bias=self.mlp_bias, activation=self.activation)
        return decoder_layer(self.dim, self.attention_of(index), wide, norms=self.norms)

    def first_like(self, index: int) -> int:
        """The number of the first layer that is described as layer ``index``; dense layers come first."""
        dense = getattr(self, "num_dense_layers", 0)
        begin = dense if index >= dense else 0
        return begin + (index - begin) % len(self.pattern)

    def described(self, index: int) -> Layer:
        """``layer(index)``, made once for all layers that are alike."""
        first = self.first_like(index)
        if first not in self._described:
            self._described[first] = self.layer(first)
        return self._described[first]

    @cached_property
    def _described(self) -> dict[int, Layer]:
        return {}

    def layers(self) -> tuple[tuple[int, Layer], ...]:
        """All layers in order, as pairs of count and description; equal neighbours are one pair."""
        starts = {0, self.first_like(self.num_layers)}  # where a layer may begin to differ from the one before
        if len(self.pattern) > 1:
            starts = set(range(min(self.num_layers, MOST_LAYERS)))
        edges = [*sorted(start for start in starts if start < self.num_layers), self.num_layers]
        runs: list[tuple[int, Layer]] = []
        for start, stop in itertools.pairwise(edges):
            layer = self.described(start)
            before = 0
            if runs and (runs[-1][1] is layer or runs[-1][1] == layer):
                before, _ = runs.pop()
            runs.append((before + stop - start, layer))
        return tuple(runs)


WORDS = (
    "pattern",
    "rotary_share",
    "rotary_pairs",
    "qkv_bias",
    "o_bias",
    "mlp_bias",
    "qk_norm",
    "attention_scale",
    "attention_softcap",
    "norms",
    "norm_plus_one",
    "activation",
    "embedding_multiplier",
    "embedding_multiplier_rounded",
    "residual_multiplier",
    "logits_divisor",
    "logits_softcap",
)
"""Fields of ``DecoderConfig`` that are no sizes: what its layers compute."""


@dataclass(frozen=True, kw_only=True)
class RoutedConfig(DecoderConfig):
    """Sizes of a decoder with experts in every layer except the first ``num_dense_layers``.

    Attributes:
        num_experts: routed experts per layer.
        top_k: routed experts that a token visits.
        expert_ffn_dim: hidden width of one routed expert; ``ffn_dim`` is the hidden width of the dense layers.
        shared_ffn_dim: hidden width of all shared experts together, which every token visits; 0: no shared experts.
        num_dense_layers: leading layers with a dense feed-forward.
        score: function that turns the router's logits into weights: a softmax over all experts, or a sigmoid of each.
        norm_topk: the weights of the chosen experts are divided by their sum.
        route_scale: factor on the weights.
        router_bias: experts are chosen by score plus a bias that balances their load. The bias does not change the
            weights (arXiv:2408.15664).
        num_groups: number of groups, of equal size, that the experts are divided into.
        top_groups: number of best groups that experts are chosen from. A group is ranked by the sum of its two best
            scores (DeepSeek-V3, arXiv:2412.19437).
    """

    num_experts: int
    top_k: int
    expert_ffn_dim: int
    shared_ffn_dim: int = 0
    num_dense_layers: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk: bool = True
    route_scale: float = 1.0
    router_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1

    def layer(self, index: int) -> Layer:
        """A dense layer, or a layer with experts."""
        if index < self.num_dense_layers:
            return super().layer(index)
        experts = routed_feed_forward(
            self.dim,
            num_experts=self.num_experts,
            top_k=self.top_k,
            width=self.expert_ffn_dim,
            shared_width=self.shared_ffn_dim,
        )
        bias = (Buffer("router.bias", (self.num_experts,)),) if self.router_bias else ()
        load = Buffer("load", (self.num_experts + 1,), "int64", persistent=False)
        return decoder_layer(self.dim, self.attention_of(index), experts, (*bias, load), norms=self.norms)


Config = TypeVar("Config", bound=DecoderConfig)


def resized(config: Config, **sizes: Any) -> Config:
    """``config`` with other sizes. A size that depends on a changed size, and is not given, is adapted.

    ``head_dim`` stays ``dim / num_heads`` where it was, and ``embedding_multiplier`` the root of ``dim``. Hidden widths
    keep their ratio to ``dim``. ``num_kv_heads`` keeps its ratio to ``num_heads``; where the new number of heads is not
    divisible, it becomes ``num_heads``.
    """
    changed = dict(sizes)
    dim = sizes.get("dim", config.dim)
    heads = sizes.get("num_heads", config.num_heads)
    if "head_dim" not in sizes and config.head_dim * config.num_heads == config.dim:
        changed["head_dim"] = -1
    if "embedding_multiplier" not in sizes and config.embedding_multiplier == config.dim**0.5:
        changed["embedding_multiplier"] = dim**0.5
    for name in ("ffn_dim", "expert_ffn_dim", "shared_ffn_dim") if dim != config.dim else ():
        if name not in sizes and (width := getattr(config, name, 0)):
            changed[name] = -(-width * dim // (config.dim * FFN_UNIT)) * FFN_UNIT
    if "num_kv_heads" not in sizes and heads != config.num_heads:
        group = config.num_heads // config.num_kv_heads
        changed["num_kv_heads"] = heads // group if heads % group == 0 else heads
    return replace(config, **changed)

"""``DecoderConfig``: the sizes of a decoder, and the weights of its layers that follow from them. Torch-free."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from crius.models.description import Attention, Buffer, FeedForward, Layer, Weight
from crius.strict_json import load_object

FFN_UNIT = 64
"""A feed-forward width that is computed from another width is rounded up to a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the low rotary frequencies for longer contexts (arXiv:2407.21783 and its code).

    Attributes:
        factor: divisor of the low frequencies.
        low_freq_factor: wavelengths above ``original_context / low_freq_factor`` tokens are stretched by ``factor``.
        high_freq_factor: wavelengths below ``original_context / high_freq_factor`` tokens stay unchanged.
        original_context: context length in tokens that the base model was trained with.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


ROPE_SCALING_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context",
}
"""Hugging Face's names in config.json of the numbers of ``RopeScaling``, mapped to our names."""


_PRECISION = "frequencies"
"""Key of ``model.rope_scaling`` beside Hugging Face's: ``float32`` is ``DecoderConfig.rope_float32``."""


def parse_rope_scaling(text: str) -> tuple[RopeScaling | None, bool]:
    """Parse ``model.rope_scaling``: ``none``, or JSON as ``rope_scaling_of`` takes it, perhaps with ``frequencies``.

    Returns:
        ``rope_scaling`` and ``rope_float32`` of ``DecoderConfig``.

    Raises:
        ValueError: the text is not valid; the message says why.
    """
    if text == "none":
        return None, False
    section = load_object(text.encode())
    precision = section.get(_PRECISION, "float64")
    if precision not in ("float32", "float64"):
        raise ValueError(f"{_PRECISION} {json.dumps(precision)[:100]} is not supported, only float32 and float64 are")
    return rope_scaling_of(section), precision == "float32"


def rope_scaling_text(scaling: RopeScaling | None, *, is_float32: bool = False) -> str:
    """The text that ``parse_rope_scaling`` parses to ``scaling`` and ``is_float32``."""
    if scaling is None and not is_float32:
        return "none"
    numbers = {key: getattr(scaling, name) for key, name in ROPE_SCALING_KEYS.items()} if scaling else {}
    section = {"rope_type": "llama3" if scaling else "default", **numbers}
    if is_float32:
        section[_PRECISION] = "float32"
    return json.dumps(section)


def rope_scaling_of(section: Mapping[str, Any]) -> RopeScaling | None:
    """Parse ``rope_scaling`` of a config.json. None: frequencies are not stretched. Unknown keys are ignored.

    Raises:
        ValueError: the section is not valid; the message says why.
    """
    kind = section.get("rope_type", section.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_type {json.dumps(kind)[:100]} is not supported, only llama3 and default are")
    for key in ROPE_SCALING_KEYS:
        number = section.get(key)
        kinds = int if key.startswith("original") else int | float
        if not isinstance(number, kinds) or isinstance(number, bool) or not 0 < number < 2**63:
            said = f", not {json.dumps(number)[:100]}" if key in section else ""
            noun = "whole number" if kinds is int else "number"
            raise ValueError(f"rope_type llama3 needs {key}, a positive {noun}{said}")
    scaling = RopeScaling(**{name: section[key] for key, name in ROPE_SCALING_KEYS.items()})
    if scaling.factor < 1 or scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ValueError("rope_type llama3 needs a factor of at least 1, and low_freq_factor below high_freq_factor")
    return scaling


def gqa(dim: int, num_heads: int, num_kv_heads: int, head_dim: int, *, head_norms: bool = False) -> Attention:
    """Weights of grouped-query attention (arXiv:2305.13245), built as in ``crius.models.layers``.

    Args:
        dim: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: width of a head.
        head_norms: each head's queries and keys are normalised before they are rotated.
    """
    queries = num_heads * head_dim
    keys = num_kv_heads * head_dim
    norms = (Weight("q_norm.weight", (head_dim,), "norm"), Weight("k_norm.weight", (head_dim,), "norm"))
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        rotary_dim=head_dim,
        weights=(
            Weight("wq.weight", (queries, dim), "linear"),
            Weight("wk.weight", (keys, dim), "linear"),
            Weight("wv.weight", (keys, dim), "linear"),
            Weight("wo.weight", (dim, queries), "linear", to_residual=True),
            *(norms if head_norms else ()),
        ),
    )


def feed_forward(dim: int, width: int, *, gated: bool = True) -> FeedForward:
    """Weights of a dense feed-forward, built as in ``crius.models.layers``; without a gate there is no ``w3``."""
    gate = (Weight("w3.weight", (width, dim), "linear"),) if gated else ()
    first = Weight("w1.weight", (width, dim), "linear")
    return FeedForward(
        width=width, gated=gated, weights=(first, Weight("w2.weight", (dim, width), "linear", to_residual=True), *gate)
    )


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


def decoder_layer(dim: int, attention: Attention, feed_forward: FeedForward, buffers: tuple[Buffer, ...] = ()) -> Layer:
    """Attention and feed-forward, each after a norm: the weights of ``crius.models.decoder.Block``, in its order.

    The names of ``buffers`` are relative to the feed-forward.
    """
    return Layer(
        attention=attention,
        feed_forward=feed_forward,
        weights=(
            Weight("attention_norm.weight", (dim,), "norm"),
            *(weight.within("attention") for weight in attention.weights),
            Weight("ffn_norm.weight", (dim,), "norm"),
            *(weight.within("feed_forward") for weight in feed_forward.weights),
        ),
        buffers=tuple(buffer._replace(name=f"feed_forward.{buffer.name}") for buffer in buffers),
    )


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of one decoder. A model whose layers have other weights overrides ``layer`` or ``layers``.

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
    """

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int
    head_dim: int = -1
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    rope_float32: bool = False
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    attention_mask: Literal["causal", "document"] = "causal"

    def __post_init__(self) -> None:
        if self.head_dim == -1:
            object.__setattr__(self, "head_dim", self.dim // max(1, self.num_heads))

    @property
    def rotary_dim(self) -> int:
        """Leading dims of a head that rotary positions rotate."""
        return self.head_dim

    @property
    def ties(self) -> dict[str, str]:
        """Tied parameters: the name of each, and the name of the parameter whose tensor it shares."""
        return {"output.weight": "tok_embeddings.weight"} if self.tied_embeddings else {}

    def layer(self) -> Layer:
        """The description of one layer, where all layers are alike."""
        attention = gqa(self.dim, self.num_heads, self.num_kv_heads, self.head_dim)
        return decoder_layer(self.dim, attention, feed_forward(self.dim, self.ffn_dim))

    def layers(self) -> tuple[tuple[int, Layer], ...]:
        """All layers in order, as pairs of count and description; equal neighbours are one pair."""
        return ((self.num_layers, self.layer()),)


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

    def layers(self) -> tuple[tuple[int, Layer], ...]:
        """The dense layers, then the layers with experts."""
        dense = self.layer()
        experts = routed_feed_forward(
            self.dim,
            num_experts=self.num_experts,
            top_k=self.top_k,
            width=self.expert_ffn_dim,
            shared_width=self.shared_ffn_dim,
        )
        bias = (Buffer("router.bias", (self.num_experts,)),) if self.router_bias else ()
        load = Buffer("load", (self.num_experts + 1,), "int64", persistent=False)
        routed = decoder_layer(self.dim, dense.attention, experts, (*bias, load))
        num_dense = min(self.num_dense_layers, self.num_layers)
        runs = ((num_dense, dense), (self.num_layers - num_dense, routed))
        return tuple((count, layer) for count, layer in runs if count)


Config = TypeVar("Config", bound=DecoderConfig)


def resized(config: Config, **sizes: Any) -> Config:
    """``config`` with other sizes. A size that depends on a changed size, and is not given, is adapted.

    ``head_dim`` stays ``dim / num_heads`` where it was. Hidden widths keep their ratio to ``dim``. ``num_kv_heads``
    keeps its ratio to ``num_heads``; where the new number of heads is not divisible, it becomes ``num_heads``.
    """
    changed = dict(sizes)
    dim = sizes.get("dim", config.dim)
    heads = sizes.get("num_heads", config.num_heads)
    if "head_dim" not in sizes and config.head_dim * config.num_heads == config.dim:
        changed["head_dim"] = -1
    for name in ("ffn_dim", "expert_ffn_dim", "shared_ffn_dim") if dim != config.dim else ():
        if name not in sizes and (width := getattr(config, name, 0)):
            changed[name] = -(-width * dim // (config.dim * FFN_UNIT)) * FFN_UNIT
    if "num_kv_heads" not in sizes and heads != config.num_heads:
        group = config.num_heads // config.num_kv_heads
        changed["num_kv_heads"] = heads // group if heads % group == 0 else heads
    return replace(config, **changed)

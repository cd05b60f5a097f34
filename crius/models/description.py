"""``ModelDescription``: a model without torch, as its weights in order and the widths of its layers.

Counts, FLOPs, pipeline modules, linear layers, initial weights, and the planner's memory and matmuls derive from it.
``crius.models.decoder.check_decoder`` checks a built model against it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple

from crius.models.adapted import Adapted
from crius.models.plan import ShardingPlan
from crius.models.rope import Rope

Kind = Literal["embedding", "norm", "linear", "router", "expert", "output", "bias", "adapter"]

Norm = Literal["none", "head", "all"]
"""How queries and keys are normalised: not, each head alone, or all heads together."""
Placement = Literal["pre", "post", "both"]
"""Whether norms stand before attention and feed-forward, after them, or both."""
Activation = Literal["silu", "gelu", "gelu_tanh"]
"""Function of a feed-forward's gate."""

MATMULS = ("linear", "router", "expert", "output")
"""Kinds of weights that take part in a matmul with each token."""


class Buffer(NamedTuple):
    """One tensor without a gradient: state that a layer's ``after_update`` changes, or a counter of a step.

    Every rank that has the layer has the whole buffer. Its dtype does not depend on the training precision.

    Attributes:
        name: dotted name within the layer or model that lists it.
        shape: shape of the buffer.
        dtype: torch's name of the dtype; ``int64`` for a counter, since sums of int64 do not depend on the order.
        value: initial value of every element.
        persistent: True: state, saved in every checkpoint. False: a counter, which starts each step at 0.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    value: float = 0.0
    persistent: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class Weight(NamedTuple):
    """One trained tensor.

    Attributes:
        name: dotted name within the layer or model that lists it.
        shape: ``(out, in)`` of a matrix; ``(experts, out, in)`` of the stacked matrices of experts.
        kind: role of the weight in the model.
        unit: pipeline module that holds it, such as ``layers.3``; empty within a layer.
        to_residual: its result is added to the residual stream, so its initial values shrink with the layer count.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    unit: str = ""
    to_residual: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_routed(self) -> bool:
        """Whether the first dim is the experts of a layer, so that a token uses only a part of the weight."""
        return self.kind == "expert" or (self.kind == "bias" and len(self.shape) == 2)

    def within(self, place: str, unit: str = "") -> "Weight":
        """The same weight with a name relative to the parent of the module ``place``."""
        return self._replace(name=f"{place}.{self.name}", unit=unit)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Widths of a layer's attention.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: width of a query and a key.
        value_dim: width of a value.
        rope: rotary positions; None: the layer has none.
        window: newest tokens that a token attends to, itself included; 0: all.
        scale: factor of the scores; None: ``head_dim ** -0.5``.
        softcap: bound of the scores; 0: none.
        qk_norm: how queries and keys are normalised.
        weights: weights of the attention module, in its order, with names relative to it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    rope: Rope | None
    window: int = 0
    scale: float | None = None
    softcap: float = 0.0
    qk_norm: Norm = "none"
    weights: tuple[Weight, ...]

    @property
    def rotary_dim(self) -> int:
        """Leading dims of a head that rotary positions rotate."""
        return self.rope.dim if self.rope else 0

    def mean_context(self, seq_len: int) -> float:
        """Mean number of tokens that a token of a sequence of ``seq_len`` tokens attends to."""
        window = min(self.window or seq_len, seq_len)
        return window - window * (window - 1) / (2 * seq_len)


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """Widths of a layer's feed-forward.

    Attributes:
        width: hidden width for every token, of a dense layer or of all shared experts together.
        gated: with a gate: three matrices; without: two.
        activation: function of the gate.
        num_experts: routed experts; 0: the layer is dense.
        top_k: routed experts that a token visits.
        expert_width: hidden width of one routed expert.
        weights: weights of the feed-forward module, in its order, with names relative to it.
    """

    width: int
    gated: bool = True
    activation: Activation = "silu"
    num_experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    weights: tuple[Weight, ...]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer.

    Attributes:
        attention: widths of the attention.
        feed_forward: widths of the feed-forward.
        weights: all weights of the layer, in its order, with names relative to it.
        buffers: all buffers of the layer, likewise.
    """

    attention: Attention
    feed_forward: FeedForward
    weights: tuple[Weight, ...]
    buffers: tuple[Buffer, ...] = ()

    @cached_property
    def num_parameters(self) -> int:
        """Number of trained elements."""
        return sum(weight.numel for weight in self.weights)

    @cached_property
    def num_active_parameters(self) -> int:
        """Parameters that compute one token: of the routed experts, only the visited ones."""
        return sum(self._active(weight) for weight in self.weights)

    @cached_property
    def matmul_parameters(self) -> int:
        """Active parameters that take part in a matmul with each token."""
        return sum(self._active(weight) for weight in self.weights if weight.kind in MATMULS)

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of forward and backward (PaLM, arXiv:2204.02311, appendix B, with causal attention)."""
        attention = self.attention
        width = attention.num_heads * (attention.head_dim + attention.value_dim)
        return 6 * self.matmul_parameters + 6 * width * attention.mean_context(seq_len)

    def _active(self, weight: Weight) -> int:
        if not weight.is_routed:
            return weight.numel
        return weight.numel // self.feed_forward.num_experts * self.feed_forward.top_k


@dataclass(frozen=True)
class ModuleFacts:
    """One module that a pipeline stage can hold.

    Attributes:
        name: name in the model.
        parameters: number of trained elements. A tied weight counts in the first module that has it; in a pipeline it
            counts in both, since each has a copy.
        flops_per_token: FLOPs of forward and backward, without recompute.
    """

    name: str
    parameters: int
    flops_per_token: float


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelDescription:
    """A decoder: embedding, layers, norm, output layer.

    Attributes:
        name: architecture and flavor, for tables.
        config: sizes that its modules are built from (``crius.models.config.DecoderConfig``).
        plan: sharding plan.
        block: class of a layer's module, or its dotted path and name, which is imported only to build it. Empty: Crius
            cannot train this model yet.
        layers: every layer in order, as pairs of count and description.
        published_parameters: the publisher's count, if sizes do not give it. adapted: layers with adapters, or None.
    """

    name: str
    config: Any
    plan: ShardingPlan
    block: Any
    layers: tuple[tuple[int, Layer], ...]
    published_parameters: int | None = None
    adapted: Adapted | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelDescription) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.name, self.config, self.layers, self.published_parameters, self.adapted

    @cached_property  # the planner hashes one model thousands of times
    def _hash(self) -> int:
        return hash((self.name, self.config, self.published_parameters, self.adapted))

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return int(self.config.dim)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, which is the number of token ids."""
        return int(self.config.vocab_size)

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output layer shares the embedding's weight."""
        return bool(self.config.tied_embeddings)

    @property
    def num_heads(self) -> int:
        """Query heads of a layer."""
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of a layer."""
        return self.attention.num_kv_heads

    @property
    def ffn_dim(self) -> int:
        """Hidden width of a feed-forward; with experts, the hidden width of one routed expert."""
        feed_forward = self.layers[-1][1].feed_forward
        return feed_forward.expert_width or feed_forward.width

    @property
    def attention(self) -> Attention:
        """Attention of the first layer. Its widths are those of all layers, its window and positions may not be."""
        return self.layers[0][1].attention

    @property
    def windows(self) -> list[int]:
        """The windows of its layers, without repetitions; 0 is no window."""
        return sorted({layer.attention.window for _, layer in self.layers})

    @property
    def num_experts(self) -> int:
        """Routed experts per layer; 0: a dense model."""
        return self.layers[-1][1].feed_forward.num_experts

    @property
    def top_k(self) -> int:
        """Routed experts that a token visits."""
        return self.layers[-1][1].feed_forward.top_k

    @property
    def is_routed(self) -> bool:
        """Whether each token visits only some of the experts, so that tokens must be dispatched."""
        return self.top_k < self.num_experts

    @cached_property
    def num_layers(self) -> int:
        """Decoder layers."""
        return sum(count for count, _ in self.layers)

    @cached_property
    def dense(self) -> tuple[int, Layer | None]:
        """Number of layers with a dense feed-forward, and the first of them."""
        return self._with(experts=False)

    @cached_property
    def experts(self) -> tuple[int, Layer | None]:
        """Number of layers with routed experts, and the first of them."""
        return self._with(experts=True)

    def _with(self, *, experts: bool) -> tuple[int, Layer | None]:
        matching = [(count, layer) for count, layer in self.layers if bool(layer.feed_forward.num_experts) == experts]
        return sum(count for count, _ in matching), matching[0][1] if matching else None

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Every trained weight in the model's order. A tied weight is listed once, under its first name."""
        return tuple(self._weights())

    def _weights(self) -> Iterator[Weight]:
        vocabulary = (self.vocab_size, self.dim)
        yield Weight("tok_embeddings.weight", vocabulary, "embedding", "tok_embeddings")
        index = 0
        for count, layer in self.layers:
            for index in range(index, index + count):  # noqa: B020 - continues after the previous group of layers
                unit = f"layers.{index}"
                yield from (weight.within(unit, unit) for weight in layer.weights)
            index += 1
        yield Weight("norm.weight", (self.dim,), "norm", "norm")
        if not self.tied_embeddings:
            yield Weight("output.weight", vocabulary, "output", "output")

    @cached_property
    def adapters(self) -> tuple[Weight, ...]:
        """Both factors of the adapter of each adapted layer, with names relative to the model."""
        parts = self.adapted.parts(self.linears) if self.adapted else ()
        return tuple(Weight(name, shape, "adapter", unit) for name, shape, unit in parts)

    @property
    def trained(self) -> tuple[Weight, ...]:
        """Weights that the optimizer updates: the adapters if there are any, else all weights."""
        return self.adapters or self.weights

    @cached_property
    def num_trained(self) -> int:
        """Number of elements that the optimizer updates."""
        return sum(weight.numel for weight in self.adapters) if self.adapted else self.num_parameters

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """Every buffer in the model's order."""
        layers = [layer for count, layer in self.layers for _ in range(count)]
        return tuple(
            buffer._replace(name=f"layers.{index}.{buffer.name}")
            for index, layer in enumerate(layers)
            for buffer in layer.buffers
        )

    @cached_property
    def state_names(self) -> list[str]:
        """Names of all tensors that training changes: the parameters, then the persistent buffers."""
        buffers = [buffer.name for buffer in self.buffers if buffer.persistent]
        return [*(weight.name for weight in self.trained), *buffers]

    @cached_property
    def num_parameters(self) -> int:
        """Number of elements of all weights; a tied weight counts once."""
        layers = sum(count * layer.num_parameters for count, layer in self.layers)
        return layers + self.dim + self.vocab_size * self.dim * (1 if self.tied_embeddings else 2)

    @cached_property
    def num_active_parameters(self) -> int:
        """Parameters that compute one token: all except the routed experts that it does not visit."""
        return self.num_parameters - sum(
            n * (layer.num_parameters - layer.num_active_parameters) for n, layer in self.layers
        )

    @cached_property
    def matmul_parameters(self) -> int:
        """Parameters in matmuls with each token: the output layer counts, the embedding lookup does not."""
        return sum(n * layer.matmul_parameters for n, layer in self.layers) + self.vocab_size * self.dim

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs per token of forward and backward, without recompute: 6 per weight, 4 per frozen weight.

        Args:
            seq_len: tokens of a sequence, each of which attends to itself and all earlier tokens in its window.
        """
        layers = sum(n * layer.flops_per_token(seq_len) for n, layer in self.layers)
        frozen = 2 * self.matmul_parameters - 6 * self.num_trained if self.adapted else 0
        return layers + 6 * self.vocab_size * self.dim - frozen

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of ``weights`` by name."""
        return {weight.name: weight.shape for weight in self.weights}

    @cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """``(out_features, in_features)`` of every linear layer by name, in the model's order."""
        shapes = {
            weight.name.removesuffix(".weight"): weight.shape[-2:] for weight in self.weights if weight.kind == "linear"
        }
        return shapes | {"output": (self.vocab_size, self.dim)}  # type: ignore[return-value]

    def modules(self, seq_len: int, *, is_cut: bool = False) -> list[ModuleFacts]:
        """The modules that a pipeline can be cut between, in forward order, with parameters and FLOPs.

        Args:
            seq_len: tokens of a sequence.
            is_cut: whether the run has a pipeline.
        """
        is_shared = self.tied_embeddings and not is_cut
        vocabulary = self.vocab_size * self.dim
        layers = (layer for count, layer in self.layers for _ in range(count))
        return [
            ModuleFacts("tok_embeddings", vocabulary, 0),
            *(
                ModuleFacts(f"layers.{index}", layer.num_parameters, layer.flops_per_token(seq_len))
                for index, layer in enumerate(layers)
            ),
            ModuleFacts("norm", self.dim, 0),
            ModuleFacts("output", 0 if is_shared else vocabulary, 6 * vocabulary),
        ]

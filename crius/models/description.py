"""``ModelDescription``: what a model is, said once and without torch.

Its weights in order and the widths of its layers. Counts, FLOPs, pipeline modules, linear layers, how weights start,
and the planner's memory and matmuls all derive from it; ``crius.models.decoder`` holds a built model against it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple

from crius.models.adapted import Adapted
from crius.models.plan import ShardingPlan

Kind = Literal["embedding", "norm", "linear", "router", "expert", "output", "bias", "adapter"]

MATMULS = ("linear", "router", "expert", "output")
"""Kinds of weights that a token is multiplied with."""


class Buffer(NamedTuple):
    """One tensor that no gradient trains: state that a layer's ``after_update`` changes, or a counter of a step.

    Every rank that has the layer has all of it, and it keeps its dtype whatever the weights are trained in.

    Attributes:
        name: its dotted name, within what lists it.
        shape: of it.
        dtype: as torch names it; of a counter ``int64``, whose sums are the same in any order.
        value: what each of its numbers is at the start.
        persistent: it is state, in every checkpoint; else a counter, which starts each step at 0.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    value: float = 0.0
    persistent: bool = True

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return prod(self.shape)


class Weight(NamedTuple):
    """One trained tensor.

    Attributes:
        name: its dotted name, within what lists it.
        shape: ``(out, in)`` of a matrix, with the experts in front where a layer has many.
        kind: what it does.
        unit: the pipeline module it belongs to, such as ``layers.3``; empty within a layer.
        to_residual: its result is added to the residual stream, so it starts smaller the more layers there are.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    unit: str = ""
    to_residual: bool = False

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return prod(self.shape)

    @property
    def is_routed(self) -> bool:
        """It has a part for each expert of a layer, of which a token visits some."""
        return self.kind == "expert" or (self.kind == "bias" and len(self.shape) == 2)

    def within(self, place: str, unit: str = "") -> "Weight":
        """The same weight, named from outside the module ``place``."""
        return self._replace(name=f"{place}.{self.name}", unit=unit)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Widths of a layer's attention.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: width of a query and a key.
        value_dim: width of a value.
        rotary_dim: of ``head_dim``, what the position turns.
        weights: named within the attention module, in its order.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    rotary_dim: int
    weights: tuple[Weight, ...]

    @property
    def has_head_norms(self) -> bool:
        """Queries and keys are normalised, each head alone."""
        return any(weight.kind == "norm" and weight.shape == (self.head_dim,) for weight in self.weights)


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """Widths of a layer's feed-forward.

    Attributes:
        width: hidden width for every token: of a dense one, or of the shared experts together.
        gated: with a gate (SwiGLU), so that a part has three matrices and not two.
        num_experts: routed experts; 0: it is dense.
        top_k: routed experts that a token visits.
        expert_width: hidden width of one routed expert.
        weights: named within the feed-forward module, in its order.
    """

    width: int
    gated: bool = True
    num_experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    weights: tuple[Weight, ...]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer.

    Attributes:
        attention: its widths.
        feed_forward: its widths.
        weights: all of the layer's, named within it, in its order.
        buffers: likewise.
    """

    attention: Attention
    feed_forward: FeedForward
    weights: tuple[Weight, ...]
    buffers: tuple[Buffer, ...] = ()

    @cached_property
    def num_parameters(self) -> int:
        """Trained numbers."""
        return sum(weight.numel for weight in self.weights)

    @cached_property
    def num_active_parameters(self) -> int:
        """Those that compute one token: of the routed experts the visited ones."""
        return sum(self._active(weight) for weight in self.weights)

    @cached_property
    def matmul_parameters(self) -> int:
        """Those that a token is multiplied with."""
        return sum(self._active(weight) for weight in self.weights if weight.kind in MATMULS)

    def flops_per_token(self, mean_visible_context: float) -> float:
        """Of forward and backward: PaLM (arXiv:2204.02311), appendix B, but causal."""
        attention = self.attention
        width = attention.num_heads * (attention.head_dim + attention.value_dim)
        return 6 * self.matmul_parameters + 6 * width * mean_visible_context

    def _active(self, weight: Weight) -> int:
        if not weight.is_routed:
            return weight.numel
        return weight.numel // self.feed_forward.num_experts * self.feed_forward.top_k


@dataclass(frozen=True)
class ModuleFacts:
    """One module that a pipeline stage can hold.

    Attributes:
        name: as in the model.
        parameters: its trained numbers; a tied weight counts in the first module that has it, but in a pipeline in
            both, for each has a copy.
        flops_per_token: of its forward and backward, recompute not counted.
    """

    name: str
    parameters: int
    flops_per_token: float


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelDescription:
    """A decoder: embedding, layers, norm, output layer.

    Attributes:
        name: architecture and flavor, for tables.
        config: the sizes that its modules are built from (``crius.models.config.DecoderConfig``).
        plan: how it is laid out on a mesh.
        block: dotted path and class of a layer's module, imported only to build it, or the class; empty: Crius does not
            train this model yet.
        layers: every layer in order, equal ones that follow each other counted.
        published_parameters: the publisher's count, if sizes do not give it. adapted: layers with adapters, or none.
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

    @cached_property  # the planner asks it of one model thousands of times
    def _hash(self) -> int:
        return hash((self.name, self.config, self.published_parameters, self.adapted))

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return int(self.config.dim)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
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
        """Hidden width of a feed-forward; of experts that of one."""
        feed_forward = self.layers[-1][1].feed_forward
        return feed_forward.expert_width or feed_forward.width

    @property
    def attention(self) -> Attention:
        """Widths of attention, which all layers share."""
        return self.layers[0][1].attention

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0: a dense model."""
        return self.layers[-1][1].feed_forward.num_experts

    @property
    def top_k(self) -> int:
        """Routed experts that a token visits."""
        return self.layers[-1][1].feed_forward.top_k

    @property
    def is_routed(self) -> bool:
        """Tokens choose some of the experts, and are brought to them."""
        return self.top_k < self.num_experts

    @cached_property
    def num_layers(self) -> int:
        """Decoder layers."""
        return sum(count for count, _ in self.layers)

    @cached_property
    def dense(self) -> tuple[int, Layer | None]:
        """How many layers have a dense feed-forward, and the first of them."""
        return self._with(experts=False)

    @cached_property
    def experts(self) -> tuple[int, Layer | None]:
        """How many layers have routed experts, and the first of them."""
        return self._with(experts=True)

    def _with(self, *, experts: bool) -> tuple[int, Layer | None]:
        matching = [(count, layer) for count, layer in self.layers if bool(layer.feed_forward.num_experts) == experts]
        return sum(count for count, _ in matching), matching[0][1] if matching else None

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Every trained weight in the model's order; a tied one once, under its first name."""
        return tuple(self._weights())

    def _weights(self) -> Iterator[Weight]:
        vocabulary = (self.vocab_size, self.dim)
        yield Weight("tok_embeddings.weight", vocabulary, "embedding", "tok_embeddings")
        index = 0
        for count, layer in self.layers:
            for index in range(index, index + count):  # noqa: B020 - goes on where the last run ended
                unit = f"layers.{index}"
                yield from (weight.within(unit, unit) for weight in layer.weights)
            index += 1
        yield Weight("norm.weight", (self.dim,), "norm", "norm")
        if not self.tied_embeddings:
            yield Weight("output.weight", vocabulary, "output", "output")

    @cached_property
    def adapters(self) -> tuple[Weight, ...]:
        """Both factors of the adapter of each adapted layer, named within the model."""
        parts = self.adapted.parts(self.linears) if self.adapted else ()
        return tuple(Weight(name, shape, "adapter", unit) for name, shape, unit in parts)

    @property
    def trained(self) -> tuple[Weight, ...]:
        """What the optimizer updates: the adapters where there are any, else all weights."""
        return self.adapters or self.weights

    @cached_property
    def num_trained(self) -> int:
        """Numbers that the optimizer updates."""
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
        """Names of all that training changes: of the parameters, then of the buffers that are state."""
        buffers = [buffer.name for buffer in self.buffers if buffer.persistent]
        return [*(weight.name for weight in self.trained), *buffers]

    @cached_property
    def num_parameters(self) -> int:
        """All numbers of the weights, a tied weight once."""
        layers = sum(count * layer.num_parameters for count, layer in self.layers)
        return layers + self.dim + self.vocab_size * self.dim * (1 if self.tied_embeddings else 2)

    @cached_property
    def num_active_parameters(self) -> int:
        """Those that compute one token: all but the routed experts that it does not visit."""
        return self.num_parameters - sum(
            n * (layer.num_parameters - layer.num_active_parameters) for n, layer in self.layers
        )

    @cached_property
    def matmul_parameters(self) -> int:
        """Weights that a token is multiplied with: with the output layer, without the embedding lookup."""
        return sum(n * layer.matmul_parameters for n, layer in self.layers) + self.vocab_size * self.dim

    def flops_per_token(self, mean_visible_context: float) -> float:
        """Model FLOPs of one token's forward and backward, recompute not counted; a frozen weight takes 4, not 6.

        Args:
            mean_visible_context: tokens that a token attends to, on average; ``(T + 1) / 2`` for causal attention.
        """
        layers = sum(n * layer.flops_per_token(mean_visible_context) for n, layer in self.layers)
        frozen = 2 * self.matmul_parameters - 6 * self.num_trained if self.adapted else 0
        return layers + 6 * self.vocab_size * self.dim - frozen

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of ``weights`` by name."""
        return {weight.name: weight.shape for weight in self.weights}

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """``(out_features, in_features)`` of every linear layer by name, in the model's order."""
        shapes = {
            weight.name.removesuffix(".weight"): weight.shape[-2:] for weight in self.weights if weight.kind == "linear"
        }
        return shapes | {"output": (self.vocab_size, self.dim)}  # type: ignore[return-value]

    def modules(self, mean_visible_context: float, *, is_cut: bool = False) -> list[ModuleFacts]:
        """The modules between which a pipeline can be cut, in forward order, with parameters and FLOPs.

        Args:
            mean_visible_context: tokens that a token attends to, on average.
            is_cut: there is a pipeline.
        """
        is_shared = self.tied_embeddings and not is_cut
        vocabulary = self.vocab_size * self.dim
        layers = (layer for count, layer in self.layers for _ in range(count))
        return [
            ModuleFacts("tok_embeddings", vocabulary, 0),
            *(
                ModuleFacts(f"layers.{index}", layer.num_parameters, layer.flops_per_token(mean_visible_context))
                for index, layer in enumerate(layers)
            ),
            ModuleFacts("norm", self.dim, 0),
            ModuleFacts("output", 0 if is_shared else vocabulary, 6 * vocabulary),
        ]

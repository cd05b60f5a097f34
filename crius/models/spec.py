"""``ModelSpec``: all that Crius knows of a model, without torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from crius.models.plan import ShardingPlan


@dataclass(frozen=True)
class ModuleFacts:
    """One module that a pipeline stage can hold.

    Attributes:
        name: as in the model.
        parameters: its trained numbers; a tied weight counts in the first module that has it.
        flops_per_token: of its forward and backward, recompute not counted.
    """

    name: str
    parameters: int
    flops_per_token: float


class ModelFacts(Protocol):
    """What every model's config tells without building the model."""

    @property
    def dim(self) -> int:
        """Width of the residual stream."""

    @property
    def num_heads(self) -> int:
        """Query heads of a layer."""

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of a layer."""

    @property
    def ffn_dim(self) -> int:
        """Width of the feed-forward's hidden layer."""

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output layer shares the embedding's weight."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""

    def num_parameters(self) -> int:
        """All trained numbers, a tied weight once."""

    def matmul_parameters(self) -> int:
        """Weights that a token is multiplied with: with the output layer, without the embedding lookup."""

    def flops_per_token(self, mean_visible_context: float) -> float:
        """Model FLOPs of one token's forward and backward, recompute not counted."""

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every trained parameter by name, in the model's order; a tied weight once, under its first name."""

    def linears(self) -> dict[str, tuple[int, int]]:
        """``(out_features, in_features)`` of every linear layer by name, in the model's order."""

    def modules(self, mean_visible_context: float) -> list[ModuleFacts]:
        """The modules between which a pipeline can be cut, in forward order; they sum to the two above."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One architecture.

    Attributes:
        name: folder of ``crius/models``.
        flavors: sizes by name.
        customize: a flavor with other sizes; the arguments are fields of the flavor's dataclass.
        plan: the sharding plan of a flavor.
        module: dotted path and class of the ``nn.Module``, imported only to build it.
        hf_names: our parameter name patterns to Hugging Face's; ``*`` is the layer number.
    """

    name: str
    flavors: Mapping[str, ModelFacts]
    customize: Callable[..., ModelFacts]
    plan: Callable[[Any], ShardingPlan]
    module: str
    hf_names: Mapping[str, str]

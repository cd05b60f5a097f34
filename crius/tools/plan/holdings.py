"""The weights, and what the optimizer keeps of them, that one pipeline rank holds. Torch-free."""

from dataclasses import dataclass

from crius.tools.plan.stages import RankLayers, rank_layers
from crius.tools.plan.weights import Part, Weights, weights
from crius.tools.plan.workload import Workload

_STEP_BYTES = 4  # of a weight: how often it was updated


@dataclass(frozen=True)
class Held:
    """What a pipeline rank holds, in numbers unless a unit is named.

    Attributes:
        layers: which layers.
        units: the weights of each kind.
        whole: weights that it computes with, after tensor, expert and pipeline parallelism.
        own: weights that it stores or, where they are replicated, updates.
        end: weights of an embedding; of a rank without embedding and output layer: of a layer.
        state: bytes of its optimizer's running means and counts of steps.
    """

    layers: RankLayers
    units: Weights
    whole: float
    own: float
    end: float
    state: float

    def layer(self, index: int) -> Part:
        """Layer ``index`` of the rank; the dense ones come first."""
        return self.units.dense if index < self.layers.dense else self.units.experts

    def first(self, count: int) -> tuple[float, float]:
        """Weights of its first ``count`` layers, whole and stored."""
        dense = min(count, self.layers.dense)
        kinds = ((self.units.dense, dense), (self.units.experts, count - dense))
        return sum(part.whole * n for part, n in kinds if n), sum(part.own * n for part, n in kinds if n)


def held_by(workload: Workload, rank: int) -> Held:
    """What pipeline rank ``rank`` holds."""
    layout, layers = workload.layout, rank_layers(workload, rank)
    shards = layout.fsdp
    if workload.zero_stage in (1, 2):
        shards *= layout.dp_replicate
    elif workload.zero_stage == 0:
        shards = 1
    units = weights(workload.model, layout.tp, layout.ep, shards, is_tied=workload.is_tied)
    layer = units.dense if layers.dense else units.experts
    held = (
        (units.dense, layers.dense),
        (units.experts, layers.experts),
        (units.embedding, int(layers.has_embedding)),
        (units.head, int(layers.has_head)),
    )
    return Held(
        layers=layers,
        units=units,
        whole=sum(part.whole * count for part, count in held),
        own=sum(part.own * count for part, count in held),
        end=(units.embedding if layers.has_embedding or layers.has_head else layer).whole,
        state=sum(
            count * _state(workload, part, is_layer=index < 2) for index, (part, count) in enumerate(held) if count
        ),
    )


def _state(workload: Workload, part: Part, *, is_layer: bool) -> float:
    """Bytes of the running means of a unit and of the counts of steps."""
    moment, less = workload.moment_bytes, workload.muon and is_layer
    if moment < 2:  # 8 bits in blocks
        blocks, small = 2 * part.own_blocks - less * part.matrix_blocks, 2 * part.own_small - less * part.matrix_small
        nbytes = blocks * moment + small * 4
    else:
        nbytes = (2 * part.own - less * part.own_matrices) * moment
    return nbytes + _STEP_BYTES * part.tensors

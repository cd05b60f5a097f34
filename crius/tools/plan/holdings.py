"""Layers and weights of a pipeline rank, and the number of microbatches whose activations it has. Torch-free."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from crius.config.low_precision import parts
from crius.config.parallelism import ParallelismConfig
from crius.config.pipeline import SPLIT_BACKWARD, V_SCHEDULES, layers_of_stages, split_stages, stages_of_ranks
from crius.models.description import Layer, ModelDescription, Weight
from crius.tools.plan.workload import Workload


@dataclass(frozen=True)
class RankLayers:
    """Layers of one pipeline rank.

    Attributes:
        dense: number of layers with a dense feed-forward.
        experts: number of layers with experts.
        dense_spans: begin and end in the model of each stage's dense layers.
        expert_spans: the same for layers with experts.
        has_embedding: whether the rank has the embedding.
        has_head: whether it has the last norm and the output layer.
        in_flight: microbatches whose activations it has all at once; with several stages the mean over its layers.
        neighbours: stages next to its own on other ranks, which it receives from.
    """

    dense: int
    experts: int
    dense_spans: tuple[tuple[int, int], ...]
    expert_spans: tuple[tuple[int, int], ...]
    has_embedding: bool = True
    has_head: bool = True
    in_flight: float = 1.0
    neighbours: int = 0

    @property
    def layers(self) -> int:
        """Layers of both kinds."""
        return self.dense + self.experts


def rank_layers(workload: Workload, rank: int) -> RankLayers:
    """The layers of pipeline rank ``rank``."""
    model = workload.model
    degree = workload.layout.pp
    total = degree * workload.stages_per_rank if degree > 1 else 1
    held = stages_of_ranks(workload.schedule, degree, total)[rank] if degree > 1 else [0]
    sizes: tuple[int, ...] = (model.num_layers,)
    if degree > 1:
        sizes = workload.stage_layers or stage_layers(model, total, workload.seq_len)
    leading = model.dense[0] if model.num_experts else sum(sizes)  # the first layers are dense
    spans = [(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in held]
    dense = tuple((begin, min(end, leading)) for begin, end in spans if begin < leading)
    experts = tuple((max(begin, leading), end) for begin, end in spans if end > leading)
    beside = {near for stage in held for near in (stage - 1, stage + 1) if 0 <= near < total}
    return RankLayers(
        dense=sum(end - begin for begin, end in dense),
        experts=sum(end - begin for begin, end in experts),
        dense_spans=dense,
        expert_spans=experts,
        has_embedding=0 in held,
        has_head=total - 1 in held,
        in_flight=_in_flight(workload, rank, tuple(sizes[stage] for stage in held)) if degree > 1 else 1.0,
        neighbours=sum(near not in held for near in beside),
    )


def _in_flight(workload: Workload, rank: int, sizes: tuple[int, ...]) -> float:
    """Microbatches whose activations pipeline rank ``rank`` has all at once.

    1F1B and its interleaved form: Narayanan et al. 2021 (arXiv:2104.04473); zero bubble and its V: Qi et al. 2023 and
    2024 (arXiv:2401.10241, 2405.15362); DualPipe: arXiv:2412.19437.
    """
    degree = workload.layout.pp
    microbatches = workload.num_microbatches
    schedule = workload.schedule
    if schedule == "gpipe":
        return microbatches
    if schedule in V_SCHEDULES:
        return min(microbatches, degree + (1 if schedule == "dualpipev" else 0.5))
    if schedule.startswith("interleave") and len(sizes) > 1:
        return _interleaved(degree, rank, microbatches, sizes, splits=schedule in SPLIT_BACKWARD) / sum(sizes)
    return min(microbatches, degree - rank)


@lru_cache(maxsize=4096)
def _interleaved(degree: int, rank: int, microbatches: int, sizes: tuple[int, ...], *, splits: bool) -> int:
    """The most layers, counted once per microbatch, whose activations a rank with stages of ``sizes`` layers has.

    It takes a round of microbatches through its first stage, then through its second, and so on; backwards likewise. If
    the backward is split, later ranks fill their waits with forwards, so that all have the same number.
    """
    stages = len(sizes)
    rounds = max(1, microbatches // degree)
    each = -(-microbatches // rounds)
    warm_up = 2 * (degree - (0 if splits else rank) - 1) + (stages - 1) * each
    rounds = min(rounds, (warm_up + 1) // (stages * each) + 3)  # later rounds are like one after the warm-up
    forwards = [size for _ in range(rounds) for size in sizes for _ in range(each)][: microbatches * stages]
    backwards = [size for _ in range(rounds) for size in reversed(sizes) for _ in range(each)]
    ahead = min(len(forwards), warm_up + 1 + (splits and rank > 0))
    held = most = sum(forwards[:ahead])
    for entering, leaving in zip(forwards[ahead:], backwards, strict=False):
        held += entering - leaving
        most = max(most, held)
    return most


@lru_cache(maxsize=1024)
def stage_layers(model: ModelDescription, stages: int, seq_len: int) -> tuple[int, ...]:
    """Layers of each of ``stages``, as a run balances them."""
    if stages > model.num_layers:
        return (1,) * stages
    return layers_of_stages(split_stages(model.modules(seq_len), stages, ParallelismConfig()))


MIN_QUANTIZED = 4096
"""Numbers below which a weight keeps float32 moments (``crius/optim/storage.py``)."""

BLOCK = 256
"""Numbers that share a scale in 8-bit moments."""


_STEP_BYTES = 4  # per weight: its count of updates


@dataclass(frozen=True)
class HeldPart:
    """Weights of one unit of FSDP.

    Attributes:
        whole: numbers that a rank computes with, after tensor and expert parallelism.
        own: numbers that the fullest rank stores.
        state: bytes of the optimizer's running means of these, and of its counts of steps.
        routed: numbers of ``whole`` in routed experts.
    """

    whole: float = 0
    own: float = 0
    state: float = 0
    routed: float = 0

    def and_experts(self, experts: "HeldPart") -> "HeldPart":
        """This unit with routed experts."""
        own = self.own + experts.own
        state = self.state + experts.state
        return HeldPart(self.whole + experts.whole, own, state, experts.whole)


@dataclass(frozen=True)
class HeldWeights:
    """The units of a model on one rank.

    Attributes:
        dense: a layer with a dense feed-forward.
        experts: a layer with experts.
        embedding: before the layers.
        head: after the layers: the norm and, unless it is tied on the same stage, the output layer.
    """

    dense: HeldPart
    experts: HeldPart
    embedding: HeldPart
    head: HeldPart


def model_parameters(model: ModelDescription) -> int:
    """All trained numbers, a tied weight once; the published number if that is known to differ."""
    return model.published_parameters or model.num_parameters


@lru_cache(maxsize=4096)
def weights(
    model: ModelDescription,
    tp: int,
    ep: int,
    shards: int,
    *,
    is_tied: bool,
    moment_bytes: float,
    muon: bool,
) -> HeldWeights:
    """The units of ``model``, each weight split over ``tp`` ranks and then by rows over ``shards``.

    Args:
        model: its description.
        tp: tensor-parallel ranks, which split as the plan's rows say.
        ep: ranks that share the experts of a layer; they lie within ``tp * shards``.
        shards: ranks that store a part of each weight.
        is_tied: whether the output layer has neither a weight of its own nor a copy of the embedding's.
        moment_bytes: bytes of one number of the optimizer's running means; below 2: 8 bits in blocks.
        muon: whether matrices of the layers have one running mean; other weights have two.
    """

    def part(tensors: Iterable[_Tensor], matrix_moments: int = 2) -> HeldPart:
        return part_of(tensors, shards, moment_bytes, matrix_moments)

    def unit(layer: Layer | None) -> HeldPart:
        if layer is None:
            return HeldPart()
        moments = 1 if muon else 2
        common = part(_tensors(model, layer, tp), moments)
        routed = [one for one in layer.weights if one.is_routed]
        over = max(1, tp * shards // ep)
        return common.and_experts(part_of([_experts(weight, ep, over) for weight in routed], over, moment_bytes))

    norm = _Tensor(model.dim, 1, model.dim, is_matrix=False)
    embedding = _Tensor(-(-model.vocab_size // tp), model.dim, model.vocab_size * model.dim)
    return HeldWeights(
        dense=unit(model.dense[1]),
        experts=unit(model.experts[1]),
        embedding=part([embedding]),
        head=part([norm] if is_tied else [norm, embedding]),
    )


def part_of(tensors: Iterable["_Tensor"], shards: int, moment_bytes: float, matrix_moments: int = 2) -> HeldPart:
    """A unit of weights that tensor parallelism has split, by rows over ``shards``.

    Args:
        tensors: weights of the unit.
        shards: ranks that store a part of each.
        moment_bytes: bytes of one number of the optimizer's running means.
        matrix_moments: running means of a matrix.
    """
    pairs = [(tensor, -(-tensor.rows // shards) * tensor.columns) for tensor in tensors if tensor.rows]
    return HeldPart(
        whole=sum(tensor.rows * tensor.columns for tensor, _ in pairs),
        own=sum(own for _, own in pairs),
        state=sum(
            (matrix_moments if tensor.is_matrix else 2) * _moment(tensor, own, moment_bytes) + _STEP_BYTES
            for tensor, own in pairs
        ),
    )


class _Tensor(NamedTuple):
    """One weight on a tensor-parallel rank, ``(rows, columns)``, and the numbers of the whole weight."""

    rows: int
    columns: int
    total: int
    is_matrix: bool = True


def _moment(tensor: _Tensor, own: int, moment_bytes: float) -> float:
    """Bytes of one running mean of the ``own`` numbers of a weight."""
    if moment_bytes >= 2:
        return own * moment_bytes
    return own * 4 if tensor.total < MIN_QUANTIZED else -(-own // BLOCK) * BLOCK * moment_bytes


def _tensors(model: ModelDescription, layer: Layer, tp: int) -> list[_Tensor]:
    """The weights of a layer, without its routed experts."""
    own = [weight.within("layers.0") for weight in layer.weights if weight.shape[0] and not weight.is_routed]
    return [split_tensor(model, weight, tp) for weight in own]


def _experts(weight: Weight, ep: int, shards: int) -> _Tensor:
    """The experts of a rank, ``(E / ep, out, in)``. FSDP splits them by expert, or inside each if there are too few."""
    number, out, *features = weight.shape
    own = number // ep
    width = math.prod(features)
    if own >= shards:
        return _Tensor(own, out * width, weight.numel, is_matrix=False)
    return _Tensor(out, own * width, weight.numel, is_matrix=False)


def split_tensor(model: ModelDescription, weight: Weight, tp: int) -> _Tensor:
    """A weight or adapter, by its name in the model, on one of ``tp`` ranks."""
    rows = weight.shape[0]
    columns = math.prod(weight.shape[1:])
    module, _, part = weight.name.rpartition(".")
    if weight.kind in ("router", "norm") or module.endswith((".router", ".attention")):  # with its bias, and sinks
        return _Tensor(rows, columns, weight.numel, is_matrix=False)
    if weight.kind == "embedding":
        return _Tensor(-(-rows // tp), columns, weight.numel)
    style = model.plan.style_of(module)
    over_rows, over_columns = parts(style, model.num_kv_heads, tp)
    if style == "colwise_heads" and model.num_kv_heads < tp:
        over_rows = 1  # each rank has all of them, and computes one
    over_rows, over_columns = over_rows if part != "lora_A" else 1, over_columns if part != "lora_B" else 1
    return _Tensor(-(-rows // over_rows), -(-columns // over_columns), weight.numel, is_matrix=weight.kind != "bias")


@dataclass(frozen=True)
class Held:
    """Weights and state of a pipeline rank, in numbers unless a unit is named.

    Attributes:
        layers: its layers.
        units: weights of each kind of layer.
        whole: weights that it computes with, after tensor, expert and pipeline parallelism.
        own: weights that it stores or, if they are replicated, updates.
        end: weights of an embedding; on a rank without embedding and output layer: of a layer.
        state: bytes of its optimizer's running means and counts of steps.
        buffers: bytes of tensors that no gradient trains.
    """

    layers: RankLayers
    units: HeldWeights
    whole: float
    own: float
    end: float
    state: float
    buffers: float = 0.0

    def layer(self, index: int) -> HeldPart:
        """Layer ``index`` of the rank; the dense ones come first."""
        return self.units.dense if index < self.layers.dense else self.units.experts

    def first(self, count: int) -> tuple[float, float]:
        """Weights of its first ``count`` layers, whole and stored."""
        dense = min(count, self.layers.dense)
        kinds = ((self.units.dense, dense), (self.units.experts, count - dense))
        return sum(part.whole * n for part, n in kinds if n), sum(part.own * n for part, n in kinds if n)


def held_by(workload: Workload, rank: int) -> Held:
    """Weights and state of pipeline rank ``rank``."""
    layout = workload.layout
    layers = rank_layers(workload, rank)
    shards = layout.fsdp
    if workload.zero_stage in (1, 2):
        shards *= layout.dp_replicate
    elif workload.zero_stage == 0:
        shards = 1
    units = weights(
        workload.model,
        layout.tp,
        workload.expert_ranks,
        shards,
        is_tied=workload.is_tied,
        moment_bytes=workload.moment_bytes,
        muon=workload.muon,
    )
    first = units.dense if layers.dense else units.experts
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
        end=(units.embedding if layers.has_embedding or layers.has_head else first).whole,
        state=sum(part.state * count for part, count in held),
        buffers=sum(
            count * sum(buffer.numel * int(buffer.dtype[-2:]) // 8 for buffer in layer.buffers)  # as in int64
            for count, (_, layer) in ((layers.dense, workload.model.dense), (layers.experts, workload.model.experts))
            if layer
        ),
    )

"""Memory of a rank under LoRA: a frozen base without gradients, and adapters with all that training needs. Torch-free.

``peaks`` counts adapters like the weights of a model; the base is in addition, and FSDP gathers it. A search asks for
the same few sums thousands of times, so they are kept.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

from crius.config.lora import NF4_BLOCK, NF4_SCALES, LoraConfig, is_quantized
from crius.models.description import Layer, ModelDescription
from crius.models.description import Weight as Described
from crius.tools.plan.holdings import (
    Held,
    HeldPart,
    HeldWeights,
    RankLayers,
    part_of,
    rank_layers,
    split_tensor,
)
from crius.tools.plan.peaks import Activations, LossBytes, Moment, peak, waits_for_loss
from crius.tools.plan.workload import Workload

_UNPACKED_BYTES = 6
"""Bytes per number of the largest layer in fewer bits while it is multiplied: in float32, and in the dtype of the
matmul or of the widened codes."""


class Kept(NamedTuple):
    """Numbers that a layer keeps for its backward if not all of its weights have a gradient; means over the layers.

    Attributes:
        inputs: inputs of the first linear layers of attention and feed-forward; 2 if all weights are trained.
        products: share of the input of the feed-forward's last linear layer that is kept, in [0, 1].
        adapters: numbers per token that adapters computed from their inputs.
        first: share of the layers whose input needs no gradient.
    """

    inputs: float = 2.0
    products: float = 1.0
    adapters: float = 0.0
    first: float = 0.0


@lru_cache(maxsize=64)
def kept_by(model: ModelDescription) -> Kept:
    """Numbers that the layers of ``model`` keep."""
    adapted = model.adapted
    if adapted is None:
        return Kept()
    places: dict[tuple[str, bool], set[str]] = {}
    for name in adapted.linears:
        layer, _, module = name.removeprefix("layers.").partition(".")
        is_last = model.plan.style_of(name) == "rowwise"
        places.setdefault((module.partition(".")[0], is_last), set()).add(layer)
    shares = {place: len(layers) / model.num_layers for place, layers in places.items()}
    inputs = sum(share for (_, is_last), share in shares.items() if not is_last)
    products = shares.get(("feed_forward", True), 0.0)
    adapters = adapted.rank * len(adapted.linears) / model.num_layers
    return Kept(inputs, products, adapters, 1 / model.num_layers)


@lru_cache(maxsize=256)
def every_other(model: ModelDescription, layer: Layer, tp: int) -> float:
    """Further numbers per token that ``selective`` keeps: every second of all matmuls, with those of adapters.

    Args:
        model: a model with adapters.
        layer: one of its layers.
        tp: tensor-parallel ranks.
    """
    adapted = model.adapted
    assert adapted is not None
    widths: list[float] = []
    plain: list[float] = []
    for weight in sorted(layer.weights, key=lambda weight: weight.name.endswith("w2.weight")):  # w2 comes last
        if weight.kind == "linear":
            width = split_tensor(model, weight.within("layers.0"), tp).rows
            plain.append(width)
            name = weight.name.removesuffix(".weight")
            share = sum(linear.endswith(f".{name}") for linear in adapted.linears) / model.num_layers
            widths += [width, adapted.rank * share, width * share] if share else [width]
    return sum(widths[::2]) - sum(plain[::2])


@lru_cache(maxsize=4096)
def base_bytes(
    model: ModelDescription,
    units: tuple[str, ...],
    tp: int,
    ep: int,
    shards: int,
    param_bytes: float,
    base: Literal["keep", "int8", "nf4"],
) -> float:
    """Bytes of the frozen weights of ``units``, such as ``layers.3``, on the fullest of ``shards`` ranks.

    Args:
        model: its description.
        units: pipeline modules that hold the weights.
        tp: tensor-parallel ranks.
        ep: ranks that share the experts of a layer.
        shards: ranks that store a part of each weight.
        param_bytes: bytes of a number that is kept as it is.
        base: format of the linear layers.
    """
    lora = LoraConfig(rank=1, base=base)
    chosen = frozenset(units)
    total = 0.0
    for weight in (weight for weight in model.weights if weight.unit in chosen):
        if weight.kind == "linear" and is_quantized(lora, weight.shape):
            total += sum(_rows(rows, shards) * nbytes for rows, nbytes in _kept(weight, base))
        elif weight.kind == "expert":  # FSDP splits it over the tensor-parallel ranks too, and gathers a rank's experts
            split = shards * tp if shards > 1 else ep
            total += weight.numel / split * param_bytes
        else:
            tensor = split_tensor(model, weight, tp)
            total += _rows(tensor.rows, shards) * tensor.columns * param_bytes
    return total


def _kept(weight: Described, base: str) -> list[tuple[int, int]]:
    """Rows of each stored tensor of a weight, and bytes per row (``crius.quantize.frozen``)."""
    out_features, in_features = weight.shape
    if base == "int8":
        return [(out_features, in_features), (out_features, 4)]
    blocks = weight.numel // NF4_BLOCK
    return [(weight.numel // 2, 1), (blocks, 1), (17 + blocks // NF4_SCALES, 4)]


def _rows(rows: int, shards: int) -> int:
    return math.ceil(rows / shards)


def adapters_held(workload: Workload, rank: int) -> Held:
    """The adapters of pipeline rank ``rank``; each of its layers counts as the mean of them."""
    layers = rank_layers(workload, rank)
    layout = workload.layout
    total = _adapters(workload.model, _units(layers), layout.tp, layout.fsdp, workload.moment_bytes)
    each = max(1, layers.layers)
    mean = HeldPart(total.whole / each, total.own / each, total.state / each)
    held = HeldWeights(dense=mean, experts=mean, embedding=HeldPart(), head=HeldPart())
    return Held(layers=layers, units=held, whole=total.whole, own=total.own, end=0.0, state=total.state)


@lru_cache(maxsize=4096)
def _adapters(model: ModelDescription, units: tuple[str, ...], tp: int, shards: int, moment_bytes: float) -> HeldPart:
    chosen = frozenset(units)
    own = [split_tensor(model, weight, tp) for weight in model.adapters if weight.unit in chosen]
    return part_of(own, shards, moment_bytes)


@lru_cache(maxsize=1024)
def _units(layers: RankLayers) -> tuple[str, ...]:
    """Names of the layers of a rank."""
    spans = layers.dense_spans + layers.expert_spans
    return tuple(f"layers.{index}" for begin, end in spans for index in range(begin, end))


def frozen(workload: Workload, rank: int) -> tuple[float, float, float]:
    """Bytes of the base of a pipeline rank: stored, gathered at a time, and all of it whole."""
    layers = rank_layers(workload, rank)
    shards = workload.layout.fsdp
    units = _units(layers)
    ends: tuple[str, ...] = ("norm", "output") if layers.has_head else ()
    if layers.has_embedding or (layers.has_head and workload.model.tied_embeddings):
        ends = ("tok_embeddings", *ends)
    whole = _base(workload, units + ends)
    gathered = (2 if shards > 1 else 1) * _base(workload, units[:1]) + _base(workload, ends)
    return _base(workload, units + ends, shards), gathered, whole


def _base(workload: Workload, units: tuple[str, ...], shards: int = 1) -> float:
    layout = workload.layout
    return base_bytes(workload.model, units, layout.tp, layout.ep, shards, workload.param_bytes, workload.lora_base)


def casts(workload: Workload, held: Held) -> float:
    """Bytes of the adapters in the dtype of the matmul, which a layer keeps if it is not recomputed."""
    is_kept = workload.activation_checkpoint == "none" and workload.param_bytes < workload.weight_bytes
    return held.whole * workload.param_bytes * is_kept


def waiting(workload: Workload, rank: int) -> float:
    """Bytes of the last layer, gathered for its backward when the backward of the output layer begins."""
    if not waits_for_loss(workload):
        return 0.0
    base = _base(workload, (f"layers.{workload.model.num_layers - 1}",))
    return base + adapters_held(workload, rank).units.dense.whole * workload.weight_bytes


def adapted_peak(workload: Workload, rank: int, loss: LossBytes, activations: Activations) -> Moment:
    """The moment of the peak memory of a pipeline rank.

    Args:
        workload: computed work.
        rank: pipeline rank.
        loss: bytes of the loss, without a gradient of the output layer.
        activations: activations of a microbatch.
    """
    held = adapters_held(workload, rank)
    # adapters are gathered in the dtype in which they are stored
    trained = replace(workload, param_bytes=workload.weight_bytes, model=_plain(workload.model))
    most = peak(trained, held, loss, activations)
    stored, gathered, whole = frozen(workload, rank)
    copies = 0.0
    if workload.layout.num_ranks > 1:
        copies = whole if workload.layout.pp > 1 or workload.reshard == "never" else gathered
    largest = 0
    if workload.lora_base != "keep":
        largest = max((weight.numel for weight in workload.model.weights if weight.kind == "linear"), default=0)
    return most._replace(
        weights=most.weights + stored,
        activations=most.activations + casts(workload, held),
        copies=most.copies + copies,
        working=most.working + _UNPACKED_BYTES * largest,
    )


@lru_cache(maxsize=64)
def _plain(model: ModelDescription) -> ModelDescription:
    return replace(model, adapted=None)

"""Memory of a rank under LoRA: a frozen base without gradients, and adapters with all that training needs. Torch-free.

``peaks`` counts adapters like the weights of a model; the base is in addition, and FSDP gathers it.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from crius.config.lora import NF4_BLOCK, NF4_SCALES, LoraConfig, is_quantized
from crius.models.description import Layer
from crius.models.description import Weight as Described
from crius.tools.plan.holdings import (
    Held,
    Part,
    Weights,
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


def kept_by(workload: Workload) -> Kept:
    """Numbers that the layers of ``workload`` keep."""
    model, adapted = workload.model, workload.model.adapted
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


def every_other(workload: Workload, layer: Layer) -> float:
    """Further numbers per token that ``selective`` keeps: every second of all matmuls, with those of adapters."""
    model, adapted, tp = workload.model, workload.model.adapted, workload.layout.tp
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


def base_bytes(workload: Workload, weights: Iterable[Described], shards: int) -> float:
    """Bytes of frozen ``weights`` on the fullest of ``shards`` ranks."""
    total = 0.0
    for weight in weights:
        if weight.kind == "linear" and is_quantized(LoraConfig(rank=1, base=workload.lora_base), weight.shape):
            total += sum(_rows(rows, shards) * nbytes for rows, nbytes in _kept(weight, workload.lora_base))
        elif weight.kind == "expert":  # FSDP splits it over the tensor-parallel ranks too, and gathers a rank's experts
            split = shards * workload.layout.tp if shards > 1 else workload.layout.ep
            total += weight.numel / split * workload.param_bytes
        else:
            tensor = split_tensor(workload.model, weight, workload.layout.tp)
            total += _rows(tensor.rows, shards) * tensor.columns * workload.param_bytes
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
    model, layers, shards = workload.model, rank_layers(workload, rank), workload.layout.fsdp
    spans = [range(*span) for span in layers.dense_spans + layers.expert_spans]
    units = {f"layers.{index}" for span in spans for index in span}
    own = [split_tensor(model, weight, workload.layout.tp) for weight in model.adapters if weight.unit in units]
    moments = workload.moment_bytes
    total = part_of(own, shards, moments)
    each = max(1, layers.layers)
    mean = Part(total.whole / each, total.own / each, total.state / each)
    held = Weights(dense=mean, experts=mean, embedding=Part(), head=Part())
    return Held(layers=layers, units=held, whole=total.whole, own=total.own, end=0.0, state=total.state)


def frozen(workload: Workload, rank: int) -> tuple[float, float, float]:
    """Bytes of the base of a pipeline rank: stored, gathered at a time, and all of it whole."""
    model, layers = workload.model, rank_layers(workload, rank)
    spans = [range(*span) for span in layers.dense_spans + layers.expert_spans]
    kept = {f"layers.{index}" for span in spans for index in span}
    ends = {"tok_embeddings"} if layers.has_embedding else set()
    ends |= {"norm", "output"} if layers.has_head else set()
    held = [weight for weight in model.weights if weight.unit in kept | ends]
    if layers.has_head and not layers.has_embedding and model.tied_embeddings:
        held.append(next(weight for weight in model.weights if weight.unit == "tok_embeddings"))
        ends.add("tok_embeddings")
    stored, whole = (base_bytes(workload, held, shards) for shards in (workload.layout.fsdp, 1))
    layer = base_bytes(workload, (weight for weight in held if weight.unit == f"layers.{spans[0][0]}"), 1)
    end = base_bytes(workload, (weight for weight in held if weight.unit in ends), 1)
    return stored, (2 if workload.layout.fsdp > 1 else 1) * layer + end, whole


def casts(workload: Workload, held: Held) -> float:
    """Bytes of the adapters in the dtype of the matmul, which a layer keeps if it is not recomputed."""
    is_kept = workload.activation_checkpoint == "none" and workload.param_bytes < workload.weight_bytes
    return held.whole * workload.param_bytes * is_kept


def waiting(workload: Workload, rank: int) -> float:
    """Bytes of the last layer, gathered for its backward when the backward of the output layer begins."""
    if not waits_for_loss(workload):
        return 0.0
    unit = f"layers.{workload.model.num_layers - 1}"
    base = base_bytes(workload, (weight for weight in workload.model.weights if weight.unit == unit), 1)
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
    trained = replace(workload, param_bytes=workload.weight_bytes, model=replace(workload.model, adapted=None))
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

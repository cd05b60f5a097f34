"""Memory of one rank at the peak of a step, in closed form. Torch-free.

``peaks`` has the moments of a step at which memory may be largest. docs/planner_accuracy.md compares the sums with
measurements, docs/planner.md with the dry run, which counts every tensor of the real code.

Widths in numbers: d residual stream, q queries, k keys or values, f hidden. A rank has its part of each under tensor
parallelism. It has a part of d between the matmuls, and all of d in a matmul whose input was gathered.

``benchmarks/fit_planner_memory.py`` writes the constants.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from crius.host import ATTENTION_BLOCK
from crius.models.description import Attention, FeedForward, Layer, ModelDescription
from crius.tools.plan.adapters import (
    adapted_peak,
    adapters_held,
    casts,
    every_other,
    frozen,
    kept_by,
    waiting,
)
from crius.tools.plan.experts import choice_bytes, routing_bytes, row_numbers, selective_bytes
from crius.tools.plan.hardware import Hardware
from crius.tools.plan.holdings import Held, held_by
from crius.tools.plan.peaks import Activations, BlockKind, LossBytes, Moment, parts_between, peak, waiting_for_loss
from crius.tools.plan.workload import Estimate, Pointwise, Workload
from crius.units import GIB

Counting = Literal["reserved", "allocated", "tensors"]


@dataclass(frozen=True, kw_only=True)
class MemoryConstants:
    """Fitted constants.

    Attributes:
        compiled_logit_bytes: bytes per logit in a compiled loss.
        chunked_logit_bytes: the same, over all logits, in a loss that other implementations split by themselves.
        fused_logit_bytes: the same in a fused kernel over a split vocabulary.
        reserved_share: memory that an allocator reserves beyond the allocated memory, as a share of it.
        reserved_eager_share: the same if blocks are not compiled, and more tensors come and go.
        reserved_bytes: memory that it reserves in addition.
        allocated_bytes: memory that libraries allocate besides tensors of the model: workspaces.
        cdna3_bytes: further memory that AMD's libraries reserve.
        nvfp4_kept: share of the activations that a layer with 4-bit matmuls keeps.
        eager_logit_bytes: bytes per logit in the backward of an eager loss: log-probabilities in float32, their
            gradient and its gradient. Not fitted.
        split_logit_bytes: further bytes per logit if the vocabulary is split. Not fitted.
    """

    compiled_logit_bytes: float = 3.74
    chunked_logit_bytes: float = 2.19
    fused_logit_bytes: float = 4.2
    reserved_share: float = 0.0677
    reserved_eager_share: float = 0.0847
    reserved_bytes: float = 1.11 * GIB
    allocated_bytes: float = 0.569 * GIB
    cdna3_bytes: float = 3.21 * GIB
    nvfp4_kept: float = 0.506
    eager_logit_bytes: float = 12.0
    split_logit_bytes: float = 4.0


MEMORY = MemoryConstants()


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token in one layer.

    Attributes:
        full: its input only.
        selective: its input and the results of some ops.
        none: everything.
        backward: gradients inside the layer.
    """

    full: float
    selective: float
    none: float
    backward: float


def layer_bytes(workload: Workload, layer: Layer) -> LayerBytes:
    """Bytes per token of ``layer`` on a rank of ``workload``."""
    attention = layer.attention
    ffn = layer.feed_forward
    pointwise = _pointwise(workload)
    tp = workload.layout.tp
    cp = workload.layout.cp
    itemsize = workload.param_bytes
    num_kv_heads = max(1, attention.num_kv_heads / tp)
    d = float(workload.model.dim)
    source = d / tp if workload.sequence_parallel else d
    queries, values = (attention.num_heads * width / tp for width in (attention.head_dim, attention.value_dim))
    keys = num_kv_heads * (attention.head_dim + attention.value_dim)  # and values together
    scores = _score_bytes(workload, attention)
    dense_width = ffn.width / tp
    has_result = pointwise in ("operators", "silu") or (ffn.activation != "silu" and not workload.compile)
    per_hidden = 3 + has_result if ffn.gated else 2
    kept = kept_by(workload.model)
    routed = ffn.top_k * ffn.expert_width / tp
    is_whole = ffn.num_experts > 0 and not workload.splits_experts
    inputs = kept.inputs - (is_whole and not ffn.width)  # the router's input is counted with its output
    none = inputs * d + queries + keys + values + per_hidden * dense_width
    none += kept.adapters - (1 - kept.products) * dense_width
    if cp > 1:  # attention's results for the early and the late tokens of a rank are joined
        none += keys * (cp - 1) + values
    none += _mask_numbers(workload, attention)
    # of seven matmuls wq, wv, w1 and w2; attention; two reduce-scatters
    w2 = source * (tp > 1) + (d + source * (tp > 1)) * (not is_whole or ffn.width > 0)
    selective = source + queries + num_kv_heads * attention.value_dim + dense_width + w2 + values
    if workload.model.adapted:
        selective += every_other(workload.model, layer, tp)
    routing = chosen = 0.0  # bytes
    if is_whole:
        none += row_numbers(workload, ffn, per_hidden)
        routing = routing_bytes(workload, ffn)
        chosen = selective_bytes(workload, ffn)
    elif ffn.num_experts:
        dispatched = ffn.top_k * d / tp
        none += 2 * dispatched + per_hidden * routed
        selective = min(none, selective + 3 * dispatched + routed)  # sent, computed and sent back
    of_norms, normed = _norm_bytes(workload, attention, source)
    # the gradients of a gate's factors; in bfloat16 also the casts of its operators
    widest = (2 if itemsize == 4 else 3) * max(dense_width, routed)
    return LayerBytes(
        full=source * itemsize + choice_bytes(workload, ffn) * is_whole,
        selective=selective * itemsize + chosen + scores,
        none=none * itemsize + routing + of_norms + normed + scores - kept.first * (source * itemsize + normed / 2),
        backward=widest * itemsize,
    )


def _score_bytes(workload: Workload, attention: Attention) -> float:
    """Bytes per token of the probabilities of the keys that a query sees, or of the logarithms of their sums."""
    heads = attention.num_heads / workload.layout.tp
    if workload.keeps_probabilities:
        return 4 * heads * (workload.seq_len - ATTENTION_BLOCK) / 2
    if not attention.softcap or not workload.has_mask_matrix:
        return 4 * heads
    itemsize = workload.param_bytes
    casts = itemsize < 4
    of_pair = itemsize * (1 + casts) + 4  # bounded scores and probabilities
    repeated = heads - max(1, attention.num_kv_heads / workload.layout.tp)  # key/value heads
    return heads * workload.seq_len * of_pair + repeated * 2 * attention.head_dim * itemsize


def _mask_numbers(workload: Workload, attention: Attention) -> float:
    """Numbers per token of the mask that attention keeps: of the keys up to a token's chunk of the sequence."""
    cp = workload.layout.cp
    if attention.window or workload.model.config.attention_mask == "document":
        seen = (2 * cp + 1) / (4 * cp) if cp > 1 else 1.0  # an early and a late chunk together
        itemsize = workload.param_bytes if attention.softcap else 1  # a byte, or in the dtype of the scores
        return workload.seq_len * seen / itemsize * (workload.has_mask_matrix or cp > 1)
    return workload.seq_len / 2 / workload.microbatch * (workload.keeps_mask and cp > 1)


def _norm_bytes(workload: Workload, attention: Attention, source: float) -> tuple[float, float]:
    """Bytes per token of the inputs of a layer's norms, and of what their operators keep beyond them."""
    tp = workload.layout.tp
    operators = _pointwise(workload)
    has_norms = operators in ("operators", "norms")
    norms = 4 if workload.model.config.norms == "both" else 2
    given, more = _bytes_per_number(workload, is_wide=workload.model.config.norm_plus_one)
    inputs = given * norms * source
    kept = (more * norms * source + 4 * norms / tp) * has_norms
    heads = attention.num_heads / tp
    kv_heads = max(1, attention.num_kv_heads / tp)
    numbers = (heads + kv_heads) * attention.head_dim
    if attention.qk_norm == "head":
        inputs += given * numbers
        kept += more * numbers * (operators == "operators")
        kept += 4 * (attention.num_heads + attention.num_kv_heads) / tp * has_norms
    elif attention.qk_norm == "all":
        is_split = tp > 1
        given, more = _bytes_per_number(workload, is_wide=workload.model.config.norm_plus_one or is_split)
        inputs += given * numbers
        kept += (more * numbers + 8) * (has_norms or is_split)
    return inputs, kept


def _bytes_per_number(workload: Workload, *, is_wide: bool) -> tuple[float, float]:
    """Bytes per number of a norm's input, and of what its operators keep beyond it; fewer if its weight is frozen.

    ``is_wide``: it computes in float32.
    """
    itemsize = workload.param_bytes
    is_trained = workload.model.adapted is None
    if is_wide:
        return 4, 4 * is_trained
    return itemsize, itemsize * (is_trained or itemsize < 4) + 4 * (itemsize < 4) * is_trained


_PRODUCT_PARTS = 8  # parts of a chunk's addition to the output layer's gradient (crius/kernels/linear_cross_entropy.py)


def loss_bytes(workload: Workload, constants: MemoryConstants) -> LossBytes:
    """Bytes of the loss on a rank with the output layer."""
    model = workload.model
    itemsize = workload.param_bytes
    tokens = workload.tokens
    vocabulary = model.vocab_size / workload.layout.tp
    trained = vocabulary * model.dim * (model.adapted is None)  # of the output layer
    hidden = model.dim * tokens * itemsize
    part = hidden / workload.layout.tp if workload.sequence_parallel else hidden
    given, more = _bytes_per_number(workload, is_wide=model.config.norm_plus_one)
    has_norms = workload.pointwise in ("operators", "norms")
    normed = hidden + part / itemsize * (given + more * has_norms)
    if workload.loss_tokens is not None:
        # kept: the gradients of the hidden state and of the weight, which several chunks sum in float32
        has_chunks = tokens > workload.loss_tokens
        kept = normed + trained * (4 if has_chunks else itemsize)
        chunk = min(tokens, workload.loss_tokens)  # all chunks have this size, except a smaller last one
        wide = 8 * (itemsize < 4)  # logits and probabilities in float32, which otherwise reuse the memory of the logits
        work = vocabulary * chunk * itemsize
        work += max(vocabulary * min(workload.score_tokens, chunk) * wide, model.dim * chunk * itemsize)
        work += trained * itemsize / _PRODUCT_PARTS * (has_chunks and itemsize < 4)
        rounded = trained * 4 / _PRODUCT_PARTS * (not has_chunks and itemsize < 4)
        return LossBytes(kept, work, kept + trained * itemsize + rounded)
    logits = vocabulary * tokens
    if workload.loss == "eager":  # kept: log-probabilities in float32, for the backward
        split = constants.split_logit_bytes if workload.layout.tp > 1 else 0.0
        nbytes = (constants.eager_logit_bytes + split) * logits
        kept = min(nbytes / 2, 4 * logits)
        return LossBytes(normed + kept, nbytes - kept, trained * itemsize)
    nbytes = (
        logits
        * {
            "compiled": constants.compiled_logit_bytes,
            "chunked": constants.chunked_logit_bytes,
            "fused": constants.fused_logit_bytes,
        }[workload.loss]
    )
    stays = (normed + nbytes) * (workload.loss == "fused")
    return LossBytes(normed + nbytes / 2, nbytes / 2, stays + trained * itemsize)


_ROTARY_BYTES = 8  # per token and number of a head: cosine and sine in float32


def memory(
    workload: Workload,
    hardware: Hardware | None = None,
    constants: MemoryConstants = MEMORY,
    *,
    counting: Counting = "reserved",
) -> Estimate:
    """Bytes of the fullest rank at its peak; the parts sum to the total.

    Args:
        workload: computed work.
        hardware: hardware; a CPU has no allocator's cache but a process on top of the tensors. None: a GPU.
        constants: fitted constants.
        counting: ``tensors``: only tensors, as in the dry run; ``allocated``: as PyTorch's allocator reports;
            ``reserved``: the memory that must fit.
    """
    layout = workload.layout
    ranks = {0, 1, layout.pp - 1} if layout.pp > 2 else range(layout.pp)
    is_cached = counting == "reserved" and not (hardware is not None and hardware.generation == "cpu")
    moments = [(_rank(workload, rank, constants, is_cached=is_cached), rank) for rank in ranks]
    most, rank = max(moments, key=lambda found: found[0].total)
    where = f", pipeline rank {rank}" if layout.pp > 1 else ""
    parts = {
        "parameters": most.weights,
        "gradients": most.gradients,
        "optimizer": most.state,
        "activations": most.activations,
        "logits_and_loss": most.loss,
        "fsdp_buffers": most.copies,
        "pipeline_in_flight": most.in_flight,
        "working": most.working,
        "overhead": _overhead(workload, most.total, hardware, constants, counting),
    }
    if workload.snapshot:
        parts["snapshot"] = most.weights + most.state
    return Estimate(parts, f"{most.name}{where}")


def _overhead(
    workload: Workload, held: float, hardware: Hardware | None, constants: MemoryConstants, counting: Counting
) -> float:
    """Bytes on top of the ``held`` bytes of tensors."""
    if counting == "tensors":
        return 0.0
    if hardware is not None and hardware.generation == "cpu":
        return hardware.resident_bytes + held * hardware.resident_share
    if counting == "allocated":
        return constants.allocated_bytes
    share = constants.reserved_share if workload.compile else constants.reserved_eager_share
    more = constants.cdna3_bytes if hardware is not None and hardware.generation == "cdna3" else 0.0
    return held * share + constants.reserved_bytes + more


def _rank(workload: Workload, rank: int, constants: MemoryConstants, *, is_cached: bool) -> Moment:
    """The moment of the peak memory of pipeline rank ``rank``."""
    held = held_by(workload, rank)
    loss = loss_bytes(workload, constants) if held.layers.has_head else LossBytes()
    if workload.model.adapted:
        return adapted_peak(workload, rank, loss, _activations(workload, held, constants))
    return peak(workload, held, loss, _activations(workload, held, constants), is_cached=is_cached)


def rank_bytes(workload: Workload, rank: int, constants: MemoryConstants = MEMORY) -> dict[str, float]:
    """Bytes of pipeline rank ``rank``: parameters, gradients as the optimizer reads them, and its state; and the
    activations that one microbatch leaves between its forward and its backward, with the gathered layer that waits.
    """
    held = held_by(workload, rank)
    loss = loss_bytes(workload, constants) if held.layers.has_head else LossBytes()
    if workload.model.adapted:
        trained = adapters_held(workload, rank)
        activations = _activations(workload, held, constants).all
        return {
            "parameters": frozen(workload, rank)[0] + trained.own * workload.weight_bytes,
            "gradients": trained.own * workload.weight_bytes,
            "optimizer": trained.state,
            "activations": activations + loss.kept + casts(workload, trained) + waiting(workload, rank),
        }
    return {
        "parameters": held.own * workload.weight_bytes + held.buffers,
        "gradients": held.own * workload.weight_bytes,
        "optimizer": held.state,
        "activations": _activations(workload, held, constants).all
        + loss.kept
        + waiting_for_loss(workload, held) * workload.param_bytes
        + parts_between(workload, held, held.layers.layers),
    }


def _activations(workload: Workload, held: Held, constants: MemoryConstants) -> Activations:
    tokens = workload.tokens
    hidden = workload.model.dim / (workload.layout.tp if workload.sequence_parallel else 1) * workload.param_bytes
    ropes = {layer.attention.rope for _, layer in workload.model.layers if layer.attention.rope}
    shared = _ROTARY_BYTES * sum(rope.dim for rope in ropes) + hidden * _sent(workload, held)
    layers = held.layers
    kinds = tuple(
        _kind(workload, spans, constants) if spans else BlockKind()
        for spans in (layers.dense_spans, layers.expert_spans)
    )
    return Activations((kinds[0], kinds[1]), workload.selective_layers or 1, shared * tokens, hidden * tokens)


def _kind(
    workload: Workload,
    spans: tuple[tuple[int, int], ...],
    constants: MemoryConstants,
) -> BlockKind:
    mode = workload.activation_checkpoint
    tokens = workload.tokens
    factor = constants.nvfp4_kept if workload.precision == "nvfp4" else 1.0
    shares = _shares(workload.model, spans)
    each = [(share, workload.part(layer_bytes)(workload, layer)) for share, layer in shares]
    one = LayerBytes(*(sum(share * getattr(of, field) for share, of in each) for field in LayerBytes.__annotations__))
    [_, layer] = shares[0]
    own = least = {"none": one.none, "full": one.full, "selective": one.selective}[mode]
    if mode == "selective" and workload.selective_layers is not None:  # some of the layers, each in full
        own = one.none
        least = one.full
    return BlockKind(
        spans,
        kept=own * factor * tokens,
        saved=(own - least) * factor * tokens,
        recomputed=(one.none - least) * tokens,
        backward=one.backward * tokens + _last_gradient(workload, layer.feed_forward),
    )


@lru_cache(maxsize=256)
def _shares(model: ModelDescription, spans: tuple[tuple[int, int], ...]) -> tuple[tuple[float, Layer], ...]:
    """The layers in ``spans`` that differ, each with its share of them."""
    layers = [layer for count, layer in model.layers for _ in range(count)]
    found = [layer for begin, end in spans for layer in layers[begin:end]]
    different = {id(layer): layer for layer in found}
    counts = Counter(map(id, found))
    return tuple((counts[key] / len(found), layer) for key, layer in different.items())


def _last_gradient(workload: Workload, ffn: FeedForward) -> float:
    """Bytes by which the gradient of a feed-forward's last weight exceeds the input that it frees."""
    dim = workload.model.dim
    layout = workload.layout
    tokens = workload.tokens
    if workload.zero_stage < 3:
        return 0.0
    if not ffn.num_experts:
        return max(0.0, dim - tokens) * ffn.width / layout.tp * workload.param_bytes
    rows = tokens * ffn.top_k / layout.tp
    return max(0.0, dim * ffn.num_experts / workload.expert_ranks - rows) * ffn.expert_width * workload.param_bytes


def _sent(workload: Workload, held: Held) -> int:
    """Hidden states that a pipeline rank keeps in addition to those of its layers: a stage keeps its output. Its input
    is a buffer, but its first layer would keep it otherwise.
    """
    if workload.layout.pp == 1:
        return 0
    stages = workload.stages_per_rank
    layers = held.layers
    casts = workload.activation_checkpoint == "none" and _pointwise(workload) in ("operators", "norms")
    return stages - layers.has_head - (0 if casts else stages - layers.has_embedding)


def _pointwise(workload: Workload) -> Pointwise:
    """Tensors that norms and gates keep."""
    if workload.pointwise is not None:
        return workload.pointwise
    return "fused" if workload.compile else "silu"

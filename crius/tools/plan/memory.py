"""What one rank holds at the peak of a step, in closed form. Torch-free.

``peaks`` has the moments of a step that may be the one with most in memory. docs/planner_accuracy.md compares the sums
with measurements, docs/planner.md with the dry run, which counts every tensor of the real code.
"""

from typing import Literal

from crius.host import ATTENTION_BLOCK
from crius.tools.plan.activations import MEMORY, LayerBytes, LossBytes, MemoryConstants, layer_bytes, loss_bytes
from crius.tools.plan.hardware import Hardware
from crius.tools.plan.holdings import Held, held_by, model_parameters
from crius.tools.plan.peaks import Activations, LayerKind, Moment, parts_between, peak, waits_for_loss
from crius.tools.plan.workload import Estimate, Pointwise, Workload

__all__ = ["memory", "model_parameters"]

Counting = Literal["reserved", "allocated", "tensors"]


_ROTARY_BYTES = 8  # of a token and a number of a head: cosine and sine in float32


def memory(
    workload: Workload,
    hardware: Hardware | None = None,
    constants: MemoryConstants = MEMORY,
    *,
    counting: Counting = "reserved",
) -> Estimate:
    """Bytes of the rank that holds most, at the moment when it does; the parts sum to the total.

    Args:
        workload: what it computes.
        hardware: on what; a CPU has no allocator's cache but a process beside the tensors. None: a GPU.
        constants: fitted.
        counting: ``tensors`` alone, as the dry run; what PyTorch's allocator says is ``allocated``; or ``reserved``,
            which is what has to fit.
    """
    layout = workload.layout
    ranks = {0, 1, layout.pp - 1} if layout.pp > 2 else range(layout.pp)
    is_cached = counting == "reserved" and not (hardware is not None and hardware.generation == "cpu")
    moments = [(_rank(workload, rank, constants, is_cached=is_cached), rank) for rank in ranks]
    most, rank = max(moments, key=lambda found: found[0].total)
    where = f", pipeline rank {rank}" if layout.pp > 1 else ""
    return Estimate(_parts(workload, most, hardware, constants, counting), f"{most.name}{where}")


def _parts(
    workload: Workload, most: Moment, hardware: Hardware | None, constants: MemoryConstants, counting: Counting
) -> dict[str, float]:
    overhead = _overhead(most.total, hardware, constants, counting, is_compiled=workload.compile)
    found = {
        "parameters": most.weights,
        "gradients": most.gradients,
        "optimizer": most.state,
        "activations": most.activations,
        "logits_and_loss": most.loss,
        "fsdp_buffers": most.copies,
        "pipeline_in_flight": most.in_flight,
        "working": most.working,
        "overhead": overhead,
    }
    if workload.snapshot:
        found["snapshot"] = most.weights + most.state
    return found


def _overhead(
    held: float, hardware: Hardware | None, constants: MemoryConstants, counting: Counting, *, is_compiled: bool
) -> float:
    if counting == "tensors":
        return 0.0
    if hardware is not None and hardware.generation == "cpu":
        return hardware.resident_bytes + held * hardware.resident_share
    if counting == "allocated":
        return constants.allocated_bytes
    share = constants.reserved_share if is_compiled else constants.reserved_eager_share
    more = constants.cdna3_bytes if hardware is not None and hardware.generation == "cdna3" else 0.0
    return held * share + constants.reserved_bytes + more


def _rank(workload: Workload, rank: int, constants: MemoryConstants, *, is_cached: bool) -> Moment:
    """The moment at which pipeline rank ``rank`` holds most."""
    held = held_by(workload, rank)
    tokens = workload.microbatch * workload.seq_len / workload.layout.cp
    loss = loss_bytes(workload, tokens, constants) if held.layers.has_head else LossBytes()
    return peak(workload, held, loss, _activations(workload, held, tokens, constants), is_cached=is_cached)


def rank_bytes(workload: Workload, rank: int, constants: MemoryConstants = MEMORY) -> dict[str, float]:
    """What pipeline rank ``rank`` holds: parameters, gradients as the optimizer takes them, and its state; and
    activations, which one microbatch leaves between its forward and its backward, with the gathered layer that waits.
    """
    held, layout = held_by(workload, rank), workload.layout
    tokens = workload.microbatch * workload.seq_len / layout.cp
    loss = loss_bytes(workload, tokens, constants) if held.layers.has_head else LossBytes()
    last = held.layer(held.layers.layers - 1).whole * workload.param_bytes
    return {
        "parameters": held.own * workload.weight_bytes,
        "gradients": held.own * workload.weight_bytes,
        "optimizer": held.state,
        "activations": _activations(workload, held, tokens, constants).all
        + loss.kept
        + last * waits_for_loss(workload)
        + parts_between(workload, held, held.layers.layers),
    }


def _activations(workload: Workload, held: Held, tokens: float, constants: MemoryConstants) -> Activations:
    hidden = workload.model.dim / (workload.layout.tp if workload.sequence_parallel else 1) * workload.param_bytes
    shared = _ROTARY_BYTES * workload.model.attention.rotary_dim + hidden * _sent(workload, held)
    layers = held.layers
    kinds = tuple(
        _kind(workload, spans, tokens, constants, has_experts=has_experts) if spans else LayerKind()
        for has_experts, spans in ((False, layers.dense_spans), (True, layers.expert_spans))
    )
    return Activations((kinds[0], kinds[1]), workload.selective_layers or 1, shared * tokens, hidden * tokens)


def _kind(
    workload: Workload,
    spans: tuple[tuple[int, int], ...],
    tokens: float,
    constants: MemoryConstants,
    *,
    has_experts: bool,
) -> LayerKind:
    mode = workload.activation_checkpoint
    factor = constants.nvfp4_kept if workload.precision == "nvfp4" else 1.0
    if mode != "full":
        factor *= workload.trainer.kept
    one = _layer(workload, has_experts=has_experts)
    own = least = {"none": one.none, "full": one.full, "selective": one.selective}[mode]
    if mode == "selective" and workload.selective_layers is not None:  # some of the layers, each whole
        own, least = one.none, one.full
    return LayerKind(
        spans,
        kept=own * factor * tokens,
        saved=(own - least) * factor * tokens,
        recomputed=(one.none - least) * tokens,
        backward=one.backward * tokens + _last_gradient(workload, has_experts=has_experts),
    )


def _last_gradient(workload: Workload, *, has_experts: bool) -> float:
    """Bytes of the gradient of a feed-forward's last weight by which it is larger than the input that it lets go."""
    model, layout = workload.model, workload.layout
    _, layer = model.experts if has_experts else model.dense
    if workload.zero_stage < 3 or layer is None:
        return 0.0
    tokens, found = workload.microbatch * workload.seq_len / layout.cp, layer.feed_forward
    if not has_experts:
        return max(0.0, model.dim - tokens) * found.width / layout.tp * workload.param_bytes
    width = max(layout.ep, layout.tp)
    rows = tokens * found.top_k / layout.tp
    return max(0.0, model.dim * found.num_experts / width - rows) * found.expert_width * workload.param_bytes


def _sent(workload: Workload, held: Held) -> int:
    """Hidden states that a pipeline rank keeps beyond those of its layers: a stage keeps what it sends, and what it
    receives is a buffer, where its first layer would keep it.
    """
    if workload.layout.pp == 1:
        return 0
    stages, layers = workload.stages_per_rank, held.layers
    casts = workload.activation_checkpoint == "none" and _pointwise(workload) in ("operators", "norms")
    return stages - layers.has_head - (0 if casts else stages - layers.has_embedding)


def _pointwise(workload: Workload) -> Pointwise:
    """What norms and gates keep."""
    if workload.pointwise is not None:
        return workload.pointwise
    return "fused" if workload.compile else workload.trainer.pointwise


def _layer(workload: Workload, *, has_experts: bool) -> LayerBytes:
    _, layer = workload.model.experts if has_experts else workload.model.dense
    assert layer is not None
    return layer_bytes(
        workload.model.dim,
        layer,
        workload.layout.tp,
        workload.param_bytes,
        workload.trainer,
        _pointwise(workload),
        sequence_parallel=workload.sequence_parallel,
        cp=workload.layout.cp,
        seen_tokens=(workload.seq_len - ATTENTION_BLOCK) / 2 if workload.keeps_probabilities else 0.0,
        mask_tokens=workload.seq_len / 2 / workload.microbatch if workload.keeps_mask else 0.0,
    )

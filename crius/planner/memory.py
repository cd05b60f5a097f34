"""What one rank holds at the peak of a step, in closed form. Torch-free.

Moments of a step with most in memory: when the loss is back-propagated and all activations are there, when the first
and the last block are, when the embedding is, and the update. docs/planner.md compares the sums with measurements and
with the dry run, which counts every tensor of the real code.
"""

from typing import Literal

from crius.host_cpu import ATTENTION_BLOCK
from crius.planner.activations import LayerBytes, layer_bytes
from crius.planner.estimate import Estimate
from crius.planner.hardware import Hardware
from crius.planner.holdings import Held, held_by
from crius.planner.logits import LossBytes, loss_bytes
from crius.planner.memory_constants import MEMORY, TRAITS, MemoryConstants
from crius.planner.peaks import Activations, Moment, peak
from crius.planner.weights import model_parameters
from crius.planner.workload import Workload

__all__ = ["memory", "model_parameters"]

Counting = Literal["reserved", "allocated", "tensors"]


_ROTARY_BYTES = 4  # of a token and a number of a head: half a cosine and half a sine in float32


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
    moments = [(_rank(workload, rank, constants), rank) for rank in ranks]
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


def _rank(workload: Workload, rank: int, constants: MemoryConstants) -> Moment:
    """The moment at which pipeline rank ``rank`` holds most."""
    held = held_by(workload, rank)
    tokens = workload.microbatch * workload.seq_len / workload.layout.cp
    loss = loss_bytes(workload, tokens, constants) if held.layers.has_head else LossBytes()
    return peak(workload, held, loss, _activations(workload, held, tokens, constants))


def rank_bytes(workload: Workload, rank: int, constants: MemoryConstants = MEMORY) -> dict[str, float]:
    """What pipeline rank ``rank`` holds: parameters, gradients as the optimizer takes them, and its state; and
    activations, which one microbatch leaves between its forward and its backward, with the gathered block that waits.
    """
    held, layout = held_by(workload, rank), workload.layout
    tokens = workload.microbatch * workload.seq_len / layout.cp
    loss = loss_bytes(workload, tokens, constants) if held.layers.has_head else LossBytes()
    # FSDP frees the last block with the next gather, which is after a chunked loss
    waits = layout.fsdp > 1 and layout.pp == 1 and workload.reshard != "never" and workload.loss_tokens is not None
    return {
        "parameters": held.own * workload.weight_bytes,
        "gradients": held.own * workload.weight_bytes,
        "optimizer": held.state,
        "activations": _activations(workload, held, tokens, constants).kept
        + loss.kept
        + held.block * workload.param_bytes * waits,
    }


def _activations(workload: Workload, held: Held, tokens: float, constants: MemoryConstants) -> Activations:
    mode, every, traits = workload.activation_checkpoint, workload.selective_layers, TRAITS[workload.framework]
    factor = constants.nvfp4_kept if workload.precision == "nvfp4" else 1.0
    if traits.activations and mode != "full":
        factor *= getattr(constants, traits.activations)
    kept = recomputed = 0.0
    kinds = ((held.layers.dense, held.layers.dense_spans), (held.layers.experts, held.layers.expert_spans))
    for has_experts, (count, spans) in enumerate(kinds):
        if not count:
            continue
        one = _layer(workload, has_experts=bool(has_experts))
        least = own = {"none": one.none, "full": one.full, "selective": one.selective}[mode]
        if mode == "selective" and every is not None:  # all of the layers whose number, from 1, is a multiple
            whole = sum(end // every - begin // every for begin, end in spans)
            least, own = one.full if whole else one.none, one.none + (one.full - one.none) * whole / count
        kept += own * factor * count
        recomputed = max(recomputed, one.none - least + one.backward)
    kept += _ROTARY_BYTES * workload.model.head_dim  # for all blocks together
    hidden = workload.model.dim / (workload.layout.tp if workload.sequence_parallel else 1) * workload.param_bytes
    return Activations(kept=kept * tokens, recomputed=recomputed * tokens, hidden=hidden * tokens)


def _layer(workload: Workload, *, has_experts: bool) -> LayerBytes:
    pointwise = workload.pointwise
    if pointwise is None:
        pointwise = "fused" if workload.compile else TRAITS[workload.framework].pointwise
    return layer_bytes(
        workload.model,
        workload.layout.tp,
        workload.param_bytes,
        workload.framework,
        pointwise,
        has_experts=has_experts,
        sequence_parallel=workload.sequence_parallel,
        cp=workload.layout.cp,
        seen_tokens=(workload.seq_len - ATTENTION_BLOCK) / 2 if workload.keeps_probabilities else 0.0,
        is_traced=workload.framework == "torchtitan_graph",
        mask_tokens=workload.seq_len / 2 / workload.microbatch if workload.keeps_mask else 0.0,
    )

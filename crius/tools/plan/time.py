"""Seconds of one optimizer step in closed form, by part. Torch-free.

A step is ``num_microbatches`` times a forward and a backward through a pipeline stage, the bubble, what is sent once a
step, and the optimizer. Sources: Narayanan et al. 2021 (arXiv:2104.04473), Korthikanti et al. 2022 (2205.05198), the
Ultra-Scale Playbook; what none of them gives is in ``time_constants``.
"""

import math

from crius.config.pipeline import stages_of_ranks
from crius.tools.plan.communication import HOST_BANDWIDTH, Communication
from crius.tools.plan.estimate import Estimate
from crius.tools.plan.hardware import Hardware
from crius.tools.plan.layer_time import Compute, forward, head, recomputed
from crius.tools.plan.rates import Rates, rates
from crius.tools.plan.stages import stage_layers
from crius.tools.plan.time_constants import TIME, TimeConstants
from crius.tools.plan.workload import Workload

ATTENTION_BACKWARD = 2.5
"""Forwards that attention's backward costs: five matmuls against two (arXiv:2205.14135)."""

OPTIMIZER_BYTES = {"fused": 30.0, "foreach": 60.0, "for-loop": 60.0}
"""Bytes that AdamW moves for a weight: the weight, its gradient and two running means in float32, read and written."""

OPS = 60.0
"""Operations of a layer's forward, launched one by one."""

ROUTING = 1.4
"""How far waiting for the routing to experts hides behind other work: at 1 not at all, at infinity all of it."""

EXPERTS = 8
"""Experts of a rank at which a host that loops over them waits for their routing as ``expert_torch`` says."""

BUBBLE = {"interleave_zero_bubble": 1 / 3, "zbv_zero_bubble": 1 / 6, "dualpipev": 1 / 6}
"""Share of 1F1B's bubble that is left (arXiv:2401.10241); no published row validates it."""


def step_time(workload: Workload, hardware: Hardware, constants: TimeConstants = TIME) -> Estimate:
    """Seconds of one step on the busiest rank; the note is the largest part."""
    reached = rates(workload, hardware, constants)
    found = [
        _of_stage(workload, hardware, constants, reached, compute, scale)
        for compute, scale in _microbatch(workload, reached, constants)
    ]
    return max(found, key=lambda estimate: estimate.total)


def _of_stage(
    workload: Workload,
    hardware: Hardware,
    constants: TimeConstants,
    reached: Rates,
    compute: Compute,
    scale: float,
) -> Estimate:
    """``step_time`` where all wait for a pipeline rank that computes ``compute`` for a microbatch."""
    count, p = workload.num_microbatches, workload.layout.pp
    forth = forward(workload, reached, constants).times(scale)
    sent = Communication(workload, hardware, constants)
    accumulated = sent.weights * 8 / reached.bytes if workload.zero_stage < 3 else 0.0
    elementwise = compute.elementwise + accumulated
    busy = compute.total + accumulated
    tensor, context, expert = (scale * part for part in (sent.tensor(), sent.context(), sent.expert()))
    back = busy - forth.total
    # a forward has a third of what is sent beside it; what FSDP sends hides behind launches too
    idle_forth, idle_back = (
        _idle(workload, hardware, reached, constants, part + share * (tensor + expert), scale, passes)
        for part, share, passes in (
            (forth.total, 1 / 3, 1.0),
            (back, 2 / 3, 2.0 + (workload.activation_checkpoint != "none")),
        )
    )
    idle, hiding = idle_forth + idle_back, back + idle_back
    once, each = sent.sharded(forth.total + idle_forth, hiding)
    send = sent.pipeline()
    stage = busy + tensor + context + expert + idle + each + send
    parts = {
        "matmul": count * compute.matmul,
        "attention": count * compute.attention,
        "elementwise": count * elementwise,
        "communication_fsdp": count * each + once,
        "communication_tp": count * tensor,
        "communication_cp": count * context,
        "communication_ep": count * expert,
        "communication_pp": count * send,
        "communication_dp": sent.replicas(hiding),
        "bubble": (p - 1) / workload.stages_per_rank * BUBBLE.get(workload.schedule, 1.0) * stage,
        "optimizer": _optimizer(workload, sent, reached),
        "other": count * idle + (0.0 if hardware.generation == "cpu" else constants.step_seconds),
    }
    return Estimate(parts, max(parts, key=lambda name: parts[name]))


def tokens_per_second(workload: Workload, hardware: Hardware, constants: TimeConstants = TIME) -> float:
    """Of one GPU."""
    return workload.tokens_per_rank / step_time(workload, hardware, constants).total


def _microbatch(workload: Workload, reached: Rates, constants: TimeConstants) -> list[tuple[Compute, float]]:
    """Forward and backward of a microbatch on the ranks that may be the slowest, and their layers relative to the mean.

    These are the one with the output layer, and under pipeline parallelism one with the most layers.
    """
    once, output = forward(workload, reached, constants), head(workload, reached)
    matmuls, attention = recomputed(workload)
    by_op = workload.activation_checkpoint != "none" and workload.selective_layers is None
    layers = Compute(
        matmul=once.matmul * (3 + matmuls),
        attention=once.attention * (1 + ATTENTION_BACKWARD + attention),
        elementwise=once.elementwise * (3 + (1.0 if by_op else matmuls)),
    )
    mean = workload.model.num_layers / workload.layout.pp
    middle, last = _stages(workload)
    found = [(layers.times(last / mean).plus(output), last / mean)]
    return found if not middle else [*found, (layers.times(middle / mean), middle / mean)]


def _stages(workload: Workload) -> tuple[int, int]:
    """Most layers of a pipeline rank, and layers of the rank that has the output layer.

    Crius splits by cost; elsewhere all ranks have as many layers as the first and the last has what is left.
    """
    count, degree = workload.model.num_layers, workload.layout.pp
    if degree == 1:
        return 0, count
    if not workload.trainer.balances_time:
        each = -(-count // degree)
        return each, max(0, count - (degree - 1) * each)
    sizes = workload.stage_layers or stage_layers(workload.model, degree * workload.stages_per_rank, workload.seq_len)
    held = stages_of_ranks(workload.schedule, degree, len(sizes))
    last = next(rank for rank, stages in enumerate(held) if len(sizes) - 1 in stages)
    layers = [sum(sizes[stage] for stage in stages) for stages in held]
    return max(count for rank, count in enumerate(layers) if rank != last), layers[last]


def _idle(
    workload: Workload,
    hardware: Hardware,
    reached: Rates,
    constants: TimeConstants,
    busy: float,
    scale: float,
    passes: float,
) -> float:
    """Seconds that the processor waits for the host in passes that take ``busy`` seconds at least: to launch, to route.

    A GPU computes while the host launches ahead, but waits at every layer of experts for what goes where; a CPU
    launches nothing ahead.
    """
    layers = scale * workload.model.num_layers / workload.layout.pp
    share = constants.graph_launch if workload.compile else 1.0
    launch = share * OPS * passes * layers * reached.op_seconds
    routing = 0.0
    if workload.model.is_routed:
        routing = share * layers * constants.expert_seconds * reached.experts / 2
        if workload.trainer.loops_over_experts:
            routing *= math.sqrt(max(1.0, workload.model.num_experts / workload.layout.ep) / EXPERTS)
    if hardware.generation == "cpu":
        return launch + routing
    return float(((busy**4 + launch**4) ** (ROUTING / 4) + routing**ROUTING) ** (1 / ROUTING) - busy)


def _optimizer(workload: Workload, sent: Communication, reached: Rates) -> float:
    if workload.cpu_offload:
        return sent.own_weights * OPTIMIZER_BYTES[workload.optimizer] / HOST_BANDWIDTH
    return sent.own_weights * OPTIMIZER_BYTES[workload.optimizer] / reached.bytes

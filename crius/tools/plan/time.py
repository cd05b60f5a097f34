"""Seconds of one optimizer step in closed form, by part. Torch-free.

A step is ``num_microbatches`` times a forward and a backward through a pipeline stage, plus the bubble, the traffic
once per step, and the optimizer. Sources: Narayanan et al. 2021 (arXiv:2104.04473), Korthikanti et al. 2022
(2205.05198), the Ultra-Scale Playbook. Numbers that they lack are in ``rates.TimeConstants``.
"""

from dataclasses import dataclass

from crius.config.pipeline import stages_of_ranks
from crius.tools.plan.hardware import Hardware
from crius.tools.plan.holdings import stage_layers
from crius.tools.plan.rates import TIME, Compute, TimeConstants, forward, head, numbers, passes, rates, recomputed
from crius.tools.plan.workload import Estimate, Workload


@dataclass(frozen=True)
class RankGroup:
    """Ranks of a collective.

    Attributes:
        size: number of ranks.
        bandwidth: bytes per second that each rank sends.
        latency: seconds that a collective of any size takes at least.
    """

    size: int
    bandwidth: float
    latency: float

    def gather(self, full_bytes: float) -> float:
        """Seconds to all-gather, or to reduce-scatter, ``full_bytes``."""
        if self.size == 1:
            return 0.0
        return full_bytes * (self.size - 1) / self.size / self.bandwidth + self.latency

    def reduce(self, num_bytes: float) -> float:
        """Seconds to all-reduce ``num_bytes``."""
        return 2 * self.gather(num_bytes)


def group(size: int, stride: int, hardware: Hardware, constants: TimeConstants) -> RankGroup:
    """The group of ``size`` ranks that are ``stride`` apart.

    A ring over nodes has as many network cards as it has members in a node. FSDP over all GPUs of a node has all its
    cards. With tensor parallelism over the node, FSDP has one member in the node, and one card.
    """
    members = max(1, min(size, hardware.gpus_per_node // stride))
    link = _link(hardware, constants)
    hop = _hop_seconds(hardware, constants)
    if members >= size:
        return RankGroup(size, link, hop * (size > 1))
    nodes = -(-size // members)
    return RankGroup(size, min(link, members * hardware.nic_bandwidth * constants.nic), hop * nodes)


def _link(hardware: Hardware, constants: TimeConstants) -> float:
    """Bandwidth of collectives inside a node. A measured bandwidth includes their efficiency."""
    return hardware.link_bandwidth * (1.0 if hardware.measured else constants.link)


def _hop_seconds(hardware: Hardware, constants: TimeConstants) -> float:
    return constants.hop_seconds if hardware.hop_seconds is None else hardware.hop_seconds


def all_to_all(size: int, stride: int, hardware: Hardware, constants: TimeConstants, sent_bytes: float) -> float:
    """Seconds until each rank has sent ``sent_bytes``, spread over the group; bytes to other nodes use its card."""
    if size == 1:
        return 0.0
    members = max(1, min(size, hardware.gpus_per_node // stride))
    inside = (members - 1) / size
    outside = (size - members) / size
    link = _link(hardware, constants)
    nic = hardware.nic_bandwidth * constants.nic
    return sent_bytes * max(inside / link, outside / nic) + _hop_seconds(hardware, constants) * (size > 1)


def exposed(communication: float, compute: float, cost: float) -> float:
    """Seconds that communication adds to simultaneous compute: the excess, and ``cost`` times the hidden part."""
    return max(0.0, communication - compute) + cost * min(communication, compute)


HOST_BANDWIDTH = 20e9
"""Bytes per second and GPU over host memory and PCIe if weights are offloaded."""

BYTES = 2
"""Bytes of one number of the activations that are sent."""


class Communication:
    """Communication of one workload on one kind of hardware.

    Attributes:
        weights: number of weights of a rank before data parallelism splits them.
        own_weights: number of weights that the rank updates.
    """

    def __init__(self, workload: Workload, hardware: Hardware, constants: TimeConstants) -> None:
        self._workload = workload
        self._hardware = hardware
        self._constants = constants
        self._model = workload.model
        self._layout = workload.layout
        self._tokens = workload.tokens
        self._layers = self._model.num_layers / self._layout.pp
        self._expert_layers = self._model.experts[0] / self._layout.pp
        attention = self._model.attention
        self._key_value_dim = attention.num_kv_heads * (attention.head_dim + attention.value_dim)
        self._dense, self._experts = self._count()
        self.weights = self._dense + self._experts
        layout = self._layout
        zero = workload.zero_stage
        over = layout.fsdp if zero >= 2 else layout.batch * layout.cp if zero == 1 else 1
        self._trained = self._model.num_trained / self._model.num_parameters  # of the weights, in numbers
        own = self._dense / over + self._experts / max(1.0, over * layout.tp / layout.ep)
        self.own_weights = self._trained * own

    def _count(self) -> tuple[float, float]:
        """Numbers of weights of a rank: all except routed experts, and routed experts."""
        layout = self._layout
        model = self._model
        kinds = [(count / layout.pp, layer) for count, layer in (model.dense, model.experts) if layer]
        layers = sum(count * numbers(layer, "linear", "router") for count, layer in kinds)
        embeddings = model.vocab_size * model.dim * (1 if model.tied_embeddings else 2) / layout.pp
        experts = sum(count * numbers(layer, "expert") for count, layer in kinds) / self._workload.expert_ranks
        return (layers + embeddings) / layout.tp, experts

    def _collect(self, size: int, number_bytes: float, expert_bytes: float | None = None) -> float:
        """Seconds to gather, or to reduce and scatter, the rank's weights over ``size`` data-parallel ranks.

        Each layer is one collective and costs its latency. Experts have fewer copies, which are ``ep`` ranks apart. A
        weight of an expert has ``expert_bytes`` bytes if it is not sent in float8 like the others.
        """
        layout = self._layout
        ring = group(size, layout.tp, self._hardware, self._constants)
        seconds = ring.gather(self._dense * number_bytes) + self._layers * ring.latency
        if self._experts:
            width = self._workload.expert_ranks
            copies = max(1, size * layout.tp // width)
            few = group(copies, width, self._hardware, self._constants)
            seconds += few.gather(self._experts * (expert_bytes or number_bytes)) + self._expert_layers * few.latency
        return seconds

    def sharded(self, forward: float, backward: float) -> tuple[float, float]:
        """Seconds of FSDP once per step, and per microbatch, during a forward and a backward of so many seconds.

        A pipeline keeps weights gathered, and reduces gradients once, unless it is told to reshard always.
        """
        work = self._workload
        c = self._constants
        gather, again, reduce = self._gathers()
        cost = c.overlap_cost
        if self._layout.pp > 1 and work.reshard != "always":
            return exposed(gather, forward, cost) + exposed(reduce, backward, cost), 0.0
        if work.gathers_once:  # weights stay until the last microbatch
            gather /= work.num_microbatches
        each = exposed(gather, forward, cost)
        if work.gradient_sync == "deferred":
            alone = exposed(again, backward, cost)
            return exposed(again + reduce, backward, cost) - alone, each + alone
        return 0.0, each + exposed(again + reduce, backward, cost)

    def _gathers(self) -> tuple[float, float, float]:
        """Seconds of FSDP's gather in the forward, its gather in the backward, and its reduction."""
        work = self._workload
        size = self._layout.fsdp
        has_copies = self._experts and size * self._layout.tp > work.expert_ranks
        if work.zero_stage < 2 or (size == 1 and not has_copies):
            return 0.0, 0.0, 0.0
        gather = self._collect(size, 1 if work.float8_all_gather else work.param_bytes, work.param_bytes)
        reduce = self._collect(size, self._trained * work.reduce_bytes)
        again = gather
        if work.reshard == "never" or work.zero_stage == 2:
            again = 0.0
        elif work.reshard.isdigit():
            again = self._collect(min(size, int(work.reshard)), work.param_bytes)
        if work.cpu_offload:
            from_host = self.own_weights * work.weight_bytes / HOST_BANDWIDTH
            gather, again, reduce = gather + from_host, again + from_host, reduce + from_host
        return gather, again, reduce

    def replicas(self, backward: float) -> float:
        """Seconds of the reduction of gradients over replicas and of ZeRO-1's gather of weights, once per step.

        Both run during the last backward, after FSDP's communication.
        """
        layout = self._layout
        work = self._workload
        c = self._constants
        size = layout.dp_replicate if work.zero_stage >= 2 else layout.batch * layout.cp
        if size == 1:
            return 0.0
        if work.zero_stage >= 2:
            ring = group(size, layout.tp * layout.fsdp, self._hardware, c)
            sent = ring.reduce(self.own_weights * work.reduce_bytes)
        elif work.zero_stage == 1:
            sent = self._collect(size, work.reduce_bytes) + self._collect(size, work.param_bytes)
        else:
            sent = 2 * self._collect(size, work.reduce_bytes)
        left = max(0.0, backward - sum(self._gathers()[1:]))
        return exposed(sent, left, c.dp_exposed)

    def tensor(self) -> float:
        """Seconds per microbatch: two gathers and two scatters forward, one more gather backward, and recomputation."""
        work = self._workload
        c = self._constants
        tp = self._layout.tp
        if tp == 1:
            return 0.0
        one = group(tp, 1, self._hardware, c).gather(BYTES * self._tokens * self._model.dim)
        again = {"none": 0.0, "selective": 2.0, "full": 3.0}[work.activation_checkpoint]
        if work.selective_layers is not None:
            again = 3.0 / work.selective_layers
        share = c.tp_exposed
        if work.async_tp:
            share *= c.tp_async
        return share * (9 + again) * one * self._layers

    def context(self) -> float:
        """Seconds per microbatch: keys and values forward; keys and values again and their gradients backward."""
        cp = self._layout.cp
        tp = self._layout.tp
        if cp == 1:
            return 0.0
        ring = group(cp, tp, self._hardware, self._constants)
        passes = 3 + recomputed(self._workload)[1]
        sent = BYTES * self._tokens * cp * self._key_value_dim / tp
        return self._constants.cp_exposed * passes * ring.gather(sent) * self._layers

    def expert(self) -> float:
        """Seconds per microbatch: tokens to their experts and back, forward and backward."""
        if not self._expert_layers or self._layout.ep == 1:
            return 0.0
        sent = BYTES * self._tokens / self._layout.tp * self._model.top_k * self._model.dim
        one = all_to_all(self._layout.ep, 1, self._hardware, self._constants, sent)
        passes = 4 + 2 * recomputed(self._workload)[1]
        return self._expert_layers * self._constants.ep_exposed * passes * one

    def pipeline(self) -> float:
        """Seconds per microbatch: activations to the next stages, and their gradients back."""
        layout = self._layout
        if layout.pp == 1:
            return 0.0
        pair = group(layout.pp, layout.num_ranks // layout.pp, self._hardware, self._constants)
        sent = BYTES * self._tokens * self._model.dim / layout.tp
        return 2 * self._workload.stages_per_rank * (sent / pair.bandwidth + pair.latency / layout.pp)


ATTENTION_BACKWARD = 2.5
"""Cost of attention's backward in forwards: five matmuls against two (arXiv:2205.14135)."""

OPTIMIZER_BYTES = {"fused": 30.0, "foreach": 60.0, "for-loop": 60.0}
"""Bytes that AdamW moves for a weight: the weight, its gradient and two running means in float32, read and written."""

OPS = 60.0
"""Number of operations of a layer's forward, each launched separately."""

ROUTING = 1.4
"""Overlap of the wait for the routing with other work: 1: no overlap, infinity: full overlap."""

BUBBLE = {"interleave_zero_bubble": 1 / 3, "zbv_zero_bubble": 1 / 6, "dualpipev": 1 / 6}
"""Remaining share of 1F1B's bubble (arXiv:2401.10241). No published row validates it."""


def step_time(workload: Workload, hardware: Hardware, constants: TimeConstants = TIME) -> Estimate:
    """Seconds of one step on the busiest rank. The note names the largest part."""
    step = _Step(workload, hardware, constants)
    return max((step.at_pace_of(*stage) for stage in step.microbatches()), key=lambda estimate: estimate.total)


def tokens_per_second(workload: Workload, hardware: Hardware, constants: TimeConstants = TIME) -> float:
    """Tokens per second of one GPU."""
    return workload.tokens_per_rank / step_time(workload, hardware, constants).total


class _Step:
    """The step of one workload on one kind of hardware."""

    def __init__(self, workload: Workload, hardware: Hardware, constants: TimeConstants) -> None:
        self._workload = workload
        self._hardware = hardware
        self._constants = constants
        self._rates = workload.part(rates)(workload, hardware, constants)
        self._forward = forward(workload, self._rates, constants)
        self._sent = Communication(workload, hardware, constants)

    def microbatches(self) -> list[tuple[Compute, float]]:
        """Forward and backward of a microbatch on the ranks that may be the slowest, and their layers over the mean.

        These are the rank with the output layer and, under pipeline parallelism, a rank with the most layers.
        """
        workload = self._workload
        once = self._forward
        output = head(workload, self._rates)
        matmuls, attention = recomputed(workload)
        by_op = workload.activation_checkpoint != "none" and workload.selective_layers is None
        layers = Compute(
            matmul=once.matmul * (passes(workload) + matmuls),
            attention=once.attention * (1 + ATTENTION_BACKWARD + attention),
            elementwise=once.elementwise * (3 + (1.0 if by_op else matmuls)),
        )
        mean = workload.model.num_layers / workload.layout.pp
        middle, last = _stages(workload)
        found = [(layers.times(last / mean).plus(output), last / mean)]
        return found if not middle else [*found, (layers.times(middle / mean), middle / mean)]

    def at_pace_of(self, compute: Compute, scale: float) -> Estimate:
        """The step if all ranks wait for a pipeline rank that computes ``compute`` per microbatch."""
        workload = self._workload
        sent = self._sent
        count = workload.num_microbatches
        p = workload.layout.pp
        forth = self._forward.times(scale).total
        accumulated = sent.weights * 8 / self._rates.bytes if workload.zero_stage < 3 else 0.0
        elementwise = compute.elementwise + accumulated
        busy = compute.total + accumulated
        tensor, context, expert = (scale * part for part in (sent.tensor(), sent.context(), sent.expert()))
        back = busy - forth
        # a third of the communication is in the forward; FSDP's communication hides behind launches too
        passes_back = 2.0 + (workload.activation_checkpoint != "none")
        idle_forth = self._idle(forth + 1 / 3 * (tensor + expert), scale, 1.0)
        idle_back = self._idle(back + 2 / 3 * (tensor + expert), scale, passes_back)
        idle = idle_forth + idle_back
        hiding = back + idle_back
        once, each = sent.sharded(forth + idle_forth, hiding)
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
            "optimizer": sent.own_weights
            * OPTIMIZER_BYTES[workload.optimizer]
            / (HOST_BANDWIDTH if workload.cpu_offload else self._rates.bytes),
            "other": count * idle + (0.0 if self._hardware.generation == "cpu" else self._constants.step_seconds),
        }
        return Estimate(parts, max(parts, key=lambda name: parts[name]))

    def _idle(self, busy: float, scale: float, passes: float) -> float:
        """Seconds that the processor waits for the host to launch and to route, in passes of ``busy`` seconds or more.

        A GPU computes while the host launches ahead. At every layer of experts it waits for the routing if rows leave
        the rank. A CPU launches nothing ahead, and launches each expert's matmuls separately.
        """
        workload = self._workload
        layers = scale * workload.model.num_layers / workload.layout.pp
        share = self._constants.graph_launch if workload.compile else 1.0
        launch = share * OPS * passes * layers * self._rates.op_seconds
        experts = max(1.0, workload.model.num_experts / workload.layout.ep)
        if self._hardware.generation == "cpu":
            each = 3 * experts / OPS * (workload.model.num_experts > 0)
            return launch * (1 + each)
        routing = 0.0
        if workload.model.is_routed and (workload.layout.ep > 1 or workload.splits_experts):
            routing = share * layers * self._constants.expert_seconds * self._rates.experts / 2
        return float(((busy**4 + launch**4) ** (ROUTING / 4) + routing**ROUTING) ** (1 / ROUTING) - busy)


def _stages(workload: Workload) -> tuple[int, int]:
    """Most layers of a pipeline rank, and layers of the rank with the output layer."""
    count = workload.model.num_layers
    degree = workload.layout.pp
    if degree == 1:
        return 0, count
    sizes = workload.stage_layers or stage_layers(workload.model, degree * workload.stages_per_rank, workload.seq_len)
    held = stages_of_ranks(workload.schedule, degree, len(sizes))
    last = next(rank for rank, stages in enumerate(held) if len(sizes) - 1 in stages)
    layers = [sum(sizes[stage] for stage in stages) for stages in held]
    return max(count for rank, count in enumerate(layers) if rank != last), layers[last]

"""Seconds of communication that compute does not hide, by axis of the mesh. Torch-free."""

from crius.tools.plan.collectives import all_to_all, exposed, group
from crius.tools.plan.hardware import Hardware
from crius.tools.plan.layer_time import recomputed
from crius.tools.plan.matmuls import numbers
from crius.tools.plan.time_constants import TimeConstants
from crius.tools.plan.workload import Workload

HOST_BANDWIDTH = 20e9
"""Bytes a second for each GPU that a host's memory and its PCIe link move, where weights are offloaded."""

BYTES = 2
"""Of a number of activations that is sent."""


class Communication:
    """Of one workload on one kind of hardware.

    Attributes:
        weights: of a rank before data parallelism splits them.
        own_weights: those that it updates.
    """

    def __init__(self, workload: Workload, hardware: Hardware, constants: TimeConstants) -> None:
        self._workload, self._hardware, self._constants = workload, hardware, constants
        self._model, self._layout = workload.model, workload.layout
        self._tokens = workload.microbatch * workload.seq_len / workload.layout.cp
        self._layers = self._model.num_layers / self._layout.pp
        self._expert_layers = self._model.experts[0] / self._layout.pp
        attention = self._model.attention
        self._key_value_dim = attention.num_kv_heads * (attention.head_dim + attention.value_dim)
        self._dense, self._experts = self._count()
        self.weights = self._dense + self._experts
        layout, zero = self._layout, workload.zero_stage
        over = layout.fsdp if zero >= 2 else layout.batch * layout.cp if zero == 1 else 1
        self.own_weights = self._dense / over + self._experts / max(1.0, over * layout.tp / layout.ep)

    def _count(self) -> tuple[float, float]:
        """Weights of a rank: all but routed experts, and routed experts."""
        layout, model = self._layout, self._model
        kinds = [(count / layout.pp, layer) for count, layer in (model.dense, model.experts) if layer]
        layers = sum(count * numbers(layer, "linear", "router") for count, layer in kinds)
        embeddings = model.vocab_size * model.dim * (1 if model.tied_embeddings else 2) / layout.pp
        experts = sum(count * numbers(layer, "expert") for count, layer in kinds) / max(layout.ep, layout.tp)
        return (layers + embeddings) / layout.tp, experts

    def _collect(self, size: int, number_bytes: float) -> float:
        """Seconds to gather, or to reduce and scatter, the rank's weights over ``size`` data-parallel ranks.

        Layer by layer, so that each has a collective's latency. Experts have fewer copies, ``ep`` ranks apart.
        """
        layout = self._layout
        ring = group(size, layout.tp, self._hardware, self._constants)
        seconds = ring.gather(self._dense * number_bytes) + self._layers * ring.latency
        if self._experts:
            width = max(layout.ep, layout.tp)  # ranks that share one copy of the experts, next to each other
            copies = max(1, size * layout.tp // width)
            few = group(copies, width, self._hardware, self._constants)
            seconds += few.gather(self._experts * number_bytes) + self._expert_layers * few.latency
        return seconds

    def sharded(self, forward: float, backward: float) -> tuple[float, float]:
        """Of FSDP, once a step, and in each microbatch, beside a forward and a backward of so many seconds.

        A pipeline keeps weights gathered, and reduces gradients once, unless it is told to reshard always.
        """
        work, c = self._workload, self._constants
        gather, again, reduce = self._gathers()
        cost = c.overlap_cost if work.trainer.waits is None else work.trainer.waits
        if self._layout.pp > 1 and work.reshard != "always":
            return exposed(gather, forward, cost) + exposed(reduce, backward, cost), 0.0
        count = work.num_microbatches
        if work.reshard == "never" and count > 1 and work.trainer.keeps_weights:  # weights stay until the last
            gather /= count
        each = exposed(gather, forward, cost)
        if work.gradient_sync == "deferred":
            alone = exposed(again, backward, cost)
            return exposed(again + reduce, backward, cost) - alone, each + alone
        return 0.0, each + exposed(again + reduce, backward, cost)

    def _gathers(self) -> tuple[float, float, float]:
        """Seconds of FSDP's gather in the forward, of that in the backward, and of its reduction."""
        work, size = self._workload, self._layout.fsdp
        if work.zero_stage < 2 or size == 1:
            return 0.0, 0.0, 0.0
        gather = self._collect(size, 1 if work.float8_all_gather else work.param_bytes)
        reduce = self._collect(size, work.reduce_bytes)
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
        """Of reducing gradients over replicas, and ZeRO-1's gather of weights, once a step beside its last backward.

        FSDP's communication beside that backward comes first.
        """
        layout, work, c = self._layout, self._workload, self._constants
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
        return exposed(sent, left, c.dp_exposed if work.trainer.reduces is None else work.trainer.reduces)

    def tensor(self) -> float:
        """Of a microbatch: two gathers and two scatters forward, one gather more backward, and those recomputed."""
        work, c, tp = self._workload, self._constants, self._layout.tp
        if tp == 1:
            return 0.0
        one = group(tp, 1, self._hardware, c).gather(BYTES * self._tokens * self._model.dim)
        again = {"none": 0.0, "selective": 2.0, "full": 3.0}[work.activation_checkpoint]
        if work.selective_layers is not None:
            again = 3.0 / work.selective_layers
        share = c.tp_exposed
        if work.async_tp:
            share *= c.tp_async if work.trainer.overlaps_tensor is None else work.trainer.overlaps_tensor
        return share * (9 + again) * one * self._layers

    def context(self) -> float:
        """Of a microbatch: keys and values forward, again and their gradients backward."""
        cp, tp = self._layout.cp, self._layout.tp
        if cp == 1:
            return 0.0
        ring = group(cp, tp, self._hardware, self._constants)
        passes = 3 + recomputed(self._workload)[1]
        sent = BYTES * self._tokens * cp * self._key_value_dim / tp
        return self._constants.cp_exposed * passes * ring.gather(sent) * self._layers

    def expert(self) -> float:
        """Of a microbatch: tokens to their experts and back, forward and backward."""
        if not self._expert_layers or self._layout.ep == 1:
            return 0.0
        sent = BYTES * self._tokens / self._layout.tp * self._model.top_k * self._model.dim
        one = all_to_all(self._layout.ep, 1, self._hardware, self._constants, sent)
        passes = 4 + 2 * recomputed(self._workload)[1]
        share = self._constants.ep_exposed
        if self._workload.stages_per_rank > 1:
            share *= self._workload.trainer.overlaps_experts
        return self._expert_layers * share * passes * one

    def pipeline(self) -> float:
        """Of a microbatch: activations to the next stages, and their gradients back."""
        layout = self._layout
        if layout.pp == 1:
            return 0.0
        pair = group(layout.pp, layout.num_ranks // layout.pp, self._hardware, self._constants)
        sent = BYTES * self._tokens * self._model.dim / layout.tp
        return 2 * self._workload.stages_per_rank * (sent / pair.bandwidth + pair.latency / layout.pp)

"""What trainers other than Crius do differently: a table of traits, and the parts of a plan that these change.

A plan takes its parts from ``Workload``; ``Other`` is one whose methods and constants change them. Traits are read off
the trainers' code; ``fit_planner.py`` and ``fit_planner_memory.py`` write the constants.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from crius.models.description import Layer
from crius.tools.plan.hardware import Hardware
from crius.tools.plan.holdings import Held
from crius.tools.plan.memory import MEMORY, Counting, LayerBytes, MemoryConstants, layer_bytes, memory
from crius.tools.plan.peaks import Activations, Rank
from crius.tools.plan.rates import TIME, UNFUSED_CAST, Rates, TimeConstants, rates
from crius.tools.plan.time import tokens_per_second
from crius.tools.plan.workload import Pointwise, Workload

EXPERTS = 8
"""Experts per rank at which a host that loops over them waits for the routing as ``expert_torch`` says."""


@dataclass(frozen=True)
class OthersTime:
    """Constants of time of one trainer each; ``TimeConstants`` are those of all.

    Attributes:
        attention_fsdp1: factor on what attention reaches with the kernels that FSDP1's trainers of 2023 had.
        elementwise_fsdp1: times that a layer's activations cross the memory in them, whose LayerNorm and GELU are
            single kernels.
        elementwise_fused: the same with TransformerEngine's and Megatron's fused kernels.
        float8_fused: of float8's peak relative to bfloat16's efficiency in TransformerEngine, on H100 and H200.
        float8_fused_blackwell: the same on Blackwell.
        overlap_cost_fsdp1: share of hidden communication that slows the compute beside it in FSDP1.
        overlap_cost_megatron: the same in Megatron's FSDP.
        tp_fused: factor on the exposed communication of tensor parallelism with TransformerEngine's overlap.
        ep_interleaved: factor on that of experts in Megatron where a pipeline rank has several stages: it computes one
            microbatch while another's tokens are on their way.
        dp_exposed_nanotron: share of nanotron's gradient reduction that overlaps in theory and yet is not hidden.
        bias_megatron: logarithm of how much slower Megatron's compute is than the rest says.
        bias_fsdp1: the same of FSDP1's trainers.
        bias_nanotron: the same of nanotron.
    """

    attention_fsdp1: float = 0.713
    elementwise_fsdp1: float = 0.747
    elementwise_fused: float = 0.681
    float8_fused: float = 0.977
    float8_fused_blackwell: float = 1.19
    overlap_cost_fsdp1: float = 0.114
    overlap_cost_megatron: float = 0.299
    tp_fused: float = 0.31
    ep_interleaved: float = 0.33
    dp_exposed_nanotron: float = 0.761
    bias_megatron: float = 0.004
    bias_fsdp1: float = 0.128
    bias_nanotron: float = -0.0846


@dataclass(frozen=True)
class OthersMemory:
    """Constants of memory of one trainer each.

    Attributes:
        torchtitan_logit_bytes: of one logit, all that exists of it in the backward of torchtitan's eager loss, which
            also keeps the logits in bfloat16.
        graph_logit_bytes: the same where forward, loss and backward are one graph, though not compiled.
        kempnerforge_logit_bytes: the same of KempnerForge's loss.
        in_place_logit_bytes: the same of Megatron's and nanotron's, which work in place on float32.
        nanotron_activations: what nanotron's layers keep, as a factor on what is counted.
    """

    torchtitan_logit_bytes: float = 14.3
    graph_logit_bytes: float = 10.1
    kempnerforge_logit_bytes: float = 3.42
    in_place_logit_bytes: float = 10.5
    nanotron_activations: float = 1.59


Traits = Mapping[str, Any]
"""Those traits of a trainer, by name, in which it differs from most others (``Other``)."""


def trainers(time: OthersTime, memory: OthersMemory) -> Mapping[str, Traits]:
    """Traits of each trainer; ``other``: one that nothing is known of."""
    torchtitan = {"logit_bytes": {"eager_logit_bytes": memory.torchtitan_logit_bytes}}
    fused = {"float8": (time.float8_fused, time.float8_fused_blackwell)}
    megatron = {
        "logit_bytes": {"eager_logit_bytes": memory.in_place_logit_bytes, "split_logit_bytes": 0.0},
        "is_megatron": True,
    }
    return {
        "torchtitan": torchtitan,
        "torchtitan_graph": {
            "logit_bytes": {"eager_logit_bytes": memory.graph_logit_bytes, "split_logit_bytes": 0.0},
            "gates": "operators",
            "is_traced": True,
        },
        "kempnerforge": {
            "logit_bytes": {"eager_logit_bytes": memory.kempnerforge_logit_bytes, "split_logit_bytes": 4.0},
            "gathers_logits": True,
        },
        "megatron": {
            **megatron,
            "gates": "fused",
            "time": {
                "flash2_flops": math.inf,  # attention reaches the speed of the GPU's fastest kernel
                "elementwise_eager": time.elementwise_fused,
                "elementwise_compiled": time.elementwise_fused,
                "overlap_cost": time.overlap_cost_megatron,
                "tp_async": time.tp_fused,
                "expert_torch": 1.0,
                "bias": time.bias_megatron,
            },
            **fused,
            "fuses": True,
            "overlaps_experts": time.ep_interleaved,
        },
        "fsdp1": {
            **torchtitan,
            "time": {
                "elementwise_eager": time.elementwise_fsdp1,
                "elementwise_compiled": time.elementwise_fsdp1,
                "overlap_cost": time.overlap_cost_fsdp1,
                "bias": time.bias_fsdp1,
            },
            "attention": time.attention_fsdp1,
            **fused,
        },
        "nanotron": {
            **megatron,
            "kept": memory.nanotron_activations,
            "time": {"dp_exposed": time.dp_exposed_nanotron, "bias": time.bias_nanotron},
        },
        "other": {**torchtitan, "time": {"bias": 0.0}},
    }


TRAINERS = trainers(OthersTime(), OthersMemory())


class OneEnd(Rank):
    """Embedding and output layer are one unit of FSDP, gathered and with whole gradients until the end of a
    microbatch.
    """

    def __init__(self, workload: "Other", held: Held, activations: Activations) -> None:
        super().__init__(workload, held, activations)
        is_sharded = workload.zero_stage == 3 and not workload.is_megatron
        if is_sharded and held.layers.has_head and not workload.is_tied:
            self._is_one_end = True
            self._ends *= 1 + held.layers.has_embedding
            self._waiting = self._end * self._is_copied
            self._last.append(held.units.head)


@dataclass(frozen=True, kw_only=True)
class Other(Workload):
    """A workload of another trainer. A method or class with the name of a part of the plan replaces that part.

    Attributes:
        framework: name of the trainer in ``TRAINERS``.
        logit_bytes: its values of ``MemoryConstants`` for an eager loss.
        is_megatron: Megatron's model and pipeline. Tensor parallelism keeps the rank's part of the sequence, not the
            gathered input of a matmul. Selective checkpointing recomputes the core of attention, which fused attention
            does not keep anyway. A pipeline balances its stages by the number of layers, and allocates its received
            tensors for one microbatch. Otherwise embedding and output layer are one unit of FSDP (``OneEnd``).
        gates: tensors that norms and gates keep, unless they are compiled; None: as in Crius.
        is_traced: forward, loss and backward are one graph, which keeps only tensors that it reads again.
        gathers_logits: tensor parallelism gathers the logits of the whole vocabulary before the loss.
        kept: factor on the memory that layers keep, except with full recomputation.
        time: its values of ``TimeConstants``.
        attention: factor on the speed of attention.
        float8: share of float8's peak relative to bfloat16's efficiency, before Blackwell and on it; None: torchao's.
        fuses: quantizing is one kernel without compilation too, and weights that stay on their rank are quantized once
            per step. The experts of a rank are one kernel too; otherwise the host launches each by itself, so it waits
            for the expert's rows.
        overlaps_experts: factor on the exposed all-to-alls if a pipeline rank has several stages.
    """

    framework: str
    logit_bytes: Mapping[str, float]
    is_megatron: bool = False
    gates: Pointwise | None = None
    is_traced: bool = False
    gathers_logits: bool = False
    kept: float = 1.0
    time: Mapping[str, float] = field(default_factory=dict)
    attention: float = 1.0
    float8: tuple[float, float] | None = None
    fuses: bool = False
    overlaps_experts: float = 1.0
    splits_experts: bool = True

    Rank = OneEnd

    def part(self, usual: Any) -> Any:
        return getattr(type(self), usual.__name__, usual)

    @property
    def received(self) -> int:
        return 1 if self.is_megatron else self.num_microbatches

    @property
    def gathers_once(self) -> bool:
        return False

    def layer_bytes(self, layer: Layer) -> LayerBytes:
        """Context parallelism keeps keys and values of a rank's part of the sequence only."""
        tp = self.layout.tp
        pointwise = "fused" if self.compile else self.gates
        found = layer_bytes(replace(self, layout=replace(self.layout, cp=1), pointwise=pointwise), layer)
        gathered = self.model.dim * self.param_bytes
        own = gathered / tp if self.sequence_parallel else gathered
        none = found.none - 2 * (gathered - own) * self.is_megatron
        none *= 1.0 if self.activation_checkpoint == "full" else self.kept
        selective = found.selective - (gathered + own * (tp > 1)) * self.is_traced
        return replace(found, none=none, selective=selective)

    def rates(self, hardware: Hardware, constants: TimeConstants) -> Rates:
        found = rates(self, hardware, constants)
        once = self.fuses and self.zero_stage < 3
        return replace(
            found,
            attention_flops=found.attention_flops * self.attention,
            recast=1 / self.num_microbatches if once else 1.0,
        )


def planned_memory(
    work: Workload, hardware: Hardware, constants: MemoryConstants = MEMORY, *, counting: Counting = "reserved"
) -> float:
    """Bytes of the fullest rank."""
    if isinstance(work, Other):
        parts = work.layout.tp if work.gathers_logits else 1
        constants = replace(constants, **{name: nbytes * parts for name, nbytes in work.logit_bytes.items()})
        if work.is_megatron:
            stages = work.layout.pp * work.stages_per_rank
            each, over = divmod(work.model.num_layers, stages)
            work = replace(
                work,
                activation_checkpoint="full" if work.activation_checkpoint == "full" else "none",
                stage_layers=(each + 1,) * over + (max(1, each),) * (stages - over),
            )
    return memory(work, hardware, constants, counting=counting).total


def planned_speed(work: Workload, hardware: Hardware, constants: TimeConstants = TIME) -> float:
    """Tokens per second of one GPU."""
    if isinstance(work, Other):
        ranks = work.layout.pp
        casts_fuse = work.fuses and not (work.compile or ("rowwise" in work.float8_recipe and work.layout.tp > 1))
        experts = max(1.0, work.model.num_experts / work.layout.ep)
        float8 = work.float8 or 2 * (constants.float8_tensorwise,)
        constants = replace(
            constants,
            float8_tensorwise=float8[hardware.generation.startswith("blackwell")],
            cast_traffic=constants.cast_traffic / (UNFUSED_CAST if casts_fuse else 1),
            ep_exposed=constants.ep_exposed * (work.overlaps_experts if work.stages_per_rank > 1 else 1),
            expert_seconds=constants.expert_seconds * (1 if work.fuses else math.sqrt(experts / EXPERTS)),
            **work.time,
        )
        # all ranks have as many layers as the first, and the last has the rest
        each = -(-work.model.num_layers // ranks)
        last = max(0, work.model.num_layers - (ranks - 1) * each)
        work = replace(work, stage_layers=(each,) * (ranks - 1) + (last,))
    return tokens_per_second(work, hardware, constants)


def as_known(workload: Workload, known: Mapping[str, Traits]) -> Workload:
    """``workload`` with the traits of its trainer as ``known`` has them."""
    return replace(workload, **known[workload.framework]) if isinstance(workload, Other) else workload

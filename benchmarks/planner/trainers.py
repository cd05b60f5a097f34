"""How other trainers than Crius differ, by their name, for the planner's closed forms.

Traits are read off their code; ``fit_planner.py`` and ``fit_planner_memory.py`` write the constants.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from crius.tools.plan.workload import CRIUS, Trainer, Workload


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


def trainers(time: OthersTime, memory: OthersMemory) -> Mapping[str, Trainer]:
    """Trainers by name; ``other``: one that nothing is known of."""
    torchtitan = Trainer(
        gathers_keys=False,
        ends_stay=True,
        eager_logit_bytes=memory.torchtitan_logit_bytes,
        balances_time=False,
        keeps_weights=False,
        splits_experts=True,
    )
    megatron = Trainer(
        gathers_keys=False,
        keeps_gathered=False,
        pointwise="fused",
        selects_ops=False,
        receives_all=False,
        balances_memory=False,
        eager_logit_bytes=memory.in_place_logit_bytes,
        split_logit_bytes=0.0,
        balances_time=False,
        keeps_weights=False,
        splits_experts=True,
    )
    fused = time.float8_fused, time.float8_fused_blackwell
    return {
        "crius": CRIUS,
        "torchtitan": torchtitan,
        "torchtitan_graph": replace(
            torchtitan,
            pointwise="operators",
            is_traced=True,
            eager_logit_bytes=memory.graph_logit_bytes,
            split_logit_bytes=0.0,
        ),
        "kempnerforge": replace(torchtitan, gathers_logits=True, eager_logit_bytes=memory.kempnerforge_logit_bytes),
        "megatron": replace(
            megatron,
            own_kernels=True,
            elementwise=time.elementwise_fused,
            float8=fused,
            fuses_casts=True,
            casts_once=True,
            waits=time.overlap_cost_megatron,
            overlaps_tensor=time.tp_fused,
            overlaps_experts=time.ep_interleaved,
            experts=1.0,
            loops_over_experts=False,
            bias=time.bias_megatron,
        ),
        "fsdp1": replace(
            torchtitan,
            receives_all=False,
            attention=time.attention_fsdp1,
            elementwise=time.elementwise_fsdp1,
            float8=fused,
            waits=time.overlap_cost_fsdp1,
            bias=time.bias_fsdp1,
        ),
        "nanotron": replace(
            megatron,
            pointwise="silu",
            kept=memory.nanotron_activations,
            reduces=time.dp_exposed_nanotron,
            bias=time.bias_nanotron,
        ),
        "other": replace(torchtitan, bias=0.0),
    }


TRAINERS = trainers(OthersTime(), OthersMemory())


def as_known(workload: Workload, known: Mapping[str, Trainer]) -> Workload:
    """``workload`` with its trainer, one of ``TRAINERS``, as ``known`` has it."""
    name = next(name for name, trainer in TRAINERS.items() if trainer is workload.trainer)
    return replace(workload, trainer=known[name])

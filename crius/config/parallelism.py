"""``[parallelism]``: the degrees of the mesh, and how FSDP reshards."""

import math
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleave_1f1b", "interleave_zero_bubble", "zbv_zero_bubble", "dualpipev"]


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """The layout: degrees multiply to the number of ranks."""

    auto: bool = False
    """Let the planner choose all degrees, the microbatch, the schedule, resharding and activation checkpointing for the
    ranks at hand, as ``crius plan`` does; what is given of the latter four stays. The global batch is never changed.
    A CPU, and a GPU that is not known by name, should be measured once: crius plan --calibrate."""

    data_parallel_replicate_degree: int = 1
    """Replicas of the model. Alone it is DDP, with data_parallel_shard_degree HSDP. Raise it where FSDP would gather
    over slow links: gradients are all-reduced over replicas, weights are gathered inside one."""

    data_parallel_shard_degree: int = -1
    """FSDP: ranks that share the weights, gradients and optimizer state. -1: all ranks left over (``--nproc``, or the
    visible GPUs, or 1 on a CPU). Raise it until the model fits."""

    tensor_parallel_degree: int = 1
    """Ranks that share the matmuls of one layer, with sequence-parallel norms, a vocabulary-parallel embedding and a
    loss whose logits are never gathered. Keep it inside a node. It must divide the heads; fewer key/value heads than
    ranks are replicated."""

    context_parallel_degree: int = 1
    """Ranks that share one sequence. Raise it when the activations of a single sequence do not fit. FSDP shards over
    these ranks too."""

    context_parallel_method: Literal["all_gather", "ulysses"] = "all_gather"
    """How attention sees the whole sequence. all_gather: each rank gathers keys and values; its queries are an early
    and a late part of the sequence, so that causal work is balanced (zigzag). ulysses: all-to-all, each rank holds
    all tokens of some heads; the degree must divide the heads that tensor parallelism leaves a rank."""

    pipeline_parallel_degree: int = 1
    """Ranks that each hold some of the layers. Raise it across nodes, where gathering weights costs more than the
    pipeline's bubble."""

    expert_parallel_degree: int = 1
    """Ranks that share the experts of one layer, each with whole experts; rows travel to them by all-to-all. It adds no
    ranks: it must divide the product of the shard, context and tensor parallel degrees, and the experts. FSDP splits
    the experts of a rank over the ranks that are left. Raise it until the experts that are gathered for one layer fit,
    and keep it inside a node."""

    pipeline_parallel_schedule: Schedule = "1f1b"
    """Order of the microbatches in the pipeline. gpipe: all forwards, then all backwards. 1f1b: fewer live
    activations. interleave_1f1b: several stages a rank, a smaller bubble. interleave_zero_bubble, zbv_zero_bubble and
    dualpipev fill the bubble with weight gradients. No effect at pipeline_parallel_degree 1."""

    pipeline_parallel_schedule_csv: str = ""
    """A schedule of your own instead: a CSV file with one row of actions a rank, such as 0F0,0F1,0B0, as
    torch.distributed.pipelining dumps it (compute only)."""

    pipeline_parallel_stages_per_rank: int = -1
    """Stages that each pipeline rank holds. -1: 1, or 2 where the schedule needs several; interleave_1f1b has 1,
    and nothing to interleave, where the model has too few layers for 2."""

    pipeline_parallel_first_stage_less_layers: int = -1
    """Layers that the first stage has less than the middle ones, for the embedding. -1: layers are balanced by cost."""

    pipeline_parallel_last_stage_less_layers: int = -1
    """Layers that the last stage has less than the middle ones, for the output layer. -1: balanced by cost."""

    pipeline_parallel_module_names_per_stage: tuple[str, ...] = ()
    """The modules of each stage in order, one value a stage, names joined by commas; layers.0-3 is a range. For
    example tok_embeddings,layers.0-3 and layers.4-7,norm,output. Empty: split automatically."""

    enable_async_tensor_parallel: bool = False
    """Overlap the communication of tensor parallelism with its matmuls: symmetric memory and fused kernels. Needs
    --compile.enable and CUDA; on a CPU the run goes on with plain tensor parallelism and says so."""

    reshard_after_forward_mode: Literal["default", "always", "never"] | int = "default"
    """When FSDP frees gathered weights between forward and backward.

    always: least memory, weights are gathered twice a microbatch. never: one copy of the weights in
    ``training.mixed_precision_param`` stays until the last microbatch's backward, one gather a step. default: always,
    but not for the last unit, whose backward comes next; never under pipeline parallelism. An integer: reshard to
    that many ranks (a node), so that the second gather stays inside it; it must divide the shard degree.
    No effect on communication at one shard rank."""

    def ranks_beside_shards(self) -> int:
        """The product of all degrees but the shard degree."""
        return math.prod(
            (
                self.data_parallel_replicate_degree,
                self.tensor_parallel_degree,
                self.context_parallel_degree,
                self.pipeline_parallel_degree,
            )
        )

    def shard_degree(self, num_ranks: int) -> int:
        """``data_parallel_shard_degree`` with -1 filled from ``num_ranks``; at least 1."""
        if self.data_parallel_shard_degree != -1:
            return self.data_parallel_shard_degree
        return max(1, num_ranks // max(1, self.ranks_beside_shards()))

    def total_ranks(self, num_ranks: int) -> int:
        """Ranks that the layout has when -1 is filled from ``num_ranks``."""
        return self.ranks_beside_shards() * self.shard_degree(num_ranks)


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """Timeouts of the process groups."""

    timeout_seconds: int = 300
    """A collective that is not finished after this many seconds fails. Also bounds the rendezvous."""

"""``[parallelism]``: degrees of the mesh, and how FSDP reshards."""

import math
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleave_1f1b", "interleave_zero_bubble", "zbv_zero_bubble", "dualpipev"]


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """The layout: the product of the degrees is the number of ranks."""

    auto: bool = False
    """Let the planner choose all degrees, the microbatch, the pipeline schedule, resharding and activation
    checkpointing for the available ranks, as ``crius plan`` does. The last four stay as given, where they are given.
    The global batch never changes. On a CPU, and on a GPU that Crius does not know by name, ``crius bench calibrate``
    has to measure the machine once."""

    data_parallel_replicate_degree: int = 1
    """Replicas of the model: DDP alone, HSDP together with data_parallel_shard_degree. Raise it where FSDP would gather
    over slow links: gradients are all-reduced over the replicas, and weights are gathered inside one replica."""

    data_parallel_shard_degree: int = -1
    """FSDP: ranks that share weights, gradients and optimizer state. -1: all ranks left over (of ``--nproc``, or of
    the visible GPUs, or 1 on a CPU). Raise it until the model fits."""

    tensor_parallel_degree: int = 1
    """Ranks that share a layer's matmuls. Norms are sequence-parallel, the embedding is vocabulary-parallel, and
    the loss never gathers its logits. Keep it inside a node. It must divide the heads; key/value heads are replicated
    if there are fewer of them than ranks."""

    context_parallel_degree: int = 1
    """Ranks that share one sequence. Raise it when the activations of a single sequence do not fit. FSDP shards over
    these ranks too."""

    context_parallel_method: Literal["all_gather", "ulysses"] = "all_gather"
    """How attention sees the whole sequence. all_gather: each rank gathers keys and values. Its queries are one early
    and one late part of the sequence, so that causal work is balanced (zigzag). ulysses: after an all-to-all each rank
    holds all tokens of some heads. The degree must divide the heads that each tensor-parallel rank has."""

    pipeline_parallel_degree: int = 1
    """Ranks that each hold some layers. Raise it across nodes, where gathering weights takes more time than the
    pipeline's bubble."""

    expert_parallel_degree: int = 1
    """Ranks that share a layer's experts. Each rank has whole experts, and an all-to-all sends the rows to them.
    It adds no ranks: it must divide the number of experts, and the product of the shard, context and tensor parallel
    degrees. FSDP splits the experts of a rank over the remaining ranks. Raise it until the experts that are gathered
    for one layer fit, and keep it inside a node."""

    pipeline_parallel_schedule: Schedule = "1f1b"
    """Order of the microbatches in the pipeline. gpipe: all forwards, then all backwards. 1f1b: fewer activations at a
    time. interleave_1f1b: several stages per rank, a smaller bubble. interleave_zero_bubble, zbv_zero_bubble and
    dualpipev fill the bubble with weight gradients. No effect at pipeline_parallel_degree 1."""

    pipeline_parallel_schedule_csv: str = ""
    """A schedule of your own instead: a CSV file with one row of actions per rank, such as 0F0,0F1,0B0, as
    torch.distributed.pipelining dumps it (compute only)."""

    pipeline_parallel_stages_per_rank: int = -1
    """Stages that each pipeline rank holds. -1: 1, or 2 if the schedule needs several. interleave_1f1b gets 1, and has
    nothing to interleave, if the model has too few layers for 2."""

    pipeline_parallel_first_stage_less_layers: int = -1
    """How many layers fewer the first stage has than the middle ones, to make room for the embedding. -1: layers are
    balanced by cost."""

    pipeline_parallel_last_stage_less_layers: int = -1
    """How many layers fewer the last stage has than the middle ones, to make room for the output layer. -1: balanced by
    cost."""

    pipeline_parallel_module_names_per_stage: tuple[str, ...] = ()
    """The modules of each stage in order. Give one value per stage, names joined by commas; layers.0-3 is a range. For
    example tok_embeddings,layers.0-3 and layers.4-7,norm,output. Empty: layers are balanced by cost."""

    enable_async_tensor_parallel: bool = False
    """Overlap the communication of tensor parallelism with its matmuls, by symmetric memory and fused kernels. Needs
    --compile.enable and CUDA. A run on CPUs continues with plain tensor parallelism and logs it."""

    reshard_after_forward_mode: Literal["default", "always", "never"] | int = "default"
    """When FSDP frees gathered weights between forward and backward.

    always: least memory; weights are gathered twice per microbatch. never: one copy of the weights in
    ``training.mixed_precision_param`` stays until the backward of the last microbatch; weights are gathered once per
    step. default: always, except for the last unit, whose backward comes next; under pipeline parallelism never. An
    integer: reshard to that many ranks (a node), so that the second gather stays inside the node; it must divide the
    shard degree. Resharding communicates nothing if there is one shard rank.
    """

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
        """Ranks of the layout after -1 is filled from ``num_ranks``."""
        return self.ranks_beside_shards() * self.shard_degree(num_ranks)


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """Timeouts of the process groups."""

    timeout_seconds: int = 300
    """Seconds after which an unfinished collective fails. Also the limit of the rendezvous."""

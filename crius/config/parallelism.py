"""``[parallelism]``: the degrees of the mesh, and how FSDP reshards."""

import math
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleave_1f1b", "interleave_zero_bubble", "zbv_zero_bubble", "dualpipev"]


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """The layout: degrees multiply to the number of ranks."""

    data_parallel_replicate_degree: int = 1
    """Replicas of the model. Alone it is DDP, with data_parallel_shard_degree HSDP. Raise it where FSDP would gather
    over slow links: gradients are all-reduced over replicas, weights are gathered inside one."""

    data_parallel_shard_degree: int = -1
    """FSDP: weights, gradients and optimizer state are split over this many ranks. -1: all ranks left over
    (``--nproc``, or the visible GPUs, or 1 on a CPU). Raise it until the model fits."""

    tensor_parallel_degree: int = 1
    """Ranks that share the matmuls of one layer."""

    context_parallel_degree: int = 1
    """Ranks that share one sequence."""

    pipeline_parallel_degree: int = 1
    """Ranks that each hold some of the layers."""

    expert_parallel_degree: int = 1
    """Ranks that share the experts of a mixture-of-experts layer."""

    pipeline_parallel_schedule: Schedule = "1f1b"
    """Order of the microbatches in the pipeline. No effect at pipeline_parallel_degree 1."""

    enable_async_tensor_parallel: bool = False
    """Overlap the communication of tensor parallelism with its matmuls."""

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

"""``[training]``: length, batch, precision and accumulation."""

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long and on what batches the model is trained."""

    steps: int = 10_000
    """Number of optimizer steps."""

    seq_len: int = 2048
    """Tokens in a sequence."""

    local_batch_size: int = -1
    """Sequences a rank takes in one microbatch. -1: global_batch_size / data-parallel ranks, at most 8, the rest is
    accumulated. Lower it to save activation memory; the loss curve does not change."""

    global_batch_size: int = -1
    """Sequences in one optimizer step, over all ranks and microbatches. More than local_batch_size x data-parallel
    ranks accumulates gradients. -1: 8, so that the loss curve does not depend on the layout, or where that is no
    multiple of local_batch_size x data-parallel ranks, the next one."""

    gradient_sync: Literal["default", "immediate", "deferred", "auto"] = "default"
    """When gradients are synchronised under accumulation. immediate: reduce-scatter (and all-reduce over replicas) in
    every microbatch: least memory. deferred: only in the last microbatch: least communication, but each rank keeps
    unsharded gradients. auto: reduce-scatter in every microbatch, all-reduce over replicas once. default: auto, but
    deferred under pipeline parallelism, whose schedules know only that."""

    dtype: Dtype = "float32"
    """dtype in which weights are kept and updated. bfloat16 halves their memory; see optimizer.stochastic_rounding."""

    mixed_precision_param: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the gathered weights and of the activations. The weights that are updated stay in training.dtype. auto:
    bfloat16 on a GPU and on a CPU that multiplies it (amx_bf16 or avx512_bf16), else float32; a run that goes on from
    its checkpoint keeps the checkpoint's."""

    mixed_precision_reduce: Dtype = "float32"
    """dtype in which gradients are reduced over ranks and accumulated."""

    max_norm: float = 1.0
    """Gradients are scaled down so that their global L2 norm is at most this. 0 turns clipping off."""

    enable_cpu_offload: bool = False
    """Keep sharded weights, gradients and optimizer state in host memory: least device memory, slow."""

    reproducible: bool = False
    """Sum gradients in an order that does not depend on the number of data-parallel ranks, so that the curve is the
    same to the last bit on 1, 2, 4, ... of them. The batch is cut into virtual_shards, each computed by itself. Slower;
    see docs/reproducible.md."""

    virtual_shards: int = 8
    """Parts of the global batch under reproducible, a power of two that the data-parallel ranks divide. Each is a
    microbatch."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where torch can use a GPU, else cpu."""

    gc_interval: int = 50
    """Steps between runs of Python's garbage collector, on all ranks at the same step so that none waits for
    another's; in the first step it is automatic. 0 leaves it so."""

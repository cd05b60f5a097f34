"""How a trainer differs in what it keeps, fuses and overlaps. Crius's ways are the defaults. Torch-free.

Those of others, with which constants are fitted to published runs, are in ``benchmarks/planner/trainers.py``.
"""

from dataclasses import dataclass
from typing import Literal

Pointwise = Literal["operators", "norms", "silu", "fused"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trainer:
    """Of memory first, then of time. Where a factor is None the fitted constant of that name holds.

    Attributes:
        gathers_keys: context parallelism keeps the keys and values of the whole sequence.
        keeps_gathered: tensor parallelism keeps the gathered input of a matmul, not the rank's part of the sequence.
        pointwise: what norms and gates keep, unless they are compiled.
        selects_ops: selective checkpointing keeps the results of some ops; if not, it recomputes the core of attention,
            of which fused attention keeps nothing anyway.
        is_traced: forward, loss and backward are one graph, which keeps nothing that it does not read again.
        receives_all: a pipeline allocates what it receives once for all microbatches.
        ends_stay: embedding and output layer are one unit of FSDP, gathered and with whole gradients until the end of a
            microbatch.
        gathers_logits: tensor parallelism gathers the logits of the whole vocabulary before the loss.
        balances_memory: pipeline stages are balanced by cost where memory is counted; if not, by the number of layers.
        eager_logit_bytes: of one logit, all that exists of it in the backward of an eager loss.
        split_logit_bytes: how many more where the vocabulary is split, or the logits of its parts are gathered.
        kept: factor on what layers are counted to keep, but where all is recomputed.
        balances_time: pipeline stages are balanced by cost where time is counted; if not, all ranks have as many layers
            but the last, which has what is left.
        own_kernels: attention reaches what the GPU's fastest kernel does, not only FlashAttention-2's FLOPs.
        attention: factor on what attention reaches.
        elementwise: times that a layer's activations cross the memory; None: as eager or compiled PyTorch does.
        float8: of float8's peak relative to bfloat16's efficiency, before Blackwell and on it; None: torchao's.
        fuses_casts: quantizing is one kernel without compilation too.
        casts_once: weights that stay on their rank are quantized once a step.
        waits: share of the compute that communication hidden beside it costs.
        keeps_weights: ``reshard never`` gathers once a step, not in each microbatch.
        reduces: share of the replicas' reduction that is not hidden.
        overlaps_tensor: factor on the exposed communication of tensor parallelism where it is overlapped.
        overlaps_experts: factor on the exposed all-to-alls where a pipeline rank has several stages.
        experts: factor on permutation and routing to experts.
        loops_over_experts: the host launches each expert of a rank by itself.
        bias: logarithm of how much slower its compute is than the rest says.
    """

    gathers_keys: bool = True
    keeps_gathered: bool = True
    pointwise: Pointwise = "silu"
    selects_ops: bool = True
    is_traced: bool = False
    receives_all: bool = True
    ends_stay: bool = False
    gathers_logits: bool = False
    balances_memory: bool = True
    eager_logit_bytes: float = 12.0  # log-probabilities in float32, their gradient, its gradient
    split_logit_bytes: float = 4.0
    kept: float = 1.0
    balances_time: bool = True
    own_kernels: bool = False
    attention: float = 1.0
    elementwise: float | None = None
    float8: tuple[float, float] | None = None
    fuses_casts: bool = False
    casts_once: bool = False
    waits: float | None = None
    keeps_weights: bool = True
    reduces: float | None = None
    overlaps_tensor: float | None = None
    overlaps_experts: float = 1.0
    experts: float | None = None
    loops_over_experts: bool = True
    bias: float | None = None


CRIUS = Trainer()

"""What layers keep of a token for their backward, and what the loss takes, counted from their operators. Torch-free.

Widths in numbers: d residual stream, q queries, k keys or values, f hidden. A rank has its part of each under tensor
parallelism; of d it has a part between the matmuls, and all of it in a matmul whose input was gathered.
``benchmarks/fit_planner_memory.py`` writes the constants.
"""

from dataclasses import dataclass
from functools import lru_cache

from crius.models.description import Layer
from crius.tools.plan.workload import Pointwise, Trainer, Workload
from crius.units import GIB


@dataclass(frozen=True, kw_only=True)
class MemoryConstants:
    """Fitted.

    Attributes:
        compiled_logit_bytes: of one logit, all that exists of it in a compiled loss.
        chunked_logit_bytes: the same, of all logits, in a loss that other implementations cut by themselves.
        fused_logit_bytes: the same in a fused kernel over a split vocabulary.
        reserved_share: what an allocator reserves beyond what is allocated, as a share of it.
        reserved_eager_share: the same where blocks are not compiled, and more tensors come and go.
        reserved_bytes: what it reserves beside that.
        allocated_bytes: what libraries allocate that is no tensor of the model: workspaces.
        cdna3_bytes: what AMD's libraries reserve more.
        nvfp4_kept: share of the activations that a layer with 4-bit matmuls keeps.
    """

    compiled_logit_bytes: float = 3.74
    chunked_logit_bytes: float = 2.19
    fused_logit_bytes: float = 4.2
    reserved_share: float = 0.0677
    reserved_eager_share: float = 0.0847
    reserved_bytes: float = 1.11 * GIB
    allocated_bytes: float = 0.569 * GIB
    cdna3_bytes: float = 3.21 * GIB
    nvfp4_kept: float = 0.506


MEMORY = MemoryConstants()


@dataclass(frozen=True)
class LayerBytes:
    """Of one token in one layer.

    Attributes:
        full: its input alone.
        selective: that and the results of some ops.
        none: everything.
        backward: the gradients inside it.
    """

    full: float
    selective: float
    none: float
    backward: float


@lru_cache(maxsize=4096)
def layer_bytes(
    dim: int,
    layer: Layer,
    tp: int,
    itemsize: float,
    trainer: Trainer,
    pointwise: Pointwise,
    *,
    sequence_parallel: bool,
    cp: int = 1,
    mask_tokens: float = 0,
    seen_tokens: float = 0,
) -> LayerBytes:
    """``layer`` on one of ``tp`` ranks.

    Args:
        dim: width of the residual stream.
        layer: what it has.
        tp: tensor-parallel ranks.
        itemsize: bytes of a number of the activations.
        trainer: whose implementation.
        pointwise: what its norms and gates keep.
        sequence_parallel: between the matmuls a rank has a part of the sequence.
        cp: ranks that share a sequence.
        seen_tokens: of a query, whose probabilities are kept for each head.
        mask_tokens: of an explicit mask of attention that is kept, numbers for each token.
    """
    attention, ffn = layer.attention, layer.feed_forward
    num_kv_heads, d = max(1, attention.num_kv_heads / tp), float(dim)
    source = d / tp if sequence_parallel else d
    gathered = d if trainer.keeps_gathered else source
    queries, values = (attention.num_heads * width / tp for width in (attention.head_dim, attention.value_dim))
    keys = num_kv_heads * (attention.head_dim + attention.value_dim)  # and values together
    scores = 4 * attention.num_heads / tp * (seen_tokens or 1)  # probabilities, or the logarithms of their sums
    dense_width = ffn.width / tp
    per_hidden = 3 + (pointwise in ("operators", "silu")) if ffn.gated else 2
    routed = ffn.top_k * ffn.expert_width / tp
    headwise = (queries + num_kv_heads * attention.head_dim) * attention.has_head_norms  # what the norms of heads read
    none = 2 * source + 2 * gathered + queries + keys + values + headwise + per_hidden * dense_width
    if (
        cp > 1 and trainer.gathers_keys
    ):  # and what attention gives for the early and the late tokens of a rank is joined
        none += keys * (cp - 1) + values + mask_tokens
    # of seven matmuls wq, wv, w1 and w2; attention; two reduce-scatters
    w2 = source * (tp > 1) + (d + source * (tp > 1)) * (not trainer.is_traced)
    selective = source + queries + num_kv_heads * attention.value_dim + dense_width + w2 + values
    if ffn.num_experts:
        dispatched = ffn.top_k * d / tp
        none += 2 * dispatched + per_hidden * routed
        selective = min(none, selective + 3 * dispatched + routed)  # sent, computed and sent back
    normed = (itemsize + 4 * (itemsize < 4)) * (2 * source + headwise) * (pointwise in ("operators", "norms"))
    # the gradients of a gate's factors; in bfloat16 what its operators cast too
    widest = (2 if itemsize == 4 else 3) * max(dense_width, routed)
    every = none * itemsize + normed + scores
    return LayerBytes(
        full=source * itemsize,
        selective=selective * itemsize + scores if trainer.selects_ops else every,
        none=every,
        backward=widest * itemsize,
    )


_PRODUCT_PARTS = 8  # of what a chunk adds to the output layer's gradient (crius/kernels/linear_cross_entropy.py)


@dataclass(frozen=True)
class LossBytes:
    """Bytes of the last norm, the logits and the loss of a microbatch.

    Attributes:
        kept: between the loss and its backward.
        work: beside them while it is computed or back-propagated.
        output: all there is while the gradient of the output layer is made.
    """

    kept: float = 0.0
    work: float = 0.0
    output: float = 0.0


def loss_bytes(workload: Workload, tokens: float, constants: MemoryConstants) -> LossBytes:
    """Of ``tokens`` tokens on one rank that has the output layer."""
    model, itemsize = workload.model, workload.param_bytes
    vocabulary = model.vocab_size / workload.layout.tp
    embedding = vocabulary * model.dim
    hidden = model.dim * tokens * itemsize
    part = hidden / workload.layout.tp if workload.sequence_parallel else hidden
    wide = (1 + 4 / itemsize * (itemsize < 4)) * (workload.pointwise in ("operators", "norms"))  # of the norm's input
    normed = hidden + part * (1 + wide)
    if workload.loss_tokens is not None:
        # stays: the gradients of the hidden state and of the weight, which several chunks sum in float32
        has_chunks = tokens > workload.loss_tokens
        kept = normed + embedding * (4 if has_chunks else itemsize)
        chunk = min(tokens, workload.loss_tokens)  # they are cut alike, so that one may be smaller, but no larger
        wide = 8 * (itemsize < 4)  # logits and probabilities in float32, which else lie over the logits
        work = vocabulary * chunk * itemsize
        work += max(vocabulary * min(workload.score_tokens, chunk) * wide, model.dim * chunk * itemsize)
        work += embedding * itemsize / _PRODUCT_PARTS * (has_chunks and itemsize < 4)
        rounded = embedding * 4 / _PRODUCT_PARTS * (not has_chunks and itemsize < 4)
        return LossBytes(kept, work, kept + embedding * itemsize + rounded)
    logits = vocabulary * tokens
    if workload.loss == "eager":  # stays: log-probabilities in float32, which the backward takes
        nbytes = _eager_logit_bytes(workload) * logits
        kept = min(nbytes / 2, 4 * logits)
        return LossBytes(normed + kept, nbytes - kept, embedding * itemsize)
    nbytes = (
        logits
        * {
            "compiled": constants.compiled_logit_bytes,
            "chunked": constants.chunked_logit_bytes,
            "fused": constants.fused_logit_bytes,
        }[workload.loss]
    )
    stays = (normed + nbytes) * (workload.loss == "fused")
    return LossBytes(normed + nbytes / 2, nbytes / 2, stays + embedding * itemsize)


def _eager_logit_bytes(workload: Workload) -> float:
    """Of one logit of this rank's part of the vocabulary."""
    trainer, tp = workload.trainer, workload.layout.tp
    if tp == 1:
        return trainer.eager_logit_bytes
    return (trainer.eager_logit_bytes + trainer.split_logit_bytes) * (tp if trainer.gathers_logits else 1)

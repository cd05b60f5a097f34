"""What a layer keeps of a token for its backward, counted from its operators. Torch-free.

Widths in numbers: d residual stream, q queries, k keys or values, f hidden. A rank has its part of each under tensor
parallelism; of d it has a part between the matmuls, and all of it in a matmul whose input was gathered.
"""

from dataclasses import dataclass
from functools import lru_cache

from crius.models.description import Layer
from crius.tools.plan.trainer import Pointwise, Trainer


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

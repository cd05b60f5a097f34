"""What a layer keeps of a token for its backward, counted from its operators. Torch-free.

Widths in numbers: d residual stream, q queries, k keys or values, f hidden. A rank has its part of each under tensor
parallelism; of d it has a part between the matmuls, and all of it in a matmul whose input was gathered.
"""

from dataclasses import dataclass
from functools import lru_cache

from crius.planner.matmuls import layer_sizes
from crius.planner.memory_constants import TRAITS
from crius.planner.workload import Framework, ModelShape, Pointwise


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
    shape: ModelShape,
    tp: int,
    itemsize: float,
    framework: Framework,
    pointwise: Pointwise,
    *,
    has_experts: bool,
    sequence_parallel: bool,
    cp: int = 1,
    mask_tokens: float = 0,
    seen_tokens: float = 0,
    is_traced: bool = False,
) -> LayerBytes:
    """A layer of ``shape`` on one of ``tp`` ranks.

    Args:
        shape: of the model.
        tp: tensor-parallel ranks.
        itemsize: bytes of a number of the activations.
        framework: whose implementation.
        pointwise: what its norms and gates keep.
        has_experts: a layer with experts, or a dense one.
        sequence_parallel: between the matmuls a rank has a part of the sequence.
        cp: ranks that share a sequence.
        seen_tokens: of a query, whose probabilities are kept for each head.
        mask_tokens: of an explicit mask of attention that is kept, numbers for each token.
        is_traced: in one graph with its backward, which keeps nothing that this does not read, such as its own result.
    """
    traits, sizes = TRAITS[framework], layer_sizes(shape)
    d = float(shape.dim)
    source = d / tp if sequence_parallel else d
    gathered = d if traits.keeps_gathered else source
    queries, values = sizes.score_dim / tp, sizes.value_dim / tp
    keys = sizes.key_value_dim * max(1, shape.num_kv_heads / tp) / shape.num_kv_heads  # and values together
    scores = 4 * shape.num_heads / tp * (seen_tokens or 1)  # probabilities, or the logarithms of their sums
    dense_width = (shape.shared_ffn_dim if has_experts else shape.ffn_dim) / tp
    per_hidden = 3 + (pointwise in ("operators", "silu")) if shape.gated else 2
    routed = shape.top_k * shape.expert_ffn_dim / tp if has_experts else 0
    none = 2 * source + 2 * gathered + queries + keys + values + per_hidden * dense_width
    if cp > 1 and traits.gathers_keys:  # and what attention gives for the early and the late tokens of a rank is joined
        none += keys * (cp - 1) + values + mask_tokens
    # of seven matmuls wq, wv, w1 and w2; attention; two reduce-scatters
    w2 = source * (tp > 1) + (d + source * (tp > 1)) * (not is_traced)
    one_of_keys = max(1, shape.num_kv_heads / tp) * (sizes.value_dim / shape.num_heads)
    selective = source + queries + one_of_keys + dense_width + w2 + values
    if has_experts:
        dispatched = shape.top_k * d / tp
        none += 2 * dispatched + per_hidden * routed
        selective = min(none, selective + 3 * dispatched + routed)  # sent, computed and sent back
    normed = (itemsize + 4 * (itemsize < 4)) * source * 2 * (pointwise in ("operators", "norms"))
    # the gradients of a gate's factors; in bfloat16 what its operators cast too
    widest = (2 if itemsize == 4 else 3) * max(dense_width, routed)
    every = none * itemsize + normed + scores
    return LayerBytes(
        full=source * itemsize,
        selective=selective * itemsize + scores if traits.selects_ops else every,
        none=every,
        backward=widest * itemsize,
    )

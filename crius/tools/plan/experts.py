"""Memory that a layer with experts keeps for its backward, as ``crius.models.moe`` computes it. Torch-free.

The load is even. A rank whose experts get n times the mean number of tokens keeps n times as much for them.
"""

from crius.models.description import FeedForward
from crius.tools.plan.workload import Workload

_ID_BYTES = 8
_FLOAT_BYTES = 4


def routing_bytes(workload: Workload, ffn: FeedForward) -> float:
    """Bytes per token of the router's input and float32 scores, the choice and its weights, and the places of rows."""
    layout = workload.layout
    itemsize = workload.param_bytes
    dim = workload.model.dim
    visits = ffn.top_k
    moves = 4 if layout.ep > 1 else 2  # to the ranks, on them, and back
    ids = _ID_BYTES * visits * (1 + moves)
    scores = _FLOAT_BYTES * (ffn.num_experts + 2 * visits + 1)
    is_widened = itemsize < _FLOAT_BYTES and not workload.compile
    widened = _FLOAT_BYTES * ffn.num_experts * dim / workload.tokens * is_widened  # the router's matrix
    read = (_FLOAT_BYTES if is_widened else itemsize) * dim
    return (read + scores + ids) / layout.tp + widened


def row_numbers(workload: Workload, ffn: FeedForward, per_hidden: float) -> float:
    """Number of elements of a token's rows: input of its experts, inside them, and output."""
    return ffn.top_k * (2 * workload.model.dim + per_hidden * ffn.expert_width) / workload.layout.tp


def choice_bytes(workload: Workload, ffn: FeedForward) -> float:
    """Bytes per token of its experts and their scores. Recomputation keeps them and does not choose again."""
    return (_ID_BYTES + _FLOAT_BYTES) * ffn.top_k / workload.layout.tp


def selective_bytes(workload: Workload, ffn: FeedForward) -> float:
    """Bytes per token that selective keeps: results of every second matmul, starting with the router's."""
    hidden = ffn.top_k * ffn.expert_width * workload.param_bytes
    return (_FLOAT_BYTES * ffn.num_experts + hidden) / workload.layout.tp + choice_bytes(workload, ffn)

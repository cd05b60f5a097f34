"""Memory that a layer with experts keeps for its backward, as ``crius.models.moe`` computes it. Torch-free.

At an even load: of what tokens bring to its experts, a rank with n times the mean keeps n times as much.
"""

from crius.models.description import FeedForward
from crius.tools.plan.workload import Workload

_ID_BYTES, _FLOAT_BYTES = 8, 4


def routing_bytes(workload: Workload, ffn: FeedForward) -> float:
    """Bytes per token of the router's input and float32 scores, the choice, its weights, and places of rows."""
    layout, itemsize = workload.layout, workload.param_bytes
    dim, visits = workload.model.dim, ffn.top_k
    moves = 4 if layout.ep > 1 else 2  # to the ranks and on them, and the same way back
    ids = _ID_BYTES * visits * (1 + moves)
    scores = _FLOAT_BYTES * (ffn.num_experts + 2 * visits + 1)
    is_widened = itemsize < _FLOAT_BYTES and not workload.compile
    widened = _FLOAT_BYTES * ffn.num_experts * dim / workload.tokens * is_widened  # the router's matrix
    read = (_FLOAT_BYTES if is_widened else itemsize) * dim
    return (read + scores + ids) / layout.tp + widened


def row_numbers(workload: Workload, ffn: FeedForward, per_hidden: float) -> float:
    """Numbers of a token's rows: as input of its experts, inside them, and as output."""
    return ffn.top_k * (2 * workload.model.dim + per_hidden * ffn.expert_width) / workload.layout.tp


def choice_bytes(workload: Workload, ffn: FeedForward) -> float:
    """Bytes per token of its experts and their scores, which no recomputation chooses again."""
    return (_ID_BYTES + _FLOAT_BYTES) * ffn.top_k / workload.layout.tp


def selective_bytes(workload: Workload, ffn: FeedForward) -> float:
    """Bytes per token of the results of every second matmul, from the router's on, that selective keeps."""
    hidden = ffn.top_k * ffn.expert_width * workload.param_bytes
    return (_FLOAT_BYTES * ffn.num_experts + hidden) / workload.layout.tp + choice_bytes(workload, ffn)

"""How Qwen3 is laid out on a mesh."""

from crius.models.plan import ShardingPlan, decoder_plan
from crius.models.qwen3.config import Qwen3Config

ROWS = {"layers.*.attention.q_norm": "head_norm", "layers.*.attention.k_norm": "head_norm"}


def plan(config: Qwen3Config) -> ShardingPlan:
    """The sharding plan: that of the plain decoder, and every rank has the norms of heads."""
    return decoder_plan(tied_embeddings=config.tied_embeddings, rows=ROWS)

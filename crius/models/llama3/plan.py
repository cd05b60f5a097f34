"""How Llama 3 is laid out on a mesh."""

from crius.models.llama3.config import Llama3Config
from crius.models.plan import ShardingPlan


def plan(config: Llama3Config) -> ShardingPlan:
    """The sharding plan; a tied output layer shares the embedding's weight and so must share its FSDP unit."""
    ends = ("tok_embeddings+norm+output", "layers.*") if config.tied_embeddings else None
    return ShardingPlan(
        block="layers.*",
        fsdp_units=ends or ("tok_embeddings", "layers.*", "norm+output"),  # norm is too small to gather alone
        embeddings=("tok_embeddings",),
    )

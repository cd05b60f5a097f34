"""How Llama 3 is laid out on a mesh."""

from crius.models.llama3.config import Llama3Config
from crius.models.plan import ShardingPlan, decoder_plan


def plan(config: Llama3Config) -> ShardingPlan:
    """The sharding plan: that of the plain decoder."""
    return decoder_plan(tied_embeddings=config.tied_embeddings)

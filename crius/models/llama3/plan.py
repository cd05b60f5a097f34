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
        sensitive=("output",),
        tensor_parallel={
            "tok_embeddings": "vocab",
            "layers.*.attention_norm": "sequence",
            "layers.*.attention": "gather_sequence",  # once for wq, wk and wv
            "layers.*.attention.wq": "colwise",
            "layers.*.attention.wk": "colwise_heads",  # replicated where there are fewer heads than ranks
            "layers.*.attention.wv": "colwise_heads",
            "layers.*.attention.wo": "rowwise",
            "layers.*.ffn_norm": "sequence",
            "layers.*.feed_forward": "gather_sequence",
            "layers.*.feed_forward.w1": "colwise",
            "layers.*.feed_forward.w3": "colwise",
            "layers.*.feed_forward.w2": "rowwise",
            "norm": "sequence",
            "output": "logits",
        },
        heads=("num_heads", "num_kv_heads"),
    )

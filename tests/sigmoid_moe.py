"""A small model with all that DeepSeek-V3's experts have: sigmoids, a bias, groups, a scale, a shared expert, a dense
first layer. ``--import sigmoid_moe`` knows it.
"""

from crius.models.config import RoutedConfig
from crius.models.spec import ModelSpec

SMALL = RoutedConfig(
    dim=64,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    ffn_dim=128,
    vocab_size=512,
    num_experts=8,
    top_k=2,
    expert_ffn_dim=64,
    shared_ffn_dim=64,
    num_dense_layers=1,
    score="sigmoid",
    route_scale=2.5,
    router_bias=True,
    num_groups=4,
    top_groups=2,
)


SPEC = ModelSpec(name="sigmoid_moe", flavors={"small": SMALL})

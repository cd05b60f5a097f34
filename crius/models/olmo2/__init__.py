"""OLMo 2 (arXiv:2501.00656): norms after attention and feed-forward, and queries and keys normalised over all heads.

Flavors have the published sizes, from config.json on the Hugging Face hub.
"""

from dataclasses import dataclass

from crius.models.config import DecoderConfig
from crius.models.description import Norm, Placement
from crius.models.huggingface import ATTENTION_BIAS, NAMES, HuggingFace
from crius.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """Sizes of one OLMo 2 model."""

    vocab_size: int = 100_352
    norm_eps: float = 1e-6
    qk_norm: Norm = "all"
    norms: Placement = "post"


FLAVORS: dict[str, Olmo2Config] = {
    "debug": Olmo2Config(dim=128, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=384, vocab_size=512),
    "1b": Olmo2Config(dim=2048, num_layers=16, num_heads=16, num_kv_heads=16, ffn_dim=8192),
    "7b": Olmo2Config(dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, ffn_dim=11_008),
    "13b": Olmo2Config(dim=5120, num_layers=40, num_heads=40, num_kv_heads=40, ffn_dim=13_824),
    "32b": Olmo2Config(dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, ffn_dim=27_648),
}

POST_NORMS = {name: theirs for name, theirs in NAMES.items() if name.count("_norm") == 0 or "attention." in name} | {
    "layers.*.attention_post_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.ffn_post_norm.weight": "model.layers.*.post_feedforward_layernorm.weight",
}

HF = HuggingFace(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    names=POST_NORMS,
    config=Olmo2Config,
    sizes=ATTENTION_BIAS,
    defaults={"norm_eps": 1e-5, "rope_theta": 10_000.0, "tied_embeddings": False},
)

SPEC = ModelSpec(name="olmo2", flavors=FLAVORS, hf=HF)

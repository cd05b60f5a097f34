"""Seed-OSS (ByteDance, 2025): Llama's decoder with biases of queries, keys and values.

The flavor 36b has the published sizes, from config.json on the Hugging Face hub.
"""

from dataclasses import dataclass

from crius.models.config import DecoderConfig
from crius.models.huggingface import MLP_BIAS, NAMES, HuggingFace, Size
from crius.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(DecoderConfig):
    """Sizes of one Seed-OSS model. ``head_dim`` is 128 for every ``dim``."""

    vocab_size: int = 155_136
    head_dim: int = 128
    rope_theta: float = 10_000_000.0
    norm_eps: float = 1e-6
    qkv_bias: bool = True


FLAVORS: dict[str, SeedOssConfig] = {
    "debug": SeedOssConfig(
        dim=128, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=32, ffn_dim=384, vocab_size=512
    ),
    "36b": SeedOssConfig(dim=5120, num_layers=64, num_heads=80, num_kv_heads=8, ffn_dim=27_648),
}

HF = HuggingFace(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    names=NAMES,
    config=SeedOssConfig,
    sizes=(
        Size("attention_bias", "qkv_bias", bool, True),
        Size("attention_out_bias", "o_bias", bool, True),
        MLP_BIAS,
    ),
    computes={"attention_dropout": (), "residual_dropout": ()},  # of training, which published files leave at 0.1
    defaults={
        "num_kv_heads": 8,
        "head_dim": 128,
        "norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tied_embeddings": False,
    },
)

SPEC = ModelSpec(name="seed_oss", flavors=FLAVORS, hf=HF)

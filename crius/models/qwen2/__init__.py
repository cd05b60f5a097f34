"""Qwen2 and Qwen2.5 (arXiv:2412.15115): Llama's decoder with biases of queries, keys and values.

Flavors have the published sizes of Qwen2.5, from config.json on the Hugging Face hub.
"""

from dataclasses import dataclass

from crius.models.config import DecoderConfig
from crius.models.huggingface import NAMES, HuggingFace
from crius.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """Sizes of one Qwen2 model."""

    vocab_size: int = 151_936
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    qkv_bias: bool = True


FLAVORS: dict[str, Qwen2Config] = {
    "debug": Qwen2Config(dim=128, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=384, vocab_size=512),
    "0.5b": Qwen2Config(dim=896, num_layers=24, num_heads=14, num_kv_heads=2, ffn_dim=4864, tied_embeddings=True),
    "1.5b": Qwen2Config(dim=1536, num_layers=28, num_heads=12, num_kv_heads=2, ffn_dim=8960, tied_embeddings=True),
    "3b": Qwen2Config(dim=2048, num_layers=36, num_heads=16, num_kv_heads=2, ffn_dim=11_008, tied_embeddings=True),
    "7b": Qwen2Config(dim=3584, num_layers=28, num_heads=28, num_kv_heads=4, ffn_dim=18_944, vocab_size=152_064),
}

HF = HuggingFace(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    names=NAMES,
    config=Qwen2Config,
    computes={"attention_bias": ()},  # transformers' Qwen2 has no such key
    defaults={"num_kv_heads": 32, "norm_eps": 1e-6, "rope_theta": 10_000.0, "tied_embeddings": False},
)

SPEC = ModelSpec(name="qwen2", flavors=FLAVORS, hf=HF)

"""Mistral (arXiv:2310.06825): Llama's decoder. The first version has a window of 4096 tokens in all layers.

Flavors have the published sizes, from config.json on the Hugging Face hub: 7B v0.3, Nemo and Small 3.
"""

from dataclasses import dataclass

from crius.models.config import DecoderConfig
from crius.models.huggingface import NAMES, HuggingFace, Kinds
from crius.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """Sizes of one Mistral model."""

    num_kv_heads: int = 8
    vocab_size: int = 131_072
    rope_theta: float = 1_000_000.0


FLAVORS: dict[str, MistralConfig] = {
    "debug": MistralConfig(dim=128, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=384, vocab_size=512),
    "7b": MistralConfig(dim=4096, num_layers=32, num_heads=32, ffn_dim=14_336, vocab_size=32_768),
    "12b": MistralConfig(dim=5120, num_layers=40, num_heads=32, head_dim=128, ffn_dim=14_336),
    "24b": MistralConfig(dim=5120, num_layers=40, num_heads=32, head_dim=128, ffn_dim=32_768, rope_theta=100_000_000.0),
}

HF = HuggingFace(
    model_type="mistral",
    architecture="MistralForCausalLM",
    names=NAMES,
    kinds=Kinds(windows="all", window=4096),
    defaults={"num_kv_heads": 8, "norm_eps": 1e-6, "rope_theta": 10_000.0, "tied_embeddings": False},
)

SPEC = ModelSpec(name="mistral", flavors=FLAVORS, hf=HF)

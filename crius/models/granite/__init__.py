"""Granite 3 (IBM, 2024), dense: Llama's decoder with four multipliers.

Flavors have the published sizes of Granite 3.3, from config.json on the Hugging Face hub.
"""

from dataclasses import dataclass

from crius.models.config import DecoderConfig
from crius.models.huggingface import ATTENTION_BIAS, MLP_BIAS, NAMES, HuggingFace, Size
from crius.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """Sizes of one Granite model."""

    vocab_size: int = 49_159
    num_kv_heads: int = 8
    rope_theta: float = 10_000_000.0
    tied_embeddings: bool = True
    attention_scale: float | None = 1 / 128
    embedding_multiplier: float = 12.0
    residual_multiplier: float = 0.22
    logits_divisor: float = 16.0


FLAVORS: dict[str, GraniteConfig] = {
    "debug": GraniteConfig(dim=128, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=384, vocab_size=512),
    "2b": GraniteConfig(
        dim=2048, num_layers=40, num_heads=32, ffn_dim=8192, attention_scale=1 / 64, logits_divisor=8.0
    ),
    "8b": GraniteConfig(dim=4096, num_layers=40, num_heads=32, ffn_dim=12_800),
}

HF = HuggingFace(
    model_type="granite",
    architecture="GraniteForCausalLM",
    names=NAMES,
    config=GraniteConfig,
    sizes=(
        *ATTENTION_BIAS,
        MLP_BIAS,
        Size("attention_multiplier", "attention_scale", float, True),
        Size("embedding_multiplier", "embedding_multiplier", float, True),
        Size("residual_multiplier", "residual_multiplier", float, True),
        Size("logits_scaling", "logits_divisor", float, True),
    ),
    computes={"attention_dropout": ()},  # of training, which some published files leave at 0.1
    defaults={
        "norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tied_embeddings": False,
        "attention_scale": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_divisor": 1.0,
    },
)

SPEC = ModelSpec(name="granite", flavors=FLAVORS, hf=HF)

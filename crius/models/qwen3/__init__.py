"""Qwen3, dense (arXiv:2505.09388): queries and keys are normalised per head before they are rotated.

Flavors have the published sizes, from config.json on the Hugging Face hub. The class there is ``Qwen3ForCausalLM``; its
parameters have Llama's names, with two more norms.
"""

from dataclasses import dataclass

from crius.models.config import DecoderConfig
from crius.models.description import Norm
from crius.models.huggingface import ATTENTION_BIAS, NAMES, HuggingFace
from crius.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """Sizes of one dense Qwen3 model. ``head_dim`` is 128 for every ``dim``."""

    vocab_size: int = 151_936
    head_dim: int = 128
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    qk_norm: Norm = "head"


FLAVORS: dict[str, Qwen3Config] = {
    "debug": Qwen3Config(dim=128, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=32, ffn_dim=384, vocab_size=512),
    "0.6b": Qwen3Config(dim=1024, num_layers=28, num_heads=16, num_kv_heads=8, ffn_dim=3072, tied_embeddings=True),
    "1.7b": Qwen3Config(dim=2048, num_layers=28, num_heads=16, num_kv_heads=8, ffn_dim=6144, tied_embeddings=True),
    "4b": Qwen3Config(dim=2560, num_layers=36, num_heads=32, num_kv_heads=8, ffn_dim=9728, tied_embeddings=True),
    "8b": Qwen3Config(dim=4096, num_layers=36, num_heads=32, num_kv_heads=8, ffn_dim=12_288),
    "14b": Qwen3Config(dim=5120, num_layers=40, num_heads=40, num_kv_heads=8, ffn_dim=17_408),
    "32b": Qwen3Config(dim=5120, num_layers=64, num_heads=64, num_kv_heads=8, ffn_dim=25_600),
}

HF = HuggingFace(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names=NAMES,
    sizes=ATTENTION_BIAS,
    config=Qwen3Config,
    defaults={"num_kv_heads": 32, "head_dim": 128, "norm_eps": 1e-6, "rope_theta": 10_000.0, "tied_embeddings": False},
)

SPEC = ModelSpec(name="qwen3", flavors=FLAVORS, hf=HF)

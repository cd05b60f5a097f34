"""Llama 3 (arXiv:2407.21783): the plain decoder of ``crius.models.decoder``. Flavors from 3.1 on stretch frequencies.

Hugging Face's class is ``LlamaForCausalLM``. Both implementations split a head's rotary dims into halves, so weights
map by name alone, without a permutation.
"""

from dataclasses import dataclass

from crius.models.config import DecoderConfig
from crius.models.huggingface import ATTENTION_BIAS, MLP_BIAS, NAMES, HuggingFace
from crius.models.rope import Llama3Scaling
from crius.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Llama3Config(DecoderConfig):
    """Sizes of one Llama 3 model."""

    vocab_size: int = 128_256


_LLAMA_3_1 = Llama3Scaling(factor=8.0)

FLAVORS: dict[str, Llama3Config] = {
    "debug": Llama3Config(dim=128, num_layers=8, num_heads=8, num_kv_heads=4, ffn_dim=384, vocab_size=512),
    "6m": Llama3Config(  # for the comparison with other trainers on a CPU: benchmarks/README.md
        dim=256, num_layers=6, num_heads=8, num_kv_heads=4, ffn_dim=768, vocab_size=2048, rope_theta=10_000.0
    ),
    "1b": Llama3Config(  # Llama 3.2
        dim=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        ffn_dim=8192,
        rope_scaling=Llama3Scaling(factor=32.0),
        tied_embeddings=True,
    ),
    "8b": Llama3Config(dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14_336, rope_scaling=_LLAMA_3_1),
    "70b": Llama3Config(dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=28_672, rope_scaling=_LLAMA_3_1),
    "405b": Llama3Config(
        dim=16_384, num_layers=126, num_heads=128, num_kv_heads=8, ffn_dim=53_248, rope_scaling=_LLAMA_3_1
    ),
}

HF = HuggingFace(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=NAMES,
    sizes=(*ATTENTION_BIAS, MLP_BIAS),
    defaults={"norm_eps": 1e-6, "rope_theta": 10_000.0, "tied_embeddings": False},
)


SPEC = ModelSpec(name="llama3", flavors=FLAVORS, hf=HF)

"""Dimensions of Llama 3, with the published flavors."""

from dataclasses import dataclass

from crius.models.config import DecoderConfig, RopeScaling


@dataclass(frozen=True, kw_only=True)
class Llama3Config(DecoderConfig):
    """Sizes of one Llama 3 model."""

    vocab_size: int = 128_256


_LLAMA_3_1 = RopeScaling(factor=8.0)

FLAVORS: dict[str, Llama3Config] = {
    "debug": Llama3Config(dim=128, num_layers=8, num_heads=8, num_kv_heads=4, ffn_dim=384, vocab_size=512),
    "6m": Llama3Config(  # of the comparison with other trainers on a CPU: benchmarks/README.md
        dim=256, num_layers=6, num_heads=8, num_kv_heads=4, ffn_dim=768, vocab_size=2048, rope_theta=10_000.0
    ),
    "1b": Llama3Config(  # Llama 3.2
        dim=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        ffn_dim=8192,
        rope_scaling=RopeScaling(factor=32.0),
        tied_embeddings=True,
    ),
    "8b": Llama3Config(dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14_336, rope_scaling=_LLAMA_3_1),
    "70b": Llama3Config(dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=28_672, rope_scaling=_LLAMA_3_1),
    "405b": Llama3Config(
        dim=16_384, num_layers=126, num_heads=128, num_kv_heads=8, ffn_dim=53_248, rope_scaling=_LLAMA_3_1
    ),
}

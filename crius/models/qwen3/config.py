"""Dimensions of Qwen3, with the published flavors (their config.json on the Hugging Face hub)."""

from dataclasses import dataclass

from crius.models.config import DecoderConfig
from crius.models.describe import decoder_layer, feed_forward, gqa
from crius.models.description import Layer


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """Sizes of one dense Qwen3 model; a head is 128 wide, whatever ``dim`` is."""

    vocab_size: int = 151_936
    head_dim: int = 128
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6

    def layer(self) -> Layer:
        """A plain one, with norms of queries and keys."""
        attention = gqa(self.dim, self.num_heads, self.num_kv_heads, self.head_dim, head_norms=True)
        return decoder_layer(self.dim, attention, feed_forward(self.dim, self.ffn_dim))


FLAVORS: dict[str, Qwen3Config] = {
    "debug": Qwen3Config(dim=128, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=32, ffn_dim=384, vocab_size=512),
    "0.6b": Qwen3Config(dim=1024, num_layers=28, num_heads=16, num_kv_heads=8, ffn_dim=3072, tied_embeddings=True),
    "1.7b": Qwen3Config(dim=2048, num_layers=28, num_heads=16, num_kv_heads=8, ffn_dim=6144, tied_embeddings=True),
    "4b": Qwen3Config(dim=2560, num_layers=36, num_heads=32, num_kv_heads=8, ffn_dim=9728, tied_embeddings=True),
    "8b": Qwen3Config(dim=4096, num_layers=36, num_heads=32, num_kv_heads=8, ffn_dim=12_288),
    "14b": Qwen3Config(dim=5120, num_layers=40, num_heads=40, num_kv_heads=8, ffn_dim=17_408),
    "32b": Qwen3Config(dim=5120, num_layers=64, num_heads=64, num_kv_heads=8, ffn_dim=25_600),
}

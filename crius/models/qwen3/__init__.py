"""Qwen3, dense (arXiv:2505.09388): queries and keys are normalised per head before they are rotated.

Flavors have the published sizes, from config.json on the Hugging Face hub. The class there is ``Qwen3ForCausalLM``; its
parameters have Llama's names, with two more norms.
"""

from dataclasses import dataclass

from crius.models.config import DecoderConfig, decoder_layer, feed_forward, gqa
from crius.models.description import Layer
from crius.models.huggingface import HuggingFace
from crius.models.llama3 import NAMES as LLAMA3
from crius.models.plan import ShardingPlan, decoder_plan
from crius.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """Sizes of one dense Qwen3 model. ``head_dim`` is 128 for every ``dim``."""

    vocab_size: int = 151_936
    head_dim: int = 128
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6

    def layer(self) -> Layer:
        """A plain decoder layer with norms of queries and keys."""
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

NAMES = {
    **LLAMA3,
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
}

HF = HuggingFace(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names=NAMES,
    defaults={"num_kv_heads": 32, "head_dim": 128, "norm_eps": 1e-6, "rope_theta": 10_000.0, "tied_embeddings": False},
)

ROWS = {"layers.*.attention.q_norm": "head_norm", "layers.*.attention.k_norm": "head_norm"}


def plan(config: Qwen3Config) -> ShardingPlan:
    """The plan of the plain decoder. Every rank has the norms of queries and keys."""
    return decoder_plan(tied_embeddings=config.tied_embeddings, rows=ROWS)


SPEC = ModelSpec(name="qwen3", flavors=FLAVORS, plan=plan, block="crius.models.qwen3.block:Qwen3Block", hf=HF)

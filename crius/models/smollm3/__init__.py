"""SmolLM3 (Hugging Face, 2025): Llama's decoder without rotary positions in every fourth layer.

The flavor 3b has the published sizes, from config.json on the Hugging Face hub.
"""

from dataclasses import dataclass

from crius.models.config import DecoderConfig, LayerKind
from crius.models.huggingface import ATTENTION_BIAS, MLP_BIAS, NAMES, HuggingFace, Kinds
from crius.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(DecoderConfig):
    """Sizes of one SmolLM3 model."""

    vocab_size: int = 128_256
    rope_theta: float = 5_000_000.0
    norm_eps: float = 1e-6
    tied_embeddings: bool = True
    pattern: tuple[LayerKind, ...] = (LayerKind(), LayerKind(), LayerKind(), LayerKind(positions=False))


FLAVORS: dict[str, SmolLM3Config] = {
    "debug": SmolLM3Config(dim=128, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=384, vocab_size=512),
    "3b": SmolLM3Config(dim=2048, num_layers=36, num_heads=16, num_kv_heads=4, ffn_dim=11_008),
}

HF = HuggingFace(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    names=NAMES,
    config=SmolLM3Config,
    sizes=(*ATTENTION_BIAS, MLP_BIAS),
    kinds=Kinds(no_positions_every=4),
    defaults={"num_kv_heads": 4, "norm_eps": 1e-6, "rope_theta": 2_000_000.0, "tied_embeddings": True},
)

SPEC = ModelSpec(name="smollm3", flavors=FLAVORS, hf=HF)

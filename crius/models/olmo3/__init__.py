"""OLMo 3 (Ai2, 2025): OLMo 2 with a window in three of four layers. Positions of the others are stretched by YaRN.

Flavors have the published sizes, from config.json on the Hugging Face hub.
"""

from dataclasses import dataclass

from crius.models.config import LayerKind
from crius.models.huggingface import ATTENTION_BIAS, HuggingFace, Kinds
from crius.models.olmo2 import POST_NORMS, Olmo2Config
from crius.models.rope import Scaling, YarnScaling
from crius.models.spec import ModelSpec

_NEAR = LayerKind(window=4096, rope_theta=500_000.0, stretched=False)
_SHORT = LayerKind(window=24, rope_theta=500_000.0, stretched=False)


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config):
    """Sizes of one OLMo 3 model."""

    vocab_size: int = 100_278
    rope_scaling: Scaling | None = YarnScaling(factor=8.0, original_context=8192, attention_factor=1.2079441541679836)
    pattern: tuple[LayerKind, ...] = (_NEAR, _NEAR, _NEAR, LayerKind())


FLAVORS: dict[str, Olmo3Config] = {
    "debug": Olmo3Config(
        dim=128,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        ffn_dim=384,
        vocab_size=512,
        pattern=(_SHORT, _SHORT, _SHORT, LayerKind()),
    ),
    "7b": Olmo3Config(dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, ffn_dim=11_008),
    "32b": Olmo3Config(dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, ffn_dim=27_648),
}

HF = HuggingFace(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    names=POST_NORMS,
    config=Olmo3Config,
    sizes=ATTENTION_BIAS,
    kinds=Kinds(windows="listed", window=4096, full_every=4, local_theta=500_000.0),
    defaults={"norm_eps": 1e-5, "rope_theta": 500_000.0, "tied_embeddings": False},
)

SPEC = ModelSpec(name="olmo3", flavors=FLAVORS, hf=HF)

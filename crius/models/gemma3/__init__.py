"""Gemma 3 (arXiv:2503.19786), its text model: a window in five of six layers, norms before and after, GeGLU.

Norms multiply by 1 + weight, embeddings by the root of their width. Flavors have the published sizes, from config.json
on the Hugging Face hub.
"""

from dataclasses import dataclass

from crius.models.config import LayerKind
from crius.models.description import Norm
from crius.models.gemma2 import GEMMA_COMPUTES, GEMMA_NAMES, GEMMA_SIZES, Gemma2Config
from crius.models.huggingface import HuggingFace, Kinds
from crius.models.rope import LinearScaling
from crius.models.spec import ModelSpec


def _pattern(window: int) -> tuple[LayerKind, ...]:
    near = LayerKind(window=window, rope_theta=10_000.0, stretched=False)
    return (near, near, near, near, near, LayerKind())


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    """Sizes of one Gemma 3 model."""

    vocab_size: int = 262_144
    rope_theta: float = 1_000_000.0
    pattern: tuple[LayerKind, ...] = _pattern(1024)
    qk_norm: Norm = "head"
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0


_LONG = LinearScaling(factor=8.0)

FLAVORS: dict[str, Gemma3Config] = {
    "debug": Gemma3Config(
        dim=128,
        num_layers=6,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        ffn_dim=384,
        vocab_size=512,
        pattern=_pattern(24),
        attention_scale=32**-0.5,
    ),
    "270m": Gemma3Config(dim=640, num_layers=18, num_heads=4, num_kv_heads=1, ffn_dim=2048, pattern=_pattern(512)),
    "1b": Gemma3Config(dim=1152, num_layers=26, num_heads=4, num_kv_heads=1, ffn_dim=6912, pattern=_pattern(512)),
    "4b": Gemma3Config(
        dim=2560,
        num_layers=34,
        num_heads=8,
        num_kv_heads=4,
        ffn_dim=10_240,
        vocab_size=262_208,
        rope_scaling=_LONG,
    ),
    "12b": Gemma3Config(
        dim=3840,
        num_layers=48,
        num_heads=16,
        num_kv_heads=8,
        ffn_dim=15_360,
        vocab_size=262_208,
        rope_scaling=_LONG,
    ),
    "27b": Gemma3Config(
        dim=5376,
        num_layers=62,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        ffn_dim=21_504,
        vocab_size=262_208,
        rope_scaling=_LONG,
        attention_scale=168**-0.5,
    ),
}

HF = HuggingFace(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    names=GEMMA_NAMES,
    config=Gemma3Config,
    sizes=GEMMA_SIZES,
    kinds=Kinds(
        windows="listed",
        window=4096,
        full_every=6,
        period="sliding_window_pattern",
        local_theta=10_000.0,
        local_key="rope_local_base_freq",
    ),
    computes=GEMMA_COMPUTES | {"attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)},
    defaults={
        "num_kv_heads": 4,
        "head_dim": 256,
        "norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tied_embeddings": True,
    },
)

SPEC = ModelSpec(name="gemma3", flavors=FLAVORS, hf=HF)

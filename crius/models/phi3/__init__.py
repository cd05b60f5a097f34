"""Phi-3 and Phi-4 (arXiv:2412.08905): Llama's decoder, whose files join q, k and v, and gate and up.

Flavors have the published sizes, from config.json on the Hugging Face hub. Phi-3's long contexts and Phi-4 mini, whose
frequencies are stretched by longrope, are not supported.
"""

from dataclasses import dataclass

from crius.models.config import DecoderConfig, LayerKind
from crius.models.huggingface import NAMES, HuggingFace, Kinds, Size
from crius.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Phi3Config(DecoderConfig):
    """Sizes of one Phi model."""

    vocab_size: int = 100_352
    rope_theta: float = 250_000.0


FLAVORS: dict[str, Phi3Config] = {
    "debug": Phi3Config(dim=128, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=384, vocab_size=512),
    "14b": Phi3Config(dim=5120, num_layers=40, num_heads=40, num_kv_heads=10, ffn_dim=17_920),  # Phi-4
    "mini-4k": Phi3Config(  # Phi-3
        dim=3072,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        ffn_dim=8192,
        vocab_size=32_064,
        rope_theta=10_000.0,
        pattern=(LayerKind(window=2047),),
    ),
}

HF = HuggingFace(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    names=NAMES
    | {f"layers.*.attention.{name}.weight": "model.layers.*.self_attn.qkv_proj.weight" for name in ("wq", "wk", "wv")}
    | {f"layers.*.feed_forward.{name}.weight": "model.layers.*.mlp.gate_up_proj.weight" for name in ("w1", "w3")},
    sizes=(Size("partial_rotary_factor", "rotary_share", float, True),),
    kinds=Kinds(windows="all"),
    computes={
        "attention_bias": (),  # transformers' Phi-3 has neither key
        "mlp_bias": (),
        "resid_pdrop": (0.0, None),
        "embd_pdrop": (0.0, None),
    },
    defaults={"norm_eps": 1e-5, "rope_theta": 10_000.0, "tied_embeddings": False},
)

SPEC = ModelSpec(name="phi3", flavors=FLAVORS, hf=HF)

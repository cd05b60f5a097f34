"""Gemma 2 (arXiv:2408.00118): a window in every other layer, norms before and after, GeGLU, bounded scores and logits.

Norms multiply by 1 + weight, embeddings by the root of their width. Flavors have the published sizes, from config.json
on the Hugging Face hub.
"""

from dataclasses import dataclass

from crius.models.config import DecoderConfig, LayerKind
from crius.models.description import Activation, Placement
from crius.models.huggingface import ATTENTION_BIAS, NAMES, HuggingFace, Kinds, Size
from crius.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """Sizes of one Gemma 2 model. The factor of the embeddings is ``dim ** 0.5`` unless it is given."""

    vocab_size: int = 256_000
    head_dim: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tied_embeddings: bool = True
    pattern: tuple[LayerKind, ...] = (LayerKind(window=4096), LayerKind())
    attention_scale: float | None = 256**-0.5
    attention_softcap: float = 50.0
    norms: Placement = "both"
    norm_plus_one: bool = True
    activation: Activation = "gelu_tanh"
    embedding_multiplier: float = 0.0
    embedding_multiplier_rounded: bool = True
    logits_softcap: float = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.embedding_multiplier:
            object.__setattr__(self, "embedding_multiplier", self.dim**0.5)


FLAVORS: dict[str, Gemma2Config] = {
    "debug": Gemma2Config(
        dim=128,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        ffn_dim=384,
        vocab_size=512,
        pattern=(LayerKind(window=24), LayerKind()),
        attention_scale=32**-0.5,
    ),
    "2b": Gemma2Config(dim=2304, num_layers=26, num_heads=8, num_kv_heads=4, ffn_dim=9216),
    "9b": Gemma2Config(dim=3584, num_layers=42, num_heads=16, num_kv_heads=8, ffn_dim=14_336),
    "27b": Gemma2Config(
        dim=4608,
        num_layers=46,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        ffn_dim=36_864,
        attention_scale=144**-0.5,
    ),
}

GEMMA_NAMES = NAMES | {
    "layers.*.attention_post_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.pre_feedforward_layernorm.weight",
    "layers.*.ffn_post_norm.weight": "model.layers.*.post_feedforward_layernorm.weight",
}
GEMMA_SIZES = (*ATTENTION_BIAS, Size("query_pre_attn_scalar", "attention_scale", float, True, power=-0.5))
GEMMA_COMPUTES = {
    "hidden_act": (),
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "use_bidirectional_attention": (False, None),
}

HF = HuggingFace(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    names=GEMMA_NAMES,
    config=Gemma2Config,
    sizes=(
        *GEMMA_SIZES,
        Size("attn_logit_softcapping", "attention_softcap", float, True, null=0.0),
        Size("final_logit_softcapping", "logits_softcap", float, True, null=0.0),
    ),
    kinds=Kinds(windows="listed", window=4096, full_every=2),
    computes=GEMMA_COMPUTES,
    defaults={
        "num_kv_heads": 4,
        "head_dim": 256,
        "norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tied_embeddings": True,
    },
)

SPEC = ModelSpec(name="gemma2", flavors=FLAVORS, hf=HF)

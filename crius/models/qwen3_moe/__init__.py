"""Qwen3 with experts (arXiv:2505.09388): 128 experts per layer. Each token visits 8 of them.

Flavors have the published sizes, from config.json on the Hugging Face hub. The class there is ``Qwen3MoeForCausalLM``.
"""

from dataclasses import dataclass

from crius.models.config import RoutedConfig
from crius.models.huggingface import ATTENTION_BIAS, HuggingFace, Size
from crius.models.huggingface import NAMES as PLAIN
from crius.models.qwen3 import Qwen3Config
from crius.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig(Qwen3Config, RoutedConfig):
    """Sizes of one Qwen3 model with experts. ``head_dim`` is 128 for every ``dim``."""


FLAVORS: dict[str, Qwen3MoEConfig] = {
    "debug": Qwen3MoEConfig(
        dim=128,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        ffn_dim=384,
        num_experts=8,
        top_k=2,
        expert_ffn_dim=192,
        vocab_size=512,
    ),
    "30b-a3b": Qwen3MoEConfig(
        dim=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        ffn_dim=6144,
        num_experts=128,
        top_k=8,
        expert_ffn_dim=768,
    ),
    "235b-a22b": Qwen3MoEConfig(
        dim=4096,
        num_layers=94,
        num_heads=64,
        num_kv_heads=4,
        ffn_dim=12_288,
        num_experts=128,
        top_k=8,
        expert_ffn_dim=1536,
    ),
}


NAMES = {
    **{name: theirs for name, theirs in PLAIN.items() if ".feed_forward." not in name},
    "layers.*.feed_forward.router.weight": "model.layers.*.mlp.gate.weight",
    "layers.*.feed_forward.experts.w1": "model.layers.*.mlp.experts.#.gate_proj.weight",
    "layers.*.feed_forward.experts.w2": "model.layers.*.mlp.experts.#.down_proj.weight",
    "layers.*.feed_forward.experts.w3": "model.layers.*.mlp.experts.#.up_proj.weight",
}

HF = HuggingFace(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names=NAMES,
    config=Qwen3MoEConfig,
    sizes=(
        *ATTENTION_BIAS,
        Size("num_experts", "num_experts", int, True, "num_local_experts"),  # the latter since transformers 5
        Size("num_experts_per_tok", "top_k", int, True),
        Size("moe_intermediate_size", "expert_ffn_dim", int, True),
    ),
    # every layer has experts; a file without norm_topk_prob means false in transformers
    computes={"norm_topk_prob": (True,), "decoder_sparse_step": (1, None), "mlp_only_layers": ([], None)},
    defaults={
        "num_kv_heads": 4,
        "norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tied_embeddings": False,
        "num_experts": 128,
        "top_k": 8,
        "expert_ffn_dim": 768,
    },
)

SPEC = ModelSpec(name="qwen3_moe", flavors=FLAVORS, hf=HF)

"""Mixtral (arXiv:2401.04088): Llama's attention, and 8 experts per layer. Each token visits 2 of them.

Flavors have the published sizes, from config.json on the Hugging Face hub. The class there is ``MixtralForCausalLM``.
"""

from dataclasses import dataclass

from crius.models.config import RoutedConfig
from crius.models.huggingface import NAMES as PLAIN
from crius.models.huggingface import HuggingFace, Size
from crius.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(RoutedConfig):
    """Sizes of one Mixtral model. ``ffn_dim`` equals ``expert_ffn_dim``, since no layer is dense."""

    vocab_size: int = 32_000
    ffn_dim: int = -1
    num_experts: int = 8
    top_k: int = 2
    rope_theta: float = 1_000_000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ffn_dim", self.expert_ffn_dim)


FLAVORS: dict[str, MixtralConfig] = {
    "debug": MixtralConfig(
        dim=128, num_layers=4, num_heads=8, num_kv_heads=4, num_experts=4, expert_ffn_dim=192, vocab_size=512
    ),
    "8x7b": MixtralConfig(dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, expert_ffn_dim=14_336),
    "8x22b": MixtralConfig(
        dim=6144, num_layers=56, num_heads=48, num_kv_heads=8, expert_ffn_dim=16_384, vocab_size=32_768
    ),
}

NAMES = {
    **{name: theirs for name, theirs in PLAIN.items() if ".feed_forward." not in name},
    "layers.*.feed_forward.router.weight": "model.layers.*.block_sparse_moe.gate.weight",
    "layers.*.feed_forward.experts.w1": "model.layers.*.block_sparse_moe.experts.#.w1.weight",
    "layers.*.feed_forward.experts.w2": "model.layers.*.block_sparse_moe.experts.#.w2.weight",
    "layers.*.feed_forward.experts.w3": "model.layers.*.block_sparse_moe.experts.#.w3.weight",
}

HF = HuggingFace(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    names=NAMES,
    sizes=(
        Size("num_local_experts", "num_experts", int, True, "num_experts"),
        Size("num_experts_per_tok", "top_k", int, True),
        Size("intermediate_size", "expert_ffn_dim"),
    ),
    computes={"sliding_window": (None,), "router_jitter_noise": (0.0, None)},
    defaults={
        "num_kv_heads": 8,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tied_embeddings": False,
        "num_experts": 8,
        "top_k": 2,
    },
)


SPEC = ModelSpec(name="mixtral", flavors=FLAVORS, hf=HF)

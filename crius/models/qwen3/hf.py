"""Qwen3 as Hugging Face's ``Qwen3ForCausalLM``: Llama's names, and two norms."""

from crius.models.huggingface import HuggingFace
from crius.models.llama3.hf import NAMES as LLAMA3

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

"""Names of Qwen3's parameters in Crius and in Hugging Face's ``Qwen3ForCausalLM``: Llama's, and two norms."""

from crius.models.llama3.hf import HF_NAMES as LLAMA3

HF_NAMES = {
    **LLAMA3,
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
}

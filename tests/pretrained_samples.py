"""Small random models of transformers, saved as folders of Hugging Face."""

import json
from pathlib import Path

import torch

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 384, "rms_norm_eps": 1e-5},
}
EXPERTS = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
WINDOWS = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    },
}
OWN = EXPERTS | {"gemma3": WINDOWS}
KINDS = {
    "llama": ("Llama", False),
    "llama_tied": ("Llama", True),
    "gemma3": ("Gemma3Text", True),
    "qwen2": ("Qwen2", False),
    "qwen3": ("Qwen3", False),
    "qwen3_tied": ("Qwen3", True),
    "qwen3_moe": ("Qwen3Moe", False),
    "mixtral": ("Mixtral", False),
}


def save(kind: str, folder: Path, *, dtype=torch.float32, **sizes):
    """Write a model in several shards; returns it."""
    import transformers

    family, tied = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**SIZES | OWN.get(kind, {}) | sizes, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start at 1, which would hide one in another's place
                parameter.normal_(1.0, 0.2)
    model.save_pretrained(folder, max_shard_size="100KB")
    return model


def save_tokenizer(folder: Path, *, template: str = "{{ messages }}") -> None:
    """Write a byte-level tokenizer without merges, and its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))

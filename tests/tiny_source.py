"""A small random model with a tokenizer and a chat template, as a folder of Hugging Face."""

import json

import torch

from crius import cli
from crius.kernels import choice
from crius.models import registry

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def save_tokenizer(folder):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))


def save_source(folder):
    """A random model of 259 ids in 320 rows, and its byte-level tokenizer."""
    from safetensors.torch import save_file

    sizes = {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64, "vocab_size": 320}
    spec = registry.SPECS["llama3"]
    model = registry.build(spec.describe("debug", **sizes))
    random = torch.Generator().manual_seed(0)
    weights = {}
    for name, weight in model.state_dict().items():
        number = next((part for part in name.split(".") if part.isdigit()), "")
        weight.normal_(0.0, 0.3, generator=random).add_(1.0 if weight.dim() == 1 else 0.0)
        weights[spec.hf.names[name.replace(f".{number}.", ".*.")].replace("*", number)] = weight
    save_file(weights, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 32}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    config |= {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))


def runner(verb, capsys, source):
    """Runs a verb of ``crius`` on a source in this process; gives exit code, stdout and stderr."""

    def run(*argv, src=source):
        with choice.applied(choice.current()):
            code = cli.main([verb, str(src), *map(str, argv)])
        return code, *capsys.readouterr()

    return run

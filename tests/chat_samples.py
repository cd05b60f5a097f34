"""Models to talk to: their answers are random, but only characters that they may say."""

import json

from safetensors.torch import load_file, save_file
from tiny_source import CHATML, SPECIAL, save_source

FORGETS = CHATML.replace(
    "{{ message['content'] }}", "{{ message['content'] if loop.last else message['content'][-9:] }}"
)
"""A template that leaves out the beginning of earlier messages, as others leave out what a model thought."""


def save_talker(folder, *, says="abcdefghijklmnopqrstuvwxyz", context=1 << 20, window=0, template=CHATML):
    """A random model that says only these characters, and never ends an answer; without a template for ``""``."""
    folder.mkdir()
    save_source(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    # ids are in the order of the letters that stand for bytes in byte-level tokenizers
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = [*printable, *(byte for byte in range(256) if byte not in printable)]
    kept = [order.index(ord(char)) for char in says]
    head = weights["lm_head.weight"]
    rows = head[kept].clone()
    head.zero_()
    head[kept] = rows
    save_file(weights, file)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": context}
    if window:
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    (folder / "config.json").write_text(json.dumps(config))
    told = {"eos_token": SPECIAL[2], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps({key: value for key, value in told.items() if value}))
    return folder

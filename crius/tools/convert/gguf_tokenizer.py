"""The tokenizer in the fields of a GGUF file, as tokenizer.json: byte-level BPE, and Gemma's pieces. Torch-free."""

import json
import re
from collections.abc import Sequence
from typing import Any

from crius.interop.unpickle import refusal
from crius.tokens.conversion import beginning

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(("gpt-2", "default"), []),
    "smollm": [{"type": "Digits", "individual_digits": True}],
    "llama-bpe": [{"type": "Split", "pattern": {"Regex": _LLAMA3}, "behavior": "Isolated", "invert": False}],
    "qwen2": [
        {
            "type": "Split",
            "pattern": {"Regex": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")},
            "behavior": "Isolated",
            "invert": False,
        }
    ],
}
"""Rules that split a text before its bytes are merged, by ``tokenizer.ggml.pre``, in the form of tokenizer.json."""

# of tokenizer.ggml.token_type
_CONTROL = 3
_USER_DEFINED = 4

_MOST_LENGTH = 1024
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens of tokenizer_config.json, and their names in the fields of a file."""


def tokenizer_of(fields: dict[str, Any], template: str, where: str) -> tuple[dict[str, str], str]:
    """tokenizer.json and tokenizer_config.json with the facts in the fields of a file, and a note.

    Args:
        fields: fields of the file.
        template: its chat template.
        where: path of the file, for messages.

    Raises:
        CheckpointError: a token is too long.
    """
    kind = fields.get("tokenizer.ggml.model")
    pre = fields.get("tokenizer.ggml.pre", "default")
    is_gemma = kind == "llama" and fields["general.architecture"] == "gemma3"
    if kind is None:
        return {}, "none: the file has none"
    if not is_gemma and (kind != "gpt2" or pre not in _SPLITS):
        return {}, f"none: Crius cannot build the file's kind, {str(kind)[:40]} with {str(pre)[:40]}"
    tokens = fields["tokenizer.ggml.tokens"]
    if max(map(len, tokens), default=0) > _MOST_LENGTH:
        raise refusal(where, f"a token has more than {_MOST_LENGTH:,} characters")
    names = {name: fields.get(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in _SPECIAL.items()}
    special = {f"{name}_token": tokens[number] for name, number in names.items() if number is not None}
    if is_gemma:
        spec = _pieces(tokens, special.get("unk_token"))
    else:
        spec = _byte_level(tokens, fields["tokenizer.ggml.merges"], pre)
    vocabulary = spec["model"]["vocab"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": number, "content": token, **flags, "special": kind == _CONTROL}
        for number, (token, kind) in enumerate(zip(tokens, fields["tokenizer.ggml.token_type"], strict=True))
        if kind in (_CONTROL, _USER_DEFINED) and token in vocabulary
    ]
    # a writer of pieces that leaves it out wants it
    if fields.get("tokenizer.ggml.add_bos_token", is_gemma) and "bos_token" in special:
        spec["post_processor"] = beginning(special["bos_token"], vocabulary)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        **({"chat_template": template} if template else {}),
    }
    if length := fields.get(f"{fields['general.architecture']}.context_length"):
        config["model_max_length"] = length
    texts = {"tokenizer.json": {"version": "1.0", "added_tokens": added, **spec}, "tokenizer_config.json": config}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in texts.items()}, "built from the file"


def _byte_level(tokens: Sequence[str], merges: Sequence[str], pre: str) -> dict[str, Any]:
    """Byte-level BPE, which splits a text by the rules of ``pre``."""
    bytes_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    cut = [*_SPLITS[pre], {**bytes_level, "use_regex": pre not in ("llama-bpe", "qwen2")}]
    model = {
        "type": "BPE",
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": [merge.split(" ", 1) for merge in merges],
        "ignore_merges": pre == "llama-bpe",
    }
    return {
        "model": model,
        # a file does not say it, and Qwen's tokenizer.json does
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "decoder": {**bytes_level, "use_regex": True},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cut},
    }


def _pieces(tokens: Sequence[str], unknown: str | None) -> dict[str, Any]:
    """Gemma's BPE of pieces, in which a space is U+2581 and a text has no space in front.

    A file has no merges: they are all pairs of tokens that make a token, in the order of the tokens. It writes runs of
    spaces as spaces.
    """
    spelled = [re.sub(r"\s", "▁", token) if " " in token and token.isspace() else token for token in tokens]
    vocabulary = {token: number for number, token in enumerate(spelled)}
    merges = [
        (token[:end], token[end:])
        for token in spelled
        for end in range(len(token) - 1, 0, -1)
        if token[:end] in vocabulary and token[end:] in vocabulary
    ]
    model = {
        "type": "BPE",
        "vocab": vocabulary,
        "merges": merges,
        "unk_token": unknown,
        "fuse_unk": True,
        "byte_fallback": True,
    }
    space = {"String": " "}
    bar = {"String": "▁"}
    decoders = [{"type": "Replace", "pattern": bar, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return {
        "model": model,
        "normalizer": {"type": "Replace", "pattern": space, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": space, "behavior": "MergedWithPrevious", "invert": False},
        "decoder": {"type": "Sequence", "decoders": decoders},
    }

"""Tokenizers of the kind of each family, as their folders have them: ids and BOS of transformers' AutoTokenizer."""

import json
import unicodedata

import pytest

from crius.config.data import TokenizerConfig
from crius.tokens.conversion import TEXTS
from crius.tokens.tokenizer import build_tokenizer
from crius.tools.convert.gguf_tokenizer import tokenizer_of

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["the quick brown fox jumps over a lazy dog and 1234567 naïve cafés", "Grüße 東京 def f(x):\n    return x\n\n"]
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = GPT4.replace("{1,3}", "")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BAR = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
FALLBACK = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}


def split(pattern):
    """Byte-level BPE that a pattern splits."""
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [rule, BYTES]}, "decoder": BYTES}


def beginning(token):
    """A post-processor that puts a token before a text."""
    parts = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {token: {"id": token, "ids": [0], "tokens": [token]}}
    return {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special}


GRANITE = {
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES | {"use_regex": True}],
    },
    "decoder": BYTES,
}
PIECES = {
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, BAR]},
    "decoder": FALLBACK,
}
METASPACE = {
    "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
    "decoder": FALLBACK,
}
GEMMA = {
    "normalizer": BAR,
    "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
    "decoder": FALLBACK,
}
# model_type, parts of tokenizer.json, BOS first among the special tokens, tokenizer_config.json
KINDS = {
    "llama3": (
        "llama",
        split(GPT4) | {"post_processor": {"type": "Sequence", "processors": [BYTES, beginning("<|begin_of_text|>")]}},
        ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eot_id|>"},
    ),
    "qwen2": (
        "qwen2",
        split(QWEN) | {"normalizer": {"type": "NFC"}, "post_processor": BYTES},
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "add_bos_token": False, "eos_token": "<|im_end|>"},
    ),
    "qwen3": (
        "qwen3",
        split(QWEN) | {"normalizer": {"type": "NFC"}, "post_processor": BYTES},
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "add_bos_token": False, "eos_token": "<|im_end|>"},
    ),
    "seed_oss": (
        "seed_oss",
        split(GPT4) | {"post_processor": BYTES},
        ["<seed:bos>", "<seed:eos>"],
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<seed:bos>", "eos_token": "<seed:eos>"},
    ),
    "smollm3": (
        "smollm3",
        split(GPT4) | {"post_processor": beginning("<|begin_of_text|>")},
        ["<|begin_of_text|>", "<|end_of_text|>", "<|im_end|>"],
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": "<|im_end|>"},
    ),
    "granite": (
        "granite",
        GRANITE | {"post_processor": BYTES},
        ["<|end_of_text|>", "<|start_of_role|>"],
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|end_of_text|>", "add_bos_token": False},
    ),
    "phi3": (
        "phi3",
        PIECES | {"post_processor": beginning("<s>")},
        ["<s>", "</s>", "<unk>", "<|end|>"],
        {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False},
    ),
    "phi3_bos": (
        "phi3",
        PIECES,
        ["<s>", "</s>", "<unk>", "<|end|>"],
        {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True},
    ),
    "phi4": (
        "phi3",
        split(GPT4) | {"post_processor": BYTES},
        ["<|endoftext|>", "<|im_end|>"],
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
    ),
    "mistral": (
        "mistral",
        METASPACE | {"post_processor": beginning("<s>")},
        ["<s>", "</s>", "<unk>", "[INST]"],
        {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "add_bos_token": True, "add_eos_token": False},
    ),
    "mistral_nemo": (
        "mistral",
        split(GPT4) | {"post_processor": beginning("<s>")},
        ["<s>", "</s>", "<unk>", "[INST]"],
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"},
    ),
    "mixtral": (
        "mixtral",
        PIECES | {"post_processor": beginning("<s>")},
        ["<s>", "</s>", "<unk>"],
        {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "add_eos_token": False},
    ),
    "olmo2_bos": (
        "olmo2",
        split(GPT4) | {"post_processor": beginning("<|endoftext|>")},
        ["<|endoftext|>", "<|im_end|>"],
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    ),
    "olmo2": (
        "olmo2",
        split(GPT4) | {"post_processor": BYTES},
        ["<|endoftext|>", "<|im_end|>"],
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    ),
    "olmo3": (
        "olmo3",
        split(GPT4) | {"post_processor": BYTES},
        ["<|endoftext|>", "<|im_end|>"],
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "add_bos_token": False},
    ),
    "gemma3": (
        "gemma3_text",
        GEMMA | {"post_processor": beginning("<bos>")},
        ["<bos>", "<eos>", "<pad>", "<unk>", "<mask>", "<start_of_turn>"],
        {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True},
    ),
}


def trained(special, is_byte_level):
    """Vocabulary and merges of a small BPE."""
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    alphabet = []
    lines = [line.replace(" ", "▁") for line in WORDS]
    if is_byte_level:
        tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        lines = WORDS
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tok.train_from_iterator(lines * 2, trainer)
    model = json.loads(tok.to_str())["model"]
    pieces = [] if is_byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*special, *pieces, *sorted(model["vocab"], key=model["vocab"].get)]
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}, model["merges"]


def check_same(own, theirs, special, form=None):
    """The same ids of 50 texts, with names of special tokens as these tokens and as text.

    Args:
        own: our tokenizer.
        theirs: transformers'.
        special: names of special tokens.
        form: normal form of Unicode that the texts have.
    """
    texts = [*TEXTS, *(f"a {token}b" for token in special), "".join(special), " ".join(special)]
    assert len(texts) >= 50
    texts = [unicodedata.normalize(form, text) for text in texts] if form else texts
    start = [own.bos_id] if own.adds_bos else []
    for text in texts:
        assert [*start, *own.encode_marked(text).tolist()] == theirs(text).input_ids, text
        plain = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert own.encode(text).tolist() == plain, text
    assert {*own.special_names()} == {token.content for token in theirs.added_tokens_decoder.values() if token.special}
    assert theirs.bos_token_id in (None, own.bos_id)


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    model_type, parts, special, config = KINDS[request.param]
    place = tmp_path_factory.mktemp(request.param)
    is_byte_level = parts["decoder"] == BYTES
    vocab, merges = trained(special, is_byte_level)
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": request.param == "llama3"}
    if not is_byte_level:
        model |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    added = [{"id": vocab[token], "content": token, "special": True} | FLAGS for token in special]
    (place / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added, "model": model} | parts))
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    (place / "config.json").write_text(json.dumps({"model_type": model_type}))
    return place, special


def test_50_texts_have_the_ids_and_the_bos_of_transformers(folder):
    place, special = folder
    theirs = transformers.AutoTokenizer.from_pretrained(place)
    check_same(build_tokenizer(TokenizerConfig(path=str(place))), theirs, special)


# special tokens, BOS first, and fields of the tokenizer
FILES = {
    "llama": (["<|begin_of_text|>", "<|end_of_text|>"], {"pre": "llama-bpe", "add_bos_token": True}),
    "qwen2": (["<|endoftext|>", "<|im_end|>"], {"pre": "qwen2", "add_bos_token": False}),
    "gemma3": (["<bos>", "<eos>", "<pad>", "<unk>", "<mask>"], {"unknown_token_id": 3, "padding_token_id": 2}),
}


@pytest.mark.parametrize("architecture", FILES)
def test_the_tokenizer_of_a_gguf_file_has_the_ids_and_the_bos_of_transformers(architecture, tmp_path):
    gguf = pytest.importorskip("gguf")
    special, more = FILES[architecture]
    is_gemma = architecture == "gemma3"
    vocab, merges = trained(special, not is_gemma)
    plain = [*vocab][len(special) :]
    tokens = [*special, *plain, *(["  ", "\n\n"] if is_gemma else [])]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.add_block_count(1)
    writer.add_tokenizer_model("llama" if is_gemma else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 4 if token == "\n\n" else 1 for token in tokens])
    if not is_gemma:
        writer.add_token_merges([" ".join(merge) for merge in merges])
    for key, value in {"bos_token_id": 0, "eos_token_id": 1, **more}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    texts, _ = tokenizer_of({key: field.contents() for key, field in fields.items()}, "", "test")
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text" if is_gemma else architecture}))
    own = build_tokenizer(TokenizerConfig(path=str(tmp_path)))
    assert own.adds_bos == (architecture != "qwen2")
    # of a file transformers makes no normal form, of a folder of Qwen it does
    form = "NFC" if architecture == "qwen2" else None
    check_same(own, transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf"), special, form)
    check_same(own, transformers.AutoTokenizer.from_pretrained(tmp_path), special)

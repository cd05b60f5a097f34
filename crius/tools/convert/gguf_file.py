"""GGUF files, read by the gguf package: sizes, tensors as it dequantises them, and the tokenizer inside."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from crius.checkpoint.pieces import Piece, TensorSource
from crius.errors import ConfigError, CriusError, EnvironmentError
from crius.interop.foreign import check_key, check_shape, open_inside
from crius.interop.kept import BOS_ID, CONFIG, CONTEXT, EOS_ID
from crius.interop.unpickle import refusal
from crius.interop.weights import Weights, check_tensors, hash_files, settled
from crius.models.huggingface import config_of
from crius.models.registry import families
from crius.models.rope import rope_scaling_text
from crius.plugins import REQUIREMENTS, install_line
from crius.tools.convert.convert import in_halves

SUFFIX = ".gguf"

# GGUF's architecture to Crius's, and whether the writer turned halves of a head's rotary dims into pairs.
_MODELS = {"llama": ("llama3", True), "qwen3": ("qwen3", False)}
_NAMES = {
    "tok_embeddings": "token_embd",
    "norm": "output_norm",
    "output": "output",
    "attention_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    **{f"attention.w{one}": f"attn_{one}" for one in "qkv"},
    "attention.wo": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}
_SIZES = {
    "dim": "embedding_length",
    "num_layers": "block_count",
    "ffn_dim": "feed_forward_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_PLAIN = {"F32": "F32", "F16": "F16"}  # unquantised tensors stay as they are; all others become float32

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
_TOLD = {
    CONTEXT: "{}.context_length",
    BOS_ID: "tokenizer.ggml.bos_token_id",
    EOS_ID: "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
"""Keys of config.json that no size depends on, and their names in the fields of a file."""
# of tokenizer.ggml.token_type
_CONTROL = 3
_USER_DEFINED = 4


@dataclass(frozen=True)
class GgufFile:
    """Contents of a GGUF file.

    Attributes:
        weights: its weights.
        tokenizer: files of a tokenizer by name; empty if none can be built.
        note: note about the tokenizer.
    """

    weights: Weights
    tokenizer: Mapping[str, str]
    note: str


def open_gguf(path: Path, where: str) -> GgufFile:
    """Open a file; its tensors are dequantised when they are read.

    Raises:
        EnvironmentError: the gguf package is not installed.
        ConfigError: Crius does not have the file's model.
        CheckpointError: the file is damaged, or its tensors do not fit.
    """
    try:
        import gguf  # noqa: PLC0415  optional package
    except ImportError:
        fix = install_line(REQUIREMENTS["gguf"])
        raise EnvironmentError(
            f"{path} needs the gguf package, which is not installed.", where=where, fix=fix
        ) from None
    with open_inside(path.parent, path.name):
        pass
    try:
        reader = gguf.GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
        return _opened(path, fields, reader.tensors, gguf.dequantize, where)
    except CriusError:
        raise
    except Exception as error:  # any error of the package about a damaged file
        raise refusal(str(path), f"the gguf package says {type(error).__name__}: {str(error)[:200]}") from None


def _opened(path: Path, fields: dict[str, Any], tensors: Any, dequantize: Callable[..., Any], where: str) -> GgufFile:
    kind = str(fields.get("general.architecture"))[:100]
    if kind not in _MODELS:
        raise ConfigError(
            f"{path} has architecture {kind}, which Crius does not import.",
            where=where,
            fix=f"one of {', '.join(_MODELS)}",
        )
    name, is_paired = _MODELS[kind]
    found = {check_key(one.name, str(path)): one for one in tensors}
    model = settled({"name": name, "flavor": "custom", **_sizes(path, kind, fields, found)})
    heads = model["head_dim"] if is_paired else 0
    shapes = {key: check_shape([int(size) for size in one.shape[::-1]], str(path)) for key, one in found.items()}
    names = check_tensors(model, shapes, _translated, str(path))
    sources = {
        ours: _source(found[key], shapes[key], partial(dequantize, found[key].data, found[key].tensor_type), heads)
        for ours, key in names.items()
    }
    template = fields.get("tokenizer.chat_template", "")
    files, note = _tokenizer(fields, template)
    told = {key: fields.get(theirs.format(kind)) for key, theirs in _TOLD.items()}
    said = {key: number for key, number in told.items() if type(number) is int}
    weights = Weights(
        model=model,
        tensors=sources,
        tokenizer="",
        chat_template=template,
        kind="GGUF",
        origin=f"GGUF {path}",
        said={CONFIG: {**config_of(families()[name], model), **said}},
        hash_now=partial(hash_files, path.parent, [path.name]),
    )
    return GgufFile(weights, files, note)


def _sizes(path: Path, kind: str, fields: dict[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of ``[model]`` in the fields of a file."""
    missing = [f"{kind}.{key}" for key in _SIZES.values() if f"{kind}.{key}" not in fields]
    scaling = fields.get(f"{kind}.rope.scaling.type", "none")
    strange = [name for name in ("rope_freqs.weight",) if name in found]
    strange += [f"rope.scaling.type {scaling}"] if scaling != "none" else []
    strange += [key for key in ("expert_count", "attention.sliding_window") if fields.get(f"{kind}.{key}")]
    if missing or strange or "token_embd.weight" not in found:
        what = f"has {', '.join(strange)}, which cannot be imported from GGUF" if strange else ""
        raise ConfigError(
            f"{path} {what or 'lacks ' + ', '.join(missing or ['token_embd.weight'])}.",
            where=str(path),
            fix="import the model's Hugging Face folder, which has more",
        )
    sizes = {name: fields[f"{kind}.{key}"] for name, key in _SIZES.items()}
    if not all(type(size) in (int, float) and size > 0 for size in sizes.values()):
        raise refusal(str(path), f"its sizes are {str(sizes)[:300]}")
    for name in ("norm_eps", "rope_theta"):  # the shortest decimal number with the same float32 value
        sizes[name] = float(str(np.float32(sizes[name])))
    width = fields.get(f"{kind}.attention.key_length", sizes["dim"] // sizes["num_heads"])
    tied = "output.weight" not in found
    rows = int(found["token_embd.weight"].shape[-1])
    rope = rope_scaling_text(None, is_float32=True)
    return {**sizes, "head_dim": width, "vocab_size": rows, "tied_embeddings": tied, "rope_scaling": rope}


def _translated(name: str) -> str:
    """GGUF's name of a Crius parameter."""
    place, _, rest = name.removesuffix(".weight").removeprefix("layers.").partition(".")
    if name.startswith("layers."):
        return f"blk.{place}.{_NAMES[rest]}.weight"
    return f"{_NAMES[place]}.weight"


def _source(tensor: Any, shape: tuple[int, ...], dequantized: Callable[[], Any], head_dim: int) -> TensorSource:
    dtype = _PLAIN.get(tensor.tensor_type.name, "F32")
    is_rotated = head_dim and tensor.name.endswith((".attn_q.weight", ".attn_k.weight"))

    def read() -> memoryview:
        numbers = np.ascontiguousarray(tensor.data if dtype != "F32" else dequantized()).reshape(shape)
        return in_halves(numbers, head_dim) if is_rotated else numbers.reshape(-1).view(np.uint8).data

    return TensorSource(tensor.name, dtype, shape, (Piece((0,) * len(shape), shape, read),))


def _tokenizer(fields: dict[str, Any], template: str) -> tuple[dict[str, str], str]:
    """tokenizer.json and tokenizer_config.json with the facts in the fields of a file, and a note."""
    kind = fields.get("tokenizer.ggml.model")
    pre = fields.get("tokenizer.ggml.pre", "default")
    if kind is None:
        return {}, "none: the file has none"
    if kind != "gpt2" or pre not in _SPLITS:
        return {}, f"none: Crius cannot build the file's kind, {str(kind)[:40]} with {str(pre)[:40]}"
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    added: list[dict[str, Any]] = [
        dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        | {"id": number, "content": token, "special": kind == _CONTROL}
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    bytes_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    cut = [*_SPLITS[pre], {**bytes_level, "use_regex": pre not in ("llama-bpe", "qwen2")}]
    model = {
        "type": "BPE",
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": [merge.split(" ", 1) for merge in fields["tokenizer.ggml.merges"]],
        "ignore_merges": pre == "llama-bpe",
    }
    spec = {
        "version": "1.0",
        "added_tokens": added,
        "model": model,
        "decoder": {**bytes_level, "use_regex": True},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cut},
    }
    names = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        **{f"{name}_token": tokens[number] for name, number in names.items() if number is not None},
        **({"chat_template": template} if template else {}),
    }
    if length := fields.get(f"{fields['general.architecture']}.context_length"):
        config["model_max_length"] = length
    texts = {"tokenizer.json": spec, "tokenizer_config.json": config}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in texts.items()}, "built from the file"

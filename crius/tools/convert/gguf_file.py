"""GGUF files, read by the gguf package: sizes, tensors as it dequantises them, and the tokenizer inside."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from crius.checkpoint.pieces import Piece, TensorSource
from crius.errors import ConfigError, CriusError, EnvironmentError
from crius.interop.foreign import MAX_DIMS, check_key, check_shape, open_inside, overlapping
from crius.interop.kept import BOS_ID, CONFIG, CONTEXT, EOS_ID
from crius.interop.safetensors_file import said
from crius.interop.unpickle import refusal
from crius.interop.weights import Weights, check_tensors, hash_files, settled
from crius.models.huggingface import HuggingFace, config_of, settings_in
from crius.models.registry import families
from crius.plugins import REQUIREMENTS, install_line
from crius.tools.convert.convert import in_halves
from crius.tools.convert.gguf_tokenizer import tokenizer_of

SUFFIX = ".gguf"


class _Architecture(NamedTuple):
    """How GGUF stores a family.

    Attributes:
        name: our name of the family.
        is_paired: the writer turned halves of a head's rotary dims into pairs.
        usual: keys of config.json that a file need not have, with the published values.
    """

    name: str
    is_paired: bool = False
    usual: Mapping[str, Any] = {}


_MODELS = {
    "llama": _Architecture("llama3", is_paired=True),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "gemma3": _Architecture(
        "gemma3",
        usual={"query_pre_attn_scalar": 256, "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6},
    ),
}
_WIDTH_OF_GEMMA3_27B = 5376
_SCALAR_OF_GEMMA3_27B = 168
_NAMES = {
    "tok_embeddings": "token_embd",
    "norm": "output_norm",
    "output": "output",
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "ffn_norm": "ffn_norm",
    "ffn_post_norm": "post_ffw_norm",
    **{f"attention.w{one}": f"attn_{one}" for one in "qkv"},
    "attention.wo": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
"""Keys of config.json, and their names in the fields of a file."""
_OF_WINDOWS = {
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "rope_local_base_freq": "rope.freq_base_swa",
}
"""The same for a family with windows; a file need not have them."""
_NOT_READ = (
    "attention.scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
)
_PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""Types that stay as they are, and how numpy holds them; the others become float32."""
_QUANTISED = ("Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS")

_MOST_ITEMS = 3 << 19
"""Most numbers of a file, where a text counts twice. Llama 4, with 440,000 merges, has 1.5 million; each takes 8 us."""
_MOST_TEXT = 1 << 26

_TOLD = {
    CONTEXT: "{}.context_length",
    BOS_ID: "tokenizer.ggml.bos_token_id",
    EOS_ID: "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
"""Keys of config.json that no size depends on, and their names in the fields of a file."""


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
        reader = _reader(gguf.GGUFReader)(path)
        spans = ((one.data_offset, one.data_offset + one.n_bytes) for one in reader.tensors)
        if overlapping(spans):
            raise refusal(str(path), "its tensors overlap")
        fields = {key: field.contents() for key, field in reader.fields.items()}
        return _opened(path, fields, reader.tensors, gguf.dequantize, where)
    except CriusError:
        raise
    except Exception as error:  # any error of the package about a damaged file
        raise refusal(str(path), f"the gguf package says {type(error).__name__}: {str(error)[:200]}") from None


def _reader(package_reader: Any) -> Any:
    """The reader of the gguf package, which ends where the file ends, and keeps at most so many items and so much text.

    The package itself reads on behind the end of a file, as many items as the file says.
    """

    class GgufReader(package_reader):
        data: Any
        num_items = 0
        num_bytes = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **orders: Any) -> Any:
            if not self.num_items:
                self.data = self.data.view(np.ndarray)  # slices of a memmap take four times as long
            self.num_items += 1
            if dtype is np.uint64 and count > MAX_DIMS or self.num_items > _MOST_ITEMS:
                raise ValueError("it has too many items")
            if offset + np.dtype(dtype).itemsize * int(count) > self.data.size:
                raise ValueError("it has more items than bytes")
            return super()._get(offset, dtype, count, *order, **orders)

        def _get_str(self, offset: int) -> Any:
            found = super()._get_str(offset)
            self.num_bytes += found[1].size
            if self.num_bytes > _MOST_TEXT:
                raise ValueError("it has too much text")
            return found

    return GgufReader


def _opened(path: Path, fields: dict[str, Any], tensors: Any, dequantize: Callable[..., Any], where: str) -> GgufFile:
    kind = str(fields.get("general.architecture"))[:100]
    if kind not in _MODELS:
        raise ConfigError(
            f"{path} has architecture {kind}, which Crius does not import.",
            where=where,
            fix=f"one of {', '.join(_MODELS)}",
        )
    name, is_paired, _ = _MODELS[kind]
    found = {check_key(one.name, str(path)): one for one in tensors}
    family = families()[name]
    model = settled(_settings(path, kind, fields, found, family))
    heads = model["head_dim"] if is_paired else 0
    shapes = {key: check_shape([int(size) for size in one.shape[::-1]], str(path)) for key, one in found.items()}
    names = check_tensors(model, shapes, _translated, str(path))
    sources = {}
    for ours, key in names.items():
        values = partial(dequantize, found[key].data, found[key].tensor_type)
        has_one = family.config.norm_plus_one and "norm." in ours
        sources[ours] = _source(found[key], shapes[key], values, heads, has_one=has_one)
    template = fields.get("tokenizer.chat_template", "")
    files, note = tokenizer_of(fields, template, str(path))
    told = {key: fields.get(theirs.format(kind)) for key, theirs in _TOLD.items()}
    ids = {key: number for key, number in told.items() if type(number) is int}
    weights = Weights(
        model=model,
        tensors=sources,
        tokenizer="",
        chat_template=template,
        kind="GGUF",
        origin=f"GGUF {path}",
        said={CONFIG: {**config_of(family, model), **ids}},
        hash_now=partial(hash_files, path.parent, [path.name]),
    )
    return GgufFile(weights, files, note)


def _settings(
    path: Path, kind: str, fields: dict[str, Any], found: Mapping[str, Any], family: HuggingFace
) -> dict[str, Any]:
    """Settings of ``[model]`` in the fields of a file, which are those of a config.json under other names."""
    missing = [f"{kind}.{key}" for key in _SIZES.values() if f"{kind}.{key}" not in fields]
    if "token_embd.weight" not in found:
        missing.append("token_embd.weight")
    strange = _strange(kind, fields, found, family)
    if strange or missing:
        what = f"has {', '.join(strange)}, which cannot be imported from GGUF" if strange else ""
        raise ConfigError(
            f"{path} {what or 'lacks ' + ', '.join(missing)}.",
            where=str(path),
            fix="import the model's Hugging Face folder, which has more",
        )
    sizes = {name: fields[f"{kind}.{key}"] for name, key in _SIZES.items()}
    if family.kinds.windows == "listed":
        sizes |= {name: fields[f"{kind}.{key}"] for name, key in _OF_WINDOWS.items() if f"{kind}.{key}" in fields}
    scaling = fields.get(f"{kind}.rope.scaling.type", "none")
    factor = fields.get(f"{kind}.rope.scaling.factor", 1.0)
    if not all(type(size) in (int, float) and size > 0 for size in (*sizes.values(), factor)):
        raise refusal(str(path), f"its sizes are {str(sizes)[:300]}")
    for name, size in sizes.items():  # the shortest decimal number with the same float32 value
        if type(size) is float:
            sizes[name] = float(str(np.float32(size)))
    sizes["head_dim"] = fields.get(f"{kind}.attention.key_length", sizes["hidden_size"] // sizes["num_attention_heads"])
    sizes["tie_word_embeddings"] = "output.weight" not in found
    sizes["vocab_size"] = int(found["token_embd.weight"].shape[-1])
    if scaling == "linear":
        sizes["rope_scaling"] = {"rope_type": scaling, "factor": factor}
    usual = {name: value for name, value in _MODELS[kind].usual.items() if name not in sizes}
    if kind == "gemma3" and sizes["hidden_size"] == _WIDTH_OF_GEMMA3_27B:
        usual["query_pre_attn_scalar"] = _SCALAR_OF_GEMMA3_27B
    if usual:
        values = ", ".join(f"{name} {value}" for name, value in usual.items())
        said(f"{path}: what the file does not say is as published: {values}")
    return settings_in({**usual, **sizes}, family, _MODELS[kind].name)


def _strange(kind: str, fields: dict[str, Any], found: Mapping[str, Any], family: HuggingFace) -> list[str]:
    """What a file has that is not read."""
    strange = [name for name in ("rope_freqs.weight",) if name in found]
    if (scaling := fields.get(f"{kind}.rope.scaling.type", "none")) not in ("none", "linear"):
        strange.append(f"rope.scaling.type {scaling}")
    width = fields.get(f"{kind}.attention.key_length")
    rotated = fields.get(f"{kind}.rope.dimension_count", width)
    if width and rotated != width:
        strange.append(f"rope.dimension_count {rotated} of {width}")
    windows = () if family.kinds.windows == "listed" else tuple(_OF_WINDOWS.values())
    strange += [key for key in (*_NOT_READ, *windows) if fields.get(f"{kind}.{key}")]
    types = dict.fromkeys(one.tensor_type.name for one in found.values())
    strange += [f"tensors of type {name}" for name in types if name not in (*_PLAIN, *_QUANTISED)]
    return strange


def _translated(name: str) -> str:
    """GGUF's name of a Crius parameter."""
    rest, _, part = name.rpartition(".")
    place, _, rest = rest.removeprefix("layers.").partition(".")
    if name.startswith("layers."):
        return f"blk.{place}.{_NAMES[rest]}.{part}"
    return f"{_NAMES[place]}.{part}"


def _source(
    tensor: Any, shape: tuple[int, ...], dequantized: Callable[[], Any], head_dim: int, *, has_one: bool
) -> TensorSource:
    """A tensor of a file.

    Args:
        tensor: the tensor in the reader of the gguf package.
        shape: its shape.
        dequantized: function that returns its values in float32.
        head_dim: dims of a head whose rows for queries and keys are in pairs; 0 if they are in halves.
        has_one: its values are 1 + the weight.
    """
    dtype = tensor.tensor_type.name if tensor.tensor_type.name in _PLAIN and not has_one else "F32"
    is_rotated = head_dim and tensor.name.endswith((".attn_q.weight", ".attn_k.weight"))

    def read() -> memoryview:
        if has_one:
            numbers = dequantized() - np.float32(1)
        elif tensor.tensor_type.name in _PLAIN:
            numbers = tensor.data.view(_PLAIN[dtype])
        else:
            numbers = dequantized()
        numbers = np.ascontiguousarray(numbers).reshape(shape)
        return in_halves(numbers, head_dim) if is_rotated else numbers.reshape(-1).view(np.uint8).data

    return TensorSource(tensor.name, dtype, shape, (Piece((0,) * len(shape), shape, read),))

"""GGUF files: small ones with the weights of a model of transformers, and ones that lie."""

import itertools
import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pretrained_samples import SIZES, save

from crius.cli import main
from crius.interop.weights import described, open_weights, settled
from crius.models import registry
from crius.models.words import parse_words, usual_words
from crius.tools.convert import gguf_file, importing
from crius.tools.convert.exporting import model_config
from crius.tools.convert.gguf_file import _MODELS, _QUANTISED, _settings, _translated, open_gguf

gguf = pytest.importorskip("gguf")
AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM

FIELDS = {
    **{"embedding_length": 64, "block_count": 4, "feed_forward_length": 160, "attention.head_count": 4},
    **{"attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10_000.0},
    "attention.key_length": SIZES["head_dim"],
}


OF_GEMMA = {
    **{"attention.sliding_window": 16, "attention.sliding_window_pattern": 2},
    **{"rope.freq_base": 1e6, "rope.freq_base_swa": 2e4, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
}


def paired(rows, head_dim):
    """Halves of a head's rotary dims to pairs, as the writer of llama.cpp does."""
    heads = rows.reshape(-1, 2, head_dim // 2, rows.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def write(file, kind, *, architecture="", half=False, drop="", whole="", **fields):
    """A GGUF file; returns the weights by our names, as they are to come back."""
    model = save(kind, file.parent / "model")
    opened = open_weights(str(file.parent / "model"))
    weights = opened.tensors
    family, numbers = registry.families()[opened.model["name"]], model.state_dict()
    architecture = architecture or family.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in (FIELDS | fields).items():
        if value is not None:
            add = writer.add_string if isinstance(value, str) else writer.add_float32
            name_there = key if key.startswith("tokenizer.") else f"{architecture}.{key}"
            (writer.add_uint32 if isinstance(value, int) else add)(name_there, value)
    expected = {}
    for ours in weights:
        array = numbers[family.translated(ours)].numpy()
        array = array.astype(np.float16) if half and array.ndim == 2 else array
        expected[ours] = array
        if architecture == "llama" and ours.endswith(("wq.weight", "wk.weight")):
            array = paired(array, SIZES["head_dim"])
        if kind == "gemma3" and "norm." in ours:
            expected[ours] = (array + np.float32(1)) - np.float32(1)
            array = array + np.float32(1)
        array = array.astype(np.int32) if ours == whole else array
        if ours != drop:
            writer.add_tensor(_translated(ours), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize(
    ("kind", "half"),
    [("llama", False), ("llama_tied", True), ("qwen2", False), ("qwen3_tied", False), ("gemma3", False)],
)
def test_tensors_come_back_as_the_model_has_them(kind, half, tmp_path, capsys):
    expected = write(tmp_path / "model.gguf", kind, half=half, **OF_GEMMA if kind == "gemma3" else {})
    assert main(["import", str(tmp_path / "model.gguf"), str(tmp_path / "run")]) == 0
    assert "none: the file has none" in capsys.readouterr().out
    found = open_weights(str(tmp_path / "run"))
    assert found.model == open_weights(str(tmp_path / "model")).model
    for name, array in expected.items():
        assert found.tensors[name].dtype == {"float16": "F16", "float32": "F32"}[str(array.dtype)]
        assert bytes(found.tensors[name].read()) == array.tobytes(), name


def test_a_file_is_explained(tmp_path, capsys):
    write(tmp_path / "model.gguf", "llama")
    capsys.readouterr()
    assert main(["import", str(tmp_path / "model.gguf"), "--explain", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["files"] == {"model.gguf": "all of it"} and facts["model"]["dim"] == 64
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model", "model.gguf"]


HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_1": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Places of the scales in a block, in bytes; a type without an entry has one at 0."""
QUANTISED = {
    **{"embedding_length": 256, "feed_forward_length": 256, "attention.head_count": 2, "attention.head_count_kv": 1},
    **{"attention.key_length": 128, "rope.dimension_count": 128, "block_count": 6, "vocab_size": 96},
    **{"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6},
}


def drawn(shape, kind, draw):
    """Random bytes of a tensor of a type of GGUF, with small scales."""
    if kind in ("F32", "F16", "BF16"):
        numbers = draw.normal(0, 0.1, shape).astype(np.float16 if kind == "F16" else np.float32)
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) if kind == "BF16" else numbers
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = draw.integers(0, 256, (shape[0] * shape[1] // elements, size), dtype=np.uint8)
    for place in HALVES.get(kind, (0,)):
        blocks[:, place : place + 2] = np.float16([1e-4]).view(np.uint8)
    return blocks.reshape(shape[0], -1)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_every_type_is_read_and_computes_as_transformers_reads_it(architecture, tmp_path, capfd):
    """transformers reads neither a local theta nor a pattern, so that the file has none: both are as published."""
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in QUANTISED.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture}.{key}", value)
    if architecture == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window", 5)
    name, _, _ = _MODELS[architecture]
    sizes = {"dim": 256, "ffn_dim": 256, "num_heads": 2, "num_kv_heads": 1, "head_dim": 128, "vocab_size": 96}
    facts = described(settled({"name": name, "flavor": "custom", "num_layers": 6, **sizes}))
    types = itertools.cycle(["F16", "BF16", *_QUANTISED])
    draw = np.random.default_rng(0)
    for ours, shape in facts.parameter_shapes.items():
        kind = "F32" if len(shape) == 1 else next(types)
        writer.add_tensor(_translated(ours), drawn(shape, kind, draw), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    weights = open_gguf(file, "test").weights
    numbers = theirs.state_dict()
    model = registry.build(weights.facts)
    parameters = dict(model.named_parameters())
    dtypes = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
    for ours, tensor in weights.tensors.items():
        own = torch.frombuffer(bytearray(tensor.read()), dtype=dtypes[tensor.dtype]).view(tensor.shape).float()
        assert torch.equal(own, numbers[registry.families()[name].translated(ours)]), ours
        parameters[ours].data.copy_(own)
    tokens = torch.arange(24)[None] * 5 % 96
    want = theirs(tokens).logits
    assert (model(tokens) - want).abs().max() <= 2e-6 * want.abs().max()


@pytest.mark.parametrize(("width", "scalar"), [(5376, 168), (3840, 256)])
def test_scores_of_gemma_3_27b_have_a_scale_of_their_own(width, scalar):
    """config.json on the Hugging Face hub; a GGUF file says nothing of it."""
    sizes = FIELDS | {"embedding_length": width, "attention.sliding_window": 1024}
    fields = {f"gemma3.{key}": value for key, value in sizes.items()}
    table = {"token_embd.weight": SimpleNamespace(shape=(width, 96), tensor_type=gguf.GGMLQuantizationType.F16)}
    family = registry.families()["gemma3"]
    settings = _settings(Path("model.gguf"), "gemma3", fields, table, family)
    words = usual_words(family.config) | parse_words(settings.get("words", "{}"))
    assert words["attention_scale"] == scalar**-0.5


TOLD = {
    "context_length": ("max_position_embeddings", 4096),
    "tokenizer.ggml.bos_token_id": ("bos_token_id", 1),
    "tokenizer.ggml.eos_token_id": ("eos_token_id", 2),
    "tokenizer.ggml.padding_token_id": ("pad_token_id", 0),
}


def test_context_and_ids_of_the_file_are_exported_and_none_is_invented(tmp_path):
    for name, told in (("told", TOLD), ("untold", {})):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "model.gguf", "llama", **{theirs: value for theirs, (_, value) in told.items()})
        importing.import_model(str(tmp_path / name / "model.gguf"), str(tmp_path / name / "run"))
        weights = open_weights(str(tmp_path / name / "run"))
        found = model_config(weights, registry.families()["llama3"], {}, "float32")
        assert found.items() >= dict(told.values()).items()
        assert told or not found.keys() & {key for key, _ in TOLD.values()}


LIES = {
    "architecture": ({"architecture": "gemma"}, 2, "architecture gemma"),
    "field_missing": ({"block_count": None}, 2, "lacks llama.block_count"),
    "tensor_missing": ({"drop": "norm.weight"}, 1, "output_norm.weight"),
    "other_sizes": ({"feed_forward_length": 192}, 1, "of another shape"),
    "no_size": ({"attention.head_count": 0}, 1, "sizes"),
    "text_for_a_size": ({"embedding_length": "64"}, 1, "sizes"),
    "stretched": ({"rope.scaling.type": "yarn"}, 2, "rope.scaling.type yarn"),
    "all_at_once": (
        {"expert_count": 8, "rope.dimension_count": 16, "final_logit_softcapping": 30.0, "whole": "norm.weight"},
        2,
        "has rope.dimension_count 16 of 32, expert_count, final_logit_softcapping, tensors of type I32, which",
    ),
    "window": ({"attention.sliding_window": 16}, 2, "has attention.sliding_window"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_file_that_does_not_fit_is_one_error(name, tmp_path, capsys):
    changes, code, said = LIES[name]
    write(tmp_path / "model.gguf", "llama", **changes)
    refused(tmp_path, capsys, code, said)


DAMAGE = {
    "empty": lambda file: file.write_bytes(b""),
    "not_gguf": lambda file: file.write_bytes(b"PK\3\4" + bytes(100)),
    "cut_in_the_header": lambda file: os.truncate(file, 300),
    "cut_in_the_tensors": lambda file: os.truncate(file, file.stat().st_size // 2),
    "count_of_tensors": lambda file: poke(file, 8, 1 << 60),
    "count_of_fields": lambda file: poke(file, 16, 1 << 60),
    "array_of_2**40": lambda file: arrays(file, 1 << 40, b""),
    "array_of_many": lambda file: arrays(file, 1 << 12, bytes(1 << 12)),
    "text_of_2**33": lambda file: (poke(file, 24, 1 << 33), os.truncate(file, 1 << 34)),
    "one_tensor_twice": lambda file: file.write_bytes(file.read_bytes().replace(*second_tensor(file))),
    "link": lambda file: (file.rename(file.with_suffix(".real")), file.symlink_to(file.with_suffix(".real"))),
}


def poke(file, place, number):
    data = bytearray(file.read_bytes())
    data[place : place + 8] = number.to_bytes(8, "little")
    file.write_bytes(data)


def arrays(file, length, items):
    """A file with one field, an array of bytes."""
    key = b"tokenizer.ggml.scores"
    field = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, 0, length) + items
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field)


def second_tensor(file):
    """The place of the second tensor of a file, and that of the first one."""
    first, second = gguf.GGUFReader(file).tensors[:2]
    head = bytes(second.field.parts[1]) + b"".join(part.tobytes() for part in second.field.parts[2:5])
    places = (one.field.parts[5].tobytes() for one in (second, first))
    return [head + place for place in places]


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_one_error(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gguf_file, "_MOST_ITEMS", 1 << 12)
    write(tmp_path / "model.gguf", "llama")
    DAMAGE[name](tmp_path / "model.gguf")
    refused(tmp_path, capsys, 1, "model.gguf")


def refused(folder, capsys, code, said):
    before = sorted(folder.iterdir())
    capsys.readouterr()
    assert main(["import", str(folder / "model.gguf"), str(folder / "run")]) == code
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert sorted(folder.iterdir()) == before

"""GGUF files: small ones with the weights of a model of transformers, and ones that lie."""

import json
import os

import numpy as np
import pytest
from pretrained_samples import SIZES, save

from crius.cli import main
from crius.interop.weights import open_weights
from crius.models import registry
from crius.tools.convert import importing
from crius.tools.convert.exporting import model_config
from crius.tools.convert.gguf_file import _translated

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

FIELDS = {
    **{"embedding_length": 64, "block_count": 4, "feed_forward_length": 160, "attention.head_count": 4},
    **{"attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10_000.0},
    "attention.key_length": SIZES["head_dim"],
}


def paired(rows, head_dim):
    """Halves of a head's rotary dims to pairs, as the writer of llama.cpp does."""
    heads = rows.reshape(-1, 2, head_dim // 2, rows.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def write(file, kind, *, architecture="", half=False, drop="", **fields):
    """A GGUF file; returns the weights by our names, as they are to come back."""
    model = save(kind, file.parent / "model")
    name = "qwen3" if kind.startswith("qwen3") else "llama3"
    weights = open_weights(str(file.parent / "model")).tensors
    family, numbers = registry.families()[name], model.state_dict()
    architecture = architecture or family.model_type
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
        if name == "llama3" and ours.endswith(("wq.weight", "wk.weight")):
            array = paired(array, SIZES["head_dim"])
        if ours != drop:
            writer.add_tensor(_translated(ours), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize(("kind", "half"), [("llama", False), ("llama_tied", True), ("qwen3_tied", False)])
def test_tensors_come_back_as_the_model_has_them(kind, half, tmp_path, capsys):
    expected = write(tmp_path / "model.gguf", kind, half=half)
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
    "experts": ({"expert_count": 8}, 2, "expert_count"),
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
    "link": lambda file: (file.rename(file.with_suffix(".real")), file.symlink_to(file.with_suffix(".real"))),
}


def poke(file, place, number):
    data = bytearray(file.read_bytes())
    data[place : place + 8] = number.to_bytes(8, "little")
    file.write_bytes(data)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_one_error(name, tmp_path, capsys):
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

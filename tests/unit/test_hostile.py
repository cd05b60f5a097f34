"""Checkpoints made to do harm: nothing in them is executed, nothing outside their folder is read, memory is bounded."""

import contextlib
import json
import os
import pickle
import subprocess
import sys
import time

import pytest
import torch
from harness import ROOT
from hostile_samples import ENTRY, entry, payloads, plant, put, safetensors, unfired, valid
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from crius.config.data import DataConfig
from crius.data import huggingface
from crius.errors import CheckpointError, DataError
from crius.interop.safetensors_file import INDEX, read_safetensors
from crius.interop.unpickle import Table, read_pickle
from crius.tools.convert.convert import convert
from crius.tools.convert.dcp import METADATA, read_dcp

PLACES = ("metadata", "before_metadata", "after_metadata", "tensor", "value", "bare")

WATCHED = """
import encodings.cp437, json, os, sys  # the first is how zipfile reads names
from crius.tools.convert.convert import convert
from crius.config.data import DataConfig
from crius.data import huggingface
from crius.errors import CheckpointError, DataError

seen = []
inside = sys.argv[1]
os.chdir(inside)  # names that are opened relative to an open folder are plain ones
def hook(event, arguments):
    if event == "open":
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes)) else ""
        if path and not os.path.abspath(path).startswith(inside) and not path.endswith((".pyc", ".py")):
            seen.append(path)
    elif event in ("os.system", "subprocess.Popen", "exec", "compile", "pickle.find_class", "os.exec", "os.mkdir",
                   "import", "socket.connect", "socket.getaddrinfo"):
        if not (event == "os.mkdir" and os.path.abspath(arguments[0]).startswith(inside)):
            seen.append(f"{event} {str(arguments[0])[:100]}")
results = {}
first = True
for folder in sorted(os.listdir(inside)):
    source = os.path.join(inside, folder)
    for _ in range(2 if first else 1):  # the first time fills caches of modules
        try:
            convert(source, source + "-out")
            results[folder] = "converted"
        except CheckpointError as error:
            results[folder] = "refused"
        if first:
            sys.addaudithook(hook)
            first = False
json.dump([results, seen], sys.stdout)
"""


def watched(corpus):
    """What becomes of each folder of a corpus in a process of its own, and what it opens outside or executes."""
    command = [sys.executable, "-c", WATCHED, str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.long
def test_no_payload_of_a_dcp_checkpoint_is_executed(tmp_path):
    marker, corpus = tmp_path / "marker", tmp_path / "corpus"
    harmful = payloads(str(marker))
    for label, payload in harmful.items():  # each of them does harm where a pickle is simply loaded
        with contextlib.suppress(AttributeError, TypeError, pickle.UnpicklingError):  # after the harm is done
            pickle.loads(b"\x80\x04" + payload + b".")
        assert marker.exists(), label
        marker.rmdir()
    for label, payload in {**harmful, **unfired(str(marker))}.items():
        for how in PLACES:
            folder = corpus / f"{label}.{how}"
            folder.mkdir(parents=True)
            plant(folder, how, payload)
    results, seen = watched(corpus)
    assert not marker.exists()
    assert seen == []
    assert set(results.values()) == {"refused"} and len(results) == len(PLACES) * 36


NAMES = [
    *("../secret", "../../secret", "/etc/hostname", "a/../../secret", "..", ".", "", "x\0y", "~/secret", "..\\secret"),
    *("C:\\secret", "\\\\host\\share", "file:///etc/hostname", "%2e%2e/secret", "a" * 300, " x", "-x", "x\n", "x/"),
    *("．．/secret", "../secret\0.distcp", "/proc/self/environ", "/dev/zero", "./secret", "a//b", "link", "fifo"),
    *("folder", "linked_folder/secret", "$HOME", "nothing.distcp"),
]


def with_traps(folder, secret):
    """The things that names of ``NAMES`` mean; all of them would be read well, were they opened."""
    (folder.parent / "secret").write_bytes(secret)
    (folder / "link").symlink_to(folder.parent / "secret")
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "linked_folder").symlink_to(folder.parent)


@pytest.mark.parametrize("path", NAMES)
def test_no_name_in_metadata_leads_outside(path, tmp_path):
    folder = tmp_path / "source"
    metadata = valid(folder)
    with_traps(folder, (folder / ENTRY).read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = path
    put(folder, metadata)
    with pytest.raises(CheckpointError):
        read_dcp(folder)
    (folder / "link").unlink()  # what the name is of is a good file: without the trap it is read
    (folder / "plain").write_bytes((folder / ENTRY).read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "plain"
    put(folder, metadata)
    assert read_dcp(folder).tensors


@pytest.mark.parametrize("path", NAMES)
def test_no_name_in_a_safetensors_index_leads_outside(path, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    with_traps(folder, safetensors({"a": entry()}))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": path}}))
    with pytest.raises(CheckpointError):
        read_safetensors(folder)


@pytest.mark.full
def test_names_that_lead_outside_open_nothing_there(tmp_path):
    corpus = tmp_path / "corpus"
    for number, path in enumerate(NAMES):
        for kind in ("dcp", "index"):
            folder = corpus / f"{kind}{number}" / "source"
            folder.mkdir(parents=True)
            metadata = valid(folder)
            with_traps(folder, (folder / ENTRY).read_bytes())
            if kind == "dcp":
                for info in metadata.storage_data.values():
                    info.relative_path = path
                put(folder, metadata)
            else:
                (folder / METADATA).unlink()
                (folder / INDEX).write_text(json.dumps({"weight_map": {"a": path}}))
                (folder / "x.safetensors").write_bytes(b"")
    flat = tmp_path / "flat"
    flat.mkdir()
    for folder in corpus.iterdir():
        (folder / "source").rename(flat / folder.name)
    (tmp_path / "secret").write_bytes((tmp_path / "corpus" / "dcp0" / "secret").read_bytes())
    results, seen = watched(flat)
    assert set(results.values()) == {"refused"} and len(results) == 2 * len(NAMES)
    assert [path for path in seen if not path.startswith("os.mkdir")] == []


def size(*dims):
    return torch.Size(dims)


def tensor_entry(shape, chunks, dtype=torch.float32):
    parts = [ChunkStorageMetadata(size(*offset), size(*dims)) for offset, dims in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size(*shape), parts)


def lie_place(**values):
    def lie(metadata):
        for info in metadata.storage_data.values():
            vars(info).update(values)

    return lie


def lie_tensor(entry):
    def lie(metadata):
        metadata.state_dict_metadata["model.a"] = entry
        place = metadata.storage_data[MetadataIndex("model.a", [0])]
        for chunk in getattr(entry, "chunks", ()):
            metadata.storage_data[MetadataIndex("model.a", chunk.offsets)] = place

    return lie


def lie_key(key):
    return lambda metadata: metadata.state_dict_metadata.update({key: BytesStorageMetadata()})


def lie_shared(metadata):
    chunk = ChunkStorageMetadata(size(0), size(6))
    many = [chunk] * 5000
    for number in range(5000):
        metadata.state_dict_metadata[f"x{number}"] = TensorStorageMetadata(TensorProperties(), size(6), many)


LIES = {
    "negative_offset": lie_place(offset=-1),
    "negative_length": lie_place(length=-5),
    "huge_length": lie_place(length=1 << 62),
    "huge_offset": lie_place(offset=1 << 62),
    "length_beyond_the_end": lie_place(length=100_000),
    "no_length": lie_place(length=0),
    "bool_offset": lie_place(offset=True),
    "float_offset": lie_place(offset=1.5),
    "all_at_one_place": lie_place(offset=0, length=1200),
    "compressed": lie_place(transform_descriptors=["zstd"]),
    "huge_tensor": lie_tensor(tensor_entry((1 << 40,), [((0,), (1 << 40,))])),
    "huge_dims": lie_tensor(tensor_entry((1 << 40,) * 3, [((0, 0, 0), (1 << 40,) * 3)])),
    "other_shape": lie_tensor(tensor_entry((3, 2), [((0, 0), (3, 2))])),
    "other_dtype": lie_tensor(tensor_entry((6,), [((0,), (6,))], torch.int32)),
    "hole": lie_tensor(tensor_entry((12,), [((0,), (6,))])),
    "overlapping_parts": lie_tensor(tensor_entry((6,), [((0,), (6,)), ((3,), (3,))])),
    "twice": lie_tensor(tensor_entry((6,), [((0,), (6,)), ((0,), (6,))])),
    "many_dims": lie_tensor(tensor_entry((1,) * 40, [((0,) * 40, (1,) * 40)])),
    "no_parts": lie_tensor(tensor_entry((6,), [])),
    "bytes_for_a_tensor": lambda metadata: metadata.storage_data.clear(),
    "key_of_control_characters": lie_key("\x1b[2J"),
    "no_key": lie_key(""),
    "number_for_a_table": lambda metadata: setattr(metadata, "storage_data", 7),
    "one_list_a_million_times": lie_shared,
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_metadata_that_lies_is_refused_at_once(lie, tmp_path):
    metadata = valid(tmp_path / "source")
    lie(metadata)
    put(tmp_path / "source", metadata)
    began = time.monotonic()
    with pytest.raises(CheckpointError):
        convert(str(tmp_path / "source"), str(tmp_path / "to"))
    assert time.monotonic() - began < 5 and not list((tmp_path).glob("to/step-*"))


def test_a_script_in_a_dataset_folder_is_not_run(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "corpus.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'marker')!r})\n")
    with contextlib.suppress(DataError):  # versions of datasets that know scripts refuse them, others see no data
        huggingface.load(DataConfig(source="huggingface", path=(str(folder),)), "train")
    (folder / "train.jsonl").write_text('{"text": "abc"}\n')
    with contextlib.suppress(DataError):
        next(iter(huggingface.load(DataConfig(source="huggingface", path=(str(folder),)), "train")))
    assert not (tmp_path / "marker").exists()


def as_python(value):
    if isinstance(value, Table):
        return {key: as_python(child) for key, child in value.pairs}
    return type(value)(map(as_python, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_of_plain_values_is_read_as_python_reads_it(protocol):
    twice = ["the same", 2.5]
    values = [None, True, False, 0, 255, 256, 65_536, -1, 2**40, "", "é" * 300, 1e300, (), (1,), (1, 2), (1, 2, 3)]
    values += [(1, 2, 3, 4), [], [1], [1, [2, [3]]], {}, {"a": 1}, {"a": 1, "b": {"c": (twice, twice)}}, twice]
    if protocol > 2:  # before, bytes are a call
        values += [b"", b"\xff" * 300]
    assert as_python(read_pickle(pickle.dumps(values, protocol), (), "here")) == values

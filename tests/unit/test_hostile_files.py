"""Files that lie about themselves: pickles, archives, safetensors headers, manifests; memory and time are bounded."""

import io
import itertools
import json
import pickle
import random
import resource
import struct
import time
import warnings
import zipfile

import numpy as np
import pytest
import torch
from hostile_samples import ENTRY, GIB, archive, call, entry, name, put, replace_entry, safetensors, valid
from safetensors.numpy import save_file

from crius.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry, digest_of
from crius.checkpoint.tiles import MAX_SPLIT_DIMS
from crius.errors import CheckpointError
from crius.interop import safetensors_file
from crius.interop.foreign import check_key, check_shape, check_tiles, overlapping, read_inside
from crius.interop.safetensors_file import INDEX, MAX_HEADER, SafetensorsFile, read_safetensors
from crius.tools.convert.convert import convert
from crius.tools.convert.dcp import METADATA, read_dcp

BOMBS = {
    "memo_of_2**31": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "bytes_of_2**60": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".",
    "text_of_2**60": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b".",
    "frame_of_2**60": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "number_of_2**31_bytes": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "digits": b"I" + b"9" * 200_000 + b"\n.",
    "doubling_tuples": b"\x80\x04N" + b"".join(b"\x94h%ch%c\x86" % (i, i) for i in range(90)) + b".",
    "deep_lists": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "list_in_itself": b"\x80\x02]q\x00h\x00a.",
    "many_marks": b"\x80\x02" + b"(" * 100_000 + b".",
    "pops_an_empty_stack": b"\x80\x02t.",
    "mark_as_value": b"\x80\x02((\x85.",
    "odd_items": b"\x80\x02}(K\x01u.",
    "number_in_a_name": b"\x80\x04K\x01\x8c\x01a\x93.",
    "state_twice": b"\x80\x02ctorch\nSize\n)\x81}b}b.",
    "no_stop": b"\x80\x02N",
    "empty": b"",
    "two_values": b"\x80\x02NN.",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("place", ["metadata", "tensor"])
def test_a_pickle_that_eats_memory_or_time_is_refused(bomb, place, tmp_path):
    folder = tmp_path / "source"
    valid(folder)
    if place == "metadata":
        put(folder, bomb)
    else:
        replace_entry(folder, "model.a", archive(bomb))
    before, began = peak_bytes(), time.monotonic()
    with pytest.raises(CheckpointError):
        convert(str(folder), str(tmp_path / "to"))
    assert peak_bytes() - before < GIB // 8 and time.monotonic() - began < 5


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rezip(change, compression=zipfile.ZIP_STORED):
    """An archive of torch.save, its members changed by ``change``."""
    source, target = io.BytesIO(), io.BytesIO()
    torch.save(torch.arange(6.0), source)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that are there twice
            for member, data in change({info.filename: old.read(info) for info in old.infolist()}):
                new.writestr(member, data)
    return target.getvalue()


def rebuilt(**changes):
    """The pickle of a float32 tensor of 6 numbers, with other numbers in it."""
    values = {"numel": 6, "start": 0, "shape": (6,), "strides": (1,), "member": "0", "dtype": "FloatStorage"} | changes

    class Writer(pickle._Pickler):
        def persistent_id(self, found):
            return found.to if isinstance(found, Stored) else None

    class Stored:
        to = ("storage", getattr(torch, values["dtype"]), values["member"], "cpu", values["numel"])

    class Tensor:
        def __reduce__(self):
            arguments = (Stored(), values["start"], values["shape"], values["strides"], False, {})
            return torch._utils._rebuild_tensor_v2, arguments

    file = io.BytesIO()
    Writer(file, protocol=2).dump(Tensor())
    return file.getvalue()


ARCHIVES = {
    "traversal": lambda: rezip(lambda members: [*members.items(), ("archive/../../evil", b"x")]),
    "absolute": lambda: rezip(lambda members: [*members.items(), ("/etc/evil", b"x")]),
    "backslash": lambda: rezip(lambda members: [*members.items(), ("archive/..\\evil", b"x")]),
    "twice": lambda: rezip(lambda members: [*members.items(), ("archive/data/0", b"x" * 24)]),
    "compressed": lambda: rezip(lambda members: members.items(), zipfile.ZIP_DEFLATED),
    "bomb": lambda: rezip(lambda members: [*members.items(), ("archive/data/1", bytes(1 << 27))], zipfile.ZIP_DEFLATED),
    "no_pickle": lambda: rezip(lambda members: [item for item in members.items() if "data.pkl" not in item[0]]),
    "no_storage": lambda: rezip(lambda members: [item for item in members.items() if "data/0" not in item[0]]),
    "big_endian": lambda: rezip(lambda members: (members | {"archive/byteorder": b"big"}).items()),
    "cut_off": lambda: rezip(lambda members: members.items())[:-30],
    "no_archive": lambda: b"PK\x03\x04" + bytes(500),
    "one_number_as_many": lambda: archive(rebuilt(shape=(1 << 20, 1 << 20), strides=(0, 0))),
    "out_of_its_storage": lambda: archive(rebuilt(start=1)),
    "before_its_storage": lambda: archive(rebuilt(start=-1)),
    "negative_stride": lambda: archive(rebuilt(strides=(-1,))),
    "storage_said_larger": lambda: archive(rebuilt(numel=1 << 40, shape=(1 << 40,))),
    "storage_elsewhere": lambda: archive(rebuilt(member="../../etc/passwd")),
    "other_width": lambda: archive(rebuilt(dtype="DoubleStorage")),
    "bool_numel": lambda: archive(rebuilt(numel=True)),
}


@pytest.mark.parametrize("make", ARCHIVES.values(), ids=ARCHIVES)
def test_an_archive_that_lies_is_refused(make, tmp_path):
    folder = tmp_path / "source"
    valid(folder)
    replace_entry(folder, "model.a", archive(rebuilt()))
    assert bytes(read_dcp(folder).tensors["model.a"].read()) == torch.arange(6.0).numpy().tobytes()
    replace_entry(folder, "model.a", make())
    before = peak_bytes()
    with pytest.raises(CheckpointError):
        convert(str(folder), str(tmp_path / "to"))
    assert peak_bytes() - before < GIB // 8 and not list((tmp_path).glob("to/step-*"))


HEADERS = {
    "longer_than_the_file": struct.pack("<Q", 1 << 20) + b"{}",
    "longer_than_memory": struct.pack("<Q", 1 << 63) + b"{}",
    "above_the_limit": struct.pack("<Q", MAX_HEADER + 1) + bytes(64),
    "empty_file": b"",
    "no_json": safetensors(b"\xff\xfe{}"),
    "list": safetensors([1]),
    "deep": safetensors(b"[" * 100_000 + b"]" * 100_000),
    "key_twice": safetensors(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2)),
    "nan": safetensors(b'{"a":NaN}'),
    "huge_number": safetensors(b'{"a":' + b"9" * 10_000 + b"}"),
    "overlap": safetensors({"a": entry(), "b": entry(offsets=(8, 24))}, bytes(24)),
    "same_bytes": safetensors({"a": entry(), "b": entry()}),
    "hole": safetensors({"a": entry(), "b": entry(offsets=(24, 40))}, bytes(40)),
    "negative": safetensors({"a": entry(offsets=(-16, 0))}),
    "backwards": safetensors({"a": entry(offsets=(16, 0))}),
    "bool_offset": safetensors({"a": entry(shape=(), offsets=(False, True), dtype="U8")}, b"\0"),
    "float_shape": safetensors({"a": entry(shape=(4.0,))}),
    "huge_shape": safetensors({"a": entry(shape=(1 << 40, 1 << 40))}),
    "negative_shape": safetensors({"a": entry(shape=(-2, -2))}),
    "wrong_dtype": safetensors({"a": entry(dtype="F64")}),
    "dtype_is_no_text": safetensors({"a": entry(dtype=7)}),
    "beyond_the_end": safetensors({"a": entry(shape=(8,), offsets=(0, 32))}),
    "bytes_left_over": safetensors({"a": entry()}, bytes(20)),
    "more_fields": safetensors({"a": entry(more=1)}),
    "control_characters": safetensors({"\x1b[2J": entry()}),
    "metadata_is_no_object": safetensors({"__metadata__": 1, "a": entry()}),
    "many_keys": safetensors({f"{key:x}": entry(shape=(0,), offsets=(0, 0)) for key in range(100_001)}, b""),
    "sharding_is_no_object": safetensors({"__metadata__": {"DCP_SHARDING_INFO": "[]"}, "a": entry()}),
    "sharding_far_away": safetensors(
        {"__metadata__": {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [1 << 40]}})}, "a": entry()}
    ),
}


@pytest.mark.parametrize("data", HEADERS.values(), ids=HEADERS)
def test_a_safetensors_header_that_lies_is_refused(data, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(safetensors({"a": entry()}))
    assert read_safetensors(file).tensors["a"].num_bytes == 16
    file.write_bytes(data)
    with pytest.raises(CheckpointError):
        convert(str(file), str(tmp_path / "to"))
    assert not list((tmp_path).glob("to/step-*"))


TOKENS = (
    *(b"-1", b"0", b"1", b"true", b"null", b"1e9", b"1.5", b"9" * 40, b"[]", b"{}", b'""', b'"../x"', b'"/etc/x"'),
    *(b'"a"', b"NaN", b"[[[[", b",", b":", b"4611686018427387904", b'"\\u0000"', b'"F8_E4M3"', b'"rank-0.safetensors"'),
)


def mutated(data, rng):
    """``data`` with one to four of its bytes, numbers or texts changed, dropped or doubled."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        end = min(len(data), at + rng.choice((1, 1, 2, 8, 40)))
        kind = rng.randrange(5)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:end]
        elif kind == 2:
            data[at:at] = data[at:end]
        else:
            while at and chr(data[at]).isalnum():
                at -= 1
            stop = at + 1
            while stop < len(data) and chr(data[stop]).isalnum():
                stop += 1
            data[at + 1 : stop] = rng.choice(TOKENS)
        if not data:
            data = bytearray(b"{")
    return bytes(data)


def rehashed(data):
    """A manifest with a hash that is right again, as an attacker writes it."""
    begin = data.index(b"xxh3-128:") + 9
    zeroed = data[:begin] + b"0" * 32 + data[begin + 32 :]
    return zeroed[:begin] + digest_of(zeroed).encode() + zeroed[begin + 32 :]


def sample_manifest():
    digest = digest_of(b"")
    chunks = tuple(Chunk("rank-0.safetensors", 64 + 32 * i, 96 + 32 * i, (4 * i, 0), (4, 2), digest) for i in range(2))
    tensors = {"model.a": TensorEntry("F32", (8, 2), chunks), "optim.a.step": TensorEntry("F32", (), ())}
    one = Chunk("rank-0.safetensors", 128, 132, (), (), digest)
    tensors["optim.a.step"] = TensorEntry("F32", (), (one,))
    files = {"rank-0.safetensors": FileEntry(132, digest), "state.json": FileEntry(2, digest)}
    versions, config = {"crius": "1", "torch": "2.13"}, {"training.steps": 20, "data.path": ["x"]}
    kept = {"tokenizer.json": FileEntry(3, "0" * 32)}
    return Manifest(20, "run", versions, config, "fsdp2", 2, "data", files, tensors, kept).encode()


@pytest.mark.full
def test_10000_mutated_manifests_and_headers_raise_nothing_but_checkpoint_errors(tmp_path):
    rng = random.Random(11)
    before = peak_bytes()
    manifest, refused = sample_manifest(), 0
    head = manifest.index(b"\n")
    for _ in range(5000):
        data = rehashed(manifest[:head] + b"\n" + mutated(manifest[head + 1 :], rng))
        try:
            Manifest.decode(data, "manifest")
        except CheckpointError:
            refused += 1
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": entry(), "b": entry("BF16", (2, 4), (16, 32))}).encode()
    file = tmp_path / "model.safetensors"
    for number in range(5000):
        changed = mutated(header, rng)
        is_length_right = number % 5
        length = len(changed) if is_length_right else rng.choice((0, 1, len(header), 1 << 24, 1 << 40, (1 << 64) - 1))
        file.write_bytes(struct.pack("<Q", length) + changed + bytes(32))
        try:
            for tensor in read_safetensors(file).tensors.values():
                assert tensor.read().nbytes == tensor.num_bytes <= 32
        except CheckpointError:
            refused += 1
    assert refused > 8000  # the others change a name, a version or the text of a setting
    assert peak_bytes() - before < GIB // 16


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_800_mutated_dcp_checkpoints_raise_nothing_but_checkpoint_errors(tmp_path):
    folder = tmp_path / "source"
    valid(folder)
    rng = random.Random(12)
    metadata, shard = (folder / METADATA).read_bytes(), (folder / ENTRY).read_bytes()
    want = {key: bytes(tensor.read()) for key, tensor in read_dcp(folder).tensors.items()}
    before, refused = peak_bytes(), 0
    for number in range(800):
        changed = bytearray(metadata if number % 2 else shard)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(changed))
            if rng.random() < 0.7:
                changed[at] = rng.randrange(256)
            else:
                del changed[at : at + rng.randint(1, 9)]
        (folder / METADATA).write_bytes(changed if number % 2 else metadata)
        (folder / ENTRY).write_bytes(shard if number % 2 else changed)
        try:
            found = read_dcp(folder)
            for read in found.values.values():
                read()
            for key, tensor in found.tensors.items():
                assert bytes(tensor.read()) == want.get(key, bytes(tensor.read()))
        except CheckpointError:
            refused += 1
    assert refused > 400 and peak_bytes() - before < GIB // 16


def test_torch_itself_gives_up_gibibytes_for_such_an_archive():
    """Why an import has a reader of its own: bytearray is on the list of torch.load(weights_only=True)."""
    bomb = archive(b"\x80\x02" + call(name("builtins", "bytearray"), b"J" + struct.pack("<I", 200_000_000)) + b".")
    assert len(torch.load(io.BytesIO(bomb), weights_only=True)) == 200_000_000 and len(bomb) < 3000


def test_a_header_may_end_where_the_file_ends(tmp_path):
    (tmp_path / "f").write_bytes(struct.pack("<Q", 2) + b"{}")
    assert SafetensorsFile(tmp_path, "f").tensors == {}


def test_a_file_of_a_folder_has_a_largest_size_and_is_no_link(tmp_path):
    (tmp_path / "f").write_bytes(b"ab")
    (tmp_path / "link").symlink_to("f")
    assert read_inside(tmp_path, "f", 2) == b"ab"
    for file, why in {"f": "it has 2 bytes, but at most 1 are", "link": "it is a link; cp -rL", "g": "No such"}.items():
        with pytest.raises(CheckpointError, match=why):
            read_inside(tmp_path, file, 1)


@pytest.mark.parametrize("size", [20, 21])
def test_headers_and_indices_have_a_largest_size(size, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "MAX_HEADER", 20)
    (tmp_path / "f").write_bytes(struct.pack("<Q", size) + b"{}".ljust(size))
    (tmp_path / INDEX).write_text('{"weight_map":{}'.ljust(size - 1) + "}")
    if size == 20:
        assert SafetensorsFile(tmp_path, "f").tensors == {}
        assert safetensors_file._index(tmp_path) == {}
        return
    with pytest.raises(CheckpointError, match="its header has 21 bytes; the file has 29, 20 is most"):
        SafetensorsFile(tmp_path, "f")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        safetensors_file._index(tmp_path)


@pytest.mark.parametrize("shape", [(1, 4), (3,), (5, 2), (0, 3)])
def test_rows_are_read_from_the_first_to_before_the_last(shape, tmp_path):
    numbers = np.random.default_rng(0).standard_normal(shape)
    save_file({"a": np.ones(3), "w": numbers}, tmp_path / "f")
    file = SafetensorsFile(tmp_path, "f")
    assert file.read("w") == memoryview(numbers.tobytes())
    for first, last in itertools.combinations_with_replacement(range(shape[0] + 1), 2):
        assert file.read("w", first, last) == memoryview(numbers[first:last].tobytes())


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"w": "model.safetensors", "v": 1}}])
def test_an_index_that_maps_no_keys_to_files_is_refused(index, tmp_path):
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(tmp_path)
    assert "no weight_map from keys to files" in str(caught.value)


@pytest.mark.parametrize(("keys", "wrong"), [("ab", ""), ("a", "b"), ("abc", "c")])
def test_an_index_has_the_keys_of_its_files_and_no_others(keys, wrong, tmp_path):
    save_file({"a": np.ones(3), "b": np.ones(2)}, tmp_path / "m.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(keys, "m.safetensors")}))
    if not wrong:
        assert read_safetensors(tmp_path).tensors.keys() == {"a", "b"}
        return
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(tmp_path)
    assert f"'{wrong}' and 0 more keys are not in the files" in str(caught.value)


@pytest.mark.parametrize(
    ("spans", "is_shared"),
    [
        ([(4, 6), (0, 4)], False),
        ([(3, 6), (0, 4)], True),
        ([(0, 4), (2, 2)], False),
        ([(0, 4), (2, 6), (8, 9)], True),
    ],
)
def test_spans_share_a_byte_if_one_begins_before_another_ends(spans, is_shared):
    assert overlapping(spans) == is_shared


@pytest.mark.parametrize(
    ("check", "last", "beyond"),
    [
        (check_shape, ((1 << 48) - 1, 0), (3, 1 << 48)),
        (check_shape, (1,) * 16, (1,) * 17),
        (check_shape, (0,), (0, -1)),
        (check_shape, (), (3, True)),
        (check_key, "k" * 1024, "k" * 1025),
        (check_key, "k", ""),
    ],
)
def test_names_and_shapes_have_a_limit(check, last, beyond):
    assert check(last, "f") == last
    with pytest.raises(CheckpointError, match="f cannot be read"):
        check(beyond, "f")


def test_parts_of_a_stranger_fit_into_the_tensor_and_split_few_dims():
    for dims, words in ((MAX_SPLIT_DIMS, "do not cover"), (MAX_SPLIT_DIMS + 1, "do not fit into")):
        parts = [(offset, (1,) * dims) for offset in itertools.product((0, 1), repeat=dims)]
        if dims == MAX_SPLIT_DIMS:
            check_tiles(parts, (2,) * dims, "f")
        with pytest.raises(CheckpointError, match=words):
            check_tiles(parts[1:], (2,) * dims, "f")
    with pytest.raises(CheckpointError, match="do not fit into"):
        check_tiles([((0,), (2,)), ((2,), (3,))], (4,), "f")

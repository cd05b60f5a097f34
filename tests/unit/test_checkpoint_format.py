"""What is in a checkpoint: any byte that changes is found, and nothing that a manifest says is believed unchecked."""

import cProfile
import gc
import itertools
import json
import random

import numpy as np
import pytest
import torch
from checkpoint_samples import TENSORS, damage, local, pieces, problems, save
from safetensors.torch import load_file

from crius.checkpoint.disk import open_disk
from crius.checkpoint.files import Part, write_shard
from crius.checkpoint.folder import damages, extra_files, read_manifest
from crius.checkpoint.manifest import BLOCK_BYTES, ITEM_BYTES, Chunk, FileEntry, Manifest, TensorEntry, digest_of
from crius.checkpoint.pieces import stored
from crius.checkpoint.plain import DTYPES
from crius.checkpoint.tiles import MAX_SPLIT_DIMS, cover
from crius.errors import CheckpointError

STEP = "step-00000020"
ZEROS = b"0" * 32


def test_the_safetensors_library_reads_what_was_written(tmp_path):
    save(open_disk(str(tmp_path)), 20)
    for rank in (0, 1):
        found = load_file(tmp_path / STEP / f"rank-{rank:05d}.safetensors")
        mine = {name: (shape, data) for of_rank, name, _, _, shape, data in pieces(0) if of_rank == rank}
        assert found.keys() == mine.keys()
        for name, (shape, data) in mine.items():
            assert found[name].shape == shape
            assert found[name].reshape(-1).view(torch.uint8).numpy().tobytes() == data.tobytes()


def test_a_load_opens_a_file_once_for_all_parts_in_it(tmp_path, monkeypatch):
    """To open a file of a remote disk takes a question to it."""
    disk, opened = open_disk(str(tmp_path)), []
    save(disk, 20)
    manifest = read_manifest(disk, STEP)
    monkeypatch.setattr(disk, "open", lambda path, open_=disk.open: opened.append(path) or open_(path))
    parts = [part for tensor in stored(disk, STEP, manifest.tensors).values() for part in tensor.pieces]
    for part in sorted(parts, key=lambda part: part.place):
        part.read()
    assert len(opened) == len({*opened}) == 2 < len(parts)


def test_every_tensor_starts_at_a_multiple_of_its_item(tmp_path):
    disk = open_disk(str(tmp_path))
    disk.prepare("step-00000001.tmp-a")
    dtypes = ["BOOL", "F32", "U8", "F64", "BF16", "F8_E4M3"] * 3
    parts = [Part(f"{n}", t, (3,), lambda t=t: memoryview(bytes(3 * ITEM_BYTES[t]))) for n, t in enumerate(dtypes)]
    entry, places = write_shard(disk, "step-00000001.tmp-a/x.safetensors", parts, lambda: None)
    assert all(begin % ITEM_BYTES[part.dtype] == 0 for part, (begin, _, _) in zip(parts, places, strict=True))
    assert all(ITEM_BYTES[name] == dtype.itemsize for name, dtype in DTYPES.items())
    data = (tmp_path / "step-00000001.tmp-a/x.safetensors").read_bytes()
    assert (entry.size, entry.digest) == (len(data), digest_of(data))
    assert [digest_of(data[begin:end]) for begin, end, _ in places] == [digest for _, _, digest in places]


def test_a_file_is_written_and_read_in_blocks_with_a_beat_for_each(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 256, 3 * BLOCK_BYTES + 5, dtype=np.uint8)
    disk, beats = open_disk(str(tmp_path)), []
    disk.prepare("step-00000001")
    cut = np.split(numbers, [BLOCK_BYTES + 1, BLOCK_BYTES + 4])
    parts = [Part(f"{n}", "U8", part.shape, lambda part=part: memoryview(part)) for n, part in enumerate(cut)]
    entry, places = write_shard(disk, "step-00000001/x", parts, lambda: beats.append(1))
    assert len(beats) == 2 + 1 + 3
    tensors = {
        part.key: TensorEntry("U8", part.shape, (Chunk("x", begin, end, (0,), part.shape, digest),))
        for part, (begin, end, digest) in zip(parts, places, strict=True)
    }
    manifest = Manifest(1, "", {}, {}, "1", 1, "", {"x": entry}, tensors)
    assert damages(disk, "step-00000001", manifest, ["x"], lambda: beats.append(1)) == []
    assert len(beats) == 6 + 4


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([Part("w", "F32", (2,), lambda: memoryview(b"1234"))], "4 bytes instead of 8"),
        ([Part("w", "U8", (1,), lambda: memoryview(b"1"))] * 2, "two tensors of a file"),
        ([Part("__metadata__", "U8", (1,), lambda: memoryview(b"1"))], "two tensors of a file"),
    ],
)
def test_a_part_that_is_not_as_announced_is_not_written(parts, words, tmp_path):
    disk = open_disk(str(tmp_path))
    disk.prepare("step-00000001")
    with pytest.raises(CheckpointError, match=words):
        write_shard(disk, "step-00000001/x", parts, lambda: None)
    assert disk.files("step-00000001") == []


def test_a_thousand_random_damages_are_found_and_named(tmp_path):
    disk = local(tmp_path, 20)
    spans = [
        (chunk.file, chunk.begin, chunk.end, name)
        for name, entry in read_manifest(disk, STEP).tensors.items()
        for chunk in entry.chunks
    ]
    kinds = set()
    for seed in range(1000):
        kind, files, at, undo = damage(tmp_path / STEP, seed)
        found = "\n".join(problems(disk, STEP))
        assert all(file in found for file in files) or "manifest.json" in files and "manifest.json" in found, (
            seed,
            kind,
        )
        if kind == "flip":
            hit = [name for file, begin, end, name in spans if file == files[0] and begin <= at < end]
            inside = hit or ["header"] * files[0].endswith(".safetensors")
            assert all(f"{files[0]}, {name}:" in found for name in inside), (seed, found)
            assert len(found.splitlines()) == 1 or "manifest" in found, (seed, found)
        undo()
        kinds.add((kind, files[0]))
    assert len(kinds) == 6 * 4  # each kind of damage, in each file
    assert problems(disk, STEP) == []


def test_a_file_that_does_not_belong_there_is_found(tmp_path):
    disk = local(tmp_path, 20)
    (tmp_path / STEP / "x\x1b[2J").write_bytes(b"")
    (tmp_path / STEP / "link").symlink_to("/etc/passwd")
    manifest = read_manifest(disk, STEP)
    assert [damage.file for damage in extra_files(disk, STEP, manifest)] == ["link", "'x\\x1b[2J'"]
    assert len(damages(disk, STEP, manifest)) == 2
    assert damages(disk, STEP, manifest, sorted(manifest.files)) == []


def test_bytes_between_tensors_are_covered_too(tmp_path):
    disk = open_disk(str(tmp_path))
    disk.prepare("step-00000001")
    with disk.create("step-00000001/x") as sink:
        sink.write(b"head" + b"aa" + b"gap" + b"bb")
    digests = {"x": FileEntry(11, digest_of(b"headaagapbb"))}
    tensors = {
        name: TensorEntry("U8", (2,), (Chunk("x", at, at + 2, (0,), (2,), digest_of(name.encode() * 2)),))
        for name, at in (("a", 4), ("b", 9))
    }
    manifest = Manifest(1, "", {}, {}, "1", 1, "", digests, tensors)
    assert damages(disk, "step-00000001", manifest, ["x"]) == []
    (tmp_path / "step-00000001" / "x").write_bytes(b"headaaGAPbb")
    assert [damage.tensor for damage in damages(disk, "step-00000001", manifest, ["x"])] == ["gaps"]
    (tmp_path / "step-00000001" / "x").write_bytes(b"headaAgapbb")
    assert [damage.tensor for damage in damages(disk, "step-00000001", manifest, ["x"])] == ["a"]


def test_a_manifest_comes_back_as_it_was(tmp_path):
    manifest = save(open_disk(str(tmp_path)), 20)
    found = read_manifest(open_disk(str(tmp_path)), STEP)
    assert found.state_file == "state.json"
    assert {**vars(found), "digest": ""} == vars(manifest)
    assert found.encode() == (tmp_path / STEP / "manifest.json").read_bytes()


def test_settings_that_json_lacks_come_back_as_text():
    manifest = Manifest(1, "", {}, {"a": float("inf"), "b": {"c": (1, float("nan"))}}, "1", 1, "", {}, {})
    assert Manifest.decode(manifest.encode(), "m").config == {"a": "inf", "b": {"c": [1, "nan"]}}


def test_every_bit_of_a_manifest_counts(tmp_path):
    save(open_disk(str(tmp_path)), 20)
    data = (tmp_path / STEP / "manifest.json").read_bytes()
    for at, bit in itertools.product(range(len(data)), range(8)):
        with pytest.raises(CheckpointError, match="damaged"):
            Manifest.decode(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], "m")


def test_the_manifest_of_another_step_is_refused(tmp_path):
    disk = local(tmp_path, 20)
    (tmp_path / STEP).rename(tmp_path / "step-00000021")
    assert "the manifest of step 20" in problems(disk, "step-00000021")[0]


def rehashed(text: str) -> bytes:
    """A manifest with a right hash, as whoever forges one would make it."""
    body = b'{"digest": "xxh3-128:' + ZEROS + b'",\n' + text.encode()[1:]
    return body.replace(ZEROS, digest_of(body).encode(), 1)


FILES = {"a.safetensors": [100, "0" * 32], "b.safetensors": [16, "1" * 32]}


def record(**changed):
    """A small manifest as JSON text, without its hash."""
    plain = {
        **{"format": "crius-checkpoint", "version": 1, "step": 1, "run_id": "r", "versions": {}, "config": {}},
        **{"layout": "1", "num_ranks": 1, "dataset": "d", "files": FILES, "tensors": {}},
    }
    return json.dumps({**plain, **changed})


def tensor(*rows, dtype="F32", shape=(4, 4), name="w"):
    return {name: [dtype, list(shape), [list(row) for row in rows]]}


def row(file="a.safetensors", begin=8, end=72, offset=(0, 0), shape=(4, 4), digest="2" * 32):
    return [file, begin, end, list(offset), list(shape), digest]


NAMES = [
    "../x",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "..",
    ".",
    "",
    ".x",
    "-x",
    "a\x00b",
    "a\nb",
    "a..b",
    "é",
    "x" * 201,
    "C:x",
]
HOSTILE = {
    **{f"file {name!r}": record(files={name: [1, "0" * 32]}) for name in (*NAMES, "manifest.json")},
    **{f"size {size}": record(files={"a": [size, "0" * 32]}) for size in (-1, True, 1.0, "1", None, 2**61, [1])},
    **{f"hash {text!r}": record(files={"a": [1, text]}) for text in ("", "0" * 31, "G" * 32, "0" * 33, 0, None)},
    **{f"step {step}": record(step=step) for step in (-1, True, 10**15, "1", 1.5)},
    **{f"{number} ranks": record(num_ranks=number) for number in (-1, True, "1", 10**7 + 1)},
    "no files": record(files=[]),
    "a row too short": record(files={"a": [1]}),
    "a key more": record(extra=1),
    "another format": record(format="other"),
    "escape in a name": record(tensors=tensor(row(), name="\x1b[2Jw")),
    "surrogate in a name": record(tensors=tensor(row(), name="\ud800")),
    "empty name": record(tensors=tensor(row(), name="")),
    "long name": record(tensors=tensor(row(), name="w" * 1025)),
    "escape in the layout": record(layout="\x1b]0;x\x07"),
    "config is no object": record(config=[]),
    "unknown dtype": record(tensors=tensor(row(), dtype="F33")),
    "dtype is a list": record(tensors=tensor(row(), dtype=["F32"])),
    "negative dim": record(tensors=tensor(row(), shape=(-4, -4))),
    "huge shape": record(tensors=tensor(row(), shape=(2**59, 2**59))),
    "hash of a part": record(tensors=tensor(row(digest="G" * 32))),
    "many dims": record(tensors=tensor(row(end=12, offset=(0,) * 17, shape=(1,) * 17), shape=(1,) * 17)),
    "file of no list": record(tensors=tensor(row(file="c.safetensors"))),
    "part outside its folder": record(tensors=tensor(row(file="../a.safetensors"))),
    "begin below 0": record(tensors=tensor(row(begin=-8, end=56))),
    "end past the file": record(tensors=tensor(row(begin=64, end=128))),
    "end before begin": record(tensors=tensor(row(begin=72, end=8))),
    "bool for begin": record(tensors=tensor(row(begin=True, end=65))),
    "bytes too few": record(tensors=tensor(row(end=71))),
    "dims missing": record(tensors=tensor(row(offset=(0,), shape=(16,)))),
    "part past the tensor": record(tensors=tensor(row(offset=(1, 0)))),
    "hole": record(tensors=tensor(row(end=40, shape=(2, 4)))),
    "overlap": record(tensors=tensor(row(), row(end=24, begin=8, shape=(1, 4)))),
    "no parts": record(tensors=tensor()),
    "two tensors in the same bytes": record(tensors={**tensor(row()), **tensor(row(begin=12, end=76), name="v")}),
    "a key twice": record()[:-1] + ', "step": 2}',
    "a name twice": record(files={}).replace(
        '"files": {}', f'"files": {{"a": [1, "{"0" * 32}"], "a": [2, "{"0" * 32}"]}}'
    ),
    "nested deeply": record(config={}).replace('"config": {}', '"config": {"a": ' + "[" * 10**5 + "]" * 10**5 + "}"),
    "not a number": record().replace('"step": 1', '"step": NaN'),
    "a number of 5,000 digits": record().replace('"step": 1', '"step": ' + "9" * 5000),
    "no JSON": record()[:-1],
    "something behind it": record() + "{}",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_is_refused(text):
    with pytest.raises(CheckpointError) as caught:
        Manifest.decode(rehashed(text), "m")
    assert "is damaged" not in caught.value.what


def test_a_manifest_of_the_same_kind_that_is_right_is_taken():
    both = {
        **tensor(row(end=40, shape=(2, 4)), row(begin=40, offset=(2, 0), shape=(2, 4))),
        **tensor(row(begin=20, end=20, offset=(0,), shape=(0,)), shape=(0,), name="v"),
        **tensor(row(begin=72, end=76, offset=(0,) * 16, shape=(1,) * 16), shape=(1,) * 16, name="n" * 1024),
    }
    files = {**FILES, "empty": [0, "0" * 32], "large": [2**60, "0" * 32]}
    most = {"step": 10**15 - 1, "num_ranks": 10**7, "run_id": "", "versions": {"x": ""}}
    found = Manifest.decode(rehashed(record(tensors=both, files=files, **most)), "m")
    assert {name: (len(one.shape), len(one.chunks)) for name, one in found.tensors.items()} == {
        **{"w": (2, 2), "v": (1, 1), "n" * 1024: (16, 1)}
    }
    assert {name: getattr(found, name) for name in most} == most and found.files["large"].size == 2**60


def test_a_newer_manifest_is_refused_with_the_reason():
    with pytest.raises(CheckpointError) as caught:
        Manifest.decode(rehashed(record(version=2)), "m")
    assert "version 2" in caught.value.what
    assert "newer Crius" in caught.value.fix


def test_a_manifest_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    disk = local(tmp_path, 20)
    size = disk.size(f"{STEP}/manifest.json")
    for limit in (size, size - 1):
        monkeypatch.setattr("crius.checkpoint.folder.MAX_MANIFEST_BYTES", limit)
        assert [f"the limit is {limit:,}" in line for line in problems(disk, STEP)] == [True] * (limit < size)


@pytest.mark.parametrize("seed", range(30))
def test_parts_that_tile_a_tensor_are_told_from_others(seed):
    """Cut at random, then one part is left out, doubled or moved."""
    choice = random.Random(seed)
    shape = tuple(choice.randint(2, 5) for _ in range(choice.randint(1, 3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(choice.randint(1, 8)):
        offset, size = boxes.pop(choice.randrange(len(boxes)))
        dim = choice.randrange(len(shape))
        cut = choice.randint(0, size[dim])  # empty parts are fine
        boxes.append((offset, (*size[:dim], cut, *size[dim + 1 :])))
        boxes.append(
            ((*offset[:dim], offset[dim] + cut, *offset[dim + 1 :]), (*size[:dim], size[dim] - cut, *size[dim + 1 :]))
        )
    choice.shuffle(boxes)
    full = next(index for index, (_, size) in enumerate(boxes) if np.prod(size))
    assert decodes(boxes, shape)
    assert not decodes(boxes[:full] + boxes[full + 1 :], shape)
    assert not decodes([*boxes, boxes[full]], shape)
    offset, size = boxes[full]
    for dim, step in itertools.product(range(len(shape)), (-1, 1)):
        moved = (*offset[:dim], offset[dim] + step, *offset[dim + 1 :])
        assert not decodes([*boxes[:full], (moved, size), *boxes[full + 1 :]], shape)


@pytest.mark.parametrize(("dims", "is_taken"), [(MAX_SPLIT_DIMS, True), (MAX_SPLIT_DIMS + 1, False)])
def test_a_tensor_may_be_split_along_few_dims(dims, is_taken):
    boxes = [(offset, (1,) * dims) for offset in itertools.product((0, 1), repeat=dims)]
    assert decodes(boxes, (2,) * dims) == is_taken


def decodes(boxes, shape) -> bool:
    rows, at = [], 0
    for offset, size in boxes:
        length = int(np.prod(size))
        rows.append(row(begin=at, end=at + length, offset=offset, shape=size))
        at += length
    text = record(files={"a.safetensors": [at, "0" * 32]}, tensors=tensor(*rows, dtype="U8", shape=shape))
    try:
        Manifest.decode(rehashed(text), "m")
    except CheckpointError:
        return False
    return True


def test_a_wrong_file_names_only_the_tensors_in_it(tmp_path):
    disk = local(tmp_path, 20)
    (tmp_path / STEP / "rank-00001.safetensors").unlink()
    (found,) = problems(disk, STEP)
    assert found.startswith("rank-00001.safetensors: is missing; it has model.")
    assert not {"mask", "optimizer.step"} & set(found.replace(",", "").split())
    assert len(TENSORS) == 6


def test_parts_cover_a_tensor_exactly_where_counting_its_elements_says_so():
    choice = random.Random(0)
    agreed = {True: 0, False: 0}
    for _ in range(3000):
        shape = tuple(choice.randint(0, 4) for _ in range(choice.randint(1, 2)))
        counts, boxes = np.zeros(shape, dtype=int), []
        for _ in range(choice.randint(1, 3)):
            offset = tuple(choice.choice((0, 0, choice.randint(0, dim))) for dim in shape)
            size = tuple(
                choice.choice((dim - at, choice.randint(0, dim - at))) for dim, at in zip(shape, offset, strict=True)
            )
            boxes.append((offset, size))
            counts[tuple(slice(at, at + length) for at, length in zip(offset, size, strict=True))] += 1
        assert cover(shape, boxes) == bool((counts == 1).all()), (shape, boxes)
        agreed[cover(shape, boxes)] += 1
    assert min(agreed.values()) > 300


def test_a_manifest_of_many_tensors_is_checked_in_few_calls_and_without_the_garbage_collector():
    digest, count = "0" * 32, 3000
    chunks = [Chunk("a.safetensors", 64 * i, 64 * i + 64, (0, 0), (4, 4), digest) for i in range(count)]
    tensors = {f"model.layers.{i}.w": TensorEntry("F32", (4, 4), (chunk,)) for i, chunk in enumerate(chunks)}
    files = {"a.safetensors": FileEntry(64 * count, digest)}
    data = Manifest(1, "", {}, {}, "1", 1, "", files, tensors).encode()
    gc.collect()  # so that none is due
    runs = [stats["collections"] for stats in gc.get_stats()]
    Manifest.decode(data, "m")
    assert [stats["collections"] for stats in gc.get_stats()][1:] == runs[1:] and gc.isenabled()
    profile = cProfile.Profile()
    profile.runcall(Manifest.decode, data, "m")
    assert sum(entry.callcount for entry in profile.getstats()) < 50 * count  # 81 with every tensor's corners counted

"""Small checkpoints, written without torch."""

import json
import random

import numpy as np

from crius.checkpoint.disk import open_disk
from crius.checkpoint.files import Part, write_shard
from crius.checkpoint.folder import damages, read_manifest
from crius.checkpoint.manifest import MANIFEST, Chunk, FileEntry, Manifest, TensorEntry, digest_of
from crius.checkpoint.names import step_name
from crius.errors import CheckpointError

# name to dtype, shape, and at which rows the ranks' parts begin
TENSORS = {
    "model.embeddings.weight": ("F32", (7, 6), (0, 4)),
    "model.norm.weight": ("BF16", (6,), (0, 3)),
    "optimizer.exp_avg.model.norm.weight": ("F64", (6,), (0, 3)),
    "optimizer.step": ("I64", (), (0,)),
    "mask": ("BOOL", (3,), (0,)),
    "nothing": ("F16", (0, 4), (0,)),
}
ITEM = {"F32": 4, "BF16": 2, "F64": 8, "I64": 8, "BOOL": 1, "F16": 2}


def pieces(seed):
    """(rank, tensor, dtype, offset, shape, bytes) of all parts."""
    numbers = np.random.default_rng(seed)
    for name, (dtype, shape, starts) in TENSORS.items():
        ends = (*starts[1:], shape[0] if shape else 0)
        for rank, (start, end) in enumerate(zip(starts, ends, strict=True)):
            part = (end - start, *shape[1:]) if shape else ()
            offset = (start, *(0 for _ in shape[1:])) if shape else ()
            size = int(np.prod(part)) * ITEM[dtype]
            yield rank, name, dtype, offset, part, numbers.integers(0, 2, size, dtype=np.uint8)


def write(disk, step, attempt, seed=0, beat=lambda: None):
    """Write a checkpoint of two ranks, all but the commit; returns its folder and its manifest."""
    folder = disk.stage(step, attempt)
    disk.prepare(folder)
    files, chunks = {}, {name: [] for name in TENSORS}
    for rank in (0, 1):
        mine = [piece for piece in pieces(seed) if piece[0] == rank]
        parts = [
            Part(name, dtype, shape, lambda data=data: memoryview(data)) for _, name, dtype, _, shape, data in mine
        ]
        file = f"{disk.file_name(f'rank-{rank:05d}', attempt)}.safetensors"
        files[file], places = write_shard(disk, f"{folder}/{file}", parts, beat)
        for (_, name, _, offset, shape, _), (begin, end, digest) in zip(mine, places, strict=True):
            chunks[name].append(Chunk(file, begin, end, offset, shape, digest))
    state = json.dumps({"train": {"step": step, "tokens": step * 512 + seed}}).encode()
    file = f"{disk.file_name('state', attempt)}.json"
    with disk.create(f"{folder}/{file}") as sink:
        sink.write(state)
    files[file] = FileEntry(len(state), digest_of(state))
    tensors = {name: TensorEntry(dtype, shape, tuple(chunks[name])) for name, (dtype, shape, _) in TENSORS.items()}
    manifest = Manifest(
        step, f"run of seed {seed}", {"torch": "2.13.0"}, {"training.steps": 20}, "fsdp2", 2, "c0ffee", files, tensors
    )
    with disk.create(f"{folder}/{MANIFEST}") as sink:
        sink.write(manifest.encode())
    return folder, manifest


def save(disk, step, attempt="one", seed=0):
    """Write and commit a checkpoint; returns its manifest."""
    folder, manifest = write(disk, step, attempt, seed)
    disk.commit(folder, step)
    return manifest


def problems(disk, name):
    """All that is wrong with a checkpoint, as text."""
    try:
        return [str(damage) for damage in damages(disk, name, read_manifest(disk, name))]
    except CheckpointError as error:
        return [str(error)]


def seed_of(disk, step):
    """Which of several saves of a step is there; it is whole."""
    assert problems(disk, step_name(step)) == []
    return int(read_manifest(disk, step_name(step)).run_id.split()[-1])


def local(folder, *steps, scheme=""):
    """A disk with checkpoints of ``steps``."""
    disk = open_disk(f"{scheme}{folder}")
    for step in steps:
        save(disk, step)
    return disk


def damage(folder, seed):
    """Change one thing of the checkpoint in ``folder`` and return what, the files it is in, and how to undo it."""
    choice = random.Random(seed)
    files = sorted(file for file in folder.iterdir())
    file = choice.choice(files)
    before = {path: path.read_bytes() for path in files}
    data = before[file]
    kind = choice.choice(["flip", "flip", "flip", "truncate", "delete", "append", "swap", "exchange"])
    touched = [file]
    at = -1
    if kind == "flip":
        at = choice.randrange(len(data))
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << choice.randrange(8)]) + data[at + 1 :])
    elif kind == "truncate":
        file.write_bytes(data[: choice.randrange(len(data))])
    elif kind == "delete":
        file.unlink()
    elif kind == "append":
        file.write_bytes(data + choice.randbytes(choice.randint(1, 9)))
    elif kind == "swap":
        other = choice.choice([path for path in files if path != file])
        file.write_bytes(before[other])
        other.write_bytes(data)
        touched = [file, other]
    else:  # two different bytes of a file change places
        at = choice.randrange(len(data))
        other = choice.choice([index for index in range(len(data)) if data[index] != data[at]])
        changed = bytearray(data)
        changed[at], changed[other] = data[other], data[at]
        file.write_bytes(changed)

    def undo():
        for path in touched:
            path.write_bytes(before[path])

    return kind, [path.name for path in touched], at, undo

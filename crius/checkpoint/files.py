"""How a checkpoint lies on disk: shards of tensors, and small files beside them. Torch-free."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from crius.checkpoint.disk import Disk, Sink
from crius.checkpoint.folder import damages_of_file
from crius.checkpoint.manifest import BLOCK_BYTES, ITEM_BYTES, FileEntry, Hasher, Manifest, digest_of
from crius.checkpoint.names import MANIFEST
from crius.checkpoint.state import encode_state
from crius.errors import CheckpointError

METADATA = "__metadata__"
_ALIGN = 8


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor of a safetensors file.

    Attributes:
        key: its name in the file.
        dtype: as safetensors names it: F32, BF16, ...
        shape: its dims.
        data: gives its bytes, in C order, little endian, when they are to be written.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], memoryview]

    @property
    def num_bytes(self) -> int:
        """What it takes in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_shard(
    disk: Disk, path: str, parts: Sequence[Part], beat: Callable[[], None]
) -> tuple[FileEntry, list[tuple[int, int, str]]]:
    """Write ``parts`` into a new safetensors file, a block at a time.

    Args:
        disk: folder of checkpoints.
        path: of the file.
        parts: in any order; the largest dtypes are written first, so that all are aligned.
        beat: called after each block.

    Returns:
        The file's size and hash; for each of ``parts``, where it begins and ends in the file, and its hash.

    Raises:
        CheckpointError: the disk does not take it, two parts have one name, or a part gives other than its bytes.
    """
    order = sorted(range(len(parts)), key=lambda index: -ITEM_BYTES[parts[index].dtype])
    head = _header([parts[index] for index in order])
    whole = Hasher(head)
    at = len(head)
    places: list[tuple[int, int, str]] = [(0, 0, "")] * len(parts)
    with disk.create(path) as sink:
        sink.write(head)
        for index in order:
            digest = _write_part(parts[index], sink, whole, beat)
            places[index] = (at, at + parts[index].num_bytes, digest)
            at += parts[index].num_bytes
    return FileEntry(at, whole.hexdigest()), places


def _write_part(part: Part, sink: Sink, whole: Any, beat: Callable[[], None]) -> str:
    """Write a tensor and return its hash; its bytes are let go before those of the next one are there."""
    data = part.data()
    if data.nbytes != part.num_bytes:
        raise CheckpointError(f"{part.key} has {data.nbytes:,} bytes, {part.num_bytes:,} were announced.")
    view = data.cast("B") if data.nbytes else memoryview(b"")
    own = Hasher()
    for begin in range(0, view.nbytes, BLOCK_BYTES):
        block = view[begin : begin + BLOCK_BYTES]
        own.update(block)
        whole.update(block)
        sink.write(block)
        beat()
    return own.hexdigest()


def _header(parts: Sequence[Part]) -> bytes:
    """Length and JSON of what follows: https://github.com/huggingface/safetensors#format."""
    record: dict[str, object] = {METADATA: {"format": "pt"}}
    begin = 0
    for part in parts:
        if part.key in record:
            raise CheckpointError(f"two parts of a file are called {part.key}.")
        record[part.key] = {
            "dtype": part.dtype,
            "shape": part.shape,
            "data_offsets": [begin, begin + part.num_bytes],
        }
        begin += part.num_bytes
    text = json.dumps(record, separators=(",", ":")).encode()
    text = text.ljust(math.ceil(len(text) / _ALIGN) * _ALIGN)
    return len(text).to_bytes(8, "little") + text


def commit(
    disk: Disk, folder: str, attempt: str, manifest: Manifest, state: dict[str, Any], *, verify: bool = True
) -> None:
    """Write state and manifest of a checkpoint whose shards are written, and make it the checkpoint of its step.

    Args:
        disk: folder of checkpoints.
        folder: that the save writes into.
        attempt: see ``LocalDisk.file_name``.
        manifest: without the file of the state.
        state: what is no tensor.
        verify: read each file again. A manifest that is not what was written does not stay: where it is the commit,
            the checkpoint would count.

    Raises:
        OSError: the disk does not take it.
        CheckpointError: a shard is not in the folder, or a file was not read back as it was written.
    """
    name = f"{disk.file_name('state', attempt)}.json"
    entry = _write_small(disk, folder, name, encode_state(state, manifest.step))
    if verify:
        check_written(disk, folder, name, entry)
    files = {name: entry, **manifest.files}
    if missing := sorted(files.keys() - set(disk.files(folder))):
        raise CheckpointError(
            f"{disk.where}/{folder} has no {', '.join(missing[:3])}, which another rank has written: "
            "the folder of checkpoints has to be one that all ranks share."
        )
    entry = _write_small(disk, folder, MANIFEST, dataclasses.replace(manifest, files=files).encode())
    if verify:
        try:
            check_written(disk, folder, MANIFEST, entry)
        except CheckpointError:
            disk.remove(folder)
            raise
    disk.commit(folder, manifest.step)


def _write_small(disk: Disk, folder: str, name: str, data: bytes) -> FileEntry:
    with disk.create(f"{folder}/{name}") as sink:
        sink.write(data)
    return FileEntry(len(data), digest_of(data))


def check_written(
    disk: Disk, folder: str, name: str, entry: FileEntry, beat: Callable[[], None] = lambda: None
) -> None:
    """Read a file again that was just written.

    Args:
        disk, folder, name: the file.
        entry: what was written.
        beat: called after each block that was read.

    Raises:
        CheckpointError: it is not what was written.
    """
    for damage in damages_of_file(disk, f"{folder}/{name}", entry, [], beat):
        raise CheckpointError(
            f"{disk.where}/{folder}/{name} was not read back as it was written: {damage.what}.",
            why="memory, disk or the way to it changes bits",
            fix="check the machine: its log, its memory, its disk",
        )

"""Writes the files of a checkpoint: shards of tensors, the state and the manifest. Torch-free."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from crius.checkpoint.disk import Disk, DiskSink
from crius.checkpoint.folder import damages_of_file
from crius.checkpoint.manifest import BLOCK_BYTES, ITEM_BYTES, FileEntry, Hasher, Manifest, digest_of, own_digest
from crius.checkpoint.names import MANIFEST
from crius.checkpoint.state import encode_state
from crius.errors import CheckpointError

METADATA = "__metadata__"
_ALIGN = 8


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor of a safetensors file.

    Attributes:
        key: name in the file.
        dtype: name of the dtype in safetensors: F32, BF16, ...
        shape: shape of the tensor.
        data: function that returns the bytes, in C order, little endian. It is called when they are written.
        check: called with each block of the bytes before it is written; what it raises ends the file.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], memoryview]
    check: Callable[[memoryview], object] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_shard(
    disk: Disk, path: str, parts: Sequence[Part], beat: Callable[[], None]
) -> tuple[FileEntry, list[tuple[int, int, str]]]:
    """Write ``parts`` into a new safetensors file, one block at a time.

    Args:
        disk: folder of checkpoints.
        path: path of the file.
        parts: tensors in any order. The largest dtypes are written first, so that all are aligned.
        beat: called after each block.

    Returns:
        The file's size and hash; and for each of ``parts``, its first byte, its end in the file and its hash.

    Raises:
        CheckpointError: writing fails, two parts have the same name, or a part returns another number of bytes.
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


def _write_part(part: Part, sink: DiskSink, whole: Any, beat: Callable[[], None]) -> str:
    """Write a tensor and return its hash. Its bytes are freed before the next tensor's bytes are made."""
    data = part.data()
    if data.nbytes != part.num_bytes:
        raise CheckpointError(f"{part.key} has {data.nbytes:,} bytes instead of {part.num_bytes:,}.")
    view = data.cast("B") if data.nbytes else memoryview(b"")
    own = Hasher()
    for begin in range(0, view.nbytes, BLOCK_BYTES):
        block = view[begin : begin + BLOCK_BYTES]
        if part.check:
            part.check(block)
        own.update(block)
        whole.update(block)
        sink.write(block)
        beat()
    return own.hexdigest()


def _header(parts: Sequence[Part]) -> bytes:
    """Length and JSON of the header: https://github.com/huggingface/safetensors#format."""
    record: dict[str, object] = {METADATA: {"format": "pt"}}
    begin = 0
    for part in parts:
        if part.key in record:
            raise CheckpointError(f"two tensors of a file have the name {part.key}.")
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
) -> Manifest:
    """Write state and manifest of a checkpoint whose shards are written, and commit it. Returns the whole manifest.

    Args:
        disk: folder of checkpoints.
        folder: folder that the save writes into.
        attempt: see ``LocalDisk.file_name``.
        manifest: manifest without the file of the state.
        state: everything that is not a tensor.
        verify: read each file again. A manifest that is read back wrong is removed: on disks where the manifest is the
            commit, the checkpoint would count.

    Raises:
        OSError: writing fails.
        CheckpointError: a shard is not in the folder, or a file was read back with other bytes.
    """
    name = f"{disk.file_name('state', attempt)}.json"
    entry = _write_small(disk, folder, name, encode_state(state, manifest.step))
    if verify:
        check_written(disk, folder, name, entry)
    files = {name: entry, **manifest.files}
    if missing := sorted(files.keys() - set(disk.files(folder))):
        raise CheckpointError(
            f"{disk.where}/{folder} lacks {', '.join(missing[:3])}, which another rank has written: "
            "all ranks must share the folder of checkpoints."
        )
    manifest = dataclasses.replace(manifest, files=files)
    encoded = manifest.encode()
    entry = _write_small(disk, folder, MANIFEST, encoded)
    if verify:
        try:
            check_written(disk, folder, MANIFEST, entry)
        except CheckpointError:
            disk.remove(folder)
            raise
    disk.commit(folder, manifest.step)
    return dataclasses.replace(manifest, digest=own_digest(encoded))


def _write_small(disk: Disk, folder: str, name: str, data: bytes) -> FileEntry:
    with disk.create(f"{folder}/{name}") as sink:
        sink.write(data)
    return FileEntry(len(data), digest_of(data))


def check_written(
    disk: Disk, folder: str, name: str, entry: FileEntry, beat: Callable[[], None] = lambda: None
) -> None:
    """Read a file that was just written, and compare it.

    Args:
        disk, folder, name: the file.
        entry: size and hash of the written bytes.
        beat: called after each block that was read.

    Raises:
        CheckpointError: the file differs from the written bytes.
    """
    for damage in damages_of_file(disk, f"{folder}/{name}", entry, [], beat):
        raise CheckpointError(
            f"{disk.where}/{folder}/{name} differs from the bytes that were written: {damage.what}.",
            why="memory, disk or the connection to it changes bits",
            fix="check the machine: its log, its memory, its disk",
        )

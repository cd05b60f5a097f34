"""Safetensors files, written as a stream and hashed on the way. No torch."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crius.checkpoint.digest import BLOCK_BYTES, Hasher
from crius.checkpoint.disk import Disk
from crius.checkpoint.manifest import ITEM_BYTES, FileEntry
from crius.errors import CheckpointError

METADATA = "__metadata__"
_ALIGN = 8


@dataclass(frozen=True)
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
            part = parts[index]
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
            places[index] = (at, at + view.nbytes, own.hexdigest())
            at += view.nbytes
    return FileEntry(at, whole.hexdigest()), places


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

"""Tensors that are stored in pieces, in any format: the input of a load or a conversion. Torch-free."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from crius.checkpoint.disk import Disk
from crius.checkpoint.manifest import ITEM_BYTES, Chunk, TensorEntry, digest_of
from crius.errors import CheckpointError

Shape = tuple[int, ...]
SHOWN = 8
"""Most tensors or damages that a message names; it counts the others."""


class Piece(NamedTuple):  # large checkpoints have millions
    """A part of a tensor.

    Attributes:
        offset: start of the part, for each dim.
        shape: shape of the part.
        read: function that returns its bytes, little endian and in C order, after all possible checks.
        read_rows: the same for a range of rows, from the first to the one after the last; None: only the whole part can
            be read.
        place: file and first byte, by which a load orders its reads.
        row_dim: dim of the rows; dims before it have size 1.
    """

    offset: Shape
    shape: Shape
    read: Callable[[], memoryview]
    read_rows: Callable[[int, int], memoryview] | None = None
    place: tuple[str, int] = ("", 0)
    row_dim: int = 0


@dataclass(frozen=True)
class TensorSource:
    """A tensor that can be read.

    Attributes:
        key: name in the source.
        dtype: name of the dtype in safetensors files.
        shape: shape of the whole tensor.
        pieces: pieces that tile it exactly.
    """

    key: str
    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def read(self) -> memoryview:
        """The bytes of the whole tensor, assembled in memory.

        Raises:
            CheckpointError: a part is damaged.
            OSError: reading fails.
        """
        if len(self.pieces) == 1:
            return self.pieces[0].read()
        whole = np.empty((*self.shape, ITEM_BYTES[self.dtype]), dtype=np.uint8)
        for piece in self.pieces:
            place = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.shape, strict=True))
            whole[place] = as_array(piece.read(), piece.shape, self.dtype)
        return memoryview(whole.reshape(-1))  # type: ignore[arg-type]  # numpy's stubs do not say that it is a buffer


def stacked(key: str, rows: Sequence[TensorSource]) -> TensorSource:
    """Combine tensors as rows of one tensor, along a new first dim. Nothing is read.

    Args:
        key: name of the new tensor.
        rows: tensors of one shape.

    Raises:
        CheckpointError: the rows have different dtypes.
    """
    dtypes = {row.dtype: row.key for row in rows}
    if len(dtypes) > 1:
        found = ", ".join(f"{name} has dtype {dtype}" for dtype, name in sorted(dtypes.items()))
        raise CheckpointError(f"{found}, but both are parts of one tensor here.", fix="save them in one dtype")
    pieces = tuple(
        piece._replace(offset=(index, *piece.offset), shape=(1, *piece.shape), row_dim=piece.row_dim + 1)
        for index, row in enumerate(rows)
        for piece in row.pieces
    )
    return TensorSource(key, rows[0].dtype, (len(rows), *rows[0].shape), pieces)


def rows_from(source: TensorSource, start: int, count: int) -> TensorSource:
    """Some rows of a tensor that is one piece, as a tensor of their own. Nothing is read."""
    [piece] = source.pieces
    shape = (count, *source.shape[1:])
    size = source.num_bytes // source.shape[0]

    def read_rows(first: int, stop: int) -> memoryview:
        if piece.read_rows is not None:
            return piece.read_rows(start + first, start + stop)
        return piece.read()[(start + first) * size : (start + stop) * size]

    part = Piece((0,) * len(shape), shape, partial(read_rows, 0, count), read_rows, piece.place)
    return TensorSource(source.key, source.dtype, shape, (part,))


def as_array(data: memoryview, shape: Shape, dtype: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes as ``(*shape, bytes of a number)``, so that numpy can move numbers of any dtype. No copy."""
    return np.frombuffer(data, dtype=np.uint8).reshape(*shape, ITEM_BYTES[dtype])


def stored(disk: Disk, folder: str, entries: Mapping[str, TensorEntry]) -> dict[str, TensorSource]:
    """Tensors of a Crius checkpoint. A part is always read whole, and its hash is compared.

    Args:
        disk: folder of checkpoints.
        folder: folder of the checkpoint.
        entries: entries of the tensors in the manifest, by name.
    """
    read = _Reader(disk, folder)
    return {
        name: TensorSource(
            name,
            entry.dtype,
            entry.shape,
            tuple(Piece(c.offset, c.shape, partial(read, name, c), None, (c.file, c.begin)) for c in entry.chunks),
        )
        for name, entry in entries.items()
    }


class _Reader:
    """Reads parts of a checkpoint. The last file stays open: a load reads file by file, and opening a remote file takes
    a request."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self._name = ""
        self._file: BinaryIO = io.BytesIO()

    def __call__(self, name: str, chunk: Chunk) -> memoryview:
        """Read a part of the tensor ``name``."""
        if chunk.file != self._name:
            self._file.close()
            self._file = self._disk.open(f"{self._folder}/{chunk.file}")
            self._name = chunk.file
        data = np.empty(chunk.end - chunk.begin, dtype=np.uint8)
        self._file.seek(chunk.begin)
        count = self._file.readinto(data.data)  # type: ignore[attr-defined]  # every binary file has it
        if count != data.nbytes or digest_of(data.data) != chunk.digest:
            raise CheckpointError(
                f"tensor {name} in {self._disk.where}/{self._folder}/{chunk.file} differs from what was written.",
                where=f"bytes {chunk.begin:,} to {chunk.end:,}",
                why="its hash differs",
                fix="resume from another step: --checkpoint.load_step N",
            )
        return data.data

    def __del__(self) -> None:
        self._file.close()


def misfits(
    there: Mapping[str, Shape],
    wanted: Mapping[str, Shape],
    source: str,
    target: str,
    may_lack: Callable[[str], bool] = lambda name: False,
) -> str:
    """All differences between the tensors of ``source`` and those of ``target``, as one text; empty if they match.

    Args:
        there: shapes of the source's tensors, by name.
        wanted: shapes of the target's tensors, by name.
        source, target: names of the two sides, for the message.
        may_lack: whether a tensor of this name may be missing on either side.
    """
    missing = sorted(name for name in wanted.keys() - there.keys() if not may_lack(name))
    extra = sorted(name for name in there.keys() - wanted.keys() if not may_lack(name))
    shapes = [
        f"{name}: {list(there[name])} in {source}, {list(wanted[name])} in {target}"
        for name in sorted(wanted.keys() & there.keys())
        if there[name] != wanted[name]
    ]
    return "; ".join(
        f"{len(names)} {what}: {', '.join(shortened(names))}"
        for names, what in (
            (missing, f"that {target} has and {source} lacks"),
            (extra, f"that {source} has and {target} lacks"),
            (shapes, "of another shape"),
        )
        if names
    )


def shortened(lines: list[str]) -> list[str]:
    """The first few of many tensors or damages, and the number of the others."""
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"]

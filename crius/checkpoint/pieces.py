"""Tensors that lie in pieces, whoever wrote them: what a load or a conversion reads. Torch-free."""

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
"""Tensors or damages that a message names; it counts the others."""


class Piece(NamedTuple):  # large checkpoints have millions
    """A part of a tensor.

    Attributes:
        offset: where it starts, for each dim.
        shape: its own.
        read: its bytes, little endian and in C order; checks all that can be checked of them.
        read_rows: the same of the rows from a first up to another one; None: only the whole can be read.
        place: file and first byte, by which a load orders its reads.
        row_dim: dim that has the rows; those before it are of size 1.
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
        key: its name where it lies.
        dtype: as safetensors files name it.
        shape: of the whole.
        pieces: tile it exactly.
    """

    key: str
    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def read(self) -> memoryview:
        """The bytes of the whole tensor, which is put together in memory.

        Raises:
            CheckpointError: a part is damaged.
            OSError: the disk does not give it.
        """
        if len(self.pieces) == 1:
            return self.pieces[0].read()
        whole = np.empty((*self.shape, ITEM_BYTES[self.dtype]), dtype=np.uint8)
        for piece in self.pieces:
            place = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.shape, strict=True))
            whole[place] = as_array(piece.read(), piece.shape, self.dtype)
        return memoryview(whole.reshape(-1))  # type: ignore[arg-type]  # numpy's stubs do not say that it is a buffer


def stacked(key: str, rows: Sequence[TensorSource]) -> TensorSource:
    """Tensors as the rows of one, along a new dim in front; nothing is read.

    Args:
        key: of the one.
        rows: of one shape.

    Raises:
        CheckpointError: they have several dtypes.
    """
    dtypes = {row.dtype: row.key for row in rows}
    if len(dtypes) > 1:
        found = ", ".join(f"{name} is of {dtype}" for dtype, name in sorted(dtypes.items()))
        raise CheckpointError(f"{found}, and both are parts of one tensor here.", fix="save them in one dtype")
    pieces = tuple(
        piece._replace(offset=(index, *piece.offset), shape=(1, *piece.shape), row_dim=piece.row_dim + 1)
        for index, row in enumerate(rows)
        for piece in row.pieces
    )
    return TensorSource(key, rows[0].dtype, (len(rows), *rows[0].shape), pieces)


def as_array(data: memoryview, shape: Shape, dtype: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes as ``(*shape, bytes of a number)``, so that numpy moves numbers of any dtype. No copy."""
    return np.frombuffer(data, dtype=np.uint8).reshape(*shape, ITEM_BYTES[dtype])


def stored(disk: Disk, folder: str, entries: Mapping[str, TensorEntry]) -> dict[str, TensorSource]:
    """Tensors of a Crius checkpoint; a part is read whole and its hash compared.

    Args:
        disk: folder of checkpoints.
        folder: of the checkpoint.
        entries: what the manifest says of each, by name.
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
    """Reads parts of a checkpoint. The file of the last one stays open: a load reads one file after the other, and to
    open one of a remote disk takes a question to it."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk, self._folder = disk, folder
        self._name = ""
        self._file: BinaryIO = io.BytesIO()

    def __call__(self, name: str, chunk: Chunk) -> memoryview:
        """A part of the tensor ``name``."""
        if chunk.file != self._name:
            self._file.close()
            self._file, self._name = self._disk.open(f"{self._folder}/{chunk.file}"), chunk.file
        data = np.empty(chunk.end - chunk.begin, dtype=np.uint8)
        self._file.seek(chunk.begin)
        count = self._file.readinto(data.data)  # type: ignore[attr-defined]  # every binary file has it
        if count != data.nbytes or digest_of(data.data) != chunk.digest:
            raise CheckpointError(
                f"tensor {name} in {self._disk.where}/{self._folder}/{chunk.file} is not what was written.",
                where=f"bytes {chunk.begin:,} to {chunk.end:,}",
                why="its hash is another one",
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
    """How the tensors of ``source`` are not those that ``target`` wants, all of them together; empty: they are.

    Args:
        there, wanted: shapes by name.
        source, target: what they are of, for the message.
        may_lack: names of which either side may have more.
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
    """The first of many tensors or damages, and the number of the others."""
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"]

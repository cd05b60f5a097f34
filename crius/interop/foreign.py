"""Checkpoints of other programs: their contents, with tensors as bytes. No torch, and no code is run."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from crius.checkpoint.manifest import ITEM_BYTES, TORCH_NAMES
from crius.checkpoint.pieces import Shape, TensorSource
from crius.checkpoint.tiles import MAX_SPLIT_DIMS, cover, fits, split_dims
from crius.errors import CheckpointError
from crius.interop.unpickle import refusal
from crius.untrusted import open_below, read_linked, without_cache_link

ITEMSIZE = {name: ITEM_BYTES[name] for name in TORCH_NAMES.values()}
"""Bytes per number, by names of dtypes in safetensors files: the dtypes that a Crius checkpoint supports."""

MAX_DIMS = 16
MAX_KEY = 1024


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of another program.

    Attributes:
        kind: name of the format, for messages.
        tensors: tensors by key.
        values: values that are not tensors, by key. A function reads each when it is needed.
        unreadable: reasons why a Crius checkpoint cannot hold certain tensors, by key.
    """

    kind: str
    tensors: dict[str, TensorSource]
    values: dict[str, Callable[[], Any]]
    unreadable: dict[str, str]

    def all_tensors(self, where: str) -> dict[str, TensorSource]:
        """The tensors of a checkpoint whose tensors are all wanted.

        Args:
            where: path of the checkpoint, for messages.

        Raises:
            CheckpointError: some are unreadable.
        """
        if self.unreadable:
            key, why = min(self.unreadable.items())
            raise CheckpointError(f"{key} of {where} and {len(self.unreadable) - 1} more cannot be used.", why=why)
        return self.tensors


def open_inside(folder: Path, name: str) -> BinaryIO:
    """Open a file of a folder for reading. Links, devices and anything outside of the folder are refused.

    Args:
        folder: folder that the user named.
        name: name of an entry. A name from an untrusted file must first pass ``check_name``.

    Raises:
        CheckpointError: there is no regular file with that name.
    """
    try:
        return open_below(*without_cache_link(folder, name))
    except OSError as error:
        raise refusal(f"{folder}/{name}", str(error.strerror)) from None


def read_inside(folder: Path, name: str, most: int) -> bytes:
    """The bytes of a file of a folder.

    Raises:
        CheckpointError: see ``open_inside``; or the file has more than ``most`` bytes.
    """
    try:
        return read_linked(folder, name, most)
    except OSError as error:
        raise refusal(f"{folder}/{name}", str(error.strerror)) from None


def size_of(folder: Path, name: str) -> int:
    """Size of a file of a folder in bytes.

    Raises:
        CheckpointError: see ``open_inside``.
    """
    with open_inside(folder, name) as file:
        return os.fstat(file.fileno()).st_size


def check_key(key: Any, where: str) -> str:
    """Return the name of a tensor if it may be printed.

    Raises:
        CheckpointError: the name is not text, is empty, too long or not printable.
    """
    if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY or not key.isprintable():
        raise refusal(where, f"a key is not printable text of 1 to {MAX_KEY} characters")
    return key


def check_shape(shape: Any, where: str) -> Shape:
    """Return the sizes or offsets of a tensor's dims, if they are valid.

    Raises:
        CheckpointError: they are not a short list of integers of at least 0.
    """
    is_shape = isinstance(shape, (list, tuple)) and len(shape) <= MAX_DIMS
    if not is_shape or not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
        raise refusal(where, f"{str(shape)[:60] if is_shape else 'a value in it'} is not a shape")
    return tuple(shape)


def check_tiles(parts: Sequence[tuple[Shape, Shape]], shape: Shape, where: str) -> None:
    """Check that parts, each an offset and a shape, cover a tensor exactly, without overlap or gap.

    Raises:
        CheckpointError: they do not.
    """
    if not all(fits(shape, part) for part in parts) or len(split_dims(shape, parts)) > MAX_SPLIT_DIMS:
        raise refusal(where, f"its parts do not fit into {list(shape)}")
    if not cover(shape, parts):
        raise refusal(where, f"its parts do not cover {list(shape)} exactly")


def overlapping(spans: Iterable[tuple[int, int]]) -> bool:
    """Whether two spans, each a begin and an end, share a byte."""
    ordered = sorted(span for span in spans if span[0] < span[1])
    return any(before[1] > after[0] for before, after in zip(ordered, ordered[1:], strict=False))

"""Checkpoints that other programs wrote: what is in them, and their tensors as bytes. No torch, and nothing is run."""

import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from crius.checkpoint.manifest import ITEM_BYTES, TORCH_NAMES
from crius.checkpoint.pieces import Shape, TensorSource
from crius.checkpoint.tiles import MAX_SPLIT_DIMS, cover, fits, split_dims
from crius.interop.unpickle import refusal

ITEMSIZE = {name: ITEM_BYTES[name] for name in TORCH_NAMES.values()}
"""Bytes a number, by the names of dtypes in safetensors files; those that a Crius checkpoint can hold."""

MAX_DIMS = 16
MAX_KEY = 1024


@dataclass(frozen=True)
class Foreign:
    """Another program's checkpoint.

    Attributes:
        kind: the format, for people.
        tensors: by key.
        values: keys of what is no tensor; each is read only when it is asked for.
        unreadable: keys of tensors that a Crius checkpoint cannot hold, with the reason.
    """

    kind: str
    tensors: dict[str, TensorSource]
    values: dict[str, Callable[[], Any]]
    unreadable: dict[str, str]


def open_inside(folder: Path, name: str) -> BinaryIO:
    """Open a file of a folder for reading; never a link, a device or anything outside.

    Args:
        folder: one that the user named.
        name: of an entry of it. One that an untrusted file gave goes through ``check_name`` first.

    Raises:
        CheckpointError: there is no regular file of that name.
    """
    folder, name, where = *_without_cache_link(folder, name), f"{folder}/{name}"
    assert "/" not in name and name not in ("", ".", "..")
    try:
        number = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        is_link = (folder / name).is_symlink()
        raise refusal(
            where, "it is a link; cp -rL copies what it leads to" if is_link else str(error.strerror)
        ) from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise refusal(where, "it is no regular file")
    return open(number, "rb")


def _without_cache_link(folder: Path, name: str) -> tuple[Path, str]:
    """Where the file is: in a cache of the hub, a snapshot has links to the blobs beside it, and no others count."""
    if folder.parent.name == "snapshots" and (folder / name).is_symlink():
        if blob := re.fullmatch(r"\.\./\.\./blobs/([0-9a-f]{40,64})", os.readlink(folder / name)):
            return folder.parent.parent / "blobs", blob[1]
    return folder, name


def size_of(folder: Path, name: str) -> int:
    """Bytes of a file of a folder.

    Raises:
        CheckpointError: see ``open_inside``.
    """
    with open_inside(folder, name) as file:
        return os.fstat(file.fileno()).st_size


def check_key(key: Any, where: str) -> str:
    """The name of a tensor, which may be printed.

    Raises:
        CheckpointError: it is no text, empty, too long or not printable.
    """
    if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY or not key.isprintable():
        raise refusal(where, f"a key is no printable text of 1 to {MAX_KEY} characters")
    return key


def check_shape(shape: Any, where: str) -> Shape:
    """Sizes or offsets of a tensor's dims.

    Raises:
        CheckpointError: they are not few whole numbers that are not negative.
    """
    is_shape = isinstance(shape, (list, tuple)) and len(shape) <= MAX_DIMS
    if not is_shape or not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
        raise refusal(where, f"{str(shape)[:60] if is_shape else 'what it gives'} is no shape")
    return tuple(shape)


def check_tiles(parts: Sequence[tuple[Shape, Shape]], shape: Shape, where: str) -> None:
    """Check that parts, an offset and a shape each, cover a tensor exactly: nothing twice, nothing left out.

    Raises:
        CheckpointError: they do not.
    """
    if not all(fits(shape, part) for part in parts) or len(split_dims(shape, parts)) > MAX_SPLIT_DIMS:
        raise refusal(where, f"its parts do not fit into {list(shape)}")
    if not cover(shape, parts):
        raise refusal(where, f"its parts do not cover {list(shape)} exactly")


def overlapping(spans: Iterable[tuple[int, int]]) -> bool:
    """Whether two spans, a begin and an end each, share a byte."""
    ordered = sorted(span for span in spans if span[0] < span[1])
    return any(before[1] > after[0] for before, after in zip(ordered, ordered[1:], strict=False))

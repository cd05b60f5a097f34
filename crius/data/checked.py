"""Checks files against their hashes: a table of xxh3 hashes, one per block. Bytes are checked before they are used.

The hashes detect accidents: a bad disk, a truncated copy, an edited file. They do not stop an attacker.
"""

import hashlib
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from crius.errors import DataError

BLOCK_BYTES = 128 << 10
"""Bytes of a block: Linux' readahead fetches about that much from disk anyway for a random read."""

WHOLE_BYTES = 1 << 30
"""A smaller file is checked whole when it is opened. A larger file is checked per block, when a block is first read."""

SETTLED_NS = 2_000_000_000
"""A file that changed less than 2 s before it was hashed is hashed again next time: another change could have the same
time stamp, because file systems round time."""

_whole: set[tuple[object, ...]] = set()
"""Files that this process, or the process it was forked from, has checked as a whole."""


class BlockHasher:
    """Computes the hashes of the blocks of a file while it is written.

    Args:
        block_bytes: bytes per block.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._rest = b""
        self._hashes: list[int] = []

    def update(self, content: bytes) -> None:
        """Add the next bytes of the file."""
        content = self._rest + content
        whole = len(content) - len(content) % self._block_bytes
        blocks = (memoryview(content)[at : at + self._block_bytes] for at in range(0, whole, self._block_bytes))
        self._hashes += map(xxhash.xxh3_64_intdigest, blocks)
        self._rest = content[whole:]

    def hashes(self) -> npt.NDArray[np.uint64]:
        """The hashes ``(blocks,)``, little-endian; the last block may be short. Do not call ``update`` afterwards."""
        last = [xxhash.xxh3_64_intdigest(self._rest)] if self._rest else []
        return np.array([*self._hashes, *last], dtype="<u8")


class CheckedFile:
    """A memory-mapped file whose bytes are checked before they are used.

    Args:
        path: path of the file.
        content: mapped bytes of the file, ``(bytes,)`` uint8.
        hashes: hashes of its blocks, ``(blocks,)`` uint64.
        block_bytes: bytes per block.
        fix: remedy for damage, for messages.
        num_folders: folders that a run reads together.

    Raises:
        DataError: the file has less than ``WHOLE_BYTES // num_folders`` and does not match its hashes.
    """

    def __init__(
        self,
        path: Path,
        content: npt.NDArray[np.uint8],
        hashes: npt.NDArray[np.uint64],
        block_bytes: int,
        fix: str,
        num_folders: int = 1,
    ) -> None:
        self._path = path
        self._content = content
        self._hashes = hashes
        self._fix = fix
        self._block_bytes = block_bytes
        self._is_good = np.zeros(len(hashes), dtype=np.bool_)
        self._is_whole = len(content) < WHOLE_BYTES // num_folders
        key = _key(path, xxhash.xxh3_128_hexdigest(hashes.data))
        if self._is_whole and key not in _whole:
            for block in range(len(hashes)):
                self._check_block(block)
            _whole.update([key] if key else [])

    def check(self, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        """Check the blocks of these byte ranges, ``(ranges,)`` each, unless they were checked before.

        Raises:
            DataError: a block does not match its hash.
        """
        if self._is_whole:
            return
        firsts = np.maximum(begins, 0) // self._block_bytes
        lasts = (ends - 1) // self._block_bytes
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            if not self._is_good[first : last + 1].all():
                for block in range(first, min(last + 1, len(self._is_good))):
                    self._check_block(block)

    def _check_block(self, block: int) -> None:
        if self._is_good[block]:
            return
        begin = block * self._block_bytes
        part = self._content[begin : begin + self._block_bytes]
        if xxhash.xxh3_64_intdigest(part.data) != self._hashes[block]:
            raise damaged(self._path, f"bytes {begin:,} to {begin + len(part) - 1:,}", self._fix)
        self._is_good[block] = True


def check_sha256(path: Path, content: npt.NDArray[np.uint8], digest: str, fix: str) -> None:
    """Check a whole file against its sha256. Older folders have no table of blocks.

    Raises:
        DataError: the file does not match.
    """
    key = _key(path, digest)
    if key in _whole:
        return
    if hashlib.sha256(content.data).hexdigest() != digest:
        raise damaged(path, "its bytes", fix)
    _whole.update([key] if key else [])


def damaged(path: Path, part: str, fix: str) -> DataError:
    """The error for ``part`` of a file that does not match its hash."""
    return DataError(
        f"{path} is damaged: {part} do not match their hash.",
        where=str(path),
        why="the file was changed after it was written, or the disk or a copy is bad",
        fix=fix,
    )


def _key(path: Path, digest: str) -> tuple[object, ...] | None:
    """Key of a file, its last change and its hash; None if another change could have the same time stamp."""
    status = path.stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    if max(times) + SETTLED_NS >= time.time_ns():
        return None
    return (str(path), status.st_dev, status.st_ino, status.st_size, *times, digest)

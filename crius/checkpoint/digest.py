"""Hashes of what a checkpoint holds: 128-bit xxh3, which finds accidents but does not stop an attacker. No torch."""

import re
from collections.abc import Iterator
from typing import BinaryIO

import xxhash

ALGORITHM = "xxh3-128"
BLOCK_BYTES = 1 << 20
"""What is hashed, read or written at a time: it stays in the processor's cache from one of these to the next."""

_DIGEST = re.compile(r"[0-9a-f]{32}")

Hasher = xxhash.xxh3_128
"""``.update(data)`` and ``.hexdigest()``, as in hashlib."""


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """The hash as 32 hex digits."""
    return xxhash.xxh3_128(data).hexdigest()


def is_digest(text: object) -> bool:
    """Whether ``text`` is what ``digest_of`` returns for something."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def blocks_of(file: BinaryIO) -> Iterator[memoryview]:
    """The bytes of a file from here on, in blocks; each is overwritten by the next."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    while count := file.readinto(buffer):  # type: ignore[attr-defined]  # every binary file has it
        yield buffer[:count]

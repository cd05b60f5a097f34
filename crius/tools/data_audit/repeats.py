"""Validation texts that a run also trains on, found by their hashes. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from crius.data.samples import SampleSource
from crius.data.tokens import TOKENS, IndexedSource

_CHUNK = 4096  # documents whose hashes are checked at a time


def repeats_of(train: Mapping[str, Any], held_out: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Documents or conversations of each validation set, and how many of them also stand in the training data.

    All tokens are read once. Texts are equal if their tokens are.

    Args:
        train: sources by name; only indexed ones are read.
        held_out: validation sets by name, likewise.

    Raises:
        DataError: a file is damaged.
    """
    wanted = {name: list(_digests(source)) for name, source in held_out.items()}
    sought = {digest for digests in wanted.values() for digest in digests}
    found: set[bytes] = set()
    for source in train.values() if sought else ():
        found.update(digest for digest in _digests(source) if digest in sought)
    return {
        name: {"documents": len(digests), "in_training": sum(digest in found for digest in digests)}
        for name, digests in wanted.items()
    }


def _digests(source: Any) -> Iterator[bytes]:
    """A hash of each document that begins in a source."""
    file = source.file
    if isinstance(source, SampleSource):
        first = source.first
        end = source.last
    else:
        assert isinstance(source, IndexedSource)
        begins, ends = file.documents_between(*np.array([[source.first_token], [source.last_token]]))
        first = int(begins[0])
        end = int(ends[0])
    for start in range(first, end, _CHUNK):
        bounds = np.append(file.documents[start : min(start + _CHUNK, end) + 1], file.meta.num_tokens)
        bounds = bounds[: min(_CHUNK, end - start) + 1].astype(np.int64)
        file.check(TOKENS, bounds[:1], bounds[-1:])
        for begin, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            yield xxhash.xxh3_128_digest(file.tokens[begin:stop].tobytes())

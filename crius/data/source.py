"""The interface between a loader and sources of sequences, and the rule for boundaries of documents."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

ROUNDS = 8  # 3 give a pseudo-random permutation with ideal rounds (Luby and Rackoff 1988); small halves need more

_MASK64 = (1 << 64) - 1


def mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): 64 bits in, 64 well-mixed bits out."""
    return int(_mix_array(np.array([(value + 0x9E3779B97F4A7C15) & _MASK64], dtype=np.uint64))[0])


def permute(index: npt.NDArray[np.uint64], size: int, key: int) -> npt.NDArray[np.uint64]:
    """The image of each index under the permutation of ``range(size)`` that ``key`` selects.

    Args:
        index: ``(n,)``, each below ``size``.
        size: at least 1 and at most 2**62.
        key: 64 bits, made from a seed and an epoch by ``mix``.

    Returns:
        ``(n,)``, each below ``size``.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [mix(key + number) for number in range(ROUNDS)]
    out = _network(index, half, keys)
    outside = np.flatnonzero(out >= size)
    while outside.size:
        out[outside] = _network(out[outside], half, keys)
        outside = outside[out[outside] >= size]
    return out


def _network(value: npt.NDArray[np.uint64], half: int, keys: list[int]) -> npt.NDArray[np.uint64]:
    shift = np.uint64(half)
    mask = np.uint64((1 << half) - 1)
    left = value >> shift
    right = value & mask
    for key in keys:
        left, right = right, left ^ (_mix_array(right ^ np.uint64(key)) & mask)
    return (left << shift) | right


def _mix_array(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


ORDER_BLOCK = 1024
"""Samples whose order is computed at a time: a permutation takes as many NumPy calls for few samples as for many."""


class Order:
    """Maps samples to places. Epoch e is the samples from ``e * size`` on, and has each of ``size`` places once.

    Args:
        size: number of places.
        seed: seed of the orders.
        shuffle: each epoch has its own random order; else the places are in order.
    """

    def __init__(self, size: int, seed: int, *, shuffle: bool) -> None:
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self._block: tuple[int, Int64Array] = (-1, np.empty(0, dtype=np.int64))

    def __str__(self) -> str:
        return f"shuffled {self.seed}" if self.shuffle else "in order"

    def places(self, sample_ids: Sequence[int]) -> Int64Array:
        """The place of each sample, ``(batch,)``, in [0, size)."""
        ids = np.asarray(sample_ids, dtype=np.int64)
        if not self.shuffle:
            return ids % self.size
        found = np.empty_like(ids)
        blocks, indices = np.divmod(ids, ORDER_BLOCK)
        for block in np.unique(blocks):
            rows = blocks == block
            found[rows] = self._of(int(block))[indices[rows]]
        return found

    def _of(self, block: int) -> Int64Array:
        """Places of the samples from ``block * ORDER_BLOCK`` on, ``(ORDER_BLOCK,)``. The last block is cached."""
        if self._block[0] == block:
            return self._block[1]
        ids = np.arange(block * ORDER_BLOCK, (block + 1) * ORDER_BLOCK)
        epochs, indices = np.divmod(ids, self.size)
        order = np.empty_like(ids)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            key = mix(mix(self.seed) ^ int(epoch))
            order[rows] = permute(indices[rows].astype(np.uint64), self.size, key).astype(np.int64)
        self._block = block, order
        return order


Cursor = Sequence[int]
"""``[epoch, document, token_offset]`` of the next token that a shard has not trained on."""


MAX_IDENTITY = 1024
"""Most characters of an identity: the limit of texts in a checkpoint."""


def storable_identity(text: str) -> str:
    """``text`` in a form that a checkpoint accepts: printable and at most ``MAX_IDENTITY`` long.

    A text that is already so is not changed. Any other text is escaped and cut, and its hash is appended to identify
    it.
    """
    if text.isprintable() and len(text) <= MAX_IDENTITY:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{ascii(text)[1:-1][:900]} (sha256 {digest})"


BOUNDARY_VERSION = 2
"""Version of the rule. In version 1 no document had a BOS, and positions restarted after the EOS."""

NO_LABEL = -100
"""Label of a token without a target: ``IGNORE_INDEX`` of ``crius.data.loader``, which imports torch."""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """The rule for boundaries: a document is the inputs ``start t1 .. tn`` with the labels ``t1 .. tn end``.

    No label crosses a boundary. A token folder has ``t1 .. tn eos`` of each document. The place of an EOS is both the
    last label of its document and the first input of the next document. If ``start`` is the EOS, inputs and labels are
    the stored tokens, and the first document of a stream has no start.

    Attributes:
        eos_id: id that is stored after each document.
        start_id: first input of a document, the id of BOS or of EOS.
        end_label: label after the last token of a document, the id of EOS or ``NO_LABEL``.
    """

    eos_id: int
    start_id: int
    end_label: int

    @property
    def has_bos(self) -> bool:
        """Whether documents start with a token other than the EOS."""
        return self.start_id != self.eos_id

    @property
    def identity(self) -> str:
        """Changes when the same stored tokens give other inputs or labels; empty if they are the stored tokens."""
        if not self.has_bos and self.end_label == self.eos_id:
            return ""
        return f", boundaries {BOUNDARY_VERSION}: start {self.start_id}, end {self.end_label}"

    def describe(self) -> str:
        """A short description of the rule, for the log."""
        if self.start_id == self.end_label:
            return f"each document starts and ends with id {self.eos_id} (EOS)"
        start = f"start with id {self.start_id} ({'BOS' if self.has_bos else 'EOS'})"
        end = "their end is not predicted" if self.end_label == NO_LABEL else f"end with id {self.eos_id} (EOS)"
        return f"documents {start}, {end}"


class Rows(NamedTuple):
    """Sequences for a model, all int64 ``(batch, seq_len)``.

    Attributes:
        tokens: inputs.
        labels: label of each input, or ``NO_LABEL``.
        positions: position of each input in its document, counted from 0 at the start of the document or sequence.
    """

    tokens: Int64Array
    labels: Int64Array
    positions: Int64Array


PADDING_ID = 0
"""Token of padding. Padding has no labels."""


def padding_rows(batch: int, seq_len: int) -> Rows:
    """Rows of padding, each one document without labels, to be filled in place."""
    shape = (batch, seq_len)
    positions = np.tile(np.arange(seq_len, dtype=np.int64), (batch, 1))
    return Rows(np.full(shape, PADDING_ID, dtype=np.int64), np.full(shape, NO_LABEL, dtype=np.int64), positions)


class TokenSource(Protocol):
    """An endless supply of sequences, numbered from 0. A sample id stands for the same sequence on every rank and
    layout."""

    @property
    def seq_len(self) -> int:
        """Inputs per sequence, each with a label."""

    @property
    def num_shards(self) -> int:
        """Shards that are read in order, sample g from shard ``g % num_shards``; 0: any sample can be read."""

    @property
    def num_samples(self) -> int:
        """Sequences per epoch: epoch e starts at sample ``e * num_samples``; 0: each shard has its own epochs."""

    @property
    def identity(self) -> str:
        """Changes when sample ids stand for other sequences. A resume with another identity is reported.

        It is a ``storable_identity``.
        """

    def read(self, sample_ids: Sequence[int]) -> Rows:
        """Read these samples.

        With shards, the samples of each shard must be read in order, each once.

        Raises:
            DataError: the data is damaged or cannot be reached.
        """

    def cursors(self, shards: Iterable[int]) -> dict[int, list[int]]:
        """The place where each of ``shards`` continues; empty if ``num_shards`` is 0."""

    def restore(self, cursors: Mapping[int, Cursor]) -> None:
        """Continue at these cursors. Shards that are not named keep their place."""


class HeldOut(Protocol):
    """A fixed number of sequences to score."""

    @property
    def seq_len(self) -> int:
        """Inputs per sequence, each with a label that is scored."""

    @property
    def num_samples(self) -> int:
        """Number of sequences, the same on every rank."""

    def read(self, sample_ids: Sequence[int]) -> Rows:
        """Read the samples with these numbers, all below ``num_samples``."""


def positions_of(rows: Int64Array, columns: Int64Array, shape: tuple[int, int]) -> Int64Array:
    """Positions ``(batch, seq_len)`` of sequences, from the starts of documents in them. Index 0 is always a start.

    Args:
        rows: sequence of each document start, in [0, batch).
        columns: index of the start in that sequence, in [0, seq_len).
        shape: shape of the result.
    """
    positions = np.zeros(shape, dtype=np.int64)
    positions[rows, columns] = columns
    np.maximum.accumulate(positions, axis=1, out=positions)
    return np.subtract(np.arange(shape[1], dtype=np.int64), positions, out=positions)

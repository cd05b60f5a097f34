"""What a loader needs from a source of sequences, and how the documents in them are told apart."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

ROUNDS = 8  # 3 make a pseudo-random permutation with ideal rounds (Luby and Rackoff 1988); small halves need more

_MASK64 = (1 << 64) - 1


class MarkedText(NamedTuple):
    """A text as tokens, and where in it each lies.

    Attributes:
        ids: ``(tokens,)``, those of ``Tokenizer.encode_marked``.
        starts: ``(tokens,)``, character of the text at which each begins.
        ends: ``(tokens,)``, character after it; a character of several tokens is in each of them.
    """

    ids: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


def mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): 64 bits in, 64 well-mixed bits out."""
    return int(_mix_array(np.array([(value + 0x9E3779B97F4A7C15) & _MASK64], dtype=np.uint64))[0])


def permute(index: npt.NDArray[np.uint64], size: int, key: int) -> npt.NDArray[np.uint64]:
    """Image of each index under the permutation of ``range(size)`` that ``key`` selects.

    Args:
        index: ``(n,)``, each below ``size``.
        size: at least 1 and at most 2**62.
        key: 64 bits; ``mix`` a seed and an epoch into it.

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
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & mask
    for key in keys:
        left, right = right, left ^ (_mix_array(right ^ np.uint64(key)) & mask)
    return (left << shift) | right


def _mix_array(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


ORDER_BLOCK = 1024
"""Samples whose order is found at once: a permutation of few costs as many calls of NumPy as one of many."""


class Order:
    """Which of ``size`` places each sample is: epoch e is samples ``e * size`` on, each place once.

    Args:
        size: places.
        seed: chooses the orders.
        shuffle: each epoch has an order of its own; False takes the places as they come.
    """

    def __init__(self, size: int, seed: int, *, shuffle: bool) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle
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
        """Places of the samples ``block * ORDER_BLOCK`` on, ``(ORDER_BLOCK,)``; the last block is kept."""
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


TokenArray = npt.NDArray[np.integer[Any]]
Cursor = Sequence[int]
"""``[epoch, document, token_offset]`` of the next token that a shard has not trained on."""


MAX_IDENTITY = 1024
"""Characters of an identity, the limit of a checkpoint's texts."""


def storable_identity(text: str) -> str:
    """``text`` as a checkpoint takes it: printable and no longer than ``MAX_IDENTITY``.

    A text that is both stays as it is. Any other is escaped and cut, and its hash tells it from the rest.
    """
    if text.isprintable() and len(text) <= MAX_IDENTITY:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{ascii(text)[1:-1][:900]} (sha256 {digest})"


BOUNDARY_VERSION = 2
"""Version of the rule. Under version 1 no document had a BOS, and positions restarted behind the EOS."""

NO_LABEL = -100
"""Label of a token after which nothing is predicted: ``IGNORE_INDEX`` of ``batch``, which imports torch."""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """A document is the inputs ``start t1 .. tn`` with the labels ``t1 .. tn end``: no label crosses a boundary.

    A token folder holds ``t1 .. tn eos`` of each document. The place of an EOS holds two things: the last label of its
    document and the first input of the next. Where ``start`` is the EOS itself, inputs and labels are the stored
    tokens, and the first document of a stream has no start.

    Attributes:
        eos_id: id that is stored behind each document.
        start_id: first input of a document, the id of BOS or of EOS.
        end_label: label after the last token of a document, the id of EOS or ``NO_LABEL``.
    """

    eos_id: int
    start_id: int
    end_label: int

    @property
    def has_bos(self) -> bool:
        """Whether documents start with another token than the EOS."""
        return self.start_id != self.eos_id

    @property
    def identity(self) -> str:
        """Changes when the same stored tokens give other inputs or labels; empty where they are the stored tokens."""
        if not self.has_bos and self.end_label == self.eos_id:
            return ""
        return f", boundaries {BOUNDARY_VERSION}: start {self.start_id}, end {self.end_label}"

    def describe(self) -> str:
        """The rule in a few words, for the log."""
        start = f"start with id {self.start_id} ({'BOS' if self.has_bos else 'EOS'})"
        end = "their end is not predicted" if self.end_label == NO_LABEL else f"end with id {self.eos_id} (EOS)"
        return f"documents {start}, {end}"


class Rows(NamedTuple):
    """Sequences as a model takes them, all int64 ``(batch, seq_len)``.

    Attributes:
        tokens: inputs.
        labels: what to predict after each input; ``NO_LABEL`` where nothing is.
        positions: of each input in its document, counted from 0 at the start of the document and of the sequence.
    """

    tokens: Int64Array
    labels: Int64Array
    positions: Int64Array


PADDING_ID = 0
"""Token of the places that nothing fills. They have no label."""


def padding_rows(batch: int, seq_len: int) -> Rows:
    """Rows of padding alone, each of them one document without a label, to be filled in place."""
    shape = (batch, seq_len)
    positions = np.tile(np.arange(seq_len, dtype=np.int64), (batch, 1))
    return Rows(np.full(shape, PADDING_ID, dtype=np.int64), np.full(shape, NO_LABEL, dtype=np.int64), positions)


class TokenSource(Protocol):
    """An endless supply of sequences, numbered from 0. Sample id g is the same sequence on every rank and layout."""

    @property
    def seq_len(self) -> int:
        """Inputs in a sequence, each with a label."""

    @property
    def num_shards(self) -> int:
        """Shards that are read in order, sample g from shard ``g % num_shards``; 0 where any sample can be read."""

    @property
    def num_samples(self) -> int:
        """Sequences in an epoch: samples ``e * num_samples`` on are epoch e; 0 where each shard has its own."""

    @property
    def identity(self) -> str:
        """Changes when sample ids stand for other sequences; a resume under another identity is reported.

        It is a ``storable_identity``.
        """

    def read(self, sample_ids: Sequence[int]) -> Rows:
        """These samples.

        With shards, the samples of each shard have to be asked for in order, each one once.

        Raises:
            DataError: the data is damaged or cannot be reached.
        """

    def cursors(self, shards: Iterable[int]) -> dict[int, list[int]]:
        """Where each of ``shards`` goes on; empty where ``num_shards`` is 0."""

    def restore(self, cursors: Mapping[int, Cursor]) -> None:
        """Go on at these cursors; the shards that are not named stay where they are."""


class HeldOut(Protocol):
    """A fixed number of sequences to score."""

    @property
    def seq_len(self) -> int:
        """Inputs in a sequence, each with a label that is scored."""

    @property
    def num_samples(self) -> int:
        """Sequences there are; the same on every rank."""

    def read(self, sample_ids: Sequence[int]) -> Rows:
        """The samples of these numbers below ``num_samples``."""


def positions_of(rows: Int64Array, columns: Int64Array, shape: tuple[int, int]) -> Int64Array:
    """Positions of ``shape``, ``(batch, seq_len)``, of sequences in which documents start, besides at index 0.

    Args:
        rows: the sequence of each document start, in [0, batch).
        columns: its index in that sequence, in [0, seq_len).
        shape: of the result.
    """
    positions = np.zeros(shape, dtype=np.int64)
    positions[rows, columns] = columns
    np.maximum.accumulate(positions, axis=1, out=positions)
    return np.subtract(np.arange(shape[1], dtype=np.int64), positions, out=positions)

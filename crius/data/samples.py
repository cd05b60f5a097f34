"""Turns samples of conversations into sequences: whole samples packed first-fit, or each sample padded. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from crius.config.data import DataConfig, ValidationConfig
from crius.data.meta import PREPARE
from crius.data.source import (
    NO_LABEL,
    Cursor,
    Int64Array,
    Order,
    Rows,
    mix,
    padding_rows,
    permute,
    storable_identity,
)
from crius.data.tokens import DOCUMENTS, TARGETS, TOKENS, TokenFile
from crius.errors import DataError

PACKING_VERSION = 1
"""Version of the rule by which samples become sequences; part of the identity of the data."""


class Bins(NamedTuple):
    """The samples of each sequence: sequence b has ``samples[firsts[b] : firsts[b + 1]]``, in this order.

    Attributes:
        samples: ``(samples,)``, indices of samples, each once.
        firsts: ``(sequences + 1,)``, place in ``samples`` of the first sample of each sequence, and the end.
    """

    samples: Int64Array
    firsts: Int64Array


def pack(lengths: Int64Array, capacity: int, seed: int) -> Bins:
    """First-fit decreasing: the longest samples first, each into the first sequence that has room for it.

    The number of sequences is at most 11/9 of the fewest possible, plus 1 (Johnson 1973; Dosa 2007 has the constant).
    The result depends only on the lengths and the seed. Samples of one length are in a random order from ``seed``. They
    are placed together, so that n samples take one sort and ``capacity`` steps of NumPy.

    Args:
        lengths: tokens of each sample, ``(samples,)``, from 1 to ``capacity``.
        capacity: tokens per sequence.
        seed: seed of the order of samples of one length.
    """
    drawn = permute(np.arange(len(lengths), dtype=np.uint64), max(1, len(lengths)), mix(seed))
    order = np.lexsort((drawn, -lengths))
    values, counts = np.unique(lengths, return_counts=True)
    placed: list[Int64Array] = []
    rooms: list[list[Int64Array]] = [[] for _ in range(capacity)]  # sequences by the room that is left in them
    fitting = left = np.empty(0, dtype=np.int64)  # sequences with room for the current length, and their room
    number = 0
    longest = capacity
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        newly = [(bins, room) for room in range(length, longest) for bins in rooms[room]]
        if newly:
            fitting = np.concatenate([fitting, *(bins for bins, _ in newly)])
            left = np.concatenate([left, *(np.full(len(bins), room) for bins, room in newly)])
            by_number = np.argsort(fitting, kind="stable")
            fitting = fitting[by_number]
            left = left[by_number]
        # each of these takes at least one sample
        used = fitting[:count]
        fitting = fitting[count:]
        room = left[:count]
        left = left[count:]
        if (missing := count - int((room // length).sum())) > 0:
            new = -(-missing // (capacity // length))
            used = np.concatenate((used, np.arange(number, number + new)))
            room = np.concatenate((room, np.full(new, capacity)))
            number += new
        fits = room // length
        takes = np.minimum(fits, np.maximum(0, count - (np.cumsum(fits) - fits)))
        placed.append(np.repeat(used, takes))
        room = room - takes * length
        stays = room >= length
        fitting = np.concatenate((used[stays], fitting))
        left = np.concatenate((room[stays], left))
        _put(rooms, used[~stays], room[~stays])
        longest = length
    bins = np.concatenate(placed) if placed else np.empty(0, dtype=np.int64)
    return Bins(order[np.argsort(bins, kind="stable")], np.searchsorted(np.sort(bins), np.arange(number + 1)))


def _put(rooms: list[list[Int64Array]], bins: Int64Array, left: Int64Array) -> None:
    order = np.argsort(left, kind="stable")
    values, firsts = np.unique(left[order], return_index=True)
    for value, part in zip(values.tolist(), np.split(bins[order], firsts[1:]), strict=False):
        rooms[value].append(part)


class SampleSource:
    """Samples ``[first, last)`` of a folder as sequences, in any order.

    A sample is the inputs ``t0 .. tn`` from its start. The label of each input is the next token if that is a target,
    else ``NO_LABEL``. Positions restart at each sample, and once at the padding after the last sample, so that
    attention treats the padding as one document. Samples without a label, such as samples that were cut before their
    first answer, are left out.

    Args:
        file: token folder.
        first, last: range of the samples to use.
        seq_len: tokens per sequence.
        vocab_size: rows of the model's embedding; each id that is read is checked against it.
        packing: fill sequences with several whole samples; else one sample per sequence.
        too_long: cut samples of more than ``seq_len`` tokens, or leave them out.
        seed: seed of the orders.
        shuffle: False reads the sequences in order in every epoch.

    Attributes:
        num_samples: sequences per epoch.
        longest: tokens of the longest sample.
        num_long: samples with more than ``seq_len`` tokens.
        num_empty: samples that are left out because they have no target.
        num_used: samples that are read.
        num_tokens: tokens of the samples that are read, without padding.
        num_targets: targets of the samples that are read.
    """

    num_shards = 0

    def __init__(
        self,
        file: TokenFile,
        first: int,
        last: int,
        *,
        seq_len: int,
        vocab_size: int,
        packing: bool,
        too_long: Literal["truncate", "drop"],
        seed: int,
        shuffle: bool,
    ) -> None:
        assert 0 <= first <= last <= len(file.documents) and seq_len > 0
        self.file = file
        self.first = first
        self.last = last
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.packing = packing
        self.too_long = too_long
        file.check(DOCUMENTS, np.array([0]), np.array([len(file.documents)]))
        ends = np.append(file.documents[1:], file.meta.num_tokens)
        self._starts = file.documents[first:last]
        lengths = (ends - file.documents)[first:last]
        is_long = lengths > seq_len
        self._lengths = np.minimum(lengths, seq_len)
        labels = self._count_labels(lengths)
        is_used = (labels > 0) & ~(is_long if too_long == "drop" else np.zeros_like(is_long))
        used = np.flatnonzero(is_used)
        self.longest = int(lengths.max(initial=0))
        self.num_long = int(is_long.sum())
        self.num_used = len(used)
        self.num_empty = int((~is_used & ~(is_long & (too_long == "drop"))).sum())
        self.num_tokens = int(self._lengths[used].sum())
        self.num_targets = int(labels[used].sum())
        if packing:
            bins = pack(self._lengths[used], seq_len, seed)
            self._bins = Bins(used[bins.samples], bins.firsts)
        else:
            self._bins = Bins(used, np.arange(len(used) + 1))
        self.num_samples = len(self._bins.firsts) - 1
        self._order = Order(self.num_samples, seed, shuffle=shuffle)

    def _count_labels(self, lengths: Int64Array) -> Int64Array:
        """Labels of each sample in the part that is read, ``(samples,)``: the first token is never a label."""
        if not len(lengths):
            return np.empty(0, dtype=np.int64)
        begin = int(self._starts[0])
        end = int(self._starts[-1] + lengths[-1])
        self.file.check(TARGETS, np.array([begin]), np.array([end]))
        targets = self.file.targets
        starts = self._starts
        # uint32, since summing into int64 is 40 times slower
        counts = np.add.reduceat(targets[begin:end], starts - begin, dtype=np.uint32).astype(np.int64)
        counts -= targets[starts]
        for sample in np.flatnonzero(lengths > self.seq_len):
            cut = starts[sample] + self.seq_len
            counts[sample] -= np.count_nonzero(targets[cut : starts[sample] + lengths[sample]])
        return counts

    @property
    def padding(self) -> float:
        """Share of the places of all sequences that are padding, in [0, 1)."""
        return 1 - self.num_tokens / (self.num_samples * self.seq_len) if self.num_samples else 0.0

    @property
    def identity(self) -> str:
        """Identifies the samples, and everything that decides which of them a sequence has."""
        rule = f"{'packed' if self.packing else 'padded'} {PACKING_VERSION}, too long: {self.too_long}"
        part = f"{self.file.identity} samples [{self.first}, {self.last}) {rule}"
        return storable_identity(f"{part} by {self.seq_len} {self._order}")

    def conversations(self, sample_id: int) -> list[int]:
        """Numbers in the folder, from 0, of the samples in a sequence, in its order."""
        place = int(self._order.places([sample_id])[0])
        return (self.first + self._of(place)).tolist()

    def _of(self, place: int) -> Int64Array:
        return self._bins.samples[self._bins.firsts[place] : self._bins.firsts[place + 1]]

    def read(self, sample_ids: Sequence[int]) -> Rows:
        """Read these sequences, in any order.

        Raises:
            DataError: a token id is ``vocab_size`` or more, or the data is damaged.
        """
        held = [self._of(place) for place in self._order.places(sample_ids).tolist()]
        every = np.concatenate([*held, np.empty(0, dtype=np.int64)])
        for name in (TOKENS, TARGETS):
            self.file.check(name, self._starts[every], self._starts[every] + self._lengths[every])
        rows = padding_rows(len(held), self.seq_len)
        columns = np.arange(self.seq_len, dtype=np.int64)
        for row, samples in enumerate(held):
            at = 0
            for sample in samples.tolist():
                start = int(self._starts[sample])
                length = int(self._lengths[sample])
                ids = self.file.tokens[start : start + length]
                end = at + length
                rows.tokens[row, at:end] = ids
                is_target = self.file.targets[start + 1 : start + length] != 0
                rows.labels[row, at : end - 1] = np.where(is_target, ids[1:].astype(np.int64), NO_LABEL)
                rows.positions[row, at:end] = columns[:length]
                at = end
            rows.positions[row, at:] = columns[: self.seq_len - at]
        if rows.tokens.size and rows.tokens.max() >= self.vocab_size:
            self._refuse(rows, sample_ids)
        return rows

    def cursors(self, shards: Iterable[int]) -> dict[int, list[int]]:
        """Empty, since a sample id alone determines its place."""
        return {}

    def restore(self, cursors: Mapping[int, Cursor]) -> None:
        """Does nothing, since a sample id alone determines its place."""

    def _refuse(self, rows: Rows, sample_ids: Sequence[int]) -> None:
        row, position = np.argwhere(rows.tokens >= self.vocab_size)[0].tolist()
        raise DataError(
            f"{self.file.folder / TOKENS} has id {rows.tokens[row, position]}, the model has {self.vocab_size} ids.",
            where=f"sample {sample_ids[row]}, position {position}",
            why=f"meta.json says that the largest id is {self.file.meta.max_token_id}",
            fix=PREPARE,
        )


def open_samples(
    file: TokenFile,
    held_files: Mapping[str, TokenFile],
    data: DataConfig,
    validation: ValidationConfig,
    *,
    seq_len: int,
    global_batch_size: int,
    vocab_size: int,
    seed: int,
) -> tuple[SampleSource, dict[str, SampleSource], tuple[str, ...]]:
    """The sequences for training, the held-out sequences, and lines for the log.

    Whole conversations are held out: the last ``validation.fraction`` of them, at least one, or all of ``held_files``.

    Args:
        file: folder with the training data.
        held_files: folder with the data to score of each set, which may be ``file``; empty: nothing is scored.
        data: section with packing and the treatment of long samples.
        validation: the section.
        seq_len: tokens per sequence.
        global_batch_size: sequences per optimizer step; an epoch must have at least that many.
        vocab_size: rows of the model's embedding.
        seed: seed of the order.

    Raises:
        DataError: too few conversations are left; the message has a remedy.
    """
    number = len(file.documents)
    holds_out = validation.fraction > 0 and not validation.path
    cut = number - min(number - 1, max(1, round(number * validation.fraction))) if holds_out else number
    sequences = partial(
        SampleSource, seq_len=seq_len, vocab_size=vocab_size, packing=data.packing, too_long=data.too_long
    )
    train = sequences(file, 0, cut, seed=seed, shuffle=data.shuffle)
    held = {
        name: sequences(one, cut if one is file else 0, len(one.documents), seed=0, shuffle=False)
        for name, one in held_files.items()
    }
    _check(train, "to train on", global_batch_size, "")
    for name, part in held.items():
        where = "--validation.path" if validation.path else f"--validation.fraction {validation.fraction}"
        label = f"validation {name}" if name else "validation"
        _check(part, f"held out for {label}", 1, where)
    return train, held, tuple(_describe(train, held, global_batch_size))


def _check(source: SampleSource, what: str, needed: int, where: str) -> None:
    if source.num_samples >= needed:
        return
    fixes = []
    if source.num_samples:
        fixes.append(f"--training.global_batch_size {1 << (source.num_samples.bit_length() - 1)}")
    elif source.num_long:
        fixes.append(f"--training.seq_len {1 << (source.longest - 1).bit_length()}")
    if where:
        fixes.append("--validation.interval 0 for no validation")
    lack = f"one step needs {needed:,} sequences" if needed > 1 else "one is needed"
    raise DataError(
        f"{source.num_used:,} of {source.last - source.first:,} conversations are left {what} = {source.num_samples:,} "
        f"sequences of {source.seq_len:,}; {lack}.",
        where=where or source.file.meta.source,
        why="; ".join(_left_out(source)),
        fix=", or ".join([*fixes, "more conversations"]),
    )


def _left_out(source: SampleSource) -> list[str]:
    number = source.last - source.first
    fate = "left out" if source.too_long == "drop" else "cut to that"
    long = f"{source.num_long:,} of {number:,} conversations have more than {source.seq_len:,} tokens: {fate}"
    empty = f"{source.num_empty:,} of {number:,} conversations have no token to predict: left out"
    return [text for text, number in ((long, source.num_long), (empty, source.num_empty)) if number]


def _describe(train: SampleSource, held: Mapping[str, SampleSource], global_batch_size: int) -> list[str]:
    lines = [f"train: {_counts(train)} = {train.num_samples / global_batch_size:,.1f} steps per epoch"]
    if left_out := _left_out(train):
        lines.append(f"train: {'; '.join(left_out)}")
    for name, part in held.items():
        label = f"validation {name}" if name else "validation"
        where = "" if part.file is train.file else f" of {part.file.meta.source}"
        lines.append(f"{label}: {_counts(part)} held out{where}")
        if left_out := _left_out(part):
            lines.append(f"{label}: {'; '.join(left_out)}")
    return lines if held else [*lines, "validation: off"]


def _counts(source: SampleSource) -> str:
    how = "packed" if source.packing else "one each"
    return (
        f"{source.num_used:,} conversations, {source.num_tokens:,} tokens, {source.num_targets:,} of them to predict = "
        f"{source.num_samples:,} sequences of {source.seq_len:,} ({how}, {source.padding:.1%} padding)"
    )

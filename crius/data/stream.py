"""Sequences from documents that can only be read in order, as a fixed number of shards with one cursor each.

Sample g is sequence ``g // num_shards`` of shard ``g % num_shards``. The number of shards does not depend on the number
of ranks, so a sample id stands for the same sequence on any number. A rank reads the shards whose samples it trains on.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from crius.data.documents import document_text
from crius.data.source import Boundary, Cursor, Int64Array, Rows, positions_of, storable_identity
from crius.errors import DataError
from crius.tokens.tokenizer import Tokenizer

RETRIES = 5
"""Attempts after the first one, after waits of 1, 2, 4, 8 and 16 s."""

Row = Mapping[str, object]
OpenRows = Callable[[int], Iterator[Row]]
"""Function that opens the rows of a shard from its n-th document on."""

_log = logging.getLogger("crius.data")


class ShardReader:
    """The sequences of one shard, in order.

    Args:
        open_rows: function that opens the shard at a document.
        label: dataset and shard, for messages.
        tokenizer: the tokenizer.
        boundary: first input and end label of documents.
        seq_len: inputs per sequence.
        text_field: key of the text in a row.
        keep: function of the number of a document; False leaves it out.
        repeat: start again at the end, with the next epoch.
        sleep: function that waits for a number of seconds.

    Attributes:
        cursor: ``(epoch, document, token_offset)`` of the first input of the next sequence. Documents are counted in
            the shard, including those that are left out. The offset counts from the BOS. Without a BOS it counts from
            the first token of the text, and the EOS of a document is the first input of the next document.
    """

    def __init__(
        self,
        open_rows: OpenRows,
        label: str,
        tokenizer: Tokenizer,
        *,
        boundary: Boundary,
        seq_len: int,
        text_field: str,
        keep: Callable[[int], bool],
        repeat: bool = True,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.open_rows = open_rows
        self.label = label
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.boundary = boundary
        self.text_field = text_field
        self.keep = keep
        self.repeat = repeat
        self.sleep = sleep
        self._origin = 0 if boundary.has_bos else 1  # place in a document that has the cursor's offset 0
        self.restore((0, 0, 0))

    def restore(self, cursor: Cursor) -> None:
        """Continue at ``cursor``."""
        epoch, document, offset = cursor
        self.cursor = (epoch, document, offset)
        self._epoch = epoch
        self._document = document
        self._place = offset + self._origin
        self._rows: Iterator[Row] | None = None
        self._begin = self._origin  # first place of the next document: a stream without BOS begins with its text
        self._tokens: Int64Array | None = None  # start, text and end of the document at the cursor
        self._nothing_yet = document == 0

    def next_window(self) -> Rows | None:
        """The next sequence, as one row; None at the end, unless the shard repeats.

        Raises:
            DataError: a row is bad, the shard has no document, or it could not be read in ``RETRIES`` + 1 attempts.
        """
        inputs, labels = np.empty((2, 1, self.seq_len), dtype=np.int64)
        starts: list[int] = []
        filled = 0
        while filled < self.seq_len:
            tokens = self._tokens if self._tokens is not None else self._load()
            if tokens is None:
                return None
            if self._place == 0:
                starts.append(filled)
            count = min(self.seq_len - filled, len(tokens) - 1 - self._place)
            inputs[0, filled : filled + count] = tokens[self._place : self._place + count]
            labels[0, filled : filled + count] = tokens[self._place + 1 : self._place + 1 + count]
            filled += count
            self._place += count
            self.cursor = (self._epoch, self._document, self._place - self._origin)
            if self._place == len(tokens) - 1:
                self._step()
        columns = np.array(starts, dtype=np.int64)
        return Rows(inputs, labels, positions_of(np.zeros_like(columns), columns, inputs.shape))

    def check(self) -> None:
        """Read the first document, so that bad data is found before training starts.

        Raises:
            DataError: as ``next_window``.
        """
        if self._tokens is None:
            self._load()

    def _step(self) -> None:
        self._document = self._document + 1
        self._place = self._begin
        self._tokens = None

    def _load(self) -> Int64Array | None:
        """Start, text and end of the document at the cursor, or of the next kept document with text; None at the end.

        The cursor may be at the last place of the document, which is not an input.
        """
        while True:
            where = f"{self.label}, document {self._document:,}"
            row = self._row(where)
            if row is None:
                if not self.repeat:
                    return None
                self._start_again()
                continue
            text = document_text(row, self.text_field, where) if self.keep(self._document) else ""
            if not text:
                self._step()
                continue
            start = self.boundary.start_id
            end = self.boundary.end_label
            self._tokens = np.concatenate(([start], self.tokenizer.encode(text), [end]), dtype=np.int64)
            self._nothing_yet = False
            self._begin = 0
            if self._place >= len(self._tokens):
                raise DataError(
                    f"the document has {len(self._tokens) - self._origin:,} tokens, but the checkpoint was at token "
                    f"{self._place - self._origin:,}.",
                    where=where,
                    why="the dataset or the tokenizer changed since the checkpoint",
                )
            return self._tokens

    def _row(self, where: str) -> Row | None:
        """The row at the cursor; None at the end. If reading fails, the shard is opened again at the cursor."""
        for attempt in range(RETRIES + 1):
            try:
                if self._rows is None:
                    self._rows = self.open_rows(self._document)
                return next(self._rows, None)
            except Exception as error:  # network, decompression, parsing: libraries raise various types
                self._rows = None
                cause = f"{type(error).__name__}: {error}"
                if attempt == RETRIES:
                    raise DataError(
                        f"reading {where} failed {RETRIES + 1} times; the last time: {cause}",
                        where="--data.path",
                        fix="check the network and the dataset; the run can resume from its last checkpoint",
                    ) from error
                wait = 2.0**attempt
                _log.warning("reading %s failed (%s); trying again in %.0f s", where, cause, wait)
                self.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _start_again(self) -> None:
        if self._nothing_yet:
            raise DataError(
                f"{self.label} has no document with text to train on.",
                where="--data.path",
                why="each shard needs at least one document; documents are distributed over the shards",
                fix="more documents, or fewer shards: --data.virtual_shards",
            )
        _log.info("%s: epoch %d begins", self.label, self._epoch + 1)
        self._epoch = self._epoch + 1
        self._document = 0
        self._place = self._begin
        self._rows = None
        self._nothing_yet = True


class StreamSource:
    """A ``TokenSource`` over shards.

    Args:
        new_reader: function that makes the reader of a shard, at its start.
        num_shards: number of shards; the number of data-parallel ranks must divide it.
        seq_len: inputs per sequence.
        identity: names the dataset, and everything that determines the samples.
    """

    num_samples = 0

    def __init__(
        self, new_reader: Callable[[int], ShardReader], *, num_shards: int, seq_len: int, identity: str
    ) -> None:
        self.num_shards = num_shards
        self.seq_len = seq_len
        self.identity = storable_identity(identity)
        self._new_reader = new_reader
        self._readers: dict[int, ShardReader] = {}
        self._next: dict[int, int] = {}

    def read(self, sample_ids: Sequence[int]) -> Rows:
        """Read these samples.

        Raises:
            DataError: as ``ShardReader.next_window``.
        """
        rows = Rows(*np.empty((3, len(sample_ids), self.seq_len), dtype=np.int64))
        for number, sample_id in enumerate(sample_ids):
            shard = sample_id % self.num_shards
            assert self._next.get(shard, sample_id) == sample_id, "the samples of a shard are read in order, each once"
            window = self.reader(shard).next_window()
            assert window is not None, "the shards of a source repeat"
            for array, part in zip(rows, window, strict=True):
                array[number] = part[0]
            self._next[shard] = sample_id + self.num_shards
        return rows

    def cursors(self, shards: Iterable[int]) -> dict[int, list[int]]:
        """``[epoch, document, token_offset]`` of the next sequence of each of ``shards``."""
        return {shard: list(self.reader(shard).cursor) for shard in shards}

    def restore(self, cursors: Mapping[int, Cursor]) -> None:
        """Continue at these cursors of existing shards."""
        for shard, cursor in cursors.items():
            self.reader(shard).restore(cursor)
            self._next.pop(shard, None)

    def reader(self, shard: int) -> ShardReader:
        """The reader of a shard."""
        if shard not in self._readers:
            self._readers[shard] = self._new_reader(shard)
        return self._readers[shard]


class StreamSample:
    """A ``HeldOut``: the first sequences of some shards. They are read when first needed, then kept in memory.

    Args:
        readers: function that makes the readers, none of which repeats. Each is read to its end before the next one.
        num_samples: most sequences.
        seq_len: inputs per sequence.
        label: name of the data, for messages.
    """

    def __init__(
        self, readers: Callable[[], Iterator[ShardReader]], *, num_samples: int, seq_len: int, label: str
    ) -> None:
        self.seq_len = seq_len
        self._readers = readers
        self._wanted = num_samples
        self._label = label

    @property
    def num_samples(self) -> int:
        """Number of sequences, at least 1. The first call reads them.

        Raises:
            DataError: there is no sequence, or it cannot be read.
        """
        return len(self._windows)

    def read(self, sample_ids: Sequence[int]) -> Rows:
        """Read the samples with these numbers, all below ``num_samples``."""
        windows = [self._windows[sample_id] for sample_id in sample_ids]
        return Rows(*map(np.concatenate, zip(*windows, strict=True)))

    def check(self) -> None:
        """Read the first sequence, so that a lack of text is found before training starts.

        Raises:
            DataError: there is no sequence, or it cannot be read.
        """
        self._first(1)

    @cached_property
    def _windows(self) -> list[Rows]:
        return self._first(self._wanted)

    def _first(self, count: int) -> list[Rows]:
        """The first ``count`` sequences, or all if there are fewer; at least 1."""
        windows: list[Rows] = []
        for reader in self._readers():
            while len(windows) < count and (window := reader.next_window()) is not None:
                windows.append(window)
            if len(windows) == count:
                break
        if not windows:
            raise DataError(
                f"{self._label} has less than one sequence of {self.seq_len} tokens to validate on.",
                where="--validation.fraction",
                fix="--validation.fraction 0.1, --validation.path SPLIT, or --validation.interval 0 for no validation",
            )
        return windows

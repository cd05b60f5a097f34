"""A memory-mapped token folder, and its sequences by number.

tokens.bin       token ids of all documents, each followed by the end-of-document id; uint16 or uint32, little-endian
documents.bin    int64, index in tokens.bin of the first token of each document
token_bytes.bin  int32, bytes of source text that each id stands for
targets.bin      uint8, for samples of conversations: 1 for a token to predict, else 0
hashes.bin       uint64, hashes of the blocks of these files, one file after the other, see ``checked``
meta.json        TokenMeta

For conversations, the documents of the folder are samples, and no end-of-document id follows them.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from crius.data.checked import WHOLE_BYTES, CheckedFile, check_sha256, damaged
from crius.data.meta import DTYPES, META, PREPARE, TokenMeta
from crius.data.source import (
    Boundary,
    Cursor,
    Int64Array,
    Order,
    Rows,
    positions_of,
    storable_identity,
)
from crius.errors import DataError
from crius.tokens.tokenizer import TokenArray

TOKENS = "tokens.bin"
DOCUMENTS = "documents.bin"
TOKEN_BYTES = "token_bytes.bin"
TARGETS = "targets.bin"
HASHES = "hashes.bin"

_log = logging.getLogger("crius.data")


class TokenFile:
    """A token folder, opened read-only and checked against its hashes.

    A file with less than ``WHOLE_BYTES // num_folders`` is checked here. For a larger file, call ``check`` or
    ``documents_between`` before its bytes are used.

    Args:
        folder: path of the folder.
        fix: remedy for a damaged file, for messages.
        num_folders: folders that a run reads together.

    Attributes:
        folder: path of the folder.
        meta: contents of its meta.json.
        tokens: ``(num_tokens,)`` of ``meta.dtype``.
        documents: ``(num_documents,)`` int64, index of the first token of each document.
        token_bytes: ``(meta.vocab_size,)`` int32.
        targets: ``(num_tokens,)`` uint8, whether a token of a sample is to be predicted; empty for documents.

    Raises:
        DataError: a file is missing, has another size than in meta.json, or does not match its hashes.
    """

    def __init__(self, folder: Path, fix: str = PREPARE, num_folders: int = 1) -> None:
        self.folder = folder
        self._num_folders = num_folders
        self._fix = fix
        self.meta = TokenMeta.from_file(folder / META)
        if self.meta.num_tokens < 1 or self.meta.num_documents < 1:
            raise DataError(f"token folder {folder} has no tokens.", where=str(folder), fix=PREPARE)
        self.tokens = self._map(TOKENS, DTYPES[self.meta.dtype], self.meta.num_tokens)
        self.documents = self._map(DOCUMENTS, np.dtype("<i8"), self.meta.num_documents)
        self.token_bytes = self._map(TOKEN_BYTES, np.dtype("<i4"), self.meta.vocab_size)
        self.targets: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        if self.meta.is_chat:
            self.targets = self._map(TARGETS, np.dtype("u1"), self.meta.num_tokens)
        self._checked = self._hold_against_hashes()
        if self.documents.nbytes < WHOLE_BYTES // num_folders:
            starts = self.documents
            if starts[0] != 0 or starts[-1] >= len(self.tokens) or (starts[1:] <= starts[:-1]).any():
                raise self.disorder()

    def check(self, name: str, begins: Int64Array, ends: Int64Array) -> None:
        """Check the blocks of a file that have the elements ``[begin, end)``, ``(ranges,)`` each.

        A range may extend beyond the file.

        Raises:
            DataError: a block is damaged.
        """
        if name in self._checked:
            size = {TOKENS: self.tokens, DOCUMENTS: self.documents, TARGETS: self.targets}[name].itemsize
            self._checked[name].check(begins * size, ends * size)

    def documents_between(self, begins: Int64Array, ends: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Numbers ``[first, end)`` of the documents that start in ``[begin, end)``, ``(ranges,)`` each.

        The blocks of the neighbouring documents are checked too. If these are intact, the result of the binary search
        is right, even if it read damaged numbers on its way.

        Raises:
            DataError: documents.bin is damaged there.
        """
        first, end = np.searchsorted(self.documents, (begins, ends))
        self.check(DOCUMENTS, first - 1, end + 1)
        if (first > end).any():
            raise self.disorder()
        return first, end

    def disorder(self) -> DataError:
        """The error for a documents.bin that matches its hashes, but does not have ascending starts of documents."""
        path = self.folder / DOCUMENTS
        return DataError(
            f"{path} does not have ascending starts of documents, beginning with 0.",
            where=str(path),
            why="it was not written by Crius, or was changed together with its hashes",
            fix=self._fix,
        )

    @property
    def identity(self) -> str:
        """Hash of the tokens, and of the targets of samples, from meta.json."""
        names = (TOKENS, DOCUMENTS, TARGETS) if self.meta.is_chat else (TOKENS,)
        return " ".join(str(self.meta.sha256.get(name, self.folder)) for name in names)

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse a folder with an id for which the model has no row.

        Raises:
            DataError: ``meta.max_token_id`` is ``vocab_size`` or more.
        """
        largest = self.meta.max_token_id
        if largest >= vocab_size:
            raise DataError(
                f"{self.folder / TOKENS} has token id {largest}, but the model has {vocab_size} ids.",
                where=str(self.folder / META),
                fix=f"--model.vocab_size {max(self.meta.vocab_size, largest + 1)}",
            )

    def _hold_against_hashes(self) -> dict[str, CheckedFile]:
        contents: dict[str, npt.NDArray[Any]] = {TOKENS: self.tokens, DOCUMENTS: self.documents}
        contents |= {TOKEN_BYTES: self.token_bytes} | ({TARGETS: self.targets} if self.meta.is_chat else {})
        if self.meta.block_bytes < 1:
            self._hold_against_sha256(contents)
            return {}
        counts = [-(-content.nbytes // self.meta.block_bytes) for content in contents.values()]
        hashes = self._map(HASHES, np.dtype("<u8"), sum(counts))
        if xxhash.xxh3_128_hexdigest(hashes.data) != self.meta.hashes_xxh3:
            raise damaged(self.folder / HASHES, "its bytes", self._fix)
        parts = np.split(hashes, np.cumsum(counts)[:-1])
        return {
            name: CheckedFile(
                self.folder / name,
                content.view(np.uint8),
                part,
                self.meta.block_bytes,
                self._fix,
                self._num_folders,
            )
            for (name, content), part in zip(contents.items(), parts, strict=True)
        }

    def _hold_against_sha256(self, contents: Mapping[str, npt.NDArray[Any]]) -> None:
        """Check a folder without hashes.bin: only files that are small enough to be checked whole."""
        for name, content in contents.items():
            if content.nbytes < WHOLE_BYTES:
                check_sha256(self.folder / name, content.view(np.uint8), self.meta.sha256.get(name, ""), self._fix)
            else:
                _log.warning(
                    "%s is not checked for damage: the folder was written by a Crius without hashes of blocks; %s",
                    self.folder / name,
                    self._fix,
                )

    def _map(self, name: str, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        path = self.folder / name
        try:
            size = path.stat().st_size
            if size == count * dtype.itemsize:
                # not np.memmap, which is slow to create, as are its slices
                with path.open("rb") as file:
                    return np.frombuffer(mmap(file.fileno(), size, access=ACCESS_READ), dtype=dtype)
        except OSError as error:
            problem = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
            raise DataError(f"{path} {problem}.", where=str(path), fix=PREPARE) from error
        raise DataError(
            f"{path} has {size:,} bytes instead of {count:,} x {dtype.itemsize} = {count * dtype.itemsize:,}.",
            where=str(path),
            why="the file was truncated or changed",
            fix=PREPARE,
        )


class Windows(NamedTuple):
    """Stored tokens of sequences, in the order of the sequences.

    Attributes:
        first: ``(batch,)``, the token before the labels of each.
        labels: ``(batch, seq_len)``.
        begins: row and column of each input that starts a document.
        ends: row and column of each label after a document whose end has a label of its own.
        boundary: the rule for starts and ends.
    """

    first: TokenArray
    labels: TokenArray
    begins: tuple[Int64Array, Int64Array]
    ends: tuple[Int64Array, Int64Array]
    boundary: Boundary

    def rows(self) -> Rows:
        """The sequences as a model reads them."""
        labels = self.labels.astype(np.int64)
        tokens = np.empty_like(labels)
        tokens[:, 0] = self.first
        tokens[:, 1:] = self.labels[:, :-1]
        tokens[self.begins] = self.boundary.start_id
        labels[self.ends] = self.boundary.end_label
        return Rows(tokens, labels, positions_of(*self.begins, labels.shape))

    def part(self, first: int, end: int) -> "Windows":
        """The sequences from ``first`` to ``end``."""
        return Windows(
            self.first[first:end],
            self.labels[first:end],
            _part(self.begins, first, end),
            _part(self.ends, first, end),
            self.boundary,
        )


def merged(parts: Sequence[tuple[Int64Array, Windows]], batch: int) -> Windows:
    """The windows of several sources as one.

    Args:
        parts: rows of the result, ascending, and the windows that go there; at least one.
        batch: rows of the result; other rows are arbitrary.
    """
    _, one = parts[0]
    first = np.empty(batch, dtype=one.first.dtype)
    labels = np.empty((batch, one.labels.shape[1]), dtype=one.labels.dtype)
    for rows, part in parts:
        first[rows] = part.first
        labels[rows] = part.labels
    begins = _joined((rows[part.begins[0]], part.begins[1]) for rows, part in parts)
    ends = _joined((rows[part.ends[0]], part.ends[1]) for rows, part in parts)
    return Windows(first, labels, begins, ends, one.boundary)


def _part(places: tuple[Int64Array, Int64Array], first: int, end: int) -> tuple[Int64Array, Int64Array]:
    rows, columns = places
    inside = (rows >= first) & (rows < end)
    return rows[inside] - first, columns[inside]


def _joined(places: Iterable[tuple[Int64Array, Int64Array]]) -> tuple[Int64Array, Int64Array]:
    rows, columns = zip(*places, strict=True)
    return np.concatenate(rows), np.concatenate(columns)


class IndexedSource:
    """Sequences of tokens ``[first_token, last_token)`` of a folder, in any order.

    The first input of window i is token ``first_token + i * seq_len``. Its labels are the ``seq_len`` tokens after it.
    So neighbouring windows share one token, and no token is a label twice. If documents start with a BOS, the windows
    begin one place earlier, so that the first document has its BOS too. Epoch e is the samples from
    ``e * num_samples`` on: each window once, in an order of the epoch's own.

    Args:
        file: token folder.
        first_token, last_token: range of tokens to use.
        boundary: first input and end label of documents.
        seq_len: tokens per sequence.
        vocab_size: rows of the model's embedding; each id that is read is checked against it.
        seed: seed of the orders.
        shuffle: False reads the windows in order in every epoch.
    """

    num_shards = 0

    def __init__(
        self,
        file: TokenFile,
        first_token: int,
        last_token: int,
        *,
        boundary: Boundary,
        seq_len: int,
        vocab_size: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        assert 0 <= first_token <= last_token <= file.meta.num_tokens and seq_len > 0
        self.file = file
        self.first_token = first_token
        self.last_token = last_token
        self.boundary = boundary
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.seed = seed
        self.shuffle = shuffle
        begins_document = first_token == 0
        if first_token:
            (document,), (next_document,) = file.documents_between(*np.array([[first_token], [first_token + 1]]))
            begins_document = bool(document < next_document)
        # the BOS of the first document takes the place of the EOS before it; -1 at the start of the file
        self._first_input = first_token - int(boundary.has_bos and begins_document)
        self.num_samples = max(0, last_token - self._first_input - 1) // seq_len
        """Sequences per epoch."""
        size = min(seq_len, len(file.tokens))  # a smaller corpus has no sequence
        self._labels = np.lib.stride_tricks.sliding_window_view(file.tokens, size)  # a view at each token, no copies
        self._order = Order(self.num_samples, seed, shuffle=shuffle)

    @property
    def identity(self) -> str:
        """Identifies the tokens, and everything that decides which tokens a sample id stands for."""
        part = f"{self.file.identity} [{self.first_token}, {self.last_token})"
        return storable_identity(f"{part} by {self.seq_len} {self._order}{self.boundary.identity}")

    def read(self, sample_ids: Sequence[int]) -> Rows:
        """Read these samples, in any order.

        Raises:
            DataError: a token id is ``vocab_size`` or more (names file, token, sample and position), or the data is
                damaged.
        """
        return self.stored(sample_ids).rows()

    def stored(self, sample_ids: Sequence[int]) -> Windows:
        """The stored tokens of these samples; ``read`` makes rows of them.

        Raises:
            DataError: as ``read``.
        """
        starts = self._first_input + self.windows(sample_ids) * self.seq_len
        self.file.check(TOKENS, starts, starts + self.seq_len + 1)
        stored = self._labels[starts + 1]
        first = self.file.tokens[np.maximum(starts, 0)]
        if stored.size and max(stored.max(), first.max()) >= self.vocab_size:
            self._refuse(np.column_stack((first, stored)), sample_ids, starts)
        begins = self._boundaries(starts)
        ends = (np.empty(0, dtype=np.int64),) * 2
        if self.boundary.end_label != self.boundary.eos_id:
            rows, columns = self._boundaries(starts + 1)
            last = np.flatnonzero(starts + self.seq_len == self.file.meta.num_tokens - 1)
            ends = np.append(rows, last), np.append(columns, np.full_like(last, self.seq_len - 1))
        return Windows(first, stored, begins, ends, self.boundary)

    def _boundaries(self, firsts: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Row and column of each place in ``[first, first + seq_len)`` that ends a document and starts the next.

        Args:
            firsts: first place of each row, ``(batch,)``; -1 is the place before the first token.
        """
        first, end = self.file.documents_between(firsts + 1, firsts + self.seq_len + 1)
        counts = end - first
        rows = np.repeat(np.arange(len(firsts)), counts)
        # number of each document: the first number of its row, plus its index in the row
        numbers = np.arange(len(rows)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        columns = self.file.documents[numbers] - 1 - firsts[rows]
        if columns.size and not 0 <= columns.min() <= columns.max() < self.seq_len:
            raise self.file.disorder()
        return rows, columns

    def windows(self, sample_ids: Sequence[int]) -> Int64Array:
        """The window of each sample, ``(batch,)``, in [0, num_samples)."""
        return self._order.places(sample_ids)

    def cursors(self, shards: Iterable[int]) -> dict[int, list[int]]:
        """Empty, since a sample id alone determines its place."""
        return {}

    def restore(self, cursors: Mapping[int, Cursor]) -> None:
        """Does nothing, since a sample id alone determines its place."""

    def _refuse(self, stored: TokenArray, sample_ids: Sequence[int], starts: Int64Array) -> None:
        """Raise DataError for the first id that is too large; ``stored`` has the tokens from ``starts`` on."""
        row, position = np.argwhere(stored >= self.vocab_size)[0].tolist()
        token = stored[row, position]
        raise DataError(
            f"token {starts[row] + position:,} of {self.file.folder / TOKENS} has id {token}, but the model has "
            f"{self.vocab_size} ids.",
            where=f"sample {sample_ids[row]}, position {position}",
            why=f"meta.json says that the largest id is {self.file.meta.max_token_id}: the file was changed later"
            if self.file.meta.max_token_id < token
            else "",
            fix=PREPARE,
        )

"""A token folder, memory-mapped, and the sequences in it by number.

tokens.bin       token ids of all documents, each followed by the end-of-document id; uint16 or uint32, little-endian
documents.bin    int64, index in tokens.bin of the first token of each document
token_bytes.bin  int32, bytes of source text that each id stands for
meta.json        TokenMeta
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_origin

import numpy as np
import numpy.typing as npt

from crius.data.boundary import Boundary
from crius.data.permutation import mix, permute
from crius.data.source import Cursor, Int64Array, Rows, positions_of
from crius.errors import DataError

FORMAT_VERSION = 1
TOKENS, DOCUMENTS, TOKEN_BYTES, META = "tokens.bin", "documents.bin", "token_bytes.bin", "meta.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

ORDER_BLOCK = 1024
"""Samples whose order is found at once: a permutation of few costs as many calls of NumPy as one of many."""

_PREPARE = "crius data prepare writes a new folder"


@dataclass(frozen=True, kw_only=True)
class TokenMeta:
    """What meta.json says of a token folder; counts of tokens include the end-of-document ids."""

    version: int
    dtype: str
    num_tokens: int
    num_documents: int
    max_token_id: int
    tokenizer_name: str
    tokenizer_fingerprint: str
    vocab_size: int
    eos_id: int
    source: str
    sha256: dict[str, str]

    def to_json(self) -> str:
        """The text of meta.json."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_file(cls, path: Path) -> "TokenMeta":
        """Read meta.json.

        Raises:
            DataError: no such file, not JSON, another version, or a key is missing or of another type.
        """
        folder = path.parent
        try:
            record = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            kind = "has no meta.json" if folder.is_dir() else "does not exist"
            raise DataError(f"token folder {folder} {kind}.", where=str(folder), fix=_PREPARE) from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}.", where=str(path)) from error
        except ValueError as error:
            raise DataError(f"{path} is not JSON: {error}.", where=str(path), fix=_PREPARE) from error
        version = record.get("version") if isinstance(record, dict) else None
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path} has format version {version}, this Crius reads version {FORMAT_VERSION}.",
                where=str(path),
                fix=_PREPARE,
            )
        for field in fields(cls):
            expected: Any = get_origin(field.type) or field.type
            if not isinstance(record.get(field.name), expected):
                raise DataError(
                    f"{path} has {record.get(field.name)!r} for {field.name}.",
                    where=str(path),
                    why=f"it is {'an' if expected is int else 'a'} {expected.__name__}",
                    fix=_PREPARE,
                )
        if record["dtype"] not in DTYPES:
            raise DataError(
                f"{path} has dtype {record['dtype']!r}.", where=str(path), why=f"it is one of {', '.join(DTYPES)}"
            )
        return cls(**{field.name: record[field.name] for field in fields(cls)})


class TokenFile:
    """A token folder, opened read-only; nothing is read until it is asked for.

    Attributes:
        folder: the folder.
        meta: its meta.json.
        tokens: ``(num_tokens,)`` of ``meta.dtype``.
        documents: ``(num_documents,)`` int64, first token of each document.
        token_bytes: ``(meta.vocab_size,)`` int32.

    Raises:
        DataError: a file is missing or has another size than meta.json implies.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = TokenMeta.from_file(folder / META)
        if self.meta.num_tokens < 1 or self.meta.num_documents < 1:
            raise DataError(f"token folder {folder} has no tokens.", where=str(folder), fix=_PREPARE)
        self.tokens = self._map(TOKENS, DTYPES[self.meta.dtype], self.meta.num_tokens)
        self.documents = self._map(DOCUMENTS, np.dtype("<i8"), self.meta.num_documents)
        self.token_bytes = self._map(TOKEN_BYTES, np.dtype("<i4"), self.meta.vocab_size)

    @property
    def identity(self) -> str:
        """Hash of the tokens, as meta.json has it."""
        return str(self.meta.sha256.get(TOKENS, self.folder))

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse a folder whose largest id the model has no row for.

        Raises:
            DataError: ``meta.max_token_id`` is ``vocab_size`` or more.
        """
        largest = self.meta.max_token_id
        if largest >= vocab_size:
            raise DataError(
                f"{self.folder / TOKENS} has token id {largest}, the model has {vocab_size} ids.",
                where=str(self.folder / META),
                fix=f"--model.vocab_size {max(self.meta.vocab_size, largest + 1)}",
            )

    def _map(self, name: str, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        path = self.folder / name
        try:
            size = path.stat().st_size
            if size == count * dtype.itemsize:
                # not the subclass np.memmap, whose slices are slow to make
                return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))
        except OSError as error:
            problem = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
            raise DataError(f"{path} {problem}.", where=str(path), fix=_PREPARE) from error
        raise DataError(
            f"{path} has {size:,} bytes, meta.json says {count:,} x {dtype.itemsize} = {count * dtype.itemsize:,}.",
            where=str(path),
            why="the file was cut short or changed",
            fix=_PREPARE,
        )


class IndexedSource:
    """Sequences of tokens ``[first_token, last_token)`` of a folder, in any order.

    The first input of window i is token ``first_token + i * seq_len``, its labels are the ``seq_len`` tokens after it,
    so that neighbours share one token and no token is the label of two. Where documents start with a BOS, the windows
    begin one place earlier, so that the first document has its BOS too. Epoch e is samples ``e * num_samples`` on, each
    window once, in an order of its own.

    Args:
        file: the folder.
        first_token, last_token: the part of it to use.
        boundary: what documents start and end with.
        seq_len: tokens in a sequence.
        vocab_size: rows of the model's embedding; each id that is read is checked against it.
        seed: chooses the orders.
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
        self.file, self.first_token, self.last_token, self.boundary = file, first_token, last_token, boundary
        self.seq_len, self.vocab_size, self.seed, self.shuffle = seq_len, vocab_size, seed, shuffle
        document, next_document = np.searchsorted(file.documents, (first_token, first_token + 1))
        # the place of the BOS of the first document is that of the end before it; -1 at the start of the file
        self._first_input = first_token - int(boundary.has_bos and document < next_document)
        self.num_samples = max(0, last_token - self._first_input - 1) // seq_len
        """Sequences in an epoch."""
        size = min(seq_len, len(file.tokens))  # a corpus of less has no sequence
        self._labels = np.lib.stride_tricks.sliding_window_view(file.tokens, size)  # one at each token, no copies
        self._order: tuple[int, Int64Array] = (-1, np.empty(0, dtype=np.int64))

    @property
    def identity(self) -> str:
        """The tokens and all that decides which of them a sample id stands for."""
        order = f"shuffled {self.seed}" if self.shuffle else "in order"
        part = f"{self.file.identity} [{self.first_token}, {self.last_token})"
        return f"{part} by {self.seq_len} {order}{self.boundary.identity}"

    def read(self, sample_ids: Sequence[int]) -> Rows:
        """These samples, in any order.

        Raises:
            DataError: a token id is ``vocab_size`` or more; names file, token, sample and position.
        """
        starts = self._first_input + self.windows(sample_ids) * self.seq_len
        labels = self._labels[starts + 1].astype(np.int64)
        tokens = np.empty_like(labels)
        tokens[:, 0], tokens[:, 1:] = self.file.tokens[np.maximum(starts, 0)], labels[:, :-1]
        largest = max(tokens[:, :1].max(initial=0), labels.max(initial=0))
        if largest >= self.vocab_size:
            whole = np.concatenate((tokens[:, :1], labels), axis=1)
            row = int(np.argmax(whole.max(axis=1) >= self.vocab_size))
            self._refuse(whole[row], sample_ids[row], int(starts[row]))
        rows, columns = self._boundaries(starts)
        inside = columns < self.seq_len
        tokens[rows[inside], columns[inside]] = self.boundary.start_id
        behind = columns > 0
        labels[rows[behind], columns[behind] - 1] = self.boundary.end_label
        return Rows(tokens, labels, positions_of(rows[inside], columns[inside], labels.shape))

    def _boundaries(self, starts: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Row and place, in [0, seq_len], of each boundary: it ends the document before and starts the next one.

        Args:
            starts: the token that is at place 0 of each row; -1 for the place before the first one.
        """
        documents = self.file.documents
        first, end = np.searchsorted(documents, (starts + 1, starts + self.seq_len + 2))
        counts = end - first
        rows = np.repeat(np.arange(len(starts)), counts)
        # number of the n-th document of all rows together: the first one of its row, plus its place in the row
        numbers = np.arange(len(rows)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        columns = documents[numbers] - 1 - starts[rows]
        (last,) = np.nonzero(starts + self.seq_len == self.file.meta.num_tokens - 1)  # no document follows the last end
        return np.append(rows, last), np.append(columns, np.full_like(last, self.seq_len))

    def windows(self, sample_ids: Sequence[int]) -> Int64Array:
        """Which window each sample is, ``(batch,)``, in [0, num_samples)."""
        ids = np.asarray(sample_ids, dtype=np.int64)
        if not self.shuffle:
            return ids % self.num_samples
        windows = np.empty_like(ids)
        blocks, places = np.divmod(ids, ORDER_BLOCK)
        for block in np.unique(blocks):
            rows = blocks == block
            windows[rows] = self._order_of(int(block))[places[rows]]
        return windows

    def _order_of(self, block: int) -> Int64Array:
        """Windows of the samples ``block * ORDER_BLOCK`` on, ``(ORDER_BLOCK,)``; the last block is kept."""
        if self._order[0] == block:
            return self._order[1]
        ids = np.arange(block * ORDER_BLOCK, (block + 1) * ORDER_BLOCK)
        epochs, indices = np.divmod(ids, self.num_samples)
        order = np.empty_like(ids)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            key = mix(mix(self.seed) ^ int(epoch))
            order[rows] = permute(indices[rows].astype(np.uint64), self.num_samples, key).astype(np.int64)
        self._order = block, order
        return order

    def cursors(self, shards: Iterable[int]) -> dict[int, list[int]]:
        """Empty: a sample id says where it is."""
        return {}

    def restore(self, cursors: Mapping[int, Cursor]) -> None:
        """Nothing to do: a sample id says where it is."""

    def _refuse(self, tokens: Int64Array, sample_id: int, start: int) -> None:
        position = int(np.argmax(tokens >= self.vocab_size))
        raise DataError(
            f"token {start + position:,} of {self.file.folder / TOKENS} has id {tokens[position]}, the model has "
            f"{self.vocab_size} ids.",
            where=f"sample {sample_id}, position {position}",
            why=f"meta.json says that the largest id is {self.file.meta.max_token_id}: the file was changed since"
            if self.file.meta.max_token_id < tokens[position]
            else "",
            fix=_PREPARE,
        )

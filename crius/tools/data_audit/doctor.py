"""``crius data doctor``: reads a corpus once, as a run reads it, and reports what is odd about it."""

import itertools
import re
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import numpy as np
import xxhash

from crius.config.data import DataConfig, TokenizerConfig
from crius.data.chat.conversations import Conversation
from crius.data.documents import Piece
from crius.data.work import chat_encoder
from crius.errors import DataError
from crius.tokens.tokenizer import Tokenizer, build_tokenizer
from crius.tools.data_audit.diagnosis import Diagnosis, Tally
from crius.tools.data_audit.near import NearDuplicates
from crius.tools.data_audit.rows import Row, read_rows

_FILE_BITS = 40  # a place is its file and, in so many bits, its line
_BATCH = 512  # documents that are tokenised together


class Bar:
    """A bar on a terminal; nothing elsewhere.

    Args:
        total: bytes to read.
        stream: where it is drawn.
    """

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = max(1, total)
        self._stream = stream if stream.isatty() else None
        self._next = 0.0

    def show(self, done: int, rows: int) -> None:
        """Draw it, at most ten times per second."""
        if self._stream is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 0.1
        share = min(1.0, done / self._total)
        self._stream.write(f"\r{share:4.0%} {''.ljust(round(30 * share), '█'):<30} {rows:,} rows")
        self._stream.flush()

    def close(self) -> None:
        """Remove it."""
        if self._stream is not None:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


class _Reading:
    """Reads the rows, and notes what shows without a tokenizer."""

    def __init__(self, found: Diagnosis, *, is_near: bool) -> None:
        self.found = found
        self._near = NearDuplicates() if is_near else None
        self._hashes = array("Q")
        self._places = array("Q")
        self._digest = xxhash.xxh3_64()
        self._is_start = True  # of a document
        self._done = 0  # bytes that were read, about

    def tally(self, name: str) -> Tally:
        return self.found.tallies.setdefault(name, Tally())

    def _named(self, place: int) -> str:
        return f"{self.found.files[place >> _FILE_BITS]}:{place & (1 << _FILE_BITS) - 1}"

    def rows(self) -> Iterator[Row]:
        """Each row that a run reads."""
        files = self.found.files
        bar = Bar(sum(file.stat().st_size for file in files), sys.stderr)
        try:
            for row in read_rows(self.found.data, files):
                bar.show(self._done, self.found.rows)
                if self._is_read(row):
                    yield row
        finally:
            bar.close()
        self._count_repeated()

    def _is_read(self, row: Row) -> bool:
        """Note a row. Returns whether a run reads it, and it has text."""
        found = self.found
        became = row.became
        is_start = self._is_start
        found.rows += is_start
        self._is_start = not isinstance(became, Piece) or became.ends_document
        if isinstance(became, DataError):
            found.refuse(became, row.where)
            found.is_damaged |= row.is_end
            return False
        found.unused.update(f"{key!r} of rows" for key in row.unused)
        if isinstance(became, Conversation):
            self._note_chat(row, became)
            return True
        if is_start and not became.text:
            self.tally("empty documents").add(row.where)
            return False
        self._take(became.text)
        if became.ends_document:
            self._note(row, became.text)
        return True

    def _note_chat(self, row: Row, chat: Conversation) -> None:
        if not all(map(str.strip, chat.answers)):
            self.tally("empty answers").add(row.where)
        content = repr(([sorted(message.items()) for message in chat.messages], chat.tools))
        self._take(content)
        self._note(row, "\n".join(message["content"] or "" for message in chat.messages) if self._near else "")

    def _take(self, text: str) -> None:
        content = text.encode()
        self._digest.update(content)
        self._done += len(content)

    def _note(self, row: Row, text: str) -> None:
        """Note what was put into the digest since the last row."""
        place = row.file << _FILE_BITS | int(re.split(r"\D", row.where)[-1])
        self._hashes.append(self._digest.intdigest())
        self._places.append(place)
        self._digest.reset()
        if self._near and (earlier := self._near.earlier(text, f"{place:020}")):
            tally = self.tally("near duplicates")
            tally.add(row.where)
            tally.like = tally.like or self._named(int(earlier))

    def _count_repeated(self) -> None:
        """Note rows with the content of an earlier row."""
        tally = self.tally("exact duplicates")
        hashes = np.asarray(self._hashes)
        order = np.argsort(hashes, kind="stable")
        repeats = order[1:][hashes[order[1:]] == hashes[order[:-1]]]
        if len(repeats):
            first = int(repeats.min())
            tally.rows = len(repeats)
            tally.first = self._named(self._places[first])
            tally.like = self._named(self._places[int(np.flatnonzero(hashes == hashes[first])[0])])


def examine(
    data: DataConfig, files: Sequence[Path], tokenizer: TokenizerConfig | None, *, is_near: bool = False
) -> Diagnosis:
    """Read ``files`` once.

    Args:
        data: the section, with the source and the format of the files.
        files: the files.
        tokenizer: section with the tokenizer; None: nothing is tokenised.
        is_near: look for near duplicates too.

    Raises:
        DataError: the tokenizer cannot be used, or has no chat template.
        EnvironmentError: a package is missing.
    """
    found = Diagnosis(data=data, tokenizer=tokenizer, files=files)
    reading = _Reading(found, is_near=is_near)
    reading.tally("empty answers" if data.format == "chat" else "empty documents")
    if is_near:
        reading.tally("near duplicates")
    if tokenizer is None:
        for _ in reading.rows():
            pass
    elif data.format == "chat":
        _measure_chats(reading, tokenizer, build_tokenizer(tokenizer))
    else:
        _measure_documents(reading, build_tokenizer(tokenizer))
    return found


def _measure_chats(reading: _Reading, config: TokenizerConfig, tokenizer: Tokenizer) -> None:
    found = reading.found
    encoder = chat_encoder(replace(found.data, bad_rows="skip"), config, tokenizer)
    unused_keys = encoder.key_reader()
    untrained = reading.tally("conversations without a token to train on")
    doubled = reading.tally("double BOS")
    waiting = deque[str]()  # places of conversations; errors come before other ones

    def conversations() -> Iterator[Conversation]:
        for row in reading.rows():
            assert isinstance(row.became, Conversation)
            waiting.append(row.where)
            found.unused.update(key for key in unused_keys(row.became) if key.endswith("messages"))
            yield row.became

    for sample in encoder.encode(conversations()):
        if isinstance(sample, DataError):
            waiting.remove(sample.where)
            found.refuse(sample, sample.where)
            continue
        where = waiting.popleft()
        number = int(np.count_nonzero(sample.is_target))
        found.lengths.append(len(sample.ids))
        found.targets.append(number)
        if number == 0:
            untrained.add(where)
        if len(sample.ids) > 1 and sample.ids[0] == sample.ids[1] == tokenizer.bos_id:
            doubled.add(where)


def _measure_documents(reading: _Reading, tokenizer: Tokenizer) -> None:
    found = reading.found
    length = 0
    rows = reading.rows()
    while batch := [row.became for row in itertools.islice(rows, _BATCH) if isinstance(row.became, Piece)]:
        for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
            length += len(ids)
            if piece.ends_document:
                found.lengths.append(length + 1)  # with the token that ends it
                found.targets.append(length + found.data.add_eos)
                length = 0

"""Streams a Hugging Face dataset: nothing is downloaded before it is read, and local folders work offline."""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import datasets

from crius.config.data import DataConfig, ValidationConfig
from crius.data.source import Boundary, HeldOut
from crius.data.stream import Row, ShardReader, StreamSample, StreamSource
from crius.errors import DataError
from crius.hub import parse_name
from crius.tokens.tokenizer import Tokenizer


class Split:
    """One split of a dataset as ``num_shards`` shards of documents.

    If the split has enough files, a shard is some of the files. Else it is every ``num_shards``-th document, and each
    shard reads the whole split.

    Args:
        data: section with path, name and text field.
        split: name of the split.
        num_shards: number of shards.
        hold_out: one document out of this many is left out of training; 0: none.
        new_reader: makes a ``ShardReader`` from rows and label, with ``keep`` and ``repeat``.

    Raises:
        DataError: the dataset, configuration or split does not exist, or cannot be reached.
    """

    def __init__(
        self, data: DataConfig, split: str, num_shards: int, hold_out: int, new_reader: Callable[..., ShardReader]
    ) -> None:
        self.dataset = load(data, split)
        self.num_shards = num_shards
        self.hold_out = hold_out
        self._new_reader = new_reader
        self.num_files = int(self.dataset.num_shards)
        self.by_file = self.num_files >= num_shards
        self.label = " ".join(filter(None, (data.path[0], data.name, split)))

    def _rows(self, shard: int, num_shards: int, document: int) -> Iterator[Row]:
        """Rows of a shard from its n-th document on."""
        if self.by_file:
            return iter(self.dataset.shard(num_shards, shard).skip(document))
        return itertools.islice(self.dataset.skip(document * num_shards + shard), 0, None, num_shards)

    def _is_held_out(self, shard: int, num_shards: int, document: int) -> bool:
        """Whether a document is for validation only: the last of every ``hold_out`` documents in the file's order."""
        number = document if self.by_file else document * num_shards + shard
        return self.hold_out > 0 and number % self.hold_out == self.hold_out - 1

    def train_reader(self, shard: int) -> ShardReader:
        """Reader of the training documents of a shard, which repeats them endlessly."""
        return self._new_reader(
            partial(self._rows, shard, self.num_shards),
            f"{self.label}, shard {shard} of {self.num_shards}",
            keep=lambda document: not self._is_held_out(shard, self.num_shards, document),
            repeat=True,
        )

    def validation_readers(self) -> Iterator[ShardReader]:
        """Readers of the held-out documents, or of all documents if none is held out. They do not repeat."""
        num_shards = self.num_shards if self.by_file else 1  # one pass: each shard would read the whole split
        for shard in range(num_shards):
            label = f"{self.label}, shard {shard} of {num_shards}" if self.by_file else self.label
            keep = partial(self._is_held_out, shard, num_shards) if self.hold_out else lambda document: True
            yield self._new_reader(partial(self._rows, shard, num_shards), label, keep=keep, repeat=False)

    def describe(self) -> str:
        """A description of how the split is read, for the log."""
        noun = "file" if self.num_files == 1 else "files"
        files = f"{self.num_files:,} {noun}"
        if self.by_file:
            return f"{self.label}: streamed as {self.num_shards} shards of its {files}"
        return (
            f"{self.label}: streamed as {self.num_shards} shards; it has only {files}, so each shard reads all of it "
            f"and keeps one document of {self.num_shards}: {self.num_shards} times the download"
        )


def open_huggingface(
    data: DataConfig,
    tokenizer: Tokenizer,
    boundary: Boundary,
    validation: ValidationConfig,
    *,
    seq_len: int,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[StreamSource, dict[str, HeldOut], tuple[str, ...]]:
    """The source of training data, the held-out data, and lines for the log.

    The splits ``validation.path`` are held out, or else one document out of ``1 / validation.fraction``, spread over
    the dataset. These documents are never trained on. Reading them also reads the documents in between.

    Raises:
        DataError: the dataset, the split or its first documents are bad.
    """
    if len(data.path) != 1:
        raise DataError(
            f"source huggingface takes one dataset, but got {len(data.path)}.",
            where="--data.path",
            fix="--data.path allenai/c4 --data.name en, or a folder of jsonl or parquet files",
        )
    validates = validation.interval > 0
    hold_out = max(2, round(1 / validation.fraction)) if validation.fraction > 0 and not validation.path else 0
    new_reader = partial(
        ShardReader, tokenizer=tokenizer, boundary=boundary, seq_len=seq_len, text_field=data.text_field, sleep=sleep
    )
    train = Split(data, data.split, data.virtual_shards, hold_out, new_reader)
    source = StreamSource(
        train.train_reader,
        num_shards=data.virtual_shards,
        seq_len=seq_len,
        identity=f"{train.label} as {data.virtual_shards} by {seq_len} without 1 of {hold_out}, "
        f"{tokenizer.fingerprint}{boundary.identity}",
    )
    for shard in {0, data.virtual_shards - 1}:  # with few documents, the last shard is the first to be empty
        train.train_reader(shard).check()
    lines = [train.describe()]
    if not validates:
        return source, {}, (*lines, "validation: off")
    samples: dict[str, HeldOut] = {}
    for name, paths in validation.sets.items():
        held = Split(data, paths[0], 1, 0, new_reader) if paths else train
        what = held.label if paths else f"every {hold_out:,}th document, held out"
        label = f"validation {name}" if name else "validation"
        lines.append(f"{label}: first {validation.num_samples:,} sequences of {what}")
        sample = StreamSample(
            held.validation_readers, num_samples=validation.num_samples, seq_len=seq_len, label=held.label
        )
        sample.check()
        samples[name] = sample
    return source, samples, tuple(lines)


def load(data: DataConfig, split: str) -> Any:
    """Open the streaming dataset of ``data.path[0]``.

    Raises:
        DataError: the dataset, configuration or split does not exist, or cannot be reached.
    """
    path = data.path[0]
    try:
        # the library retries here by itself; while it reads rows, it does not always retry
        name = None if os.path.exists(path) else parse_name(path)
        place = name.repository if name else path
        revision = (name.revision or None) if name else None
        return datasets.load_dataset(place, data.name or None, split=split, revision=revision, streaming=True)
    except (FileNotFoundError, ValueError) as error:
        dataset = f"{path} {data.name}" if data.name else path
        raise DataError(
            f"dataset {dataset} has no split {split!r} that can be streamed: {error}",
            where="--data.path",
            fix="check --data.path, --data.name, --data.split and --validation.path",
        ) from error
    except Exception as error:
        raise DataError(
            f"dataset {path} cannot be opened: {type(error).__name__}: {error}",
            where="--data.path",
            fix="check the network and HF_HUB_OFFLINE; a local folder of jsonl or parquet files needs no network",
        ) from error

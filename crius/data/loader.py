"""Turns sequences into batches: assigns samples to ranks, prefetches, and has a state that any number of ranks resumes.

Step s of a run with global batch size B trains on samples ``s * B`` to ``s * B + B - 1``. Rank r of n takes the samples
with ``id % n == r``. So the batch of a step does not depend on n. Since n divides the number of shards of a stream, no
shard is read by two ranks. A run over whole epochs has a last sample; its last batch is filled with padding without
labels.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, NamedTuple, NotRequired, TypedDict

import torch
from torch import Tensor
from torch.nn import functional as F

from crius.data.mixture import MixedSource
from crius.data.source import HeldOut, Rows, TokenSource, padding_rows
from crius.errors import ConfigError, DataError
from crius.kernels.linear_cross_entropy import IGNORE_INDEX as IGNORE_INDEX

_log = logging.getLogger("crius.data")

_AHEAD = 1024  # sequences of a mixture that are read together at most, and their tokens
_AHEAD_TOKENS = 1 << 20


@dataclass(frozen=True)
class Batch:
    """Sequences with their labels, all int64 and ``(batch, tokens)``.

    ``labels_BT[b, t]`` is the token after ``tokens_BT[b, t]``, or ``IGNORE_INDEX``. ``positions_BT`` counts from 0 at
    the start of each document and of each sequence. ``sample_ids[b]`` is the id of row b in its source. A row of
    padding has ``~id``, below 0, of the sample that would be in its place.
    ``ends_BM[b]``, int32, has the ends of the documents of row b, ascending, filled up with the length of the row. Its
    width is the next power of two from the most documents of a row. None if attention does not use it.
    """

    tokens_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    sample_ids: tuple[int, ...]
    ends_BM: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)

    def microbatches(self, size: int) -> Iterator["Batch"]:
        """Consecutive slices of ``size`` rows, views of this batch.

        Raises:
            ValueError: ``size`` does not divide the number of rows.
        """
        if size < 1 or len(self) % size:
            raise ValueError(f"microbatches of {size} rows do not divide a batch of {len(self)} rows")
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield replace(self.map(itemgetter(rows)), sample_ids=self.sample_ids[rows])

    def grouped(self, num_groups: int) -> "Batch":
        """The rows sorted by ``sample_id % num_groups``; the order within a group is kept."""
        places = [number if number >= 0 else ~number for number in self.sample_ids]
        rows = sorted(range(len(self)), key=lambda row: places[row] % num_groups)
        ordered = self.map(lambda tensor: torch.stack([tensor[row] for row in rows]))
        return replace(ordered, sample_ids=tuple(self.sample_ids[row] for row in rows))

    def to(self, device: torch.device | str) -> "Batch":
        """A copy on ``device``, or this batch if it is there. If the batch is pinned, the host does not wait."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """A copy in page-locked host memory. Needs CUDA."""
        return self.map(Tensor.pin_memory)

    def counted(self) -> "Batch":
        """This batch with positions that count from the start of each sequence, not of each document."""
        positions = torch.arange(self.tokens_BT.shape[1], device=self.tokens_BT.device).expand_as(self.tokens_BT)
        return replace(self, positions_BT=positions, ends_BM=None)

    def with_ends(self, most: int) -> "Batch":
        """This batch, on the host, with ``ends_BM``; without it if a row has more than ``most`` documents."""
        length = self.tokens_BT.shape[1]
        places = torch.arange(length, dtype=torch.int32)
        starts = torch.where((self.positions_BT == 0) & (places > 0), places, length).sort(dim=1).values
        count = 1 + int((starts < length).sum(dim=1).max())
        width = 1 << (count - 1).bit_length()
        ends = F.pad(starts[:, :width], (0, max(0, width - length)), value=length)
        return replace(self, ends_BM=ends if count <= most else None)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply ``function`` to each tensor, for example to take some rows."""
        ends = None if self.ends_BM is None else function(self.ends_BM)
        return replace(self.map_tokens(function), ends_BM=ends)

    def map_tokens(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply ``function`` to each tensor with one number per token, for example to take some tokens."""
        tokens, labels, positions = map(function, (self.tokens_BT, self.labels_BT, self.positions_BT))
        return Batch(tokens, labels, positions, self.sample_ids, self.ends_BM)


class LoaderState(TypedDict):
    """State after the last batch that was handed out, not after prefetched batches; plain JSON types.

    ``cursors`` has the shards of one rank, as ``str(shard): [epoch, document, token_offset]``. Its keys differ between
    ranks, and everything else is equal. So the states of all ranks can be merged into one state, from which any number
    of ranks can resume.

    ``since`` explains ``next_sample``: step and sample from which on each step took the same number of samples, this
    number, and the sample where they end (0: nowhere).

    ``mixture`` is that of ``MixedSource.state``; other sources lack it.
    """

    step: int
    next_sample: int
    source: str
    cursors: dict[str, list[int]]
    since: list[int]
    mixture: NotRequired[dict[str, list[int]]]


class _Prepared(NamedTuple):
    batch: Batch
    cursors: dict[int, list[int]]


class BatchLoader:
    """The batches of one rank, one per step, without end.

    Args:
        source: source of sequences.
        global_batch_size: sequences per step, over all ranks.
        rank, num_ranks: this data-parallel rank, and their number.
        prefetch: number of batches that a thread prepares ahead; 0: each is prepared when it is needed.
        start_step: steps that are done already. A stream must be resumed by ``load_state_dict`` instead.
        end_sample: samples from this id on are padding; 0: there is no end.
        pin_memory: hand out batches in page-locked memory, which are copied to a GPU without the host waiting.
        most_documents: most documents of a row for which a batch has ``ends_BM``; 0: no batch has it.

    Attributes:
        step: number of steps whose batch was handed out.
        next_sample: first sample after them.

    Raises:
        ConfigError: the number of ranks does not divide the batch or the shards.
    """

    def __init__(
        self,
        source: TokenSource,
        *,
        global_batch_size: int,
        rank: int,
        num_ranks: int,
        prefetch: int,
        start_step: int = 0,
        end_sample: int = 0,
        pin_memory: bool = False,
        most_documents: int = 0,
    ) -> None:
        assert 0 <= rank < num_ranks
        _check_divides("training.global_batch_size", global_batch_size, num_ranks)
        _check_divides("data.virtual_shards", source.num_shards, num_ranks)
        self.source = source
        self.global_batch_size = global_batch_size
        self.rank = rank
        self.num_ranks = num_ranks
        self.end_sample = end_sample
        self._shards = range(rank, source.num_shards, num_ranks)
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._most_documents = most_documents
        self.next_sample: int
        self._begin_at(start_step, self._ended(start_step * global_batch_size))
        self._cursors = source.cursors(self._shards)
        self._is_placed = False  # by the cursors of a state; those of this rank alone may all be at their start
        self._prefetcher: _Prefetcher | None = None
        self._closed = False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The batch of step ``self.step``.

        Raises:
            DataError: the batch cannot be read; the background thread's errors are raised here too.
            StopIteration: the loader is closed.
        """
        if self._closed:
            raise StopIteration
        if self._prefetcher is None:
            self._prefetcher = self._start()
        prepared = self._prefetcher.get()
        self.step += 1
        self.next_sample = self._ended(self.next_sample + self.global_batch_size)
        self._cursors = prepared.cursors
        return prepared.batch

    @property
    def steps_left(self) -> int:
        """Batches until ``end_sample``; 0 if there is no end."""
        return -(-max(0, self.end_sample - self.next_sample) // self.global_batch_size)

    def _begin_at(self, step: int, sample: int) -> None:
        self.step = step
        self.next_sample = sample
        self._since = [step, sample, self.global_batch_size, self.end_sample]

    def _ended(self, sample: int) -> int:
        return min(sample, self.end_sample) if self.end_sample else sample

    def close(self) -> None:
        """Stop the thread and drop its batches. Waits at most 5 s for a read in progress."""
        self._closed = True
        self._stop(timeout=5.0)

    def state_dict(self) -> LoaderState:
        """State after the last batch that was handed out."""
        cursors = {str(shard): list(cursor) for shard, cursor in self._cursors.items()}
        state = LoaderState(
            step=self.step,
            next_sample=self.next_sample,
            source=self.source.identity,
            cursors=cursors,
            since=self._since,
        )
        if isinstance(self.source, MixedSource):
            state["mixture"] = self.source.state(self.source.place(self.next_sample))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last batch of ``state``, the merged states of a run on any number of ranks.

        The batch size may differ: the samples continue where they stopped.

        Raises:
            DataError: ``state`` lacks a shard of this rank, or has a shard that the source lacks.
        """
        saved = {int(shard): cursor for shard, cursor in state["cursors"].items()}
        missing = [shard for shard in self._shards if shard not in saved]
        if missing or any(shard >= self.source.num_shards for shard in saved):
            raise DataError(
                f"the checkpoint has cursors of shards {_names(saved)}; this run has {self.source.num_shards} shards"
                + (f" and needs {_names(missing)} here." if missing else "."),
                where="--data.virtual_shards",
                why="a stream can only be resumed with the number of shards that it started with",
                fix=f"--data.virtual_shards {max(saved) + 1}" if saved else "resume without the data state",
            )
        if state["source"] != self.source.identity:
            _log.warning(
                "the data changed since the checkpoint (%s, now %s): sample ids continue, but stand for other samples",
                state["source"],
                self.source.identity,
            )
        self._stop(timeout=None)  # the thread changes the cursors of the source
        self._begin_at(int(state["step"]), int(state["next_sample"]))
        if state.get("since", [])[2:] == self._since[2:]:  # the run continues as it was
            self._since = state["since"]
        self._is_placed = any(map(any, saved.values()))
        self.source.restore({shard: saved[shard] for shard in self._shards})
        if isinstance(self.source, MixedSource):
            self.source.resume(state.get("mixture", {}), self.next_sample, self._since)
            if self.end_sample or any(self.source.plan.stops):
                # as of a run that had this batch and these weights from its start
                self.end_sample = self.source.end_before(1 << 40)
                self._since = [*self._since[:3], self.end_sample]
        self._cursors = self.source.cursors(self._shards)

    def start_at(self, step: int) -> None:
        """Continue after ``step`` steps of the current batch size, if there is no state. Not for a stream."""
        self._stop(timeout=None)
        self._begin_at(step, self._ended(step * self.global_batch_size))

    def _start(self) -> "_Prefetcher":
        if self._shards and self.next_sample and not self._is_placed:
            raise DataError(
                f"step {self.step} of a stream cannot be found without its cursors.",
                why="a stream can be read from the start, or from the data state of a checkpoint",
                fix="load the data state of the checkpoint",
            )
        next_sample = self.next_sample
        ahead: Iterator[Rows] = iter(())
        num_steps = 1  # read ahead; twice as many each time, so that a run begins soon

        def prepare() -> _Prepared:
            nonlocal next_sample, ahead, num_steps
            mine = self._ids(next_sample)
            there = [number for number in mine if not self.end_sample or number < self.end_sample]
            if len(there) == len(mine):
                rows = next(ahead, None)
                if rows is None:
                    ahead = self._read_ahead(next_sample, num_steps)
                    num_steps *= 2
                    rows = next(ahead)
                batch = _batch(rows, mine, self._most_documents)
            else:
                absent = [~number for number in mine[len(there) :]]
                batch = _padded(self.source, there, absent, self._most_documents)
            next_sample += self.global_batch_size
            return _Prepared(batch.pin_memory() if self._pin_memory else batch, self.source.cursors(self._shards))

        return _Prefetcher(prepare, self._prefetch)

    def _ids(self, first: int) -> range:
        """This rank's samples of the step whose first sample is ``first``."""
        return range(first + (self.rank - first) % self.num_ranks, first + self.global_batch_size, self.num_ranks)

    def _read_ahead(self, first: int, num_steps: int) -> Iterator[Rows]:
        """The sequences of the step whose first sample is ``first``; of a mixture also of the next steps, ``num_steps``
        at most, because a call of one of its sources takes about as long for many sequences as for few."""
        mine = self._ids(first)
        if not isinstance(self.source, MixedSource):
            return iter([self.source.read(mine)])
        most = max(1, min(_AHEAD, _AHEAD_TOKENS // self.source.seq_len) // len(mine))
        steps = [self._ids(first + step * self.global_batch_size) for step in range(min(num_steps, most))]
        with contextlib.suppress(DataError):  # in a step that may never be reached
            return self.source.read_steps(steps)
        return self.source.read_steps(steps[:1])

    def _stop(self, timeout: float | None) -> None:
        if self._prefetcher is not None:
            self._prefetcher.stop(timeout)
            self._prefetcher = None


class _Prefetcher:
    """Results of ``prepare`` in order, up to ``depth`` of them ahead. An exception of ``prepare`` is
    raised by ``get``.
    """

    def __init__(self, prepare: Callable[[], _Prepared], depth: int) -> None:
        self._prepare = prepare
        self._depth = depth
        self._results: SimpleQueue[_Prepared | BaseException] = SimpleQueue()
        self._room = Semaphore(max(depth, 0))
        self._stopped = False
        self._thread = Thread(target=self._run, name="crius-prefetch", daemon=True)
        if depth > 0:
            self._thread.start()

    def get(self) -> _Prepared:
        if self._depth <= 0:
            return self._prepare()
        result = self._results.get()
        if isinstance(result, BaseException):
            self._results.put(result)  # the next call must get it too
            raise result
        self._room.release()
        return result

    def stop(self, timeout: float | None) -> None:
        self._stopped = True
        self._room.release()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while self._room.acquire() and not self._stopped:
                self._results.put(self._prepare())
        except BaseException as error:  # ``get`` raises it
            self._results.put(error)


def validation_batches(
    source: HeldOut, *, num_samples: int, batch_size: int, rank: int, num_ranks: int, most_documents: int = 0
) -> Iterator[Batch]:
    """One rank's share of the sequences that are scored. They are the same every time and under every layout.

    They are spread evenly over the held-out data. Each rank gets the same number of batches of ``batch_size`` rows.
    Missing rows have only labels ``IGNORE_INDEX`` and sample id -1.

    Args:
        source: held-out data.
        num_samples: number of sequences to score, if there are that many.
        batch_size: rows per batch of this rank.
        rank, num_ranks: this data-parallel rank, and their number.
        most_documents: as for ``BatchLoader``.
    """
    count = min(num_samples, source.num_samples)
    ids = [number * source.num_samples // count for number in range(count)]
    mine = ids[rank::num_ranks]
    for start in range(0, math.ceil(count / num_ranks), batch_size):
        ids = mine[start : start + batch_size]
        yield _padded(source, ids, [-1] * (batch_size - len(ids)), most_documents)


def _batch(rows: Rows, sample_ids: Sequence[int], most_documents: int) -> Batch:
    tokens, labels, positions = map(torch.from_numpy, rows)
    batch = Batch(tokens, labels, positions, tuple(sample_ids))
    return batch.with_ends(most_documents) if most_documents else batch


def _padded(source: HeldOut | TokenSource, sample_ids: list[int], absent: list[int], most_documents: int) -> Batch:
    """The samples, then one row of padding for each id in ``absent``, which are below 0."""
    rows = padding_rows(len(sample_ids) + len(absent), source.seq_len)
    if sample_ids:
        for array, part in zip(rows, source.read(sample_ids), strict=True):
            array[: len(sample_ids)] = part
    return _batch(rows, (*sample_ids, *absent), most_documents)


def _check_divides(name: str, value: int, num_ranks: int) -> None:
    if value % num_ranks:
        above = -(-value // num_ranks) * num_ranks
        raise ConfigError(
            f"{num_ranks} data-parallel ranks do not divide {name} {value}.",
            where=f"--{name}",
            why="each rank reads the same number of sequences per step, and no shard is read by two ranks",
            fix=f"--{name} {above}",
        )


def _names(shards: Mapping[int, Any] | list[int]) -> str:
    return ", ".join(map(str, sorted(shards))) or "none"

"""Several sources as one: ``MixedSource`` reads each sample from the source that the schedule of the mixture chose."""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crius.config.data import DataConfig
from crius.config.mixture import MixEntry, exact, integers, read_stage
from crius.data.mixture import Place, Plan, Schedule, Span, Walk, opened
from crius.data.samples import SampleSource
from crius.data.source import Cursor, Int64Array, Rows, padding_rows, storable_identity
from crius.data.tokens import IndexedSource, Windows, merged
from crius.errors import DataError

_log = logging.getLogger("crius.data")

BLOCK = 1024
"""Samples that are chosen at a time."""

MOST_EPOCHS = 4
"""Epochs up to which repeated data is worth nearly as much as new data (Muennighoff et al. 2023, arXiv:2305.16264)."""

_KEPT = 4  # blocks

Stages = tuple[tuple[int, tuple[int, ...]], ...]
"""First step, from 1, and integer weights of each stage, ascending; the first stage begins at step 1."""


class _Block(NamedTuple):
    place: Place
    sources: npt.NDArray[np.int32]
    numbers: Int64Array


class MixedSource:
    """A mixture of indexed sources. A sequence is of one source, and each source is read in an order of its own, which
    does not depend on the others.

    Args:
        sources: sources by name.
        limits: sequences after which each ends; 0: it repeats without end.
        stops: whether its end is the end of the run.
        stages: weights by step.
        batch: sequences per step, over all ranks, which give the steps of the stages their samples.

    Attributes:
        sources: as given.
        stages: as given.
        plan: the mixture in samples.
    """

    num_shards = 0
    num_samples = 0
    """Each source has epochs of its own."""

    def __init__(
        self,
        sources: Mapping[str, IndexedSource | SampleSource],
        *,
        limits: Sequence[int],
        stops: Sequence[bool],
        stages: Stages,
        batch: int,
    ) -> None:
        self.sources = dict(sources)
        self.stages = stages
        self._readers = list(sources.values())
        self.seq_len = self._readers[0].seq_len
        self.plan = Plan(
            names=tuple(sources),
            sizes=tuple(source.num_samples for source in self._readers),
            limits=tuple(limits),
            stops=tuple(stops),
            stages=_in_samples(stages, [0, 0, batch]),
        )
        self._begin(Walk(self.plan))
        self._lock = Lock()

    @property
    def identity(self) -> str:
        """Identifies sources, weights, stages and ends. A stage begins at a step: the batch does not count."""
        names = [[name, source.identity] for name, source in self.sources.items()]
        content = json.dumps([names, self.plan.limits, self.plan.stops, self.stages])
        digest = hashlib.sha256(content.encode()).hexdigest()
        return storable_identity(f"mixture sha256 {digest} of {', '.join(self.plan.names)}")

    def read(self, sample_ids: Sequence[int]) -> Rows:
        """Read these samples, in any order; fastest ascending.

        Raises:
            DataError: the data is damaged, or has ended.
        """
        return self.read_steps([sample_ids])[0]

    def read_steps(self, steps: Sequence[Sequence[int]]) -> list[Rows]:
        """``read`` for each of ``steps``, together: a source takes about as long for many sequences as for few."""
        sources, numbers = self.found([sample for step in steps for sample in step])
        windows: list[tuple[Int64Array, Windows]] = []
        others: list[tuple[Int64Array, Rows]] = []
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            reader = self._readers[source]
            own = numbers[places].tolist()
            if isinstance(reader, IndexedSource):
                windows.append((places, reader.stored(own)))
                boundary = reader.boundary
            else:
                others.append((places, reader.read(own)))
        stored = merged(windows, len(sources)) if windows else None
        batches = []
        end = 0
        for step in steps:
            first = end
            end += len(step)
            rows = stored.part(first, end).rows(boundary) if stored else padding_rows(len(step), self.seq_len)
            for places, part in others:
                inside = slice(*np.searchsorted(places, (first, end)))
                for whole, of_part in zip(rows, part, strict=True):
                    whole[places[inside] - first] = of_part[inside]
            batches.append(rows)
        return batches

    def found(self, sample_ids: Sequence[int]) -> tuple[Int64Array, Int64Array]:
        """The source of each sample, and its number in that source, ``(batch,)`` each."""
        ids = np.asarray(sample_ids, dtype=np.int64)
        sources = np.full(len(ids), -1)
        numbers = np.empty(len(ids), dtype=np.int64)
        with self._lock:
            while len(missing := np.flatnonzero(sources < 0)):
                block = self._block_of(int(ids[missing[0]]))
                indices = ids[missing] - block.place.sample
                is_here = (indices >= 0) & (indices < len(block.sources))
                sources[missing[is_here]] = block.sources[indices[is_here]]
                numbers[missing[is_here]] = block.numbers[indices[is_here]]
        return sources, numbers

    def place(self, sample: int) -> Place:
        """The place before ``sample``, which is at most the end of the data."""
        with self._lock:
            if sample == self._walk.place.sample:
                return self._walk.place
            block = self._block_of(sample)
        given = np.bincount(block.sources[: sample - block.place.sample], minlength=len(self._readers))
        return Place(block.place.span, tuple((given + block.place.counts).tolist()))

    def end_before(self, sample: int) -> int:
        """The sample at which the data ends, if that is before ``sample``; else 0."""
        walk = Walk(self.plan)
        if any(self.plan.limits):
            walk.seek(sample)
        return walk.place.sample if walk.place.is_end else 0

    def often_read(self, end: int) -> str:
        """The sources that are read more than ``MOST_EPOCHS`` times before sample ``end``, as far as shares tell."""
        totals = np.zeros(len(self._readers))
        firsts = [min(first, end) for first, _ in self.plan.stages]
        for (_, weights), first, last in zip(self.plan.stages, firsts, [*firsts[1:], end], strict=True):
            totals += np.array(weights) / sum(weights) * (last - first)
        epochs = totals / self.plan.sizes
        columns = zip(self.plan.names, epochs.tolist(), self.plan.limits, strict=True)
        return ", ".join(f"{name} {of:.1f} times" for name, of, limit in columns if of > MOST_EPOCHS and not limit)

    def cursors(self, shards: Iterable[int]) -> dict[int, list[int]]:
        """Empty: see ``state``."""
        return {}

    def restore(self, cursors: Mapping[int, Cursor]) -> None:
        """Does nothing: see ``resume``."""

    def state(self, place: Place) -> dict[str, list[int]]:
        """What a checkpoint keeps: by name, sequences before the span, sequences in it, and weight."""
        columns = (place.span.before, place.counts, place.span.weights)
        return {name: list(row) for name, *row in zip(self.plan.names, *columns, strict=True)}

    def resume(self, saved: Mapping[str, Sequence[int]], sample: int, since: Sequence[int]) -> None:
        """Continue at ``sample`` with what ``state`` returned.

        If weights have changed, the shares are counted from here on, and each source continues where it was.

        Args:
            saved: result of ``state``; empty: another kind of data came before.
            sample: next sample.
            since: step, sample and batch size from which on all batches have that size.

        Raises:
            DataError: ``saved`` contradicts itself.
        """
        self.plan = self.plan._replace(stages=_in_samples(self.stages, since))
        rows = [saved.get(name, (0, 0, 0)) for name in self.plan.names]
        before, counts, weights = map(tuple, zip(*rows, strict=True))
        start = opened(self.plan, sample, tuple(map(sum, zip(before, counts, strict=True))))
        if weights == start.span.weights and saved.keys() == self.sources.keys():
            start = Place(Span(sample - sum(counts), weights, before), counts)
            try:
                Schedule(weights, counts)
            except ValueError as error:
                raise DataError(
                    f"the checkpoint has sequences of a mixture that no run reaches: {error}.",
                    where="data.mixture of its state",
                    fix="resume from another step: --checkpoint.load_step N",
                ) from None
        else:
            now = " ".join(f"{name} {weight}" for name, weight in zip(self.plan.names, start.span.weights, strict=True))
            what = "mixture: other weights from sample %d on: %s; each source continues where it was"
            _log.warning(what, sample, now)
        self._begin(Walk(self.plan, start))

    def _begin(self, walk: Walk) -> None:
        self._walk = walk
        self._blocks: list[_Block] = []

    def _block_of(self, sample: int) -> _Block:
        for block in self._blocks:
            if 0 <= sample - block.place.sample < len(block.sources):
                return block
        while True:
            if not 0 <= sample - self._walk.place.sample < BLOCK:
                self._walk.seek(sample)
            place = self._walk.place
            block = _Block(place, *self._walk.take(BLOCK))
            self._blocks = [*self._blocks[1 - _KEPT :], block]
            if sample - place.sample < len(block.sources):
                return block


def mixed_source(
    data: DataConfig, entries: Sequence[MixEntry], sources: Mapping[str, Any], *, seq_len: int, batch: int
) -> MixedSource:
    """The mixture that ``data.mix``, ``data.stage`` and ``data.alpha`` describe.

    Args:
        data: the section.
        entries: its entries.
        sources: indexed source of each, by name.
        seq_len: tokens per sequence.
        batch: sequences per step, over all ranks.
    """
    sizes = [sources[entry.name].num_samples for entry in entries]
    stages = dict(map(read_stage, data.stage))
    shares = {first: [exact(weights.get(entry.name, 0)) for entry in entries] for first, weights in stages.items()}
    if 1 not in shares:
        shares[1] = [
            Fraction(size**data.alpha) if data.alpha is not None else _share(entry, size, seq_len)
            for entry, size in zip(entries, sizes, strict=True)
        ]
    return MixedSource(
        sources,
        limits=[
            0 if entry.on_end == "repeat" else max(1, math.ceil(size * exact(entry.epochs or 1)))
            for entry, size in zip(entries, sizes, strict=True)
        ],
        stops=[entry.on_end == "stop" for entry in entries],
        stages=tuple((first, integers(shares[first])) for first in sorted(shares)),
        batch=batch,
    )


def _share(entry: MixEntry, size: int, seq_len: int) -> Fraction:
    kind, number = entry.share
    unit = {"weight": Fraction(1), "tokens": Fraction(1, seq_len), "epochs": Fraction(size)}
    return exact(number) * unit[kind]


def _in_samples(stages: Stages, since: Sequence[int]) -> Stages:
    """The stages by their first samples. Those that begin before the step of ``since`` have begun."""
    step, sample, batch = since[:3]
    return tuple((sample + (first - 1 - step) * batch if first - 1 > step else 0, weights) for first, weights in stages)

"""Several sources as one: which of them each sequence comes from, by arithmetic, and ``MixedSource``. No torch.

``Schedule`` is Tijdeman's chairman assignment (The chairman assignment problem, Discrete Mathematics 32, 1980). After
each of t sequences, source s with share w_s has given n_s of them, and |n_s - w_s t| <= 1 - 1/(2n - 2) for n sources.
With c = 1/(2n - 2), sequence k of source s may come at steps t with k - 1 + c <= w_s t, and it must come no later than
the first t with k - c < w_s t. Of the sequences that may come, the one with the earliest deadline does.

If the shares are integers over A, then n_s = w_s t where A divides t. So the schedule repeats after A steps, and any
place in it is at most A choices away.
"""

import functools
import hashlib
import heapq
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crius.config.data import DataConfig, MixEntry, exact, integers, read_stage
from crius.data.samples import SampleSource
from crius.data.source import Cursor, Int64Array, Rows, padding_rows, storable_identity
from crius.data.tokens import IndexedSource, Windows, merged
from crius.errors import DataError

_log = logging.getLogger("crius.data")


class Schedule:
    """The choices of a source for one sequence after the other, from any counts that the schedule itself reaches.

    Args:
        weights: integer share of each source, 0 or more; a source with 0 is never chosen.
        counts: sequences that each source has given. Their sum is the number of steps done.

    Raises:
        ValueError: no schedule has these counts.
    """

    def __init__(self, weights: Sequence[int], counts: Sequence[int]) -> None:
        self._step = sum(counts)
        total = sum(weights)
        if any(abs(n * total - a * self._step) >= total for n, a in zip(counts, weights, strict=True)):
            raise ValueError("the counts are not those of these weights")
        number = max(2, 2 * sum(map(bool, weights)) - 2)
        self._period = number * total
        self._window = self._period - 2 * total
        self._divisors = [number * weight for weight in weights]
        self._releases = [n * self._period + total for n in counts]  # times the divisor
        self._ready: list[tuple[int, int]] = []  # deadline and source
        self._waiting = [
            (-(-release // divisor), source)
            for source, (release, divisor) in enumerate(zip(self._releases, self._divisors, strict=True))
            if divisor
        ]
        heapq.heapify(self._waiting)

    def take(self, count: int) -> npt.NDArray[np.int32]:
        """The sources of the next ``count`` sequences."""
        chosen = np.empty(count, dtype=np.int32)
        ready = self._ready
        waiting = self._waiting
        releases = self._releases
        divisors = self._divisors
        for place in range(count):
            self._step += 1
            while waiting and waiting[0][0] <= self._step:
                source = heapq.heappop(waiting)[1]
                heapq.heappush(ready, ((releases[source] + self._window) // divisors[source], source))
            source = heapq.heappop(ready)[1]
            chosen[place] = source
            releases[source] += self._period
            heapq.heappush(waiting, (-(-releases[source] // divisors[source]), source))
        return chosen


_SHORT = 4096  # choices after which a schedule repeats, if they are kept


@functools.lru_cache(maxsize=16)
def _round(weights: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """The choices after which a schedule repeats."""
    return Schedule(weights, [0] * len(weights)).take(sum(weights))


class Plan(NamedTuple):
    """A mixture, as known before a run.

    Attributes:
        names: names of the sources.
        sizes: sequences of each in one epoch.
        limits: sequences after which each ends; 0: it repeats without end.
        stops: whether its end is the end of the run; else the others take its share.
        stages: first sample and weights of each stage, ascending; the first begins at sample 0 or before.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    limits: tuple[int, ...]
    stops: tuple[bool, ...]
    stages: tuple[tuple[int, tuple[int, ...]], ...]


class Span(NamedTuple):
    """Sequences with constant weights.

    Attributes:
        first: its first sample.
        weights: integer weights, without a common divisor; all 0: the data has ended before this sample.
        before: sequences that each source gave before it.
    """

    first: int
    weights: tuple[int, ...]
    before: tuple[int, ...]


class Place(NamedTuple):
    """A place between two samples: the span that the next sample is in, and what each source gave in it so far."""

    span: Span
    counts: tuple[int, ...]

    @property
    def sample(self) -> int:
        """The next sample."""
        return self.span.first + sum(self.counts)

    @property
    def is_end(self) -> bool:
        """Whether the data ends here."""
        return not any(self.span.weights)

    @property
    def totals(self) -> tuple[int, ...]:
        """Sequences that each source gave so far."""
        return tuple(map(sum, zip(self.span.before, self.counts, strict=True)))


class Walk:
    """Goes through the samples of a plan.

    Args:
        plan: the plan.
        start: where to begin; None: at sample 0.

    Attributes:
        start: where it began.
        place: where the walk is.
        spans: spans that it has reached, in order.
    """

    def __init__(self, plan: Plan, start: Place | None = None) -> None:
        self.plan = plan
        self.start = start or opened(plan, 0, (0,) * len(plan.names))
        self._limits = np.array(plan.limits)
        self._begin()

    def _begin(self) -> None:
        self.place = self.start
        self.spans = [self.place.span]
        self._schedule: Schedule | None = None

    def take(self, count: int) -> tuple[npt.NDArray[np.int32], Int64Array]:
        """The source of each of the next samples, and the number of each in its source, counted from 0.

        Returns fewer than ``count``, at least one, if the span ends.

        Raises:
            DataError: the data has ended.
        """
        span, counts = self.place
        if self.place.is_end:
            raise DataError(
                f"the mixture has ended before sample {span.first:,}.",
                where="[[data.mix]]",
                why="a source with on_end stop has ended, or no source of the stage is left",
                fix="on_end repeat",
            )
        stage = self._next_stage()
        count = min(count, stage - self.place.sample)
        totals = np.array(self.place.totals)
        chosen = self._chosen(count)
        numbers = np.empty(count, dtype=np.int64)
        for source in np.unique(chosen):
            places = np.flatnonzero(chosen == source)
            numbers[places] = np.arange(totals[source], totals[source] + len(places))
        limits = self._limits[chosen]
        used_up = np.flatnonzero((limits > 0) & (numbers + 1 >= limits))
        if used_up.size:
            count = int(used_up[0]) + 1
        given = np.bincount(chosen[:count], minlength=len(counts))
        self.place = Place(span, tuple((given + counts).tolist()))
        if used_up.size or self.place.sample == stage:
            self.place = opened(self.plan, self.place.sample, self.place.totals)
            self.spans.append(self.place.span)
            self._schedule = None
        return chosen[:count], numbers[:count]

    def _chosen(self, count: int) -> npt.NDArray[np.int32]:
        span, counts = self.place
        if sum(span.weights) <= _SHORT:
            kept = _round(span.weights)
            return kept[np.arange(sum(counts), sum(counts) + count) % len(kept)]
        if self._schedule is None:
            self._schedule = Schedule(span.weights, counts)
        return self._schedule.take(count)

    def _next_stage(self) -> int:
        return min((first for first, _ in self.plan.stages if first > self.place.span.first), default=1 << 62)

    def seek(self, sample: int) -> None:
        """Go to ``sample``, or to the end of the data if that is before it. It takes at most as many choices as the
        weights of each span on the way add up to.

        Raises:
            ValueError: the walk began after it.
        """
        if sample < self.start.sample:
            raise ValueError(f"sample {sample} is before the start {self.start.sample}")
        if sample < self.place.sample:
            self._begin()
        while self.place.sample < sample and not self.place.is_end:
            self._skip(sample)
            if self.place.sample < sample:
                self.take(min(4096, sample - self.place.sample))

    def _skip(self, sample: int) -> None:
        """Skip whole rounds of the weights up to ``sample``, as far as no source ends and no stage begins in them."""
        span, counts = self.place
        total = sum(span.weights)
        steps = [sample - span.first, self._next_stage() - 1 - span.first]
        for weight, before, limit in zip(span.weights, span.before, self.plan.limits, strict=True):
            if weight and limit:
                steps.append((limit - before - 1) * total // weight)
        rounds = min(steps) // total
        if rounds * total > sum(counts):
            self.place = Place(span, tuple(weight * rounds for weight in span.weights))
            self._schedule = None

    def ends(self) -> list[Place]:
        """The end of each span so far, and the present place."""
        pairs = pairwise(self.spans)
        return [Place(one, tuple(map(int.__sub__, later.before, one.before))) for one, later in pairs] + [self.place]


def opened(plan: Plan, sample: int, totals: tuple[int, ...]) -> Place:
    """The place at the start of a new span."""
    weights = [weights for first, weights in plan.stages if first <= sample][-1]
    left = list(weights)
    for source, (total, limit) in enumerate(zip(totals, plan.limits, strict=True)):
        if limit and total >= limit:
            left = [0] * len(left) if plan.stops[source] else left
            left[source] = 0
    divisor = math.gcd(*left) or 1
    return Place(Span(sample, tuple(weight // divisor for weight in left), totals), (0,) * len(left))


BLOCK = 1024
"""Samples that are chosen at a time."""

MOST_EPOCHS = 4
"""Epochs up to which repeated data is worth nearly as much as new data (Muennighoff et al. 2023, arXiv:2305.16264)."""

_KEPT = 64  # blocks: what is prepared ahead, and what is reported, is among them

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
            stages=in_samples(stages, [0, 0, batch]),
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
        return next(self.read_steps([sample_ids]))

    def read_steps(self, steps: Sequence[Sequence[int]]) -> Iterator[Rows]:
        """``read`` for each of ``steps``, together: a source takes about as long for many sequences as for few. The
        rows of a step are made when they are asked for, while their memory is in the cache.
        """
        sources, numbers = self.found([sample for step in steps for sample in step])
        windows: list[tuple[Int64Array, Windows]] = []
        others: list[tuple[Int64Array, Rows]] = []
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            reader = self._readers[source]
            own = numbers[places].tolist()
            if isinstance(reader, IndexedSource):
                windows.append((places, reader.stored(own)))
            else:
                others.append((places, reader.read(own)))
        return self._rows(steps, merged(windows, len(sources)) if windows else None, others)

    def _rows(
        self, steps: Sequence[Sequence[int]], stored: Windows | None, others: Sequence[tuple[Int64Array, Rows]]
    ) -> Iterator[Rows]:
        end = 0
        for step in steps:
            first = end
            end += len(step)
            rows = stored.part(first, end).rows() if stored else padding_rows(len(step), self.seq_len)
            for places, part in others:
                inside = slice(*np.searchsorted(places, (first, end)))
                for whole, of_part in zip(rows, part, strict=True):
                    whole[places[inside] - first] = of_part[inside]
            yield rows

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

    def origin(self, sample: int) -> tuple[str, int]:
        """The name of the source of a sample, and its number in that source."""
        (source,), (number,) = self.found([sample])
        return self.plan.names[source], int(number)

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
        walk = Walk(self.plan, self._walk.start)
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
        self.plan = self.plan._replace(stages=in_samples(self.stages, since))
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
        while True:
            for block in self._blocks:
                if 0 <= sample - block.place.sample < len(block.sources):
                    return block
            if not 0 <= sample - self._walk.place.sample < BLOCK:
                self._walk.seek(sample)
            block = _Block(self._walk.place, *self._walk.take(BLOCK))
            self._blocks = [*self._blocks[1 - _KEPT :], block]


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
    if entry.tokens:
        return exact(entry.tokens) / seq_len
    return exact(entry.epochs) * size if entry.epochs else exact(entry.weight or 1)


def in_samples(stages: Stages, since: Sequence[int]) -> Stages:
    """The stages by their first samples. Those that begin before the step of ``since`` have begun."""
    step, sample, batch = since[:3]
    return tuple((sample + (first - 1 - step) * batch if first - 1 > step else 0, weights) for first, weights in stages)

"""Which source each sequence of a mixture comes from, by arithmetic alone: no files, no torch.

``Schedule`` is Tijdeman's chairman assignment (The chairman assignment problem, Discrete Mathematics 32, 1980). After
each of t sequences, source s with share w_s has given n_s of them, and |n_s - w_s t| <= 1 - 1/(2n - 2) for n sources.
With c = 1/(2n - 2), sequence k of source s may come at steps t with k - 1 + c <= w_s t, and it must come no later than
the first t with k - c < w_s t. Of the sequences that may come, the one with the earliest deadline does.

If the shares are integers over A, then n_s = w_s t where A divides t. So the schedule repeats after A steps, and any
place in it is at most A choices away.
"""

import functools
import heapq
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crius.data.source import Int64Array
from crius.errors import DataError


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
        place: where the walk is.
        spans: spans that it has reached, in order.
    """

    def __init__(self, plan: Plan, start: Place | None = None) -> None:
        self.plan = plan
        self._start = start or opened(plan, 0, (0,) * len(plan.names))
        self._limits = np.array(plan.limits)
        self._begin()

    def _begin(self) -> None:
        self.place = self._start
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
        numbers = totals[chosen] + _earlier(chosen)
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
        if sample < self._start.sample:
            raise ValueError(f"sample {sample} is before the start {self._start.sample}")
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


def _earlier(chosen: npt.NDArray[np.int32]) -> Int64Array:
    """How often the source of each place was chosen before it."""
    order = np.argsort(chosen, kind="stable")
    ordered = chosen[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    earlier = np.empty(len(chosen), dtype=np.int64)
    earlier[order] = np.arange(len(chosen)) - np.repeat(starts, np.diff(np.append(starts, len(chosen))))
    return earlier

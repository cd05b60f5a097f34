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

_SHORT = 4096


class Schedule:
    """The choices of a source for one sequence after the other, from any counts that the schedule itself reaches.

    Args:
        weights: integer share of each source, 0 or more; a source with 0 is never chosen.
        counts: sequences that each source has given. Their sum is the number of steps done.
        is_short: whether choices that repeat soon are kept.

    Attributes:
        counts: as given, with the choices since.
        step: steps done.

    Raises:
        ValueError: no schedule has these counts.
    """

    def __init__(self, weights: Sequence[int], counts: Sequence[int], *, is_short: bool = True) -> None:
        self.counts = list(counts)
        self.step = sum(counts)
        total = sum(weights)
        if any(abs(n * total - a * self.step) >= total for n, a in zip(counts, weights, strict=True)):
            raise ValueError("the counts are not those of these weights")
        self._round = _round(tuple(weights)) if is_short and total <= _SHORT else None
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
        if self._round is not None:
            chosen = self._round[np.arange(self.step, self.step + count) % len(self._round)]
            self.step += count
        else:
            chosen = self._chosen(count)
        self.counts = (np.bincount(chosen, minlength=len(self.counts)) + self.counts).tolist()
        return chosen

    def _chosen(self, count: int) -> npt.NDArray[np.int32]:
        chosen = np.empty(count, dtype=np.int32)
        ready = self._ready
        waiting = self._waiting
        releases = self._releases
        divisors = self._divisors
        step = self.step
        for place in range(count):
            step += 1
            while waiting and waiting[0][0] <= step:
                source = heapq.heappop(waiting)[1]
                heapq.heappush(ready, ((releases[source] + self._window) // divisors[source], source))
            source = heapq.heappop(ready)[1]
            chosen[place] = source
            releases[source] += self._period
            heapq.heappush(waiting, (-(-releases[source] // divisors[source]), source))
        self.step = step
        return chosen


@functools.lru_cache(maxsize=16)
def _round(weights: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """The choices after which a schedule repeats."""
    return Schedule(weights, [0] * len(weights), is_short=False).take(sum(weights))


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
    def totals(self) -> tuple[int, ...]:
        """Sequences that each source gave so far."""
        return tuple(map(sum, zip(self.span.before, self.counts, strict=True)))


class Walk:
    """Goes through the samples of a plan.

    Args:
        plan: the plan.
        start: where to begin; nothing before is reached. None: at ``sample``, in a new span.
        sample: first sample.
        totals: sequences that each source gave before it; empty: none.

    Attributes:
        place: where the walk is.
    """

    def __init__(self, plan: Plan, start: Place | None = None, *, sample: int = 0, totals: Sequence[int] = ()) -> None:
        self.plan = plan
        self.place = start or self._opened(sample, tuple(totals) or (0,) * len(plan.names))
        self._spans = [self.place.span]
        self._least = self.place.sample
        self._limits = np.array(plan.limits)
        self._schedule: Schedule | None = None

    def _opened(self, sample: int, totals: tuple[int, ...]) -> Place:
        """The place at the start of a new span."""
        plan = self.plan
        has_ended = [limit > 0 and total >= limit for total, limit in zip(totals, plan.limits, strict=True)]
        weights = [weights for first, weights in plan.stages if first <= sample][-1]
        left = [0 if ended else weight for weight, ended in zip(weights, has_ended, strict=True)]
        if any(ended and stops for ended, stops in zip(has_ended, plan.stops, strict=True)):
            left = [0] * len(left)
        divisor = math.gcd(*left) or 1
        return Place(Span(sample, tuple(weight // divisor for weight in left), totals), (0,) * len(left))

    def take(self, count: int) -> tuple[npt.NDArray[np.int32], Int64Array]:
        """The source of each of the next samples, and the number of each in its source, counted from 0.

        Returns fewer than ``count``, at least one, if the span ends.

        Raises:
            DataError: the data has ended.
        """
        span, counts = self.place
        if not any(span.weights):
            raise DataError(
                f"the mixture has ended before sample {span.first:,}.",
                where="[[data.mix]]",
                why="a source with on_end stop has ended, or no source of the stage is left",
                fix="on_end repeat",
            )
        if self._schedule is None:
            self._schedule = Schedule(span.weights, counts)
        next_stage = self._next_stage(span)
        if next_stage is not None:
            count = min(count, next_stage - self.place.sample)
        totals = np.array(self.place.totals)
        chosen = self._schedule.take(count)
        numbers = totals[chosen] + _earlier(chosen)
        limits = self._limits[chosen]
        used_up = np.flatnonzero((limits > 0) & (numbers + 1 >= limits))
        if used_up.size:
            count = int(used_up[0]) + 1
        given = np.bincount(chosen[:count], minlength=len(counts))
        self.place = Place(span, tuple((given + counts).tolist()))
        if used_up.size or self.place.sample == next_stage:
            self.place = self._opened(self.place.sample, self.place.totals)
            self._schedule = None
            if self.place.sample > self._spans[-1].first:
                self._spans.append(self.place.span)
        return chosen[:count], numbers[:count]

    def _next_stage(self, span: Span) -> int | None:
        return min((first for first, _ in self.plan.stages if first > span.first), default=None)

    def seek(self, sample: int) -> None:
        """Go to ``sample``, or to the end of the data if that is before it. It takes at most as many choices as the
        weights of each span on the way add up to.

        Raises:
            ValueError: the walk began after it.
        """
        if sample < self._least:
            raise ValueError(f"sample {sample} is before the start {self._least}")
        known = [span for span in self._spans if span.first <= sample]
        if not self.place.span.first <= self.place.sample <= sample or self.place.span != known[-1]:
            self._go(known[-1], 0)
        while self.place.sample < sample and any(self.place.span.weights):
            span = self.place.span
            self._go(span, min(sample, self._earliest_end(span)) - span.first)
            while self.place.span == span and self.place.sample < sample:
                self.take(min(4096, sample - self.place.sample))

    def _go(self, span: Span, steps: int) -> None:
        """Go to the last place of ``span``, at most ``steps`` after its first sample, whose counts follow from the
        weights. Stay if the walk is nearer."""
        periods = max(0, steps) // (sum(span.weights) or 1)
        here = self.place
        is_ahead = here.span == span and periods * sum(span.weights) <= sum(here.counts) <= steps
        if not is_ahead:
            self.place = Place(span, tuple(weight * periods for weight in span.weights))
            self._schedule = None

    def _earliest_end(self, span: Span) -> int:
        """A sample at or before which ``span`` does not end, as far as the limits of sources tell."""
        total = sum(span.weights)
        ends = [
            (limit - before - 1) * total // weight
            for weight, before, limit in zip(span.weights, span.before, self.plan.limits, strict=True)
            if weight and limit
        ]
        next_stage = self._next_stage(span)
        lasts = [] if next_stage is None else [next_stage - 1]
        return min([span.first + max(0, end) for end in ends] + lasts, default=1 << 62)

    def spans_to(self, sample: int) -> list[Place]:
        """The end of each span before ``sample``, and the place at ``sample`` or at the end of the data before it."""
        self.seek(sample)
        ended = [
            Place(span, tuple(after - before for before, after in zip(span.before, later.before, strict=True)))
            for span, later in pairwise(self._spans)
            if later.first <= self.place.span.first
        ]
        return [*ended, self.place]


def _earlier(chosen: npt.NDArray[np.int32]) -> Int64Array:
    """How often the source of each place was chosen before it."""
    order = np.argsort(chosen, kind="stable")
    ordered = chosen[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    earlier = np.empty(len(chosen), dtype=np.int64)
    earlier[order] = np.arange(len(chosen)) - np.repeat(starts, np.diff(np.append(starts, len(chosen))))
    return earlier

"""Proves from the folder of a run that a mixture had its shares: each logged step against the schedule."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from crius.data.mixture import Place, Plan, Span, Walk
from crius.data.sample_log import MIXTURE, Attempt
from crius.errors import DataError
from crius.untrusted import HUGE, records_below

if TYPE_CHECKING:
    from crius.tools.data_audit.audit import RankLog

_MOST_NAMED = 10
_MOST_SHOWN = 20  # sources


class _Shares:
    """The shares of a run.

    Attributes:
        lines: the realised shares, as text.
        problems: what differs from the schedule.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.problems: list[str] = []
        self._place: Place | None = None
        self._plan: Plan | None = None
        self._far: npt.NDArray[np.float64] = np.zeros(0)

    def replay(self, plan: Plan, place: Place, start: Attempt, last: int, logs: "Mapping[int, RankLog]") -> None:
        """Hold the steps of an attempt, up to ``last``, against the schedule."""
        if self._place and (self._place != place if plan == self._plan else self._place.totals != place.totals):
            self.problems.append(f"attempt {start.attempt} starts with other counts than the schedule has there")
        if self._place is None or self._place.span != place.span:
            self._begin(plan)
        self._plan = plan
        walk = Walk(plan, place)
        ranges = {rank: log.steps(start.attempt) for rank, log in logs.items()}
        for step in range(start.after + 1, last + 1):
            first = walk.place.sample
            end = first + start.batch
            chosen = self._taken(plan, walk, min(end, start.end or end))
            for rank, log in logs.items():
                ids = [number - first for span in ranges[rank].get(step, ()) for number in range(*span)]
                inside = [number for number in ids if 0 <= number < len(chosen)]
                expected = np.bincount(chosen[inside], minlength=len(plan.names))
                logged = log.mixes.get((start.attempt, step), {})
                for source in np.flatnonzero(expected != [logged.get(one, 0) for one in range(len(expected))]):
                    where = f"step {step} of attempt {start.attempt} on rank {rank}"
                    had = f"{logged.get(int(source), 0)} sequences of {plan.names[source]}"
                    self.problems.append(f"{where} has {had}, the schedule has {expected[source]}")
        self._place = walk.place

    def _taken(self, plan: Plan, walk: Walk, end: int) -> npt.NDArray[np.int32]:
        """The sources of the samples up to ``end``."""
        parts = [np.empty(0, dtype=np.int32)]
        while walk.place.sample < end:
            before = walk.place
            chosen, _ = walk.take(end - before.sample)
            parts.append(chosen)
            weights = np.array(before.span.weights) / sum(before.span.weights)
            counts = np.array(before.counts) + np.bincount(chosen, minlength=len(weights))
            self._far = np.maximum(self._far, np.abs(counts - weights * counts.sum()))
            if walk.place.span != before.span:
                self._place = Place(before.span, tuple(counts.tolist()))
                self._begin(plan)
        return np.concatenate(parts)

    def _begin(self, plan: Plan) -> None:
        """Begin a span, and add the lines of the span before."""
        self.finish()
        self._place = None
        self._far = np.zeros(len(plan.names))

    def finish(self) -> None:
        """Add the lines of the last span."""
        plan = self._plan
        place = self._place
        if plan is None or place is None or not sum(place.counts):
            return
        total = sum(place.counts)
        weights = sum(place.span.weights) or 1
        self.lines.append(f"mixture  samples {place.span.first:,} to {place.sample - 1:,}")
        rows = zip(plan.names, place.span.weights, place.counts, place.totals, plan.sizes, self._far, strict=True)
        for name, weight, count, of_run, size, far in list(rows)[:_MOST_SHOWN]:
            self.lines.append(
                f"  {name:<12} share {weight / weights:.4f}  had {count:,} of {total:,} = {count / max(1, total):.4f}, "
                f"at most {far:.2f} sequences from its share after a step; {of_run / size:.2f} epochs"
            )


def prove(
    run_dir: Path, attempts: Sequence[tuple[Attempt, int]], logs: "Mapping[int, RankLog]"
) -> tuple[list[str], list[str]]:
    """Lines with the realised shares, and problems; nothing without a mixture.

    Args:
        run_dir: folder of the run.
        attempts: each start, and the last step after it that counts.
        logs: logs by rank.

    Raises:
        DataError: the record of the mixture cannot be read.
    """
    try:
        records = {one["attempt"]: one for one in records_below(run_dir / "data", MIXTURE, HUGE) if one}
        mixtures = {attempt: _read(record) for attempt, record in records.items()}
    except (OSError, KeyError, TypeError, ValueError) as error:
        path = run_dir / "data" / MIXTURE
        raise DataError(
            f"{path} cannot be read: {error}.", where=str(path), fix="the shares cannot be proved"
        ) from None
    has_mixes = any(log.mixes for log in logs.values())
    if not mixtures and not has_mixes:
        return [], []
    shares = _Shares()
    for start, last in attempts:
        if start.attempt not in mixtures:
            shares.problems.append(f"attempt {start.attempt} has no line in {MIXTURE}")
        elif last > start.after:
            shares.replay(*mixtures[start.attempt], start, last, logs)
    shares.finish()
    more = len(shares.problems) - _MOST_NAMED
    named = shares.problems[:_MOST_NAMED] + (
        [f"and {more} more steps that differ from the schedule"] if more > 0 else []
    )
    return shares.lines, named


def _read(record: Mapping[str, Any]) -> tuple[Plan, Place]:
    columns = {name: tuple(record[name]) for name in ("names", "sizes", "limits", "stops")}
    plan = Plan(**columns, stages=tuple((first, tuple(weights)) for first, weights in record["stages"]))
    span = Span(record["first"], tuple(record["weights"]), tuple(record["before"]))
    return plan, Place(span, tuple(record["counts"]))

"""``crius data audit``: checks that each sample was trained on exactly once, over all attempts of a run and their
numbers of ranks.

The logs are those of ``sample_log``. An attempt that starts after step s repeats the steps after s; the audit counts
them as ``redone``.
"""

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crius.data.sample_log import Attempt, samples_path
from crius.errors import ConfigError, DataError
from crius.tools.data_audit.shares import prove
from crius.untrusted import SMALL, object_below, open_below, parse_json

Ints = npt.NDArray[np.int64]

_CHUNK = 1 << 22  # samples that are checked together
_MOST_SAMPLES = 1 << 24  # of a rank in a step; a log with more is not Crius's
_MOST_RANKS = 1 << 16  # so that missing ranks can be named
_MOST_NAMED = 10


@dataclass(frozen=True, kw_only=True)
class AuditedAttempt:
    """Log of an attempt, and the part of it that counts.

    Attributes:
        attempt: number of the attempt.
        after: step that it started after.
        ranks: data-parallel ranks.
        last: last step that counts; ``after`` if no step counts.
        redone: logged steps that a later attempt repeated.
    """

    attempt: int
    after: int
    ranks: int
    last: int
    redone: int


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Result of an audit.

    Attributes:
        steps: steps that count, over all attempts.
        last_step: number of the last of them.
        first_sample, end_sample: samples that these steps should have had, up to and without ``end_sample``.
        epoch_samples: sequences in an epoch; 0 if not known.
        attempts: attempts in order.
        repeated: repeated samples; each counts as often as it was trained on too many times.
        skipped: samples that are missing.
        problems: descriptions of the errors, with a limit per kind.
        notes: further facts.
        shares: realised shares of a mixture, as lines.
    """

    steps: int
    last_step: int
    first_sample: int
    end_sample: int
    epoch_samples: int
    attempts: tuple[AuditedAttempt, ...]
    repeated: int
    skipped: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    shares: tuple[str, ...] = ()

    @property
    def epochs_crossed(self) -> int | None:
        """Ends of epochs between the first and the last sample; None if not known."""
        if not self.epoch_samples:
            return None
        last = max(self.first_sample, self.end_sample - 1)
        return last // self.epoch_samples - self.first_sample // self.epoch_samples

    def lines(self) -> list[str]:
        """The result as text."""
        samples = self.end_sample - self.first_sample
        crossed = self.epochs_crossed
        span = f" ({self.first_sample:,} to {self.end_sample - 1:,})" if samples else ""
        epoch = "of unknown length" if crossed is None else f"{crossed} crossed (of {self.epoch_samples:,} samples)"
        lines = [
            f"{'attempt':>7}  {'ranks':>5}  {'steps':<15}  {'redone':>6}",
            *(f"{one.attempt:>7}  {one.ranks:>5}  {_steps(one):<15}  {one.redone:>6}" for one in self.attempts),
            f"steps    {self.steps:,}, the last is {self.last_step:,}",
            f"samples  {samples:,}{span}",
            f"epochs   {epoch}",
            f"redone   {sum(one.redone for one in self.attempts):,} steps (work lost, not data)",
            *self.shares,
            *(f"note     {note}" for note in self.notes),
            *(f"problem  {problem}" for problem in self.problems),
            f"{self.repeated:,} repeated, {self.skipped:,} skipped",
        ]
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The result as data."""
        attempts = [vars(one) for one in self.attempts]
        return vars(self) | {"epochs_crossed": self.epochs_crossed, "attempts": attempts}


@dataclass
class RankLog:
    """A log file: for each attempt its start, and ``(step, first sample, end, stride)`` of each range, flat.

    Attributes:
        starts: starts by attempt.
        ranges: ranges by attempt.
        torn: lines that cannot be read.
        mixes: sequences of each source of a mixture, by attempt and step.
    """

    starts: dict[int, Attempt] = field(default_factory=dict)
    ranges: "dict[int, array[int]]" = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)
    mixes: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)

    def steps(self, attempt: int) -> dict[int, list[list[int]]]:
        """Ranges of samples of each step of an attempt: first, end and stride."""
        found: dict[int, list[list[int]]] = {}
        for step, *span in np.frombuffer(self.ranges.get(attempt, array("q")), dtype=np.int64).reshape(-1, 4).tolist():
            found.setdefault(step, []).append(span)
        return found


@dataclass(frozen=True)
class _Kept:
    """The ranges of an attempt that count: arrays ``(n,)``, sorted by step, and the rank of each."""

    attempt: int
    step: Ints
    first: Ints
    end: Ints
    stride: Ints
    rank: Ints


def audit(run_dir: Path) -> Audit:
    """Check the sample logs of a run.

    Raises:
        ConfigError: there are no logs.
        DataError: they cannot be read.
    """
    logs = read_logs(run_dir)
    attempts = sorted(logs[0].starts.values(), key=lambda start: start.attempt)
    known = {start.attempt for start in attempts}
    problems = [
        f"attempt {attempt} has steps of rank {rank} and no start on rank 0"
        for rank, log in logs.items()
        for attempt in sorted(set(log.ranges) - known)
    ]
    kept = []
    audited = []
    for place, start in enumerate(attempts):
        limit = min((later.after for later in attempts[place + 1 :]), default=None)
        rows = _gather(start, logs)
        steps = rows[:, 0]
        ranks = rows[:, -1]
        done, missing = _complete_steps(start, steps, ranks, limit)
        problems += missing
        kept.append(_Kept(start.attempt, *rows[steps <= done].T))
        redone = np.unique(steps[steps > done]).size if limit is not None else 0
        audited.append(
            AuditedAttempt(attempt=start.attempt, after=start.after, ranks=start.ranks, last=done, redone=redone)
        )
    counted = [one for one, result in zip(attempts, audited, strict=True) if result.last > result.after]
    first = counted[0].sample if counted else 0
    expected = sum(_expected(start, one) for start, one in zip(attempts, audited, strict=True))
    end, repeated, skipped = _coverage(kept, first, first + expected)
    problems += _named(repeated, "repeated", kept) + _named(skipped, "skipped", kept)
    notes = [line for rank in sorted(logs) for line in logs[rank].torn]
    notes += [
        f"attempt {b.attempt} read other data than attempt {a.attempt}: the same numbers are other samples"
        for a, b in zip(attempts, attempts[1:], strict=False)
        if a.source != b.source
    ]
    shares, wrong = prove(run_dir, [(start, one.last) for start, one in zip(attempts, audited, strict=True)], logs)
    problems += wrong
    ended = (object_below(run_dir, "summary.json") or {}).get("steps")
    logged = max((one.last + one.redone for one in audited), default=0)
    if isinstance(ended, int) and ended > logged:
        problems.append(f"the run ended after step {ended} (summary.json), and its logs end with step {logged}")
    return Audit(
        steps=sum(one.last - one.after for one in audited),
        last_step=max((one.last for one in audited if one.last > one.after), default=0),
        first_sample=first,
        end_sample=end,
        epoch_samples=attempts[-1].epoch_samples if attempts else 0,
        attempts=tuple(audited),
        repeated=sum((stop - start) * times for start, stop, times in repeated),
        skipped=sum(stop - start for start, stop, _ in skipped),
        problems=tuple(problems),
        notes=tuple(notes),
        shares=tuple(shares),
    )


def _expected(start: Attempt, found: AuditedAttempt) -> int:
    """Number of samples that the counted steps of an attempt should have had."""
    number = start.batch * (found.last - found.after)
    return min(number, max(0, start.end - start.sample)) if start.end else number


def read_logs(run_dir: Path) -> dict[int, RankLog]:
    """The logs by rank; rank 0 is always there, as every attempt has it.

    Raises:
        ConfigError: there are no logs.
        DataError: they cannot be read.
    """
    first = samples_path(run_dir, 0)
    if not first.exists():
        raise ConfigError(
            f"{run_dir} has no sample log.",
            where="command line",
            why=f"a run with checkpoints writes {first.relative_to(run_dir)} from its first step on",
            fix="give the folder of a run, such as runs/llama3_debug-20261121-120000",
        )
    found = (re.fullmatch(r"samples-rank-(\d{1,6})\.jsonl", path.name) for path in first.parent.iterdir())
    return {rank: _read(samples_path(run_dir, rank)) for rank in sorted(int(match[1]) for match in found if match)}


def samples_of(logs: dict[int, RankLog], attempt: int, step: int) -> list[int]:
    """Samples of all ranks in a step of an attempt, ascending; empty if no rank logged it."""
    found = set[int]()
    for log in logs.values():
        for span in log.steps(attempt).get(step, ()):
            found |= set(range(*span))
    return sorted(found)


def _read(path: Path) -> RankLog:
    log = RankLog()
    try:
        with open_below(path.parent, path.name) as file:
            for number, line in enumerate(iter(lambda: file.readline(SMALL), b""), start=1):
                if not _take(log, line) and line.strip():
                    log.torn.append(f"{path}:{number} cannot be read and is not counted")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", where=str(path)) from error
    return log


def _take(log: RankLog, line: bytes) -> bool:
    """Add ``line`` to ``log``; False if it is not a line of a sample log."""
    try:
        record = parse_json(line)
        if "ids" not in record:
            start = Attempt(**record)
            numbers = (value for name, value in record.items() if name != "source")
            if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
                return False
            log.starts[start.attempt] = start
            return True
        flat = array("q")
        if record["step"] >> 40:
            return False
        for first, end, stride in record["ids"]:
            if not (0 <= first < end < 1 << 62 and 0 < stride and (end - first) // stride <= _MOST_SAMPLES):
                return False
            flat.extend((record["step"], first, end, stride))
        if not record["ids"]:  # only padding, but the rank took part
            flat.extend((record["step"], 0, 0, 1))
        if "mix" in record:
            log.mixes[record["attempt"], record["step"]] = {int(one): count for one, count in record["mix"].items()}
        log.ranges.setdefault(record["attempt"], array("q")).extend(flat)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return False
    return True


def _gather(start: Attempt, logs: dict[int, RankLog]) -> Ints:
    """Logs of all ranks of an attempt, sorted by step: the columns of ``_Kept``."""
    parts = []
    for rank, log in logs.items():
        if start.attempt in log.ranges:
            rows = np.frombuffer(log.ranges[start.attempt], dtype=np.int64).reshape(-1, 4)
            parts.append(np.column_stack((rows, np.full(len(rows), rank))))
    rows = np.concatenate(parts) if parts else np.empty((0, 5), dtype=np.int64)
    return rows[np.argsort(rows[:, 0], kind="stable")]


def _complete_steps(start: Attempt, steps: Ints, ranks: Ints, limit: int | None) -> tuple[int, list[str]]:
    """The last step that counts, and the steps up to it that some ranks did not log.

    Args:
        start: start of the attempt.
        steps, ranks: step and rank of each logged range.
        limit: earliest step that a later attempt started after; None if there was none. Then the last step that all
            ranks logged is the last one: the processes may have been killed before all could log more.
    """
    pairs = np.unique(np.column_stack((steps, ranks)), axis=0)
    logged, counts = np.unique(pairs[:, 0], return_counts=True)
    complete = logged[(counts == start.ranks) & (logged > start.after)]
    if limit is None:
        limit = int(complete[-1]) if complete.size else start.after
    last = max(start.after, limit)
    fences = np.concatenate(([start.after], complete[complete <= last], [last + 1]))
    holes = np.flatnonzero(np.diff(fences) > 1)
    lines = []
    for first, end in zip((fences[holes] + 1).tolist(), fences[holes + 1].tolist(), strict=True):
        there = pairs[(pairs[:, 0] >= first) & (pairs[:, 0] < end), 1]
        number = np.bincount(there, minlength=min(start.ranks, _MOST_RANKS))
        absent = ", ".join(map(str, np.flatnonzero(number < end - first)[:_MOST_NAMED]))
        which = (
            f"step {first} of attempt {start.attempt} was"
            if end == first + 1
            else (f"steps {first} to {end - 1} of attempt {start.attempt} were")
        )
        lines.append(f"{which} not logged by rank {absent}")
    if len(lines) > _MOST_NAMED:
        lines[_MOST_NAMED:] = [f"and {len(lines) - _MOST_NAMED} more spans of steps of attempt {start.attempt}"]
    if outside := logged[logged <= start.after].tolist():
        lines.append(f"attempt {start.attempt} starts after step {start.after} and logged step {outside[0]}")
    return last, lines


Span = tuple[int, int, int]
"""First sample, end, and number of times too many; -1 for missing samples."""


def _coverage(kept: list[_Kept], first: int, end: int) -> tuple[int, list[Span], list[Span]]:
    """The end of the expected samples, and the spans of samples that were repeated or skipped."""
    starts = [np.array([], dtype=np.int64)]
    stops = [np.array([], dtype=np.int64)]
    for attempt in kept:
        for ids in _ids(attempt):
            while ids.size:
                is_new = np.append(True, ids[1:] != ids[:-1])
                once = ids[is_new]
                ids = ids[~is_new]
                breaks = np.flatnonzero(np.diff(once) != 1)
                starts.append(once[np.append(0, breaks + 1)])
                stops.append(once[np.append(breaks, -1)] + 1)
    begin = np.concatenate(starts)
    finish = np.concatenate(stops)
    end = max(end, int(finish.max(initial=first)))
    first = min(first, int(begin.min(initial=first)))
    points = np.unique(np.concatenate((begin, finish, [first, end])))
    change = np.zeros(points.size, dtype=np.int64)
    np.add.at(change, np.searchsorted(points, begin), 1)
    np.add.at(change, np.searchsorted(points, finish), -1)
    times = np.cumsum(change)[:-1] - 1
    spans = list(zip(points[:-1].tolist(), points[1:].tolist(), times.tolist(), strict=True))
    return end, [span for span in spans if span[2] > 0], [span for span in spans if span[2] < 0]


def _ids(kept: _Kept) -> Iterator[Ints]:
    """The samples of an attempt, sorted in chunks of successive steps."""
    counts = -((kept.first - kept.end) // kept.stride)
    chunks = np.cumsum(counts) // _CHUNK
    for rows in np.split(np.arange(counts.size), np.flatnonzero(np.diff(chunks)) + 1):
        number = counts[rows]
        within = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
        yield np.sort(np.repeat(kept.first[rows], number) + within * np.repeat(kept.stride[rows], number))


def _named(spans: list[Span], what: str, kept: list[_Kept]) -> list[str]:
    """Lines that name repeated or skipped samples, with their steps or the nearest steps."""
    lines = []
    for first, end, _ in spans[:_MOST_NAMED]:
        samples = f"sample {first:,}" if end == first + 1 else f"samples {first:,} to {end - 1:,}"
        if what == "repeated":
            lines.append(f"{samples} repeated: {', '.join(_users(first, kept))}")
        else:
            near = [*_users(first - 1, kept), *_users(end, kept)]
            lines.append(f"{samples} skipped" + (f": near {near[0]}" if near else ""))
    if len(spans) > _MOST_NAMED:
        lines.append(f"and {len(spans) - _MOST_NAMED} more spans of samples {what}")
    return lines


def _users(sample: int, kept: list[_Kept]) -> list[str]:
    """Steps, attempts and ranks that trained on ``sample``."""
    found = []
    for one in kept:
        is_in = (one.first <= sample) & (sample < one.end) & ((sample - one.first) % one.stride == 0)
        for step, rank in zip(one.step[is_in].tolist(), one.rank[is_in].tolist(), strict=True):
            found.append(f"step {step} of attempt {one.attempt} on rank {rank}")
    return found


def _steps(one: AuditedAttempt) -> str:
    return f"{one.after + 1:,} to {one.last:,}" if one.last > one.after else "none"

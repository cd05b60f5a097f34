"""Proves from the folder of a run that a mixture had its shares: each logged step against the schedule."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from crius.config.data import DataConfig, read_entry, table_text
from crius.config.toml_file import settings_of_run
from crius.data.mixture import Place, Plan, Schedule, Span, Walk, in_samples, mixed_source
from crius.data.sample_log import MIXTURE, Attempt
from crius.errors import DataError
from crius.untrusted import HUGE, records_below

if TYPE_CHECKING:
    from crius.tools.data_audit.audit import RankLog

_MOST_NAMED = 10
_ROWS = ("names", "sizes", "limits", "stops", "weights", "before", "counts")


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
        records = records_below(run_dir / "data", MIXTURE, HUGE)
        mixtures = {record["attempt"]: _read(record) for record in records if record}
    except (OSError, KeyError, TypeError, ValueError) as error:
        path = str(run_dir / "data" / MIXTURE)
        raise DataError(f"{path} cannot be read: {error}.", where=path) from None
    if not mixtures and not any(log.mixes for log in logs.values()):
        return [], []
    problems = []
    lines = dict[Span, list[str]]()
    reached = dict[str, int]()
    mixed = {attempt for log in logs.values() for attempt, _ in log.mixes}
    for start, last in attempts:
        if start.attempt not in mixtures:
            problems += [f"attempt {start.attempt} has no line in {MIXTURE}"] if start.attempt in mixed else []
            continue
        plan, place = mixtures[start.attempt]
        totals = dict(zip(plan.names, place.totals, strict=True))
        if reached and totals != {name: reached.get(name, 0) for name in totals}:
            problems.append(f"attempt {start.attempt} starts with other counts than the schedule has there")
        walk = Walk(plan, place)
        problems += _differences(walk, start, last, logs)
        reached = dict(zip(plan.names, walk.place.totals, strict=True))
        lines |= {one.span: _lines(plan, one) for one in walk.ends() if sum(one.counts)}
        if start is attempts[-1][0]:  # run.toml is that of the newest attempt
            problems += _unlike_settings(run_dir, plan, start)
    named = problems[:_MOST_NAMED]
    if len(problems) > len(named):
        named.append(f"and {len(problems) - len(named)} more differences from the schedule")
    return [line for of_span in lines.values() for line in of_span], named


def _differences(walk: Walk, start: Attempt, last: int, logs: "Mapping[int, RankLog]") -> list[str]:
    """What the steps of an attempt, up to ``last``, have otherwise than the schedule."""
    names = dict(enumerate(walk.plan.names))
    steps = {rank: log.steps(start.attempt) for rank, log in logs.items()}
    found = []
    for step in range(start.after + 1, last + 1):
        first = walk.place.sample
        end = min(first + start.batch, start.end or 1 << 62)
        chosen = np.empty(0, dtype=np.int32)
        while walk.place.sample < end:
            chosen = np.append(chosen, walk.take(end - walk.place.sample)[0])
        for rank, log in logs.items():
            ids = [number - first for span in steps[rank].get(step, ()) for number in range(*span)]
            inside = [number for number in ids if 0 <= number < len(chosen)]  # else a sample is repeated or skipped
            logged = Counter(log.mixes.get((start.attempt, step)))
            wanted = Counter(chosen[inside].tolist())
            for source in {**logged, **wanted}:
                if logged[source] != wanted[source]:
                    where = f"step {step} of attempt {start.attempt} on rank {rank}"
                    name = names.get(source, source)
                    found.append(f"{where} has {logged[source]} sequences of {name}, the schedule has {wanted[source]}")
    return found


def _unlike_settings(run_dir: Path, plan: Plan, start: Attempt) -> list[str]:
    """What the mixture of an attempt has otherwise than run.toml."""
    try:
        settings = settings_of_run(run_dir)
        data = settings["data"]
        entries = [read_entry(table_text(table)) for table in data["mix"]]
        config = DataConfig(stage=tuple(map(table_text, data["stage"])), alpha=data.get("alpha"))
        seq_len = settings["training"]["seq_len"]
        sizes = [SimpleNamespace(num_samples=size, seq_len=seq_len) for size in plan.sizes]
        sources = dict(zip([entry.name for entry in entries], sizes, strict=True))
        mixed = mixed_source(config, entries, sources, seq_len=seq_len, batch=start.batch)
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        return [f"run.toml has no mixture as in {MIXTURE}: {error}"]
    later = in_samples(mixed.stages, (start.after, start.sample, start.batch))
    found, wanted = (
        one._replace(stages=tuple((max(first, start.sample), weights) for first, weights in stages))
        for one, stages in ((plan, plan.stages), (mixed.plan, later))
    )
    differ = [name for name, own, other in zip(Plan._fields, found, wanted, strict=True) if own != other]
    return [f"{MIXTURE} has other {name} in attempt {start.attempt} than run.toml" for name in differ]


def _lines(plan: Plan, end: Place) -> list[str]:
    """The shares in a span, up to ``end``."""
    total = sum(end.counts)
    lines = [f"mixture  samples {end.span.first:,} to {end.sample - 1:,}"]
    rows = zip(plan.names, end.span.weights, end.counts, end.totals, plan.sizes, strict=True)
    for name, weight, count, of_run, size in rows:
        share = weight / sum(end.span.weights)
        lines.append(
            f"  {name:<12} share {share:.4f}  had {count:,} of {total:,} = {count / total:.4f}, "
            f"{abs(count - share * total):.2f} sequences from its share; {of_run / size:.2f} epochs"
        )
    return lines


def _read(record: Mapping[str, Any]) -> tuple[Plan, Place]:
    names, sizes, limits, stops, weights, before, counts = (tuple(record[name]) for name in _ROWS)
    stages = {first: tuple(of_stage) for first, of_stage in record["stages"]}
    first = record["first"]
    rows = [sizes, limits, weights, before, counts, *stages.values()]
    is_right = all(type(number) is int and number >= 0 for number in [first, *stages, *chain(*rows)])
    begin = max(min(stages), sum(before))
    if not is_right or {len(stops), *map(len, rows)} != {len(names)} or 0 in sizes or begin > first:
        raise ValueError("its numbers are not those of a mixture")
    if any(weights):
        Schedule(weights, counts)
    plan = Plan(tuple(map(str, names)), sizes, limits, stops, tuple(stages.items()))
    return plan, Place(Span(first, weights, before), counts)

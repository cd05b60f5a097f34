"""``crius data mix show``: what a run will read of each source of its mixture, by arithmetic."""

from pathlib import Path
from typing import Any

from crius.config.run import RunConfig
from crius.data.mixture import MixedSource, Place, Plan, Walk
from crius.data.samples import SampleSource
from crius.errors import ConfigError
from crius.tools.data_audit.repeats import repeats_of
from crius.train.inputs import open_run_corpus, run_batch_sizes


def plan_of(config: RunConfig, data_parallel_ranks: int, run_dir: Path | None) -> dict[str, Any]:
    """What a run reads from its first step to its end.

    Returns:
        ``sizes``: sequences, tokens and labels of each source in one epoch, by name; ``spans``: first and last step of
        each span of constant weights, and its sources, with share, sequences, epochs since the start of the run, and
        whether they end there; ``validation``: see ``repeats_of``.

    Raises:
        ConfigError: the run has no mixture.
        DataError: its data cannot be read.
    """
    if not config.data.mix:
        raise ConfigError("the run has no mixture.", where="data.mix", fix="give a TOML file with [[data.mix]]")
    corpus = open_run_corpus(config, data_parallel_ranks, run_dir)
    source = corpus.train
    assert isinstance(source, MixedSource)
    batch = run_batch_sizes(config, data_parallel_ranks).total
    walk = Walk(source.plan)
    walk.seek(config.training.steps * batch)
    sizes = {}
    for name, one in source.sources.items():
        tokens = one.num_samples * one.seq_len
        labels = tokens
        if isinstance(one, SampleSource):
            tokens = one.num_tokens
            labels = one.num_targets
        sizes[name] = {"sequences": one.num_samples, "tokens": tokens, "labels": labels}
    spans = [
        {
            "first_step": end.span.first // batch + 1,
            "last_step": -(-end.sample // batch),
            "sources": _sources(source.plan, end),
        }
        for end in walk.ends()
        if sum(end.counts)
    ]
    return {"sizes": sizes, "spans": spans, "validation": repeats_of(source.sources, corpus.held_out)}


def _sources(plan: Plan, end: Place) -> list[dict[str, Any]]:
    rows = zip(plan.names, end.span.weights, end.counts, end.totals, plan.sizes, plan.limits, strict=True)
    return [
        {
            "name": name,
            "share": weight / sum(end.span.weights),
            "sequences": count,
            "epochs": total / size,
            "ends": 0 < limit <= total,
        }
        for name, weight, count, total, size, limit in rows
        if weight
    ]


def lines_of(plan: dict[str, Any]) -> list[str]:
    """The result of ``plan_of`` as text."""
    lines = [f"{'source':<16}{'sequences':>14}{'tokens':>18}{'labels':>18}"]
    for name, size in plan["sizes"].items():
        lines.append(f"{name:<16}{size['sequences']:>14,}{size['tokens']:>18,}{size['labels']:>18,}")
    for span in plan["spans"]:
        lines.append(f"steps {span['first_step']:,} to {span['last_step']:,}")
        for one in span["sources"]:
            share = f"share {one['share']:.4f}, {one['sequences']:,} sequences, {one['epochs']:.2f} epochs"
            end = f", ends in step {span['last_step']:,}" if one["ends"] else ""
            lines.append(f"  {one['name']:<14} {share} at the end{end}")
    for name, one in plan["validation"].items():
        counts = f"{one['in_training']:,} of {one['documents']:,} texts also stand in the training data"
        if not one["documents"]:
            counts = "no whole text is held out"
        lines.append(f"validation {name}: {counts}")
    return lines

"""``crius data mix show``: what a run will read of each source of its mixture, by arithmetic."""

from pathlib import Path
from typing import Any

from crius.config.run import RunConfig
from crius.data.mixed import MixedSource
from crius.data.mixture import Place, Walk
from crius.data.samples import SampleSource
from crius.errors import ConfigError
from crius.train.inputs import end_sample, open_run_corpus, run_batch_sizes


def plan_of(config: RunConfig, data_parallel_ranks: int, run_dir: Path | None) -> dict[str, Any]:
    """What a run reads from its first step to its end.

    Returns:
        ``sizes``: sequences, tokens and labels of each source in one epoch, by name; ``spans``: first and last step of
        each span of constant weights, and its sources, with share, sequences, epochs since the start of the run, and
        whether they end there.

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
    end = end_sample(config, corpus, batch) or config.training.steps * batch
    sizes = {}
    for name, one in source.sources.items():
        tokens = one.num_tokens if isinstance(one, SampleSource) else one.num_samples * one.seq_len
        labels = one.num_targets if isinstance(one, SampleSource) else tokens
        sizes[name] = {"sequences": one.num_samples, "tokens": tokens, "labels": labels}
    spans = [
        {
            "first_step": place.span.first // batch + 1,
            "last_step": -(-place.sample // batch),
            "sources": _sources(source, place),
        }
        for place in Walk(source.plan).spans_to(end)
        if sum(place.counts)
    ]
    return {"sizes": sizes, "spans": spans}


def _sources(source: MixedSource, place: Place) -> list[dict[str, Any]]:
    plan = source.plan
    rows = zip(plan.names, place.span.weights, place.counts, place.totals, plan.sizes, plan.limits, strict=True)
    return [
        {
            "name": name,
            "share": weight / sum(place.span.weights),
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
            end = f", ends in step {span['last_step']:,}" if one["ends"] else ""
            share = f"share {one['share']:.4f}, {one['sequences']:,} sequences"
            lines.append(f"  {one['name']:<14} {share}; {one['epochs']:.2f} epochs{end}")
    return lines

"""``crius data show``: prints the sequences that a run trains on, or trained on in a step."""

from collections.abc import Sequence
from pathlib import Path

from crius.config.run import RunConfig
from crius.data.corpus import Corpus
from crius.data.sample_log import Attempt, samples_path, source_digest
from crius.data.show import ShownDocument, read_shown
from crius.errors import ConfigError, DataError
from crius.tools.data_audit.audit import read_logs, samples_of
from crius.train.inputs import end_sample, open_run_data, run_batch_sizes
from crius.untrusted import HUGE, records_below


def show(
    config: RunConfig, data_parallel_ranks: int, run_dir: Path | None, samples: Sequence[int], step: int
) -> dict[int, list[ShownDocument]]:
    """The documents of samples of a run, by sample id.

    Args:
        config: the run, resolved.
        data_parallel_ranks: data-parallel ranks of the run.
        run_dir: its folder, whose log has the samples of each step; None: the run has not started.
        samples: sample ids.
        step: step whose samples are shown too; 0: none.

    Raises:
        ConfigError: there is no such step or sample.
        DataError: the data of the run has changed, or cannot be read.
    """
    config, corpus = open_run_data(config, data_parallel_ranks, run_dir)
    end = end_sample(config, corpus, run_batch_sizes(config, data_parallel_ranks).total)
    attempt = None
    if step:
        logged = _logged(run_dir, step) if run_dir else None
        attempt, found = logged or (None, _planned(config, data_parallel_ranks, run_dir, step, end))
        samples = [*samples, *found]
    _check_same_data(corpus, run_dir, attempt)
    outside = [sample for sample in samples if sample < 0 or (end and sample >= end)]
    if outside:
        why = f"the run has samples 0 to {end - 1:,}" if end else "they count from 0"
        raise ConfigError(f"there is no sample {outside[0]}.", where="--sample", why=why)
    if corpus.train.num_shards:
        return _from_stream(corpus, samples)
    return read_shown(corpus.train, samples, corpus.tokenizer)


def _logged(run_dir: Path, step: int) -> tuple[Attempt, list[int]] | None:
    """The attempt whose step counts, and its samples; None if the run wrote no log."""
    if not samples_path(run_dir, 0).exists():
        return None
    logs = read_logs(run_dir)
    starts = sorted(logs[0].starts.values(), key=lambda start: start.attempt)
    # an attempt that starts after step s repeats the later steps of earlier attempts
    owner = next((start for start in reversed(starts) if start.after < step), None)
    found = samples_of(logs, owner.attempt, step) if owner else []
    if owner is None or not found:
        raise ConfigError(
            f"step {step} is not in the sample log.",
            where=f"--step, {samples_path(run_dir, 0)}",
            why="the run has not reached it, or resumed from an earlier one",
            fix="crius data audit RUN shows the steps of the log; --sample I shows any sample",
        )
    return owner, found


def _planned(config: RunConfig, data_parallel_ranks: int, run_dir: Path | None, step: int, end: int) -> range:
    """The samples of a step of a run without a log, which reads one step after the other from sample 0."""
    if step < 1 or step > config.training.steps:
        raise ConfigError(f"there is no step {step}.", where="--step", why=f"the run has {config.training.steps} steps")
    size = run_batch_sizes(config, data_parallel_ranks).total
    if run_dir is not None:
        size = _batch_of_metrics(run_dir, config.training.seq_len) or size
    return range((step - 1) * size, min(step * size, end) if end else step * size)


def _batch_of_metrics(run_dir: Path, seq_len: int) -> int:
    """Sequences per step, from the tokens of the first record in metrics.jsonl; 0 without a record."""
    try:
        record = next(one for one in records_below(run_dir, "metrics.jsonl", HUGE) if one and "tokens" in one)
        return int(record["tokens"]) // int(record["step"]) // seq_len
    except (OSError, ValueError, KeyError, TypeError, StopIteration, ZeroDivisionError):
        return 0


def _check_same_data(corpus: Corpus, run_dir: Path | None, attempt: Attempt | None) -> None:
    """Refuse data in which the run's sample ids mean other sequences."""
    if run_dir is not None and attempt is None and samples_path(run_dir, 0).exists():
        starts = read_logs(run_dir)[0].starts
        attempt = starts[max(starts)] if starts else None
    if attempt and attempt.source != source_digest(corpus.train.identity):
        raise DataError(
            f"attempt {attempt.attempt} of the run read other data: the same numbers are other samples.",
            where=str(samples_path(run_dir, 0)) if run_dir else "",
            why="files, tokenizer, seed or settings of the data have changed; run.toml has those of the newest attempt",
            fix="restore the files",
        )


def _from_stream(corpus: Corpus, samples: Sequence[int]) -> dict[int, list[ShownDocument]]:
    """Documents of a stream, which is read from its start: the samples of a shard come in order."""
    source = corpus.train
    found = dict[int, list[ShownDocument]]()
    for shard in sorted({sample % source.num_shards for sample in samples}):
        wanted = {sample for sample in samples if sample % source.num_shards == shard}
        for sample in range(shard, max(wanted) + 1, source.num_shards):
            if sample in wanted:
                found |= read_shown(source, [sample], corpus.tokenizer)
            else:
                source.read([sample])
    return dict(sorted(found.items()))

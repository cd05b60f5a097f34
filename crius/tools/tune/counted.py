"""Numbers for ``training.epochs auto`` and ``training.global_batch_size auto``."""

from collections.abc import Collection, Mapping
from typing import Any

from crius.config.pipeline import microbatch_unit
from crius.config.resolve import batch_unit
from crius.config.run import RunConfig, replace_fields
from crius.errors import ConfigError
from crius.tools.tune.choices import schedule_for
from crius.train.inputs import open_run_corpus, run_batch_sizes

EPOCHS = "training.epochs"
BATCH = "training.global_batch_size"


def unit_of(config: RunConfig, ranks: int) -> int:
    """Sequences of which a batch that is chosen is a multiple."""
    return batch_unit(config.training, ranks, microbatch_unit(config.parallelism))


def counted(
    config: RunConfig, names: Collection[str], ranks: int, saved: Mapping[str, Any]
) -> tuple[dict[str, int], str]:
    """Values of settings that are ``auto``, from the sequences of the data, and a line that says so.

    Args:
        config: the run; the settings of ``names`` have values that are not used.
        names: settings that are ``auto``.
        ranks: its data-parallel ranks.
        saved: settings of the checkpoint that it resumes from, which keeps its numbers; empty: there is none.

    Raises:
        ConfigError: the number of sequences is not known.
        DataError: the data cannot be used.
    """
    if config.data.source == "huggingface":
        what = f"{' and '.join(sorted(names))} auto needs the number of sequences, which a stream does not tell."
        raise ConfigError(what, where="--data.source huggingface", fix="give numbers, or a local copy of the data")
    unit = unit_of(config, ranks)
    known = {name: max(0, saved.get(name, 0)) for name in names}
    batch = known[BATCH] if BATCH in names else run_batch_sizes(config, ranks).total
    smallest = replace_fields(config, {BATCH: batch or unit})
    sequences = open_run_corpus(smallest, ranks).train.num_samples
    batch, epochs, steps = schedule_for(sequences, unit, batch, known.get(EPOCHS, max(0, config.training.epochs)))
    values = {name: number for name, number in ((EPOCHS, epochs), (BATCH, batch)) if name in names}
    said = ", ".join(f"{name} {number}" for name, number in values.items())
    length = f"{steps:,} steps" if EPOCHS in names else "a step"
    return values, f"auto: {said}: {length} of {batch}, from {sequences:,} sequences an epoch"

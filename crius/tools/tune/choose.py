"""Choose the settings of a run for a model and conversations, one after the other."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from crius.config.data import DataConfig
from crius.config.facts import Facts
from crius.data.chat.conversations import Conversation, read_conversations
from crius.data.documents import find_files
from crius.data.samples import SampleSource
from crius.errors import ConfigError, DataError, OutOfMemoryError
from crius.interop.context import longest_context
from crius.interop.weights import open_weights
from crius.tokens.tokenizer import Tokenizer
from crius.tools.tune.choices import (
    LEAST_STEPS,
    MOST_BATCH,
    RANK,
    Choices,
    held_out_fraction,
    learning_rate,
    lengths_of,
    schedule_for,
    seq_len_for,
    trains_all,
)
from crius.tools.tune.counted import BATCH, EPOCHS, unit_of
from crius.train.inputs import open_run_corpus, open_run_data
from crius.units import GIB

SEQ_LEN = "training.seq_len"
ADAPTERS: dict[str, tuple[object, str]] = {
    "lora.rank": (RANK, ""),
    "lora.alpha": (2 * RANK, "twice the rank, as usual"),
}
WAYS: tuple[dict[str, tuple[object, str]], ...] = (ADAPTERS, ADAPTERS | {"lora.base": ("nf4", "in 4 bits it fits")})
"""Ways to train fewer weights: settings, and why."""

_MOST_TOKENS = 1 << 20
"""Tokens of a sequence while the conversations are measured: none is cut before its answer."""

_NO_CONVERSATIONS = "these settings give no conversations."
_OTHER_DATA = "crius train, which takes every kind of data"

LookAt = Callable[[Sequence[str]], Facts]
Memory = Callable[[Sequence[str]], tuple[float, float]]


def corpus_of(facts: Facts) -> tuple[SampleSource, SampleSource, Tokenizer]:
    """Conversations to train on, those that are held out, and the tokenizer.

    Raises:
        ConfigError: the data has no conversations.
        DataError: it cannot be used.
    """
    corpus = open_run_data(facts.config, facts.data_parallel_ranks)[1]
    held = corpus.held_out.get("")
    if not isinstance(held, SampleSource):
        what = "some conversations are held out, to show what the model learned."
        raise ConfigError(what, where="command line", fix="leave out --validation.interval 0, or crius train")
    return _conversations(corpus.train), held, corpus.tokenizer


def _conversations(source: object) -> SampleSource:
    if isinstance(source, SampleSource):
        return source
    raise ConfigError(_NO_CONVERSATIONS, where="command line", fix=_OTHER_DATA)


def _whole_lengths(facts: Facts) -> npt.NDArray[np.int64]:
    """Tokens of each conversation.

    Raises:
        DataError: there is only one.
    """
    lengths = lengths_of(_conversations(open_run_corpus(facts.config, facts.data_parallel_ranks).train))
    if len(lengths) == 1:
        what = "there is one conversation, but another one is held out, to show what the model learned."
        raise DataError(what, where="--data.path", fix="more conversations")
    return lengths


def about_answers(data: DataConfig) -> list[str]:
    """A line that says how many answers are empty, if some are.

    Raises:
        DataError: all are.
    """
    if data.source not in ("jsonl", "csv", "parquet"):
        return []
    number = 0
    empty: list[str] = []
    for row in read_conversations(data, find_files(data)):
        if isinstance(row, Conversation):
            number += len(row.answers)
            empty += [row.where for text in row.answers if not text.strip()]
    if not empty:
        return []
    if len(empty) == number:
        what = f"all {number:,} answers of the assistant are empty."
        fix = "conversations with answers; --data.columns PROMPT --data.columns COMPLETION names their columns"
        raise DataError(what, where=empty[0], why="the model would learn to say nothing", fix=fix)
    return [
        f"  {len(empty):,} of {number:,} answers are empty, first {empty[0]}: the model learns to say nothing there"
    ]


def choose(
    named: Sequence[str], chosen: Choices, look_at: LookAt, memory: Memory, new_ids: Sequence[str] = ()
) -> tuple[Facts, list[str]]:
    """Choose what is open.

    Args:
        named: words of ``crius train`` that are fixed: model, data, and what was given.
        chosen: gets the choices.
        look_at: facts about the run of such words.
        memory: bytes that a rank of it needs, and bytes that a rank may use.
        new_ids: tokens that the model does not know yet.

    Returns:
        The facts about the run, and its words.

    Raises:
        CriusError: the run is not possible, or nothing fits the memory.
    """
    if chosen.given.get("data.format") == "documents":
        raise ConfigError(_NO_CONVERSATIONS, where="--data.format", fix=_OTHER_DATA)
    chosen.take("data.format", "chat", "conversations are tuned on")
    words = [*named, *chosen.words()]
    facts = look_at([*words, f"--{BATCH}=-1"])
    chosen.notes += about_answers(facts.config.data)
    unit = unit_of(facts.config, facts.data_parallel_ranks)
    for name, value in (
        ("data.source", facts.config.data.source),
        ("model.attention_mask", facts.config.model.attention_mask),
    ):
        chosen.take(name, value, "as the data looks")
    whole = [f"--{BATCH}", str(unit), f"--{SEQ_LEN}", str(_MOST_TOKENS), "--data.no_packing"]
    lengths = _whole_lengths(look_at([*words, *whole, "--validation.interval", "0"]))
    fraction = held_out_fraction(len(lengths))
    why = f"{max(1, round(fraction * len(lengths))):,} of {len(lengths):,} conversations are never trained on"
    chosen.take("validation.fraction", fraction, why)
    context = longest_context(open_weights(facts.config.checkpoint.init_from))
    chosen.take(SEQ_LEN, *seq_len_for(lengths, context))
    facts = look_at([*named, *chosen.words(), f"--{BATCH}", str(unit)])
    train_set = corpus_of(facts)[0]
    sequences = train_set.num_samples
    given = chosen.given
    batch, epochs, steps = schedule_for(sequences, unit, int(given.get(BATCH, 0)), int(given.get(EPOCHS, 0)))
    if "training.steps" in given:
        steps = facts.config.training.steps
    else:
        why = f"usual, more for {LEAST_STEPS} steps; {steps:,} steps of {batch}, from {sequences:,} sequences an epoch"
        chosen.take(EPOCHS, epochs, why)
    chosen.take(BATCH, batch, f"the most sequences a step, up to {MOST_BATCH}, that give {LEAST_STEPS} steps")
    weights = facts.model.num_parameters
    takes_all, why = trains_all(weights, train_set.num_targets)
    if new_ids:
        takes_all = True
        why = "new ids have rows of the embedding, which adapters do not train"
    choose_weights(named, chosen, weights, memory, why, takes_all=takes_all, only_all=bool(new_ids))
    every = max(5, steps // 5)
    chosen.take("lr_scheduler.warmup_steps", max(2, steps // 20), "a twentieth of the steps")
    chosen.take("validation.interval", every, "five times")
    chosen.take("checkpoint.interval", every, "as often")
    words = [*named, *chosen.words()]
    return look_at(words), words


def choose_weights(
    named: Sequence[str], chosen: Choices, weights: int, memory: Memory, why: str, *, takes_all: bool, only_all: bool
) -> None:
    """Choose all weights, adapters, or adapters on a base in 4 bits: the first that fits the memory.

    Args:
        named, chosen, memory: see ``choose``.
        weights: number of weights.
        why: reason for ``takes_all``.
        takes_all: whether all weights are tried first.
        only_all: whether nothing else is tried.

    Raises:
        OutOfMemoryError: none of them fits.
    """
    ways = list(WAYS)
    if "lora.rank" in chosen.given or only_all:
        ways = [{}]
    elif takes_all:
        ways = [{}, *WAYS]
    tried = []
    for way in ways:
        trial = Choices(chosen.given, dict(chosen.values))
        for name, (value, _) in way.items():
            trial.take(name, value, "")
        needed, usable = memory([*named, *trial.words()])
        tried.append(f"{needed / GIB:,.1f}")
        if needed <= usable:
            break
    else:
        raise OutOfMemoryError(
            f"nothing fits into {usable / GIB:,.1f} GiB of memory: {', '.join(tried)} GiB are needed.",
            where="command line",
            fix=f"a smaller model, or a smaller --{SEQ_LEN}",
        )
    why += f"; {needed / GIB:,.1f} of {usable / GIB:,.1f} GiB"
    for name, (value, reason) in way.items():
        chosen.take(name, value, reason or why)
    rate, usual = learning_rate(weights, adapters=bool(way) or "lora.rank" in chosen.given)
    chosen.take("optimizer.lr", rate, usual if way else f"{usual}; {why}")

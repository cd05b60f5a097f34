"""Rules about the corpus: which settings belong to which source and format, and how often the corpus is read."""

import functools
import shlex

from crius.config.data import MEANINGS, SOURCES
from crius.config.facts import Facts, Rule, Violations
from crius.config.rules_mixture import (
    entries_are_right,
    mixture_settings_have_effect,
    mixture_weights_are_right,
)

CHAT_SOURCES = ("jsonl", "csv", "parquet", "tokens")
"""Sources whose rows can be conversations; a folder of tokens was written from such files."""


def _of_one_corpus(rule: Rule) -> Rule:
    """``rule``, for runs without a mixture."""

    @functools.wraps(rule)
    def checked(facts: Facts) -> Violations:
        return iter(()) if facts.config.data.mix else rule(facts)

    return checked


_OF_CHAT = ("data.columns", "data.train_on", "data.train_on_end_of_turn")


@_of_one_corpus
def data_path_given(facts: Facts) -> Violations:
    """Sources that read files have a path; the standard library needs none."""
    data = facts.config.data
    if facts.is_dry:
        return  # nothing is read
    if data.source == "stdlib" and data.path:
        yield facts.error(
            f"data.path {', '.join(data.path) or '(empty)'} has no effect with data.source stdlib.",
            "data.path",
            fix="--data.source text or jsonl",
        )
    elif data.source != "stdlib" and not data.path:
        yield facts.error(
            f"data.source {data.source} needs data.path.",
            "data.source",
            fix=f"e.g. --data.source {data.source} --data.path PATH",
        )
    elif data.source in ("tokens", "huggingface") and len(data.path) > 1:
        yield facts.error(
            f"data.source {data.source} takes one data.path, not {len(data.path)}.",
            "data.path",
            fix=f"--data.path {data.path[0]}",
        )


def validation_sets_have_names(facts: Facts) -> Violations:
    """Several validation sets have a name each, and data."""
    name = "validation.path"
    sets = facts.config.validation.sets
    fix = "--validation.path books=PATH --validation.path code=PATH; ./PATH where a path itself has a ="
    if "" in sets and len(sets) > 1:
        yield facts.error(f"{name} {' '.join(sets[''])} is in no set, others are.", name, fix=fix)
    for title, paths in sets.items():
        if title and "" in paths:
            yield facts.error(f"{name} {title}= names no data.", name, fix=fix)
    source = facts.config.data.source
    for title, paths in sets.items():
        if source in ("tokens", "huggingface") and len(paths) > 1:
            yield facts.error(
                f"data.source {source} takes one {name} for a set, not {len(paths)}.",
                name,
                fix=f"--{name} {title}={paths[0]}" if title else f"--{name} {paths[0]}",
            )


@_of_one_corpus
def data_flags_have_effect(facts: Facts) -> Violations:
    """A setting of one kind of source is not given on the command line for another source."""
    source = facts.config.data.source
    like_jsonl = source if source in SOURCES else "jsonl"  # a source of a package reads files too
    owners = {
        "text_field": ("jsonl", "csv", "parquet", "huggingface"),
        "bad_rows": ("jsonl", "csv", "parquet"),
        "name": ("huggingface",),
        "split": ("huggingface",),
        "virtual_shards": ("huggingface",),
        "shuffle": ("stdlib", "text", "jsonl", "csv", "parquet", "tokens"),
    }
    for name, sources in owners.items():
        if like_jsonl not in sources:
            fix = f"leave it out, or --data.source {sources[0]}"
            yield from facts.no_effect([f"data.{name}"], f" with data.source {source}", fix)


def virtual_shards_split(facts: Facts) -> Violations:
    """Each rank reads whole virtual shards of a stream."""
    shards = facts.config.data.virtual_shards
    ranks = facts.data_parallel_ranks
    if facts.config.data.source == "huggingface" and min(shards, ranks) >= 1 and shards % ranks:
        yield facts.error(
            f"data.virtual_shards {shards} is not a multiple of the {ranks} data-parallel ranks.",
            "data.virtual_shards",
            why="each rank reads whole shards of a stream, so that no rank tokenises text of another rank",
            fix=f"--data.virtual_shards {-(-shards // ranks) * ranks}",
        )


def chat_reads_conversations(facts: Facts) -> Violations:
    """Conversations come from one or two columns of files with rows, and the tokenizer has a chat template."""
    config, data = facts.config, facts.config.data
    if data.format != "chat" or facts.is_dry:
        return
    if data.source not in CHAT_SOURCES:
        yield facts.error(
            f"data.format chat does not go with data.source {data.source}.",
            "data.format",
            why="conversations are rows of files",
            fix=f"--data.source {' or '.join(CHAT_SOURCES)}, or --data.format documents",
        )
    if config.tokenizer.path == "byte":
        why = "weights of --checkpoint.init_from come with their tokenizer; without it all weights start at random"
        yield facts.error(
            "data.format chat needs a tokenizer with a chat template; tokenizer.path byte has none.",
            "tokenizer.path",
            why="" if config.checkpoint.init_from else why,
            fix="a model that has both: --checkpoint.init_from; or --tokenizer.path DIR, with tokenizer.json and "
            "chat_template.jinja",
        )
    names = data.named_columns
    if len(names) > 2 or len({*names}) < len(names):
        yield facts.error(
            f"data.columns {', '.join(names)} must be one or two columns.",
            "data.columns",
            why="a conversation is a list of messages, or a prompt and its completion",
            fix=" ".join(f"--data.columns {shlex.quote(name)}" for name in dict.fromkeys(names[:2])),
        )
    for name, meaning in data.meanings.items():
        if meaning not in MEANINGS:
            yield facts.error(
                f"data.columns {name}={meaning} has no known meaning.",
                "data.columns",
                why=f"a name of the files can stand for {', '.join(MEANINGS)}",
                fix=f"--data.columns {meaning}={name}" if name in MEANINGS else f"e.g. --data.columns {name}=messages",
            )


@_of_one_corpus
def chat_flags_have_effect(facts: Facts) -> Violations:
    """A setting of one format is not given on the command line for the other format."""
    if facts.config.data.format == "chat":
        yield from facts.no_effect(
            ("data.text_field", "data.add_bos", "data.add_eos"),
            " with data.format chat",
            why="the chat template writes every token of a conversation",
            fix="leave it out, or --data.format documents",
        )
    else:
        fix = "leave it out, or --data.format chat"
        yield from facts.no_effect(_OF_CHAT, " with data.format documents", fix)


def length_is_said_once(facts: Facts) -> Violations:
    """A run ends after its steps or after whole epochs."""
    epochs, steps = facts.config.training.epochs, facts.config.training.steps
    if epochs != -1 and epochs < 1:
        return  # ``ranges`` reports it
    # if two sources gave them, the stronger one has won, and the other setting has its default or follows from the plan
    if epochs > 0 and facts.origin("training.steps") == facts.origin("training.epochs") != "default":
        yield facts.error(
            f"training.epochs {epochs} and training.steps {steps} both give the length of the run.",
            "training.epochs",
            "training.steps",
            fix="leave out one of them",
        )
    if epochs > 0 and facts.config.data.source == "huggingface":
        yield facts.error(
            f"training.epochs {epochs} does not go with a stream.",
            "training.epochs",
            why="the number of sequences of a stream is not known before it was read",
            fix="--training.epochs -1 and a number of steps, or a local copy of the data",
        )


def packed_samples_keep_apart(facts: Facts) -> Violations:
    """Conversations in one sequence do not see each other."""
    data, mask = facts.config.data, facts.config.model.attention_mask
    if data.format == "chat" and data.packing and mask != "document":
        yield facts.error(
            f"packed conversations see those before them in their sequence with model.attention_mask {mask}.",
            "data.packing",
            "model.attention_mask",
            why="the mask belongs to the model, so the data does not change it by itself",
            fix="--model.attention_mask document, or --data.no_packing",
        )


@_of_one_corpus
def sample_flags_have_effect(facts: Facts) -> Violations:
    """Packing and too_long are for conversations only, and not for a folder of tokens, which already has its masks."""
    data = facts.config.data
    if data.format != "chat":
        yield from facts.no_effect(
            ("data.packing", "data.too_long"),
            " with data.format documents",
            why="documents follow one another without padding, and a long one continues in the next sequence",
            fix="leave it out, or --data.format chat",
        )
    elif data.source == "tokens":
        why = "crius data prepare has applied them to the folder"
        yield from facts.no_effect(_OF_CHAT, " with data.source tokens", "leave it out", why)


def mixture_entries_are_right(facts: Facts) -> Violations:
    """Each entry of data.mix has a name, data and a share of its own, and none of them is there twice."""
    yield from entries_are_right(facts, (chat_reads_conversations, packed_samples_keep_apart))


CORPUS_RULES = (
    data_flags_have_effect,
    chat_reads_conversations,
    chat_flags_have_effect,
)
"""Rules for the sources that ``crius data prepare`` reads."""

DATA_RULES = (
    data_path_given,
    validation_sets_have_names,
    *CORPUS_RULES,
    virtual_shards_split,
    length_is_said_once,
    packed_samples_keep_apart,
    sample_flags_have_effect,
    mixture_entries_are_right,
    mixture_weights_are_right,
    mixture_settings_have_effect,
)

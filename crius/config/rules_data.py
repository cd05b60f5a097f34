"""Rules about the corpus: which settings belong to which source and format, and how often the corpus is read."""

import contextlib
import functools
import glob
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from crius.config.data import (
    KINDS,
    MEANINGS,
    ONE_CORPUS,
    SOURCES,
    MixEntry,
    as_keys,
    check_source,
    exact,
    integers,
    read_entry,
    read_stage,
    sums_up,
    tables_of,
)
from crius.config.facts import Facts, Rule, Violations
from crius.errors import ConfigError

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
    config = facts.config
    data = config.data
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
    epochs = facts.config.training.epochs
    steps = facts.config.training.steps
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
    data = facts.config.data
    mask = facts.config.model.attention_mask
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


_Problem = tuple[str, str, str]
"""What is wrong, why, and a fix."""

_DOWNLOAD = 'hf download --repo-type dataset NAME --local-dir DIR, and path = "DIR"'

_EXAMPLE = 'such as name = "web", path = "FILE or FOLDER", weight = 0.5'


def mixture_entries_are_right(facts: Facts) -> Violations:
    """Each entry of data.mix has a name, data and a share of its own, and none of them is there twice."""
    data = facts.config.data
    if data.mix and (given := facts.changed(ONE_CORPUS)):
        fix = f"leave out {given[0]}: each [[data.mix]] has its own path, source, format, field and columns"
        yield facts.error(f"data.mix and {given[0]} both say what the data is.", "data.mix", *given, fix=fix)
    needs_share = data.alpha is None and 1 not in [table.get("from") for table in _tables(data.stage)]
    names: list[str] = []
    paths: dict[str, str] = {}
    for number, text in enumerate(data.mix, start=1):
        where = f"[[data.mix]] {number} ({facts.origin('data.mix')})"
        try:
            entry = read_entry(text)
        except ValueError as error:
            yield ConfigError(f"entry {number} of data.mix {error}.", where=where, fix=_EXAMPLE)
            continue
        problems = [
            *_name_problems(entry, names),
            *_data_problems(entry, paths, facts.is_dry),
            *_share_problems(entry, needs_share),
            *_effect_problems(entry),
        ]
        for what, why, fix in problems:
            yield ConfigError(f"{entry.name or f'entry {number}'} of data.mix {what}.", where=where, why=why, fix=fix)
        names.append(entry.name)
        of_entry = replace(facts, config=replace(facts.config, data=entry.corpus(data)))
        for problem in [*chat_reads_conversations(of_entry), *packed_samples_keep_apart(of_entry)]:
            problem.where = as_keys(f"{where}, {problem.where}")
            problem.fix = as_keys(problem.fix)
            yield problem


def _name_problems(entry: MixEntry, names: Sequence[str]) -> Iterator[_Problem]:
    if not re.fullmatch(r"\w[\w.-]*", entry.name):
        yield f"has the name {entry.name!r}", "", 'name = "web": letters, digits, _, - and .'
    elif entry.name in names:
        yield "has the name of an earlier entry", "reports would mix them up", f'name = "{entry.name}2"'


def _data_problems(entry: MixEntry, paths: dict[str, str], is_dry: bool) -> Iterator[_Problem]:
    """Errors in source and paths; ``paths`` are those of earlier entries, with their names."""
    if entry.source == "huggingface":
        why = "the sizes of all sources must be known before the run"
        yield "is a stream", why, _DOWNLOAD
        return
    try:
        check_source(entry.source or "text", "")
    except ConfigError as error:
        yield f"has source {entry.source}", error.what, error.fix
    if not entry.path and entry.source != "stdlib":
        yield "has no path", "", 'path = "FILE or FOLDER"'
    for path in entry.path:
        expanded = os.path.expanduser(path)
        if not is_dry and not glob.glob(expanded):
            yield f"has path {path}, which does not exist", "", f"correct the path; from the hub: {_DOWNLOAD}"
            continue
        other = paths.setdefault(os.path.realpath(expanded), entry.name)
        if other != entry.name:
            why = "its sequences would be read twice, with two counts of epochs"
            yield f"reads {path}, as {other} does", why, "one entry for it, with the sum of both weights"


def _share_problems(entry: MixEntry, needs_share: bool) -> Iterator[_Problem]:
    given = [kind for kind in KINDS if getattr(entry, kind) is not None]
    if len(given) > 1 or len(given) < needs_share:
        yield f"has {' and '.join(given) or 'no weight'}", "", "give it one of weight, tokens and epochs"


def _effect_problems(entry: MixEntry) -> Iterator[_Problem]:
    is_chat = entry.format == "chat"
    if entry.field and (is_chat or entry.source in ("stdlib", "text", "tokens")):
        yield f'has field = "{entry.field}", which has no effect', "it names the text of a row", "leave it out"
    if entry.columns and not is_chat:
        yield "has columns, which have no effect", "they name the parts of a conversation", "leave them out"


def mixture_weights_are_right(facts: Facts) -> Violations:
    """The weights of data.mix are shares or a ratio, and stages of data.stage begin one after the other."""
    data = facts.config.data
    tables = _tables(data.mix)
    kinds = sorted({kind for table in tables for kind in KINDS if kind in table})
    said = " and ".join(kinds)
    if data.alpha is not None and kinds:
        what = f"data.alpha gives the weights, and entries of data.mix have {said}."
        yield facts.error(what, "data.alpha", "data.mix", fix="leave out one of them")
    elif "weight" in kinds and len(kinds) > 1:
        why = "a weight is a share of the run, tokens and epochs are sizes"
        fix = "weights for all entries, or tokens and epochs for all"
        yield facts.error(f"entries of data.mix have {said}.", "data.mix", why=why, fix=fix)
    last = 0
    with contextlib.suppress(ValueError):  # ``mixture_entries_are_right`` reports it
        shares = [(entry.name, entry.weight) for entry in map(read_entry, data.mix) if entry.weight]
        yield from _sum_problems(facts, shares, "data.mix")
    for number, text in enumerate(data.stage, start=1):
        try:
            first, weights = read_stage(text)
        except ValueError as error:
            fix = "such as from = 1000, weights = { web = 0.2, code = 0.8 }"
            yield facts.error(f"entry {number} of data.stage {error}.", "data.stage", fix=fix)
            continue
        name = f"the stage from {first} of data.stage"
        if first <= last:
            yield facts.error(f"{name} comes after one from {last}.", "data.stage", fix="order them by their steps")
        last = max(last, first)
        names = [table.get("name") for table in tables]
        if unknown := [one for one in weights if one not in names]:
            fix = f"one of {', '.join(map(str, names)) or 'the names in [[data.mix]]'}"
            yield facts.error(f"{name} has {unknown[0]}, which data.mix lacks.", "data.stage", fix=fix)
        yield from _sum_problems(facts, [*weights.items()], "data.stage")


def _sum_problems(facts: Facts, weights: Sequence[tuple[str, float]], name: str) -> Violations:
    numbers = [weight for _, weight in weights]
    if weights and not sums_up(numbers):
        ratio = zip(weights, integers(list(map(exact, numbers))), strict=True)
        yield facts.error(
            f"the weights {', '.join(f'{one} {weight:g}' for one, weight in weights)} do not sum to 1.",
            name,
            why="they are shares that sum to 1, or whole numbers that stand for a ratio",
            fix=f"the same ratio: {', '.join(f'{one} {number}' for (one, _), number in ratio)}",
        )


def mixture_settings_have_effect(facts: Facts) -> Violations:
    """Stages, alpha, epochs and validation data go with a mixture, or with one corpus."""
    data = facts.config.data
    given = [] if data.mix else facts.changed(["data.stage", "data.alpha"])
    for name in given:
        yield facts.error(f"{name} has no effect without data.mix.", name, fix="give [[data.mix]], or leave it out")
    if data.alpha is not None and not 0 <= data.alpha <= 10:
        yield facts.error(f"data.alpha {data.alpha:g} is not between 0 and 10.", "data.alpha", fix="--data.alpha 0.5")
    if data.mix and facts.config.training.epochs > 0:
        why = "each source of a mixture has epochs of its own"
        fix = "--training.epochs -1 and a number of steps, or epochs in each [[data.mix]]"
        yield facts.error("training.epochs does not go with data.mix.", "training.epochs", why=why, fix=fix)
    names = [table.get("name") for table in _tables(data.mix)]
    for title in facts.config.validation.sets if names and facts.config.validation.path else ():
        if title not in names:
            why = "validation data of a mixture is read as the source of its name"
            fix = f"give it the name of its source, as {names[0]}=PATH"
            what = f"validation.path has the set {title!r}, which data.mix lacks."
            yield facts.error(what, "validation.path", why=why, fix=fix)


def _tables(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [table for table in tables_of(texts) if isinstance(table, dict)]


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

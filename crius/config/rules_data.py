"""Rules about the corpus: what belongs to which source and to which format."""

import shlex

from crius.config.data import SOURCES
from crius.config.facts import Facts, Rule, Violations, without_effect
from crius.errors import ConfigError

CHAT_SOURCES = ("jsonl", "parquet")
"""Sources whose rows can be conversations."""

_OF_CHAT = ("columns", "train_on", "train_on_end_of_turn")


def data_path_given(facts: Facts) -> Violations:
    """Sources that read files say which; the standard library needs none."""
    data = facts.config.data
    if data.source == "stdlib" and data.path:
        yield ConfigError(
            f"data.path {', '.join(data.path)} has no effect with data.source stdlib.",
            where=facts.flag("data.path"),
            fix="--data.source text or jsonl",
        )
    elif data.source != "stdlib" and not data.path:
        yield ConfigError(
            f"data.source {data.source} needs data.path.",
            where=facts.flag("data.source"),
            fix=f"e.g. --data.source {data.source} --data.path PATH",
        )
    elif data.source in ("tokens", "huggingface") and len(data.path) > 1:
        yield ConfigError(
            f"data.source {data.source} takes one data.path, not {len(data.path)}.",
            where=facts.flag("data.path"),
            fix=f"--data.path {data.path[0]}",
        )


def data_flags_have_effect(facts: Facts) -> Violations:
    """What was given on the command line for one kind of source is not given to another."""
    source = facts.config.data.source
    like_jsonl = source if source in SOURCES else "jsonl"  # of a package: it reads files too
    owners = {
        "text_field": ("jsonl", "parquet", "huggingface"),
        "name": ("huggingface",),
        "split": ("huggingface",),
        "virtual_shards": ("huggingface",),
        "shuffle": ("stdlib", "text", "jsonl", "parquet", "tokens"),
    }
    vain = {f"data.{name}": sources[0] for name, sources in owners.items() if like_jsonl not in sources}
    reason = f" with data.source {source}"
    rows = [(name, reason, f"leave it out, or --data.source {owner}") for name, owner in vain.items()]
    return without_effect(facts, rows)


def virtual_shards_split(facts: Facts) -> Violations:
    """Each rank reads whole virtual shards of a stream."""
    data, ranks = facts.config.data, facts.data_parallel_ranks
    if data.source == "huggingface" and data.virtual_shards >= 1 and ranks >= 1 and data.virtual_shards % ranks:
        yield ConfigError(
            f"data.virtual_shards {data.virtual_shards} is no multiple of the {ranks} data-parallel ranks.",
            where=facts.flag("data.virtual_shards"),
            why="each rank reads whole shards of a stream, so that none tokenises what another needs",
            fix=f"--data.virtual_shards {-(-data.virtual_shards // ranks) * ranks}",
        )


def chat_reads_conversations(facts: Facts) -> Violations:
    """Conversations come from files with rows, in one or two columns of them, by a tokenizer that has a template."""
    config, data = facts.config, facts.config.data
    if data.format != "chat":
        return
    if data.source not in CHAT_SOURCES:
        yield ConfigError(
            f"data.format chat does not go with data.source {data.source}.",
            where=facts.flag("data.format"),
            why="conversations are rows of files",
            fix=f"--data.source {' or '.join(CHAT_SOURCES)}, or --data.format documents",
        )
    if config.tokenizer.path == "byte":
        yield ConfigError(
            "data.format chat needs a tokenizer with a chat template; tokenizer.path byte has none.",
            where=facts.flag("tokenizer.path"),
            fix="--tokenizer.path DIR, with tokenizer.json and chat_template.jinja",
        )
    if len(data.columns) > 2 or len({*data.columns}) < len(data.columns):
        yield ConfigError(
            f"data.columns {', '.join(data.columns)} is not one column, or two.",
            where=facts.flag("data.columns"),
            why="a conversation is a list of messages, or a prompt and its completion",
            fix=" ".join(f"--data.columns {shlex.quote(name)}" for name in dict.fromkeys(data.columns[:2])),
        )


def chat_flags_have_effect(facts: Facts) -> Violations:
    """What was given on the command line for one format is not given to the other."""
    is_chat = facts.config.data.format == "chat"
    vain = ("text_field", "add_bos", "add_eos") if is_chat else _OF_CHAT
    reason, other = f" with data.format {facts.config.data.format}", "documents" if is_chat else "chat"
    rows = [(f"data.{name}", reason, f"leave it out, or --data.format {other}") for name in vain]
    why = "the chat template writes every token of a conversation" if is_chat else ""
    return without_effect(facts, rows, why)


DATA_RULES: tuple[Rule, ...] = (
    data_path_given,
    data_flags_have_effect,
    virtual_shards_split,
    chat_reads_conversations,
    chat_flags_have_effect,
)

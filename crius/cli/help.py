"""Output of ``--help``: the common flags, whole sections, or everything. All texts are docstrings."""

import dataclasses
import re
import shutil
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from crius.cli.verbs import HELP_FLAGS, Verb, Verbs
from crius.config.arguments import Setting, alternatives
from crius.config.names import did_you_mean
from crius.config.run import RunConfig
from crius.errors import ConfigError

COMMON = {
    "Model": ("model.name", "model.flavor", "model.from_hf", "checkpoint.init_from"),
    "Data": ("data.source", "data.path", "tokenizer.path", "validation.interval"),
    "Batch": ("training.steps", "training.seq_len", "training.global_batch_size", "training.local_batch_size"),
    "Optimizer": ("optimizer.name", "optimizer.lr", "lr_scheduler.warmup_steps"),
    "Speed and memory": ("training.mixed_precision_param", "activation_checkpoint.mode", "compile.enable"),
    "Layout": (
        "parallelism.data_parallel_shard_degree",
        "parallelism.tensor_parallel_degree",
        "parallelism.context_parallel_degree",
        "parallelism.pipeline_parallel_degree",
        "parallelism.expert_parallel_degree",
    ),
    "Checkpoints and output": ("checkpoint.interval", "job.run_dir", "metrics.log_interval"),
}
"""Settings that a first page of help shows, in groups."""

SECTIONS = {field.name: get_type_hints(RunConfig)[field.name] for field in dataclasses.fields(RunConfig)}
"""Sections of the settings of a run, and their dataclasses."""

ALL = "all"
_WIDTH = 110
_SAYS_NOTHING = ("None", "", "()", "False", "-1")
_METAVARS = {str: "STR", int: "INT", float: "FLOAT", Path: "PATH"}


def help_of(verb: Verb | Verbs, words: Sequence[str]) -> str:
    """The help of a verb or of a group.

    A verb that takes the settings of a run shows its own flags and ``COMMON``, each on one line, unless sections follow
    ``--help``. On all other pages a flag has its own line, with its text indented below; choices and default stand in
    the line of the flag if they fit.

    Args:
        verb: the verb or the group.
        words: what follows it on the command line.

    Raises:
        ConfigError: there is no such section.
    """
    width = min(_WIDTH, max(40, shutil.get_terminal_size().columns))
    name = " ".join(["crius", *verb.words])
    if isinstance(verb, Verbs):
        parts = [f"{name} COMMAND\n", *_paragraphs(verb.about, width), *_members(verb, width)]
        return "\n".join(parts)
    settings = [argument.setting for argument in verb.arguments().values()]
    takes_run = any(setting.name == "recipe" for setting in settings)
    sections = _sections_in(words, name, [*SECTIONS, ALL] if takes_run else [ALL])
    parts = [f"{_usage(verb)}\n", *_paragraphs(verb.about, width)]
    if takes_run and sections:
        parts = [*(parts if ALL in sections else []), *_whole(settings, sections, width)]
    elif takes_run:
        parts += _first_page(settings, width)
    elif settings:
        parts.append(_block("Parameters", settings, width))
    return "\n".join(parts)


def _sections_in(words: Sequence[str], command: str, known: Sequence[str]) -> list[str]:
    """The sections that follow ``--help``."""
    start = next(at for at, word in enumerate(words) if word.partition("=")[0] in HELP_FLAGS)
    sections = [value] if (value := words[start].partition("=")[2]) else []
    for word in words[start + 1 :]:
        if word.startswith("-"):
            break
        sections.append(word)
    for name in sections:
        if name.split(".")[0] not in known:
            raise ConfigError(
                f"no section is called {name}{did_you_mean(name, known) or '.'}",
                where="--help",
                fix=f"{command} --help with one or more of {', '.join(known)}",
            )
    return list(dict.fromkeys(sections))


def _usage(verb: Verb) -> str:
    words = ["crius", *verb.words]
    if any(setting.has_flag for parameter in verb.parameters for setting in parameter.settings):
        words.append("[OPTIONS]")
    for argument in verb.arguments().values():
        setting = argument.setting
        if setting.takes_word:
            word = f"{setting.name.upper()}{'...' if setting.is_list else ''}"
            words.append(word if setting.is_required else f"[{word}]")
    return " ".join(words)


def _paragraphs(text: str, width: int) -> Iterator[str]:
    for paragraph in plain(text).split("\n\n"):
        if filled := " ".join(paragraph.split()):
            yield textwrap.fill(filled, width, break_on_hyphens=False) + "\n"


def _members(group: Verbs, width: int) -> Iterator[str]:
    """The verbs of a group, and what each does."""
    yield "Commands:"
    for member in group:
        yield f"  {' '.join(member.words[len(group.words) :])}"
        yield _indented(plain(member.about).split("\n\n")[0], width)
    if not group.words:
        yield "  --version\n      Print the version."


def _whole(settings: Sequence[Setting], sections: Sequence[str], width: int) -> Iterator[str]:
    """Whole sections, each with a title. ``ALL`` begins with the verb's own flags."""
    wanted = list(SECTIONS) if ALL in sections else sections
    if ALL in sections:
        yield _block("Parameters", [one for one in settings if "." not in one.name], width)
    for section in wanted:
        chosen = [one for one in settings if f"{one.name}.".startswith(f"{section}.")]
        if not chosen:
            parent = section.rpartition(".")[0]
            raise ConfigError(f"no setting is called {section}.", where="--help", fix=f"--help {parent}")
        about = _sentence(SECTIONS[section.split(".")[0]].__doc__ or "")
        yield _block(f"[{section.split('.')[0]}] {about}", chosen, width)


def _first_page(settings: Sequence[Setting], width: int) -> Iterator[str]:
    """The verb's own flags and the common ones, one line per flag, and how to see more."""
    by_name = {setting.name: setting for setting in settings}
    groups: Mapping[str, Sequence[str]] = {"Parameters": [name for name in by_name if "." not in name], **COMMON}
    labels = {name: _label(by_name[name]) for names in groups.values() for name in names}
    column = min(max(map(len, labels.values())), width * 2 // 5)
    for group, names in groups.items():
        yield f"{group}:"
        for name in names:
            setting = by_name[name]
            room = width - max(column, len(labels[name])) - 4
            text = _cut(plain(setting.help), room)
            note = "" if str(setting.default) in _SAYS_NOTHING else f"  [{setting.default}]"
            yield f"  {labels[name]:<{column}}  {text}{note if len(text) + len(note) <= room else ''}"
    yield textwrap.fill(f"Sections: {' '.join(SECTIONS)}.", width)
    more = "--help SECTION prints the flags of a section, --help all prints all. crius config explain KEY explains one."
    yield textwrap.fill(more, width, break_on_hyphens=False)


def _label(setting: Setting) -> str:
    """The flag with the kind of its value, without its negative form."""
    word = setting.name.upper() if setting.takes_word else ""
    flag = f"--{setting.name}" if setting.has_flag else ""
    return " ".join(part for part in (word, flag, "" if word else metavar(setting)) if part)


def metavar(setting: Setting) -> str:
    """The kind of value of a flag, in capitals; empty if it takes none."""
    if setting.is_switch:
        return ""
    hint = get_args(setting.hint)[0] if setting.is_list else setting.hint
    kinds = [kind for kind in alternatives(hint) if kind is not types.NoneType]
    names = ["CHOICE" if get_origin(kind) is Literal else _METAVARS[kind] for kind in kinds]
    return "|".join(names) + ("..." if setting.is_list else "")


def _block(title: str, settings: Sequence[Setting], width: int) -> str:
    head = textwrap.fill(f"{title}:", width, break_on_hyphens=False)
    return "\n".join([head, *(line for setting in settings for line in _entry(setting, width)), ""])


def _entry(setting: Setting, width: int) -> list[str]:
    notes = [f"choices: {', '.join(filter(None, setting.choices))}"] if setting.choices else []
    if not setting.is_required and setting.default not in (None, "", ()):
        notes.append(f"default: {setting.default}")
    label = _label(setting)
    head = f"  {label} --{setting.negative}" if setting.negative else f"  {label}"
    text = " ".join(plain(setting.help).split())
    note = f"[{'; '.join(notes)}]" if notes else ""
    if note and len(head) + len(note) + 3 <= width:
        head = f"{head}   {note}"
        note = ""
    text = f"{note} {text}".strip()
    return [head, _indented(text, width)] if text else [head]


def _indented(text: str, width: int) -> str:
    indent = " " * 6
    words = " ".join(text.split())
    return textwrap.fill(words, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def plain(text: str) -> str:
    """A docstring without the marks of code in it."""
    return text.replace("``", "").strip()


def _sentence(text: str) -> str:
    """The first sentence, without its full stop."""
    return re.split(r"\.(?:\s|$)", " ".join(plain(text).split()), maxsplit=1)[0]


def _cut(text: str, width: int) -> str:
    """As much of the first sentence as fits in ``width``: whole clauses, or at least whole words."""
    sentence = _sentence(text)
    if len(sentence) <= width:
        return sentence
    clauses = [match.start() for match in re.finditer(r"[,;:] | \(", sentence) if match.start() <= width]
    if clauses and clauses[-1] >= width // 3:
        return sentence[: clauses[-1]]
    return textwrap.shorten(sentence, width, placeholder=" ...")

"""Output of ``--help``: the common flags, whole sections, or everything. All texts are docstrings."""

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, get_type_hints

from cyclopts import App
from cyclopts.help import HelpEntry, HelpPanel, InlineText
from rich.console import Console, ConsoleOptions

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
_SAYS_NOTHING = (None, "", "()", '""', "False", "-1")
_HELP_FLAGS = ("--help", "-h")


class HelpPage:
    """Prints cyclopts' help as plain text (format ``plaintext``): rich's markup takes longer than all other work.

    A verb that takes the settings of a run shows its own flags and ``COMMON``, each on one line, unless the command
    line names sections. On all other pages a flag has its own line, with its text indented below; choices and default
    stand in the line of the flag if they fit.
    """

    def __init__(self) -> None:
        self._sections: list[str] = []

    def choose(self, arguments: Sequence[str], app: App) -> list[str]:
        """Note the sections that follow ``--help``; returns ``arguments`` without them.

        Raises:
            ConfigError: there is no such section.
        """
        self._sections = []
        words = [word.partition("=") for word in arguments]
        start = next((at for at, (word, _, _) in enumerate(words) if word in _HELP_FLAGS), None)
        verb, apps, _ = app.parse_commands(arguments[:start])
        if start is None or not apps[-1].default_command:  # else a verb may follow
            return list(arguments)
        flag, _, value = words[start]
        end = next((at for at in range(start + 1, len(words)) if arguments[at].startswith("-")), len(words))
        sections = [*filter(None, [value]), *arguments[start + 1 : end]]
        takes_run = any("--recipe" in argument.names for argument in apps[-1].assemble_argument_collection())
        known = [*SECTIONS, ALL] if takes_run else [ALL]
        for name in sections:
            if name.split(".")[0] not in known:
                raise ConfigError(
                    f"no section is called {name}{did_you_mean(name, known) or '.'}",
                    where="--help",
                    fix=f"crius {' '.join(verb)} --help with one or more of {', '.join(known)}",
                )
        self._sections = sections
        return [*arguments[:start], flag, *arguments[end:]]

    def render_usage(self, console: Console, options: ConsoleOptions, usage: object) -> None:
        """Print how a command is called."""
        if (text := plain(usage)) and not self._shows_sections():
            console.out(f"{text}\n", highlight=False)

    def render_description(self, console: Console, options: ConsoleOptions, description: object) -> None:
        """Print the paragraphs of a command's docstring, filled to the width."""
        for paragraph in [] if self._shows_sections() else plain(description).split("\n\n"):
            if text := " ".join(paragraph.split()):
                console.out(textwrap.fill(text, _width(options), break_on_hyphens=False) + "\n", highlight=False)

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print one panel."""
        if not panel.entries:
            return
        width = _width(options)
        title = plain(panel.title)
        by_name = {_name(entry): entry for entry in panel.entries}
        if "recipe" not in by_name:
            blocks = iter([_block(title, panel.entries, width)])
        elif self._sections:
            blocks = self._whole(title, panel.entries, width)
        else:
            blocks = _first_page(title, by_name, width)
        console.out("\n".join(blocks), highlight=False)

    def _shows_sections(self) -> bool:
        return bool(self._sections) and ALL not in self._sections

    def _whole(self, title: str, entries: Sequence[HelpEntry], width: int) -> Iterator[str]:
        """Whole sections, each with a title. ``ALL`` begins with the verb's own flags."""
        wanted = SECTIONS if ALL in self._sections else list(dict.fromkeys(self._sections))
        if ALL in self._sections:
            yield _block(title, [entry for entry in entries if "." not in _name(entry)], width)
        for section in wanted:
            chosen = [entry for entry in entries if f"{_name(entry)}.".startswith(f"{section}.")]
            if not chosen:
                parent = section.rpartition(".")[0]
                raise ConfigError(f"no setting is called {section}.", where="--help", fix=f"--help {parent}")
            about = _sentence(SECTIONS[section.split(".")[0]].__doc__ or "")
            yield _block(f"[{section.split('.')[0]}] {about}", chosen, width)


HELP_PAGE = HelpPage()


def _first_page(title: str, by_name: dict[str, HelpEntry], width: int) -> Iterator[str]:
    """The verb's own flags and the common ones, one line per flag, and how to see more."""
    own = [name for name in by_name if "." not in name]
    groups = {title: own} | {group: [name for name in names if name in by_name] for group, names in COMMON.items()}
    labels = {name: _label(by_name[name]) for names in groups.values() for name in names}
    column = min(max(map(len, labels.values())), width * 2 // 5)
    for group, names in groups.items():
        yield f"{group}:"
        for name in names:
            entry = by_name[name]
            room = width - max(column, len(labels[name])) - 4
            text = _cut(plain(entry.description), room)
            note = f"  [{entry.default}]" if entry.default not in _SAYS_NOTHING else ""
            yield f"  {labels[name]:<{column}}  {text}{note if len(text) + len(note) <= room else ''}"
    sections = f"Sections: {' '.join(SECTIONS)}."
    more = "--help SECTION prints the flags of a section, --help all prints all. crius config explain KEY explains one."
    yield textwrap.fill(f"{sections} {more}", width, break_on_hyphens=False)


def _name(entry: HelpEntry) -> str:
    """The flag without its dashes; empty for a command."""
    return next(iter(entry.names), "").removeprefix("--")


def _label(entry: HelpEntry) -> str:
    """The flag, without its negative form."""
    return " ".join(filter(None, (entry.positional_label, f"--{_name(entry)}", entry.metavar)))


def _block(title: str, entries: Sequence[HelpEntry], width: int) -> str:
    head = textwrap.fill(f"{title}:", width, break_on_hyphens=False)
    return "\n".join([head, *(line for entry in entries for line in _entry(entry, width)), ""])


def _entry(entry: HelpEntry, width: int) -> list[str]:
    notes = [f"choices: {', '.join(entry.choices)}"] if entry.choices else []
    if entry.default is not None and entry.default not in ("", "()"):
        notes.append(f"default: {entry.default}")
    head = "  " + " ".join(entry.display_labels_with_metavar)
    text = " ".join(plain(entry.description).split())
    note = f"[{'; '.join(notes)}]" if notes else ""
    if note and len(head) + len(note) + 3 <= width:
        head = f"{head}   {note}"
        note = ""
    text = f"{note} {text}".strip()
    indent = " " * 6
    wrapped = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return [head, *wrapped]


def _width(options: ConsoleOptions) -> int:
    return min(_WIDTH, max(40, options.max_width))


def plain(text: Any) -> str:
    """A renderable of cyclopts' plain text, without the marks of code in docstrings."""
    if isinstance(text, InlineText):
        text = " ".join(str(part) for part in (text.primary_renderable, *text.texts))
    return str(text or "").replace("``", "").strip()


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

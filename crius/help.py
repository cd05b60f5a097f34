"""The layout of ``--help``: a flag on a line of its own, never broken, its explanation indented below it."""

import textwrap
from typing import Any

from cyclopts.help import HelpEntry, HelpPanel, InlineText
from rich.console import Console, ConsoleOptions

_WIDTH = 110


class PlainHelp:
    """Prints cyclopts' help as plain text, for its format ``plaintext``: rich's markup takes longer than all else."""

    def render_usage(self, console: Console, options: ConsoleOptions, usage: object) -> None:
        """Print how a command is called."""
        if text := _plain(usage):
            console.out(f"{text}\n", highlight=False)

    def render_description(self, console: Console, options: ConsoleOptions, description: object) -> None:
        """Print what a command does: the docstring's paragraphs, filled anew."""
        for paragraph in _plain(description).split("\n\n"):
            if text := " ".join(paragraph.split()):
                console.out(textwrap.fill(text, _width(options), break_on_hyphens=False) + "\n", highlight=False)

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print one panel."""
        if panel.entries:
            lines = [line for entry in panel.entries for line in _entry(entry, _width(options))]
            console.out("\n".join([f"{_plain(panel.title)}:", *lines, ""]), highlight=False)


def _width(options: ConsoleOptions) -> int:
    return min(_WIDTH, max(40, options.max_width))


def _entry(entry: HelpEntry, width: int) -> list[str]:
    notes = [f"choices: {', '.join(entry.choices)}"] if entry.choices else []
    if entry.default is not None and entry.default not in ("", "()"):
        notes.append(f"default: {entry.default}")
    head = "  " + " ".join(entry.display_labels_with_metavar) + (f"   [{'; '.join(notes)}]" if notes else "")
    text = " ".join(_plain(entry.description).split())
    indent = " " * 6
    wrapped = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return [head, *wrapped]


def _plain(text: Any) -> str:
    """A renderable of cyclopts' plain text, without the marks of code in docstrings."""
    if isinstance(text, InlineText):
        text = " ".join(str(part) for part in (text.primary_renderable, *text.texts))
    return str(text or "").replace("``", "").strip()

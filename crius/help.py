"""The layout of ``--help``: a flag on a line of its own, never broken, its explanation indented below it."""

import io
import textwrap

from cyclopts.help import HelpEntry, HelpPanel
from rich.console import Console, ConsoleOptions

_WIDTH = 110


def print_panel(console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
    """Print one panel of cyclopts' help as plain text."""
    if not panel.entries:
        return
    console.out(f"{_plain(panel.title)}:", highlight=False)
    width = min(_WIDTH, max(40, options.max_width))
    for entry in panel.entries:
        for line in _entry(entry, width):
            console.out(line, highlight=False)
    console.out("")


def _entry(entry: HelpEntry, width: int) -> list[str]:
    notes = [f"choices: {', '.join(entry.choices)}"] if entry.choices else []
    if entry.default is not None and entry.default not in ("", "()"):
        notes.append(f"default: {entry.default}")
    head = "  " + " ".join(entry.display_labels_with_metavar) + (f"   [{'; '.join(notes)}]" if notes else "")
    text = " ".join(_plain(entry.description).split())
    indent = " " * 6
    wrapped = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return [head, *wrapped]


def _plain(text: object) -> str:
    """A rich renderable as plain text."""
    if text is None or isinstance(text, str):
        return text or ""
    console = Console(file=io.StringIO(), width=10_000, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(text, end="")
    return capture.get().strip()

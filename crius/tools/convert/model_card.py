"""The README.md of an export: its content and its origin, only facts."""

from collections.abc import Mapping, Sequence
from typing import Any

from crius.config.run import RunConfig
from crius.config.toml_file import flatten
from crius.redact import redact

_SHOWN = (
    "model.",
    "tokenizer.",
    "data.",
    "training.",
    "parallelism.",
    "optimizer.",
    "lr_scheduler.",
    "quantize.",
    "lora.",
    "stability.",
    "debug.",
)
"""Sections of settings about the training; other sections are about paths."""


def model_card(
    lines: Sequence[str],
    facts: Mapping[str, str],
    settings: Mapping[str, Any],
    files: Mapping[str, str],
    library: str = "transformers",
) -> str:
    """The text of a model card.

    Args:
        lines: report of the export, for people.
        facts: facts about the source, by name.
        settings: settings of the run, by dotted name.
        files: hashes by file name.
        library: library that loads the export.
    """
    default = flatten(RunConfig())
    own = {key: value for key, value in settings.items() if str(value or "") != str(default.get(key) or "")}
    head = ("---", f"library_name: {library}", "pipeline_tag: text-generation", "---", "", "# Model card", "")
    blocks = {
        "Written by `crius export`; everything here was computed or copied.": lines,
        "Settings of the run that are not the defaults:": [
            f"{key} = {value}" for key, value in own.items() if key.startswith(_SHOWN)
        ],
    }
    texts = [[title, "", "```text", *map(_plain, rows), "```", ""] for title, rows in blocks.items() if rows]
    tables = [*_table("fact", "value", facts), *_table("file", "hash", files)]
    return "\n".join([*head, *texts[0], *tables, *(line for text in texts[1:] for line in text)])


def _table(first: str, second: str, rows: Mapping[str, str]) -> list[str]:
    cells = (f"| {name} | {_plain(value).replace('|', '/')} |" for name, value in rows.items() if value)
    return [f"| {first} | {second} |", "|---|---|", *cells, ""]


def _plain(text: str) -> str:
    """``text`` as one line without secrets that cannot end a block."""
    return ascii(redact(text))[1:-1].replace("`", "'")

"""``--layout fsdp4_tp2`` as the settings that it stands for."""

from collections.abc import Iterator, Mapping
from typing import Any

from cyclopts.argument import Argument, Token

from crius.config.layout import apply_layout, parse_layout
from crius.config.run import RunConfig, replace_fields
from crius.errors import ConfigError, CriusError

FLAG = "--layout"


def spread_layout(named: Mapping[str, Argument]) -> Iterator[CriusError]:
    """Give the degrees and options of the layout on the command line to their arguments, before files are read.

    Args:
        named: arguments by their flag.
    """
    text = _text(named)
    if not text:
        return
    try:
        layout = parse_layout(text)
    except ConfigError as error:
        yield error
        return
    yield from _give(named, layout.settings(), text)


def spread_microbatches(named: Mapping[str, Argument]) -> Iterator[CriusError]:
    """Give the sizes of the batch that ``accumN`` of a layout means to their arguments, after files are read."""
    text = _text(named)
    if "accum" not in text:
        return
    total = named["--training.global_batch_size"].tokens
    try:
        given = {"training.global_batch_size": int(total[0].value)} if total else {}
        placed = apply_layout(replace_fields(RunConfig(), given), parse_layout(text))
    except ConfigError as error:
        yield error
        return
    except ValueError:
        return  # reported as what it is
    named["--training.global_batch_size"].tokens = []
    sizes = ("global_batch_size", "local_batch_size")
    yield from _give(named, {f"training.{name}": getattr(placed.training, name) for name in sizes}, text)


def _give(named: Mapping[str, Argument], changes: Mapping[str, Any], text: str) -> Iterator[CriusError]:
    for name, value in changes.items():
        argument = named[f"--{name}"]
        if any(token.source == "cli" for token in argument.tokens):
            yield ConfigError(
                f"--{name} and {FLAG} {text} both set {name}.", where="command line", fix=f"leave out --{name}"
            )
            continue
        argument.tokens = [Token(keyword=f"--{name}", value=str(value), source="cli")]


def _text(named: Mapping[str, Argument]) -> str:
    return named[FLAG].tokens[-1].value if FLAG in named and named[FLAG].tokens and "--recipe" in named else ""

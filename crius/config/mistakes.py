"""What is wrong with flags and keys, all of it as one error in clear sentences."""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cyclopts import ArgumentCollection, CoercionError, CycloptsError
from cyclopts.exceptions import MissingArgumentError, UnknownCommandError, UnknownOptionError, UnusedCliTokensError

from crius.config.names import meant, nearest_typo
from crius.errors import ConfigError, CriusError


class WrongSettings(ConfigError):
    """Keys or values are wrong.

    Attributes:
        problems: one error for each.
        arguments: of the command line.
    """

    def __init__(self, problems: list[CriusError], arguments: ArgumentCollection) -> None:
        one = ConfigError.together(problems)
        super().__init__(one.what, where=one.where, why=one.why, fix=one.fix)
        self.problems, self.arguments = problems, arguments

    def __str__(self) -> str:
        return str(ConfigError.together(self.problems))


def explain(
    error: CycloptsError | WrongSettings, argv: Sequence[str] = (), parse: Callable[[list[str]], Any] | None = None
) -> CriusError:
    """All that is wrong with a command line, as one error.

    Args:
        error: what stopped the parsing of ``argv``.
        argv: from ``normalized_argv``; empty where the error is not of the command line itself.
        parse: reads a command line; raises an error such as ``error``.
    """
    return ConfigError.together(list(_mistakes(error, argv, parse)))


def _mistakes(
    error: CycloptsError | WrongSettings, argv: Sequence[str], parse: Callable[[list[str]], Any] | None
) -> Iterator[CriusError]:
    if isinstance(error, UnusedCliTokensError):
        unused = " ".join(error.unused_tokens or ())
        fix = "repeat a flag for each of its values: --flag A --flag B"
        yield ConfigError(f"{unused} belongs to no flag.", where="command line", fix=fix)
    elif isinstance(error, WrongSettings):
        yield from _unknown_flags(error.arguments, argv)
        yield from error.problems
    elif isinstance(error, UnknownOptionError):
        yield from _unknown_flags(error.argument_collection, [error.token.keyword or error.token.value, *argv])
    else:
        yield conversion(error, error.command_chain or ())
    if parse and isinstance(error, MissingArgumentError) and error.keyword and error.keyword in argv:
        rest = list(argv)  # cyclopts looked no further
        rest.remove(error.keyword)
        try:
            parse(rest)
        except (CycloptsError, WrongSettings) as another:
            yield from _mistakes(another, rest, parse)


def _unknown_flags(arguments: ArgumentCollection, argv: Iterable[str]) -> Iterator[ConfigError]:
    known = {name for argument in arguments if not argument.children for name in (*argument.names, *argument.negatives)}
    names = [name.removeprefix("--") for name in known]
    written = (token.partition("=")[0] for token in itertools.takewhile(lambda token: token != "--", argv))
    for flag in dict.fromkeys(written):
        if flag.startswith("-") and not _is_number(flag) and flag not in known:
            yield unknown("flag", flag, names, "command line")


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


def conversion(error: CycloptsError, commands: Iterable[str]) -> ConfigError:
    """A value that is none of its kind, in one clear sentence; what cyclopts guesses is left out if it is no typo."""
    error.verbose = False
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    guess = re.search(r' Did you mean "(.*?)"\?', text)
    value = error.token.value if isinstance(error, CoercionError) and error.token else ""
    if isinstance(error, UnknownCommandError):
        value = (error.unused_tokens or [""])[0]
    if guess and not nearest_typo(value, [guess[1]]):
        text = text.replace(guess[0], "")
    return ConfigError(text, fix=f"see {' '.join(['crius', *commands])} --help for what can be given")


def unknown(kind: str, written: str, known: Iterable[str], where: str) -> ConfigError:
    """An unknown flag (``--a.b``) or TOML key (``a.b``), with what stands for it, if anything does."""
    dashes = "--" if kind == "flag" else ""
    shown = written if written.isprintable() else ascii(written)
    instead, why = meant(written.removeprefix("--").replace("-", "_"), known)
    if instead:
        hint = f"{dashes}{instead}"
        return ConfigError(f"unknown {kind} {shown}, did you mean {hint}?", where=where, fix=f"write {hint}")
    if why:
        return ConfigError(f"unknown {kind} {shown}: nothing stands for it.", where=where, why=why, fix="leave it out")
    what = f"unknown {kind} {shown}: there is no such setting."
    return ConfigError(what, where=where, fix="crius train --help lists every flag")

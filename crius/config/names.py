"""Names of settings that people know from other trainers, short forms, and guesses for misspelt names."""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cyclopts import ArgumentCollection, CoercionError, CycloptsError
from cyclopts.exceptions import MissingArgumentError, UnknownCommandError, UnknownOptionError, UnusedCliTokensError

from crius.config.other_trainers import MOVED, NOTHING
from crius.errors import ConfigError, CriusError


class WrongSettings(ConfigError):
    """Keys or values of a run are wrong.

    Attributes:
        problems: one error for each wrong key or value.
        arguments: arguments of the command line.
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
    """All errors of a command line, as one error.

    Args:
        error: the error that stopped the parsing of ``argv``.
        argv: from ``normalized_argv``; empty if the error is not about the command line itself.
        parse: reads a command line; raises an error such as ``error``.
    """
    return ConfigError.together(list(_mistakes(error, argv, parse)))


def _mistakes(
    error: CycloptsError | WrongSettings, argv: Sequence[str], parse: Callable[[list[str]], Any] | None
) -> Iterator[CriusError]:
    if isinstance(error, UnusedCliTokensError):
        unused = " ".join(error.unused_tokens or ())
        fix = "leave it out; a flag with several values is repeated: --flag A --flag B"
        if unused.endswith(".toml"):
            fix = f"--config {unused}"
        yield ConfigError(f"{unused} does not belong to a flag.", where="command line", fix=fix)
    elif isinstance(error, WrongSettings):
        yield from _unknown_flags(error.arguments, argv, argv)
        yield from error.problems
    elif isinstance(error, UnknownOptionError):
        yield from _unknown_flags(error.argument_collection, [error.token.keyword or error.token.value, *argv], argv)
    else:
        yield conversion(error, error.command_chain or ())
    if parse and isinstance(error, MissingArgumentError) and error.keyword and error.keyword in argv:
        rest = list(argv)  # cyclopts stops at the first error
        rest.remove(error.keyword)
        try:
            parse(rest)
        except (CycloptsError, WrongSettings) as another:
            yield from _mistakes(another, rest, parse)


def _unknown_flags(arguments: ArgumentCollection, words: Iterable[str], argv: Sequence[str]) -> Iterator[ConfigError]:
    known = {name for argument in arguments if not argument.children for name in (*argument.names, *argument.negatives)}
    short = {} if "--recipe" not in known else SHORT | PLAN_SHORT if "--gpus" in known else SHORT
    names = [*(name.removeprefix("--") for name in known), *short]
    verb = " ".join(itertools.takewhile(lambda token: token.isidentifier(), argv))
    written = (token.partition("=")[0] for token in itertools.takewhile(lambda token: token != "--", words))
    values = dict(itertools.pairwise(argv)) | dict(word.split("=", 1) for word in argv if "=" in word)
    for flag in dict.fromkeys(written):
        if flag.startswith("-") and not _is_number(flag) and flag not in known:
            yield unknown("flag", flag, names, "command line", verb, values.get(flag, ""))


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


def conversion(error: CycloptsError, commands: Iterable[str]) -> ConfigError:
    """A value of the wrong kind, as one clear sentence; a guess of cyclopts is left out if it is not a typo."""
    error.verbose = False
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    guess = re.search(r' Did you mean "(.*?)"\?', text)
    value = error.token.value if isinstance(error, CoercionError) and error.token else ""
    if isinstance(error, UnknownCommandError):
        value = (error.unused_tokens or [""])[0]
    if guess and not nearest_typo(value, [guess[1]]):
        text = text.replace(guess[0], "")
    if isinstance(error, MissingArgumentError) and error.argument and not error.keyword:
        what = f"{error.argument.name.removeprefix('--').upper()} is missing."
        return ConfigError(what, where="command line", fix=f"crius {' '.join(commands)} --help says what it takes")
    if not commands:
        return ConfigError(text, where="command line", fix="crius --help lists the verbs")
    if setting := re.search(r" (?:for|parameter) --([a-z_0-9]+(?:\.[a-z_0-9]+)+)", text):
        return ConfigError(text, where="command line", fix=f"crius config explain {setting[1]} says what it takes")
    where = "" if " from " in text else "command line"
    return ConfigError(
        text, where=where, fix=f"see {' '.join(['crius', *commands])} --help all for the possible values"
    )


def unknown(
    kind: str, written: str, known: Iterable[str], where: str, verb: str = "train", value: str = ""
) -> ConfigError:
    """Error about an unknown flag (``--a.b``) or TOML key (``a.b``), with Crius's name for it, if there is one.

    Args:
        kind: word for the name: flag, key or setting.
        written: the name.
        known: names that there are.
        where: origin of the name.
        verb: verb that takes it.
        value: word after a flag, which may be its value.
    """
    dashes = "--" if kind == "flag" else ""
    shown = written if written.isprintable() else ascii(written)
    names, ours = list(known), written.removeprefix("--").replace("-", "_")
    instead, why = meant(ours, names)
    if instead:
        hint = f"{dashes}{instead}"
        replaced = f" in place of {shown} {value}" if " " in instead and value and not value.startswith("-") else ""
        return ConfigError(f"unknown {kind} {shown}, did you mean {hint}?", where=where, fix=f"write {hint}{replaced}")
    if why:
        fix = "crius train --help all lists every flag" if kind == "setting" else "leave it out"
        return ConfigError(f"unknown {kind} {shown}: Crius lacks it.", where=where, why=why, fix=fix)
    if any(name.startswith(f"{ours}.") for name in names):
        fix = f"crius {verb} --help {ours} lists its settings"
        return ConfigError(f"{shown} is a section, not a setting.", where=where, fix=fix)
    what = f"unknown {kind} {shown}: there is no such setting."
    return ConfigError(what, where=where, fix=f"crius {verb} --help all lists every flag")


# Short names of flags, for the verbs that take the settings of a run.
SHORT = {
    "lr": "optimizer.lr",
    "steps": "training.steps",
    "batch": "training.global_batch_size",
    "seq_len": "training.seq_len",
}

# More short names of flags, for crius plan.
PLAN_SHORT = {
    "model": "model.name",
    "flavor": "model.flavor",
    "seq_len": "training.seq_len",
    "global_batch_size": "training.global_batch_size",
    "local_batch_size": "training.local_batch_size",
}


_NO_TYPOS = {"float16": "bfloat16", "gpu": "cpu", "step": "stop", "tpu": "cpu"}
"""Names that are near to another name but mean something else, and that name."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``, did you mean X?`` if ``name`` is a typo of the known name X; else empty."""
    near = nearest_typo(name, known)
    return f", did you mean {near}?" if near else ""


def nearest_typo(name: str, known: Iterable[str]) -> str:
    """The known name that differs from ``name`` by its case or by at most two typed characters; empty if there is none.

    Short last parts of a name may differ by less: those of up to seven characters by one, of up to two by none. If the
    last part is right, the sections may differ by two characters; sections of up to four characters by one. A number in
    front is a size, and another size is not a typo: ``80b`` is not ``70b``.
    """
    words = {word.lower(): word for word in known}
    written = name.lower()
    if written in words:
        return words[written]
    words.pop(_NO_TYPOS.get(written, ""), None)
    section, _, leaf = written.rpartition(".")
    of_leaf = 0 if len(leaf) <= 2 else 1 if len(leaf) <= 7 else 2
    of_section = 1 if len(section) <= 4 else 2
    size = _leading_number(written)
    near = []
    for lower, word in words.items():
        limit = of_section if section and lower.rpartition(".")[2] == leaf else of_leaf
        if abs(len(lower) - len(written)) <= limit and _leading_number(lower) == size:
            distance = _edits(written, lower)
            near += [(distance, word)] if distance <= limit else []
    return min(near)[1] if near else ""


def _leading_number(word: str) -> str:
    return word[: len(word) - len(word.lstrip("0123456789"))]


def _edits(a: str, b: str) -> int:
    """Number of insertions, deletions, replacements and swaps of neighbours that turn ``a`` into ``b``."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, start=1):
        oldest, before, row = before, row, [i]
        for j, other in enumerate(b, start=1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other)))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                row[j] = min(row[j], oldest[j - 2] + 1)
    return row[-1]


def meant(name: str, known: Iterable[str]) -> tuple[str, str]:
    """The setting that an unknown name stands for.

    Args:
        name: dotted, with underscores.
        known: dotted names of all settings.

    Returns:
        The setting to write instead, with a value if that matters; and why there is no such setting. At least one of
            the two is empty.
    """
    name = name.removeprefix("quantize.linear.")  # torchtitan's newer name for its float8 and mx
    names, (section, _, leaf) = list(known), name.rpartition(".")
    sections = (f"{outer}.*" for outer in itertools.accumulate(section.split("."), "{}.{}".format))
    for key in (name, leaf, *sections):
        if key in MOVED:
            return MOVED[key], ""
        if key in NOTHING:
            return "", NOTHING[key]
    if near := nearest_typo(name, names):
        return near, ""
    if "." not in name:
        homes = [other for other in names if other.count(".") == 1 and other.endswith(f".{name}")]
        return (homes[0] if len(homes) == 1 else ""), ""
    return (section if section in names else ""), ""

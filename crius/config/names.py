"""Names of settings that people know from other trainers, short forms, and guesses for misspelt names."""

import contextlib
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cyclopts import ArgumentCollection, CoercionError, CycloptsError
from cyclopts.exceptions import MissingArgumentError, UnknownCommandError, UnknownOptionError, UnusedCliTokensError

from crius.config.other_trainers import MAIN, MOVED, NOTHING, OPTIONS_BY_NAME, VALUES
from crius.errors import ConfigError, CriusError
from crius.untrusted import parse_toml


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
        for word in error.unused_tokens or ():
            yield _stray(word, argv[0] if argv else "")
    elif isinstance(error, WrongSettings):
        yield from _unknown_flags(error.arguments, argv, argv)
        yield from error.problems
    elif isinstance(error, UnknownOptionError):
        yield from _unknown_flags(error.argument_collection, [error.token.keyword or error.token.value, *argv], argv)
    elif isinstance(error, MissingArgumentError) and error.argument and error.argument.children:  # a section
        yield unknown(
            "flag",
            error.keyword or error.argument.name,
            [child.name[2:] for child in error.argument.children],
            "command line",
        )
    else:
        yield conversion(error, error.command_chain or ())
    if parse and isinstance(error, MissingArgumentError) and error.keyword and error.keyword in argv:
        rest = list(argv)  # cyclopts stops at the first error
        rest.remove(error.keyword)
        try:
            parse(rest)
        except (CycloptsError, WrongSettings) as another:
            yield from _mistakes(another, rest, parse)


_FLAG_OF_FILE = {
    ".toml": "--config",
    ".yaml": "--config",
    ".yml": "--config",
    ".json": "--config",
    ".jsonl": "--data.source jsonl --data.path",
    ".parquet": "--data.source parquet --data.path",
    ".txt": "--data.source text --data.path",
}


def _stray(word: str, verb: str) -> ConfigError:
    """Error about a word of the command line of ``verb`` that belongs to no flag."""
    name, equals, value = word.partition("=")
    what = f"{word} does not belong to a flag."
    fix = "leave it out; a flag with several values is repeated: --flag A --flag B"
    suffix = next((suffix for suffix in _FLAG_OF_FILE if word.endswith(suffix)), "")
    if equals and re.fullmatch(r"[a-z_][\w.-]*", name, re.IGNORECASE):
        what = f"{word} has no dashes."
        fix = f"write --{shlex.quote(word)} in place of {shlex.quote(word)}"
    elif suffix:
        fix = f"write {_FLAG_OF_FILE[suffix]} {shlex.quote(word)} in place of {shlex.quote(word)}"
    elif word == "help":
        fix = "write --help in place of help"
    elif verb == "generate":
        fix = f"write --prompt {shlex.quote(word)} in place of {shlex.quote(word)}"
    return ConfigError(what, where="command line", fix=fix)


def _unknown_flags(arguments: ArgumentCollection, words: Iterable[str], argv: Sequence[str]) -> Iterator[ConfigError]:
    known = {name for argument in arguments if not argument.children for name in (*argument.names, *argument.negatives)}
    short = {} if "--recipe" not in known else SHORT | PLAN_SHORT if "--gpus" in known else SHORT
    names = [*(name.removeprefix("--") for name in known), *short]
    verb = " ".join(itertools.takewhile(lambda token: token.isidentifier(), argv))
    written = (token.partition("=")[0] for token in itertools.takewhile(lambda token: token != "--", words))
    values = dict(_values(argv, takes_several="--recipe" in known))
    for flag in dict.fromkeys(written):
        if _is_flag(flag) and flag not in known:
            yield unknown("flag", flag, names, "command line", verb, values.get(flag, ""))


def _values(argv: Sequence[str], *, takes_several: bool) -> Iterator[tuple[str, str]]:
    """The flags of a command line, and what was written as the value of each; words after a flag may be several."""
    for place, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        following = list(itertools.takewhile(lambda other: not _is_flag(other), argv[place + 1 :]))
        if not takes_several:
            del following[1:]
        if _is_flag(flag):
            yield flag, value if equals else " ".join(following)


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _is_number(word)


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
    where = "" if " from " in text else "command line"
    if setting := re.search(r" (?:for|parameter) --([a-z_0-9]+(?:\.[a-z_0-9]+)+)", text):
        name = setting[1]
        instead, why = _answered(name, name, value)
        fix = f"crius config explain {name} says what it takes"
        if instead != name:
            fix = why or _replacing("flag" if where else "key", f"--{name}" if where else name, value, instead)
        return ConfigError(text, where="command line", fix=fix)
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
    names = list(known)
    ours = written.lstrip("-").replace("-", "_")
    instead, why = meant(ours, names, value)
    if instead:
        what = f"unknown {kind} {shown}, did you mean {dashes}{instead}?"
        return ConfigError(what, where=where, fix=_replacing(kind, shown, value, instead))
    if why:
        fix = "crius train --help all lists every flag" if kind == "setting" else "leave it out"
        return ConfigError(f"unknown {kind} {shown}: Crius lacks it.", where=where, why=why, fix=fix)
    if any(name.startswith(f"{ours}.") for name in names):
        fix = f"crius {verb} --help {ours} lists its settings"
        if MAIN.get(ours) in names:
            fix = _replacing(kind, shown, value, _answered(ours, MAIN[ours], value)[0] or MAIN[ours])
        return ConfigError(f"{shown} is a section, not a setting.", where=where, fix=fix)
    what = f"unknown {kind} {shown}: there is no such setting."
    return ConfigError(what, where=where, fix=f"crius {verb} --help all lists every flag")


def _replacing(kind: str, written: str, value: str, instead: str) -> str:
    """The fix that writes ``instead``, a setting and perhaps its value, in place of a name and its value."""
    setting, _, fixed = instead.partition(" ")
    words = fixed.split()
    if value and not words:
        words = [value]
    if kind == "key" and "." in setting:
        section, _, leaf = setting.rpartition(".")
        items = [_toml(word) for word in words]
        shown = items[0] if len(items) == 1 else f"[{', '.join(items)}]"
        return f"write {leaf} = {shown} below [{section}] in place of {written}" if words else f"write {instead}"
    if kind != "flag":
        return f"write {instead}"
    flags = " ".join(f"--{setting} {shlex.quote(word)}" for word in words) or f"--{setting}"
    return f"write {flags} in place of {written} {value}".rstrip() if words else f"write {flags}"


def _toml(word: str) -> str:
    """``word`` as a value of TOML: a number and true stay, all else is quoted."""
    with contextlib.suppress(ValueError):
        parse_toml(f"x = {word}")
        return word
    return json.dumps(word, ensure_ascii=False)


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


def meant(name: str, known: Iterable[str], value: str = "") -> tuple[str, str]:
    """The setting that an unknown name stands for.

    Args:
        name: dotted, with underscores.
        known: dotted names of all settings.
        value: what was written as its value.

    Returns:
        The setting to write instead, with a value if that matters; and why there is no such setting. At least one of
            the two is empty.
    """
    name = name.removeprefix("quantize.linear.")  # torchtitan's newer name for its float8 and mx
    names, (section, _, leaf) = list(known), name.rpartition(".")
    sections = (f"{outer}.*" for outer in itertools.accumulate(section.split("."), "{}.{}".format))
    if OPTIONS_BY_NAME.get(name) in names:
        return OPTIONS_BY_NAME[name], ""
    for key in (name, leaf, *sections):
        if MOVED.get(key, "").split(" ")[0] in names:
            return _answered(key, MOVED[key], value)
        if key in NOTHING:
            return "", NOTHING[key]
    if near := nearest_typo(name, names):
        return near, ""
    if "." not in name:
        homes = [other for other in names if other.count(".") == 1 and other.endswith(f".{name}")]
        return (homes[0] if len(homes) == 1 else ""), ""
    return (section if section in names else ""), ""


def _answered(key: str, instead: str, value: str) -> tuple[str, str]:
    """What to write for the name ``key`` with a value, or the reason why there is no such value.

    Args:
        key: a name in ``MOVED``, or a setting.
        instead: the setting of that name, perhaps with a value.
        value: what was written, one word or several.
    """
    setting = instead.split(" ")[0]
    if setting == "model.name" and "/" in value:
        return "checkpoint.init_from", ""
    answers = VALUES.get(key) or VALUES.get(setting, {})
    parts = [part for part in re.split(r"[\s,\[\]\"']+", value.lower()) if part] or [""]
    if not all(part in answers for part in parts):
        return instead, ""
    first, *others = dict.fromkeys(answers[part] for part in parts)
    if "." not in first.split(" ")[0]:
        return "", first
    return " ".join([first, *(other.partition(" ")[2] for other in others)]), ""

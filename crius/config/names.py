"""Names of settings that people know from other trainers, short forms, and guesses for misspelt names."""

import contextlib
import itertools
import json
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from crius.config.arguments import Argument
from crius.config.other_trainers import MAIN, MOVED, NOTHING, OPTIONS_BY_NAME, VALUES
from crius.errors import ConfigError
from crius.untrusted import parse_toml

_FLAG_OF_FILE = {
    ".toml": "--config",
    ".yaml": "--config",
    ".yml": "--config",
    ".json": "--config",
    ".jsonl": "--data.source jsonl --data.path",
    ".csv": "--data.source csv --data.path",
    ".parquet": "--data.source parquet --data.path",
    ".txt": "--data.source text --data.path",
    ".py": "--config",
}
_FLAG_OF_VERB = {"evaluate": "--tasks", "generate": "--prompt"}


def stray(word: str, verb: str, value: str = "") -> ConfigError:
    """Error about a word of the command line of ``verb`` that belongs to no flag."""
    name, equals, _ = word.lstrip("+").partition("=")  # + and ++ of Hydra
    what = f"{word} is neither a flag nor the value of one."
    fix = "leave it out; a flag with several values is repeated: --flag A --flag B"
    if equals and re.fullmatch(r"[a-z_][\w.-]*", name, re.IGNORECASE):
        what = f"{word} has no dashes."
        fix = f"write --{shlex.quote(word.lstrip('+'))} in place of {shlex.quote(word)}"
    elif value:
        what = f"{word} has no dashes."
        fix = f"write --{word} {shlex.quote(value)} in place of {word} {shlex.quote(value)}"
    elif word == "help":
        fix = "write --help in place of help"
    elif flag := _flag_of(word, verb):
        fix = f"write {flag} {shlex.quote(word)} in place of {shlex.quote(word)}"
    return ConfigError(what, where="command line", fix=fix)


def _flag_of(word: str, verb: str) -> str:
    """The flag of ``verb`` that takes a word like this one; empty if none does."""
    if verb in _FLAG_OF_VERB:
        return _FLAG_OF_VERB[verb]
    if not word:
        return ""
    if verb == "plan":
        name = "--checkpoint.init_from" if "/" in word else "--model"
        return "--flavor" if word[0].isdigit() else name
    if os.path.isfile(os.path.join(word, "config.json")):  # pathlib raises if the word is very long
        return "--checkpoint.init_from"
    return _FLAG_OF_FILE.get(Path(word).suffix, "--data.path" if os.path.isdir(word) else "")


def explained(name: str, verb: str) -> str:
    """The command that says what the argument ``name`` of ``verb`` takes, as a fix."""
    if "." in name:
        return f"crius config explain {name} says what it takes"
    return f"see crius {verb} --help all for the possible values"


def refused_value(argument: Argument, what: str, verb: str) -> ConfigError:
    """Error about a value that an argument of ``verb`` does not take; ``what`` is said about it."""
    name = argument.name
    fix = explained(name, verb)
    instead, why = _answered(name, name, argument.text) if "." in name else (name, "")
    if instead == name:
        instead = _in_own_unit(argument) or name
    if instead != name:
        is_typed = argument.source == "command line"
        written = f"--{name}" if is_typed else name
        fix = why or _replacing("flag" if is_typed else "key", written, argument.text, instead)
    return ConfigError(f"{argument.shown} {what}", where=argument.where, fix=fix)


_COUNTS = {"k": 1000, "m": 10**6, "b": 10**9, "%": 0.01}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


def _in_own_unit(argument: Argument) -> str:
    """The setting with a plain number if its value has a unit, as in 2k, 5% or 10min; else empty."""
    name = argument.name
    match = re.fullmatch(r"(\d+\.?\d*) ?([kmbshd%])[a-z]*", argument.text.lower())
    number, unit = match.groups() if match else ("0", "")
    size = 1024 if unit == "k" and name.endswith("seq_len") else _COUNTS.get(unit, 0)
    if name.endswith(("_minutes", "_seconds")):
        size = _SECONDS.get(unit, 0) / (60 if name.endswith("_minutes") else 1)
    value = f"{float(number) * size:.12g}"
    return f"{name} {value}" if size and (argument.setting.hint is not int or value.isdigit()) else ""


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
        fix = _replacing(kind, shown, value, instead)
        if kind == "key" and instead in ("data.mix", "data.stage"):
            fix = f"write [[{instead}]] in place of [{instead}]"
        return ConfigError(what, where=where, fix=fix)
    if why:
        fix = "crius train --help all lists every flag" if kind == "setting" else "leave it out"
        return ConfigError(f"unknown {kind} {shown}: Crius has no such setting.", where=where, why=why, fix=fix)
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
    names = list(known)
    (section, _, leaf) = name.rpartition(".")
    sections = (f"{outer}.*" for outer in itertools.accumulate(section.split("."), "{}.{}".format))
    option = OPTIONS_BY_NAME.get(name, "")
    if option == "nproc" and "gpus" in names:
        option = "gpus"
    if "data" in names:  # of crius tune
        option = {"checkpoint.init_from": "model", "data.path": "data"}.get(MOVED.get(name, ""), option)
    if option in names:
        return _answered(name, option, value)
    for key in (name, name.replace(".", "_"), leaf, *sections):
        if MOVED.get(key, "").split(" ")[0] in names:
            return _answered(key, MOVED[key], value)
        if key in NOTHING:
            return "", NOTHING[key]
    if near := nearest_typo(name, names):
        return near, ""
    if "." not in name:
        homes = [other for other in names if other.count(".") == 1 and other.endswith(f".{name}")]
        return (homes[0] if len(homes) == 1 else ""), ""
    if section in names:
        return section, ""
    return ("", "") if MAIN.get(section) else meant(leaf, names, value)


def _answered(key: str, instead: str, value: str) -> tuple[str, str]:
    """What to write for the name ``key`` with a value, or the reason why there is no such value.

    Args:
        key: a name in ``MOVED``, or a setting.
        instead: the setting of that name, perhaps with a value.
        value: what was written, one word or several.
    """
    setting = instead.split(" ")[0]
    if setting == "model.name" and ("/" in value or os.path.isfile(os.path.join(value, "config.json"))):
        return "checkpoint.init_from", ""
    if key == "split" and re.fullmatch(r"[\d.]+(,[\d.]+)+", value):  # of Megatron
        shares = [float(share) for share in value.split(",")]
        return f"validation.fraction {shares[1] / sum(shares):.3g}", ""
    if key == "model_args" and (model := re.search(r"\b(?:pretrained|model)=([^, ]+)", value)):  # of lm-eval
        return f"source {model[1]}", ""
    answers = VALUES.get(key) or VALUES.get(setting, {})
    parts = [part for part in re.split(r"[\s,\[\]\"']+", value.lower()) if part] or [""]
    if not all(part in answers for part in parts):
        return instead, ""
    first, *others = dict.fromkeys(answers[part] for part in parts)
    if "." not in first.split(" ")[0]:
        return "", first
    return " ".join([first, *(other.partition(" ")[2] for other in others)]), ""

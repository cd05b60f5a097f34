"""The arguments of ``crius.run``, checked and as words of a command line."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crius.cli.app import train_verb
from crius.config.arguments import settings_of
from crius.config.changes import flag
from crius.config.data import TABLES
from crius.config.names import SHORT, unknown
from crius.config.other_trainers import ALIASES
from crius.config.run import RunConfig
from crius.config.toml_file import command_line_flags, flatten, takes, to_toml, wrong_kind
from crius.errors import ConfigError, CriusError
from crius.redact import redact_value

_OPTIONS_OF_TRAIN = [name for name in train_verb().arguments() if "." not in name]
_OPTIONS = {
    **dict.fromkeys({"help", "version", *_OPTIONS_OF_TRAIN} - {"config", "layout"}, ""),
    "import": 'from crius.models.registry import import_models; import_models(["mymodel"], "notebook")',
    "nproc": 'give the degrees, such as {"layout": "fsdp2"}',
    "recipe": "crius.run(settings, recipe=NAME)",
}
"""Options of ``crius train`` that are not settings, and what to do in place of each."""

_SETTINGS = {setting.name: setting for setting in settings_of(RunConfig)}

_NAMES = {*_SETTINGS, *SHORT, "config", "layout"}

_FLAG = re.compile(r"--([\w.]+)(?:(?: |=)('[^']*'|[\w./*+-]+))?")
_FIX = "  fix    "
_NOT_VALUES = ("and", "for", "in", "is", "of", "or", "to", "with")

FILE = "run.toml"  # of a whole RunConfig, for the words of a command line


def check_arguments(config: Any, sinks: Any) -> None:
    """Check the types of the arguments of ``crius.run``.

    Raises:
        ConfigError: lists all arguments that are of another type.
    """
    problems = list[CriusError]()
    if not (config is None or isinstance(config, (RunConfig, Mapping))):
        what = f"config is {config!r:.100}, and not settings."
        problems.append(ConfigError(what, where="crius.run", fix='crius.run({"training.steps": 10})'))
    for name, value in config.items() if isinstance(config, Mapping) else ():
        problems += _wrong_value(name, value)
    wrong = [] if isinstance(sinks, (list, tuple)) else [sinks]
    wrong = wrong or [sink for sink in sinks if not all(callable(getattr(sink, do, None)) for do in ("write", "close"))]
    if wrong:
        what = f"{wrong[0]!r:.100} is not a {'sink' if isinstance(sinks, (list, tuple)) else 'list of sinks'}."
        why = "a sink is an object with write(record) and close()"
        problems.append(ConfigError(what, where="sinks", why=why, fix="crius.run(settings, sinks=[sink])"))
    if problems:
        raise ConfigError.together(problems)


def _wrong_value(name: Any, value: Any) -> list[CriusError]:
    """The error of a setting whose name or value would become another one as words of a command line."""
    if not isinstance(name, str) or not name or name.startswith("-"):
        fix = 'give a dotted name, such as "training.steps"'
        return [ConfigError(f"{name!r:.100} is not the name of a setting.", where="crius.run", fix=fix)]
    if name in _OPTIONS:
        what = f"{name} is an option of crius train, not a setting."
        return [ConfigError(what, where="crius.run", fix=_OPTIONS[name] or "leave it out")]
    if value is None and ALIASES.get(name, SHORT.get(name, name)) not in _NAMES:
        return [unknown("setting", name, _NAMES, "crius.run")]
    inner = next((setting for setting in _SETTINGS if setting.startswith(f"{name}.")), "")
    if inner:
        fix = f'name its settings, such as "{inner}"'
        return [ConfigError(f"{name} is a section, not a setting.", where="crius.run", fix=fix)]
    setting = _SETTINGS.get((ALIASES | SHORT).get(name, name))
    if isinstance(value, (list, tuple)):
        value = [os.fspath(one) if isinstance(one, os.PathLike) else one for one in value]
        if name in TABLES:
            value = ["" if isinstance(one, Mapping) else one for one in value]
    elif not isinstance(value, bool):
        return []
    if setting is None or takes(setting.hint, value):
        return []
    return [wrong_kind(name, value, setting.hint, "crius.run")]


def words_of(config: RunConfig | Mapping[str, Any], recipe: str, scratch: Path) -> list[str]:
    """The settings as words of a command line.

    Args:
        config: all settings, or dotted names with values.
        recipe: name of a recipe; empty: none is given.
        scratch: folder for a file with all settings.
    """
    if isinstance(config, Mapping):
        given = [word for name, value in config.items() if value is not None for word in _flag(name, value)]
        return ["--recipe", recipe, *given] if recipe else given
    file = scratch / FILE
    file.write_text(to_toml(config), encoding="utf-8")
    beside = {  # that the file lacks: secrets and [job]
        name: value
        for name, value in flatten(config).items()
        if redact_value(name, value) != value or (name.startswith("job.") and value)
    }
    return [
        "--config",
        str(file),
        *command_line_flags(config),
        *(word for item in beside.items() for word in _flag(*item)),
    ]


def _flag(name: str, value: Any) -> list[str]:
    is_word = not isinstance(value, (bool, list, tuple))
    return [f"--{name}={value}"] if is_word else flag(name, value)


def with_keys(error: CriusError, file: str, where: str) -> CriusError:
    """``error`` in the words of Python: keys in place of flags, and ``where`` in place of the command line.

    Args:
        error: changed in place.
        file: the file of ``words_of``.
        where: function that was called.
    """
    for part, text in {"what": error.what, "where": error.where, "why": error.why}.items():
        for place in (file, "command line"):
            text = text.replace(place, where)
        setattr(error, part, "\n".join(map(_line_with_keys, text.split("\n"))))
    error.fix = _line_with_keys(f"{_FIX}{error.fix}").removeprefix(_FIX)
    return error


def _line_with_keys(line: str) -> str:
    if line.startswith(f"{_FIX}crius "):
        return line
    if line.startswith(_FIX):
        return _FLAG.sub(_as_key, line)
    return re.sub(r"(?<!\w)--(?=[a-z_])", "", line.replace("unknown flag --", "unknown key "))


def _as_key(match: re.Match[str]) -> str:
    """A flag, and its value if it has one, as an entry of a mapping."""
    name, value = match.groups()
    if value is None or value in _NOT_VALUES:
        return f'"{name}"' + (f" {value}" if value else "")
    word = value.strip("'")
    is_literal = re.fullmatch(r"-?[\d.]+(e-?\d+)?", word) is not None
    literal = {"true": "True", "false": "False"}.get(word, word if is_literal else f'"{word}"')
    return f'"{name}": {literal}'

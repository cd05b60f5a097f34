"""The generated parts of the reference: Markdown, made from what ``--help`` prints when the site is built."""

import dataclasses
import functools
import importlib.util
import re
import runpy
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import docstring_parser
from cyclopts import App
from cyclopts.annotations import get_hint_name
from cyclopts.argument import Argument

from crius.cli import VERBS, add_verbs, app
from crius.config.other_trainers import ALIASES
from crius.config.run import RunConfig
from crius.config.toml_file import COMMAND_LINE_ONLY, flatten

NAMES = frozenset(flatten(RunConfig()))
WORD = re.compile(
    r"``(?P<code>[^`]+)``"
    r"|docs/(?P<page>[\w/]+\.md)"
    r"|(?<![\w.-])(?P<name>(?:--)?[a-z_]+(?:\.[a-z0-9_]+)+|--[a-z_]+)"
    r"|(?P<mark>[\\*_<>[\]|`])"
)
"""Pattern of ``text``: code, a page, a setting or a flag, a character that Markdown would take for a mark."""


def settings() -> str:
    """Every setting of a run: its type, default, choices and explanation, by section."""
    arguments = {_dotted(argument): argument for argument in _arguments("train")}
    return "\n\n".join(_sections(RunConfig(), arguments))


def _sections(config: Any, arguments: dict[str, Argument], prefix: str = "") -> Iterator[str]:
    """The sections of ``config`` and of the sections in them, in their order."""
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield f"## [{name}]\n\n{text(type(value).__doc__ or '')}"
            yield from _sections(value, arguments, f"{name}.")
        else:
            yield _setting(name, value, arguments[name])


def _setting(name: str, default: Any, argument: Argument) -> str:
    notes = [_type(argument.hint), f"default {_value(default)}"]
    notes += ["on the command line alone"] if name in COMMAND_LINE_ONLY else []
    others = [f"`--{alias}`" for alias, meant in ALIASES.items() if meant == name]
    notes += [f"also {', '.join(others)}"] if others else []
    return f"### {name}\n\n{'; '.join(notes)}\n\n{text(argument.parameter.help or '')}"


def _type(hint: Any) -> str:
    """A type in words; a setting that may be unset says so by its default."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_type(part) for part in get_args(hint) if part is not types.NoneType)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(_value, get_args(hint)))}"
    if get_origin(hint) is tuple:
        return f"list of {_type(get_args(hint)[0])}"
    return f"`{get_hint_name(hint).lower()}`"


def _value(value: Any) -> str:
    if value is None:
        return "unset"
    if value in ("", ()):
        return "empty"
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def verbs() -> str:
    """Every verb: what it does, and the flags that are its own."""
    add_verbs()
    return "\n\n".join(_verbs(app, ()))


def _verbs(parent: App, path: tuple[str, ...]) -> Iterator[str]:
    """The verbs below ``parent``: those of the first level in the order of VERBS, others by name."""
    names = [name for name in parent if not name.startswith("-") and parent[name].show]
    for name in sorted(names, key=lambda name: (list(VERBS).index(name) if not path else 0, name)):
        verb, words = parent[name], (*path, name)
        head = f"{'#' * (1 + len(words))} crius {' '.join(words)}"
        if verb.default_command is None:
            yield f"{head}\n\n{text(verb.help)}"
        else:
            yield f"{head}\n\n{_verb(words, verb.default_command)}"
        yield from _verbs(verb, words)


def _verb(words: tuple[str, ...], command: Callable[..., Any]) -> str:
    said = docstring_parser.parse(command.__doc__ or "")
    arguments = _arguments(*words)
    parts = [text(part) for part in (said.short_description, said.long_description) if part]
    if sections := dict.fromkeys(name.split(".")[0] for name in map(_dotted, arguments) if name in NAMES):
        which = "every setting" if len(sections) > 10 else f"the settings of {', '.join(sections)}"
        parts.append(f"Takes {which} as flags: [Settings](settings.md).")
    own = [part for part in arguments if _dotted(part) not in NAMES and not dataclasses.is_dataclass(part.hint)]
    rows = [f"- {', '.join(f'`{name}`' for name in argument.names)}: {_flag(argument)}" for argument in own]
    return "\n\n".join([*parts, "\n".join(rows)]).strip()


def _dotted(argument: Argument) -> str:
    return argument.name.removeprefix("--")


def _flag(argument: Argument) -> str:
    if argument.hint is bool:
        return text(argument.parameter.help or "")
    default = argument.field_info.default
    is_told = default not in (argument.field_info.empty, None, "", ())
    notes = "; ".join([_type(argument.hint), *([f"default {_value(default)}"] if is_told else [])])
    return f"{text(argument.parameter.help or '')} ({notes})".strip()


def _arguments(*words: str) -> list[Argument]:
    add_verbs(words[0])
    command = functools.reduce(lambda part, word: part[word], words, app)
    with app.app_stack(list(words)):
        return list(command.assemble_argument_collection(parse_docstring=True, default_parameter=app.default_parameter))


def api() -> str:
    """The Python interface: the functions of ``crius.api``, if this version has it."""
    if importlib.util.find_spec("crius.api") is None:
        return ""
    return "```{eval-rst}\n.. automodule:: crius.api\n   :members:\n```"


def capabilities() -> str:
    """Which family can do what, as the last ``make test-all`` proved it."""
    made: str = runpy.run_path(str(Path(__file__).parents[1] / "tests/capabilities.py"))["page"]()
    return made


def text(docstring: str) -> str:
    """A docstring as Markdown. Settings and pages that it names are links, and flags are code."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in docstring.split("\n\n"))
    return "\n\n".join(WORD.sub(_word, paragraph) for paragraph in paragraphs if paragraph)


def _word(match: re.Match[str]) -> str:
    if match["mark"]:
        return f"\\{match['mark']}"
    if match["page"]:
        return f"[docs/{match['page']}](../{match['page']})"
    word = match["code"] or match["name"]
    if (name := word.removeprefix("--")) in NAMES:
        return f"[`{word}`](settings.md#{_anchor(name)})"
    return f"`{word}`" if match["code"] or word.startswith("--") else word.replace("_", r"\_")


def _anchor(name: str) -> str:
    """The anchor that MyST makes for the heading ``name``."""
    return name.replace(".", "")

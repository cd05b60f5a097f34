"""The generated parts of the reference: Markdown, made from what ``--help`` prints when the site is built."""

import dataclasses
import importlib.util
import re
import runpy
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from crius.cli import VERBS, add_verbs, app
from crius.cli.verbs import Verb, Verbs
from crius.config.arguments import Setting, alternatives, settings_of
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
    return "\n\n".join(_sections(RunConfig(), {setting.name: setting for setting in settings_of(RunConfig)}))


def _sections(config: Any, settings: dict[str, Setting], prefix: str = "") -> Iterator[str]:
    """The sections of ``config`` and of the sections in them, in their order."""
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield f"## [{name}]\n\n{text(type(value).__doc__ or '')}"
            yield from _sections(value, settings, f"{name}.")
        else:
            yield _setting(settings[name])


def _setting(setting: Setting) -> str:
    name = setting.name
    notes = [_type(setting.hint), f"default {_value(setting.default)}"]
    notes += ["on the command line alone"] if name in COMMAND_LINE_ONLY else []
    others = [f"`--{alias}`" for alias, meant in ALIASES.items() if meant == name]
    notes += [f"also {', '.join(others)}"] if others else []
    return f"### {name}\n\n{'; '.join(notes)}\n\n{text(setting.help)}"


def _type(hint: Any) -> str:
    """A type in words; a setting that may be unset says so by its default."""
    kinds = alternatives(hint)
    if len(kinds) > 1:
        return " or ".join(_type(kind) for kind in kinds if kind is not types.NoneType)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(_value, get_args(hint)))}"
    if get_origin(hint) is tuple:
        return f"list of {_type(get_args(hint)[0])}"
    return f"`{hint.__name__.lower()}`"


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
    return "\n\n".join(_verbs(app))


def _verbs(group: Verbs) -> Iterator[str]:
    """The verbs of a group: those of the first level in the order of VERBS, others by name."""
    order = list(VERBS)
    for member in sorted(group, key=lambda member: order.index(member.words[0])):
        head = f"{'#' * (1 + len(member.words))} crius {' '.join(member.words)}"
        if isinstance(member, Verbs):
            yield f"{head}\n\n{text(member.about)}"
            yield from _verbs(member)
        else:
            yield f"{head}\n\n{_verb(member)}"


def _verb(verb: Verb) -> str:
    settings = [argument.setting for argument in verb.arguments().values()]
    parts = [text(verb.about)]
    if sections := dict.fromkeys(one.name.split(".")[0] for one in settings if one.name in NAMES):
        which = "every setting" if len(sections) > 10 else f"the settings of {', '.join(sections)}"
        parts.append(f"Takes {which} as flags: [Settings](settings.md).")
    rows = [f"- {_names(one)}: {_flag(one)}" for one in settings if one.name not in NAMES]
    return "\n\n".join([*parts, "\n".join(rows)]).strip()


def _names(setting: Setting) -> str:
    word = setting.name.upper() if setting.takes_word else ""
    flag = f"--{setting.name}" if setting.has_flag else ""
    negative = f"--{setting.negative}" if setting.negative else ""
    return ", ".join(f"`{name}`" for name in (word, flag, negative) if name)


def _flag(setting: Setting) -> str:
    if setting.hint is bool:
        return text(setting.help)
    is_told = not setting.is_required and setting.default not in (None, "", ())
    notes = "; ".join([_type(setting.hint), *([f"default {_value(setting.default)}"] if is_told else [])])
    return f"{text(setting.help)} ({notes})".strip()


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

"""``crius config explain``: all facts about one setting."""

import inspect
import re
import textwrap
from typing import Annotated, Any

from crius.cli.app import (
    SOURCES,
    ConfigFiles,
    Json,
    Layout,
    NumProcesses,
    Recipe,
    config_app,
    emit_result,
    facts_of,
    train_verb,
)
from crius.cli.help import plain
from crius.config import names, rules
from crius.config.arguments import Option, Setting, in_words, settings_of
from crius.config.other_trainers import ALIASES, MOVED
from crius.config.run import RunConfig
from crius.config.toml_file import flatten
from crius.errors import ConfigError
from crius.redact import redact_value

DEFAULTS = flatten(RunConfig())
SETTINGS: dict[str, Setting] = {setting.name: setting for setting in settings_of(RunConfig)}


@config_app.verb
def explain(
    key: Annotated[str, Option(known=lambda: list(DEFAULTS))],
    /,
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    layout: Layout = "",
    nproc: NumProcesses = 0,
    as_json: Json = False,
) -> int:
    """Explain one setting: type, choices, default, meaning, and its value with the flags of train that follow.

    KEY is dotted, such as optimizer.lr. The names of torchtitan and Hugging Face work too.
    """
    name, note = _find(key.removeprefix("--").partition("=")[0].replace("-", "_"))
    facts = facts_of(run, nproc, None, is_dry=run.parallelism.auto)
    value, decided, default = (redact_value(name, flatten(of)[name]) for of in (run, facts.config, RunConfig()))
    setting = SETTINGS[name]
    explained = {
        "name": name,
        "note": note,
        "type": in_words(setting.hint),
        "choices": setting.choices,
        "default": default,
        "meaning": " ".join(plain(setting.help).split()),
        "value": value,
        "origin": SOURCES.origin(name),
        "decided": decided if decided != value else None,
        "why": facts.reasons.get(name, "") if decided != value else "",
        "rules": _rules_of(name),
        "other_names": _other_names(name),
    }
    emit_result(explained, _lines(explained), as_json=as_json)
    return 0


def _find(written: str) -> tuple[str, str]:
    """The setting with this name, and a note if its own name differs.

    Raises:
        ConfigError: there is no such setting.
    """
    if written in DEFAULTS:
        return written, ""
    if written in train_verb().arguments():
        what = f"{written} is an option of crius train, not a setting."
        raise ConfigError(what, where="command line", fix="crius train --help describes it")
    leaf = {written: MOVED.get(written.rpartition(".")[2], "")}
    tables = ((ALIASES, "is taken for"), (names.SHORT, "is short for"), (MOVED, "is called"))
    for table, note in (*tables, (leaf, "is called")):
        other = table.get(written, "")
        if other.split(" ")[0] in DEFAULTS:
            return other.split(" ")[0], f"{written} {note} {other}"
    homes = [name for name in DEFAULTS if name.endswith(f".{written}")]
    if len(homes) == 1:
        return homes[0], f"{written} is short for {homes[0]} here"
    raise names.unknown("setting", written, DEFAULTS, "command line", "train")


def _rules_of(name: str) -> list[str]:
    """Rules for the setting: the range of its number, and the rules whose code names it."""
    found = [f"It must be {row.right}." for row in rules.RANGES if name in row.examples]
    word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    others = [rule for rule in rules.RULES if rule is not rules.ranges]
    return found + [
        plain((rule.__doc__ or "").strip().split("\n\n")[0]) for rule in others if word.search(inspect.getsource(rule))
    ]


def _other_names(name: str) -> list[str]:
    """Short forms of the setting, and its names in other trainers."""
    tables = ALIASES | names.SHORT | MOVED
    return sorted(other for other, ours in tables.items() if ours.split(" ")[0] == name)


def _lines(explained: dict[str, Any]) -> list[str]:
    def shown(value: Any) -> str:
        text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        return "(not given)" if value is None else text or "(empty)"

    rows = [("value", f"{shown(explained['value'])}   ({explained['origin']})")]
    if explained["decided"] is not None:
        rows.append(("here", ": ".join(filter(None, (shown(explained["decided"]), explained["why"])))))
    rows += [("default", shown(explained["default"])), ("type", explained["type"])]
    rows += [*(("rule", rule) for rule in explained["rules"]), ("also", ", ".join(explained["other_names"]) or "-")]
    meaning = textwrap.wrap(explained["meaning"], 110, initial_indent="  ", subsequent_indent="  ")
    note = [explained["note"]] if explained["note"] else []
    return [*note, f"--{explained['name']}", *meaning, "", *(f"{label:<8} {text}" for label, text in rows)]

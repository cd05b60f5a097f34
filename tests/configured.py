"""A run from its settings, without the parser: what the rules are tested on. ``harness.parse`` parses."""

import functools
import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin, get_type_hints

from harness import parse

from crius.cli.app import SOURCES
from crius.config.load import DEFAULT_RECIPE, recipe_settings
from crius.config.run import RunConfig, replace_fields

SPREAD = {"model.from_hf", "model.name", "model.flavor", "data.source", "checkpoint.init_from", "training.epochs"}
"""Settings that decide about others, or whose names the parser corrects."""


def configured(flags: list[str]) -> tuple[RunConfig, Callable[[str], str]]:
    """What ``parse(flags)`` gives, and the origin of each setting.

    Args:
        flags: settings in their own spelling, as ``--section.name value``, ``--section.name=value``, or without a value
            ``--section.name`` and ``--section.no_name``.
    """
    given = _given(flags)
    is_inferred = "data.path" in given and "data.source" not in given
    if is_inferred or SPREAD & given.keys() or not all("." in name for name in given):
        config = parse(flags)
        origins = dict(SOURCES.origins)
        return config, lambda name: origins.get(name, "default")
    if not any(name.startswith("checkpoint.") for name in given):
        given["checkpoint.enable"] = ["False"]
    config = replace_fields(_recipe(), {name: _value(hint_of(name), texts) for name, texts in given.items()})
    origins = dict.fromkeys(recipe_settings(DEFAULT_RECIPE), f"recipe {DEFAULT_RECIPE}")
    origins |= dict.fromkeys(given, "command line")
    return config, lambda name: origins.get(name, "default")


def _given(flags: list[str]) -> dict[str, list[str]]:
    """Texts of each setting; a flag without a value is True or False. The last one counts, lists collect."""
    found: dict[str, list[str]] = {}
    name = ""
    for token in flags:
        if not token.startswith("--"):
            *before, last = found[name]
            assert last == "True", f"{token} is a second value of --{name}"
            found[name] = [*before, token]
            continue
        name, equals, text = token[2:].partition("=")
        is_off = ".no_" in name
        name = name.replace(".no_", ".")
        before = found.get(name, []) if "." in name and get_origin(hint_of(name)) is tuple else []
        found[name] = [*before, text if equals else str(not is_off)]
    return found


@functools.cache
def _recipe() -> RunConfig:
    settings = recipe_settings(DEFAULT_RECIPE)
    lists = {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
    return replace_fields(RunConfig(), settings | lists)


@functools.cache
def hint_of(name: str) -> Any:
    """The type of a setting."""
    *sections, leaf = name.split(".")
    section: Any = RunConfig()
    for part in sections:
        section = getattr(section, part)
    return get_type_hints(type(section))[leaf]


def _value(hint: Any, texts: list[str]) -> Any:
    if get_origin(hint) is tuple:
        return tuple(_value(get_args(hint)[0], [text]) for text in texts)
    [text] = texts
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    choices = {str(choice): choice for part in parts for choice in get_args(part)}
    if text in choices:
        return choices[text]
    kind = next(part for part in parts if isinstance(part, type) and part is not types.NoneType)
    return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)

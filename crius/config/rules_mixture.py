"""Rules about ``[[data.mix]]`` and ``[[data.stage]]``: what can be said before a file is read."""

import contextlib
import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from crius.config.data import check_source
from crius.config.facts import Facts, Rule, Violations
from crius.config.mixture import (
    KINDS,
    ONE_CORPUS,
    MixEntry,
    exact,
    integers,
    read_entry,
    read_stage,
    sums_up,
    tables_of,
)
from crius.errors import ConfigError

_Problem = tuple[str, str, str]
"""What is wrong, why, and a fix."""

_EXAMPLE = 'such as name = "web", path = "FILE or FOLDER", weight = 0.5'


def entries_are_right(facts: Facts, rules: Sequence[Rule]) -> Violations:
    """Errors of the entries of data.mix.

    Args:
        facts: facts.
        rules: rules of a single corpus, which hold for each entry.
    """
    data = facts.config.data
    if data.mix and (given := facts.changed(ONE_CORPUS)):
        fix = f"leave out {given[0]}: each [[data.mix]] has its own path, source, format, field and columns"
        yield facts.error(f"data.mix and {given[0]} both say what the data is.", "data.mix", *given, fix=fix)
    needs_share = data.alpha is None and 1 not in [table.get("from") for table in _tables(data.stage)]
    names: list[str] = []
    paths: dict[str, str] = {}
    for number, text in enumerate(data.mix, start=1):
        where = f"[[data.mix]] {number} ({facts.origin('data.mix')})"
        try:
            entry = read_entry(text)
        except ValueError as error:
            yield ConfigError(f"entry {number} of data.mix {error}.", where=where, fix=_EXAMPLE)
            continue
        problems = [*_name_problems(entry, names), *_data_problems(entry, paths), *_share_problems(entry, needs_share)]
        for what, why, fix in problems:
            yield ConfigError(f"{entry.name or f'entry {number}'} of data.mix {what}.", where=where, why=why, fix=fix)
        names.append(entry.name)
        of_entry = replace(facts, config=replace(facts.config, data=entry.corpus(data)))
        for problem in (problem for rule in rules for problem in rule(of_entry)):
            problem.where = f"{where}, {problem.where}"
            yield problem


def _name_problems(entry: MixEntry, names: Sequence[str]) -> Iterator[_Problem]:
    if not re.fullmatch(r"\w[\w.-]*", entry.name):
        yield f"has the name {entry.name!r}", "", 'name = "web": letters, digits, _, - and .'
    elif entry.name in names:
        yield "has the name of an earlier entry", "reports would mix them up", f'name = "{entry.name}2"'


def _data_problems(entry: MixEntry, paths: dict[str, str]) -> Iterator[_Problem]:
    """Errors in source and paths; ``paths`` are those of earlier entries, with their names."""
    if entry.source == "huggingface":
        why = "the sizes of all sources must be known before the run"
        yield "is a stream", why, "hf download --repo-type dataset NAME --local-dir DIR, and path = DIR"
        return
    try:
        check_source(entry.source or "text", "")
    except ConfigError as error:
        yield f"has source {entry.source}", error.what, error.fix
    if not entry.path and entry.source != "stdlib":
        yield "has no path", "", 'path = "FILE or FOLDER"'
    for path in entry.path:
        expanded = os.path.expanduser(path)
        if not glob.glob(expanded):
            yield f"has path {path}, which does not exist", "", "correct the path, or leave the entry out"
        other = paths.setdefault(os.path.realpath(expanded), entry.name)
        if other != entry.name:
            why = "its sequences would be read twice, with two counts of epochs"
            yield f"reads {path}, as {other} does", why, "one entry for it, with the sum of both weights"


def _share_problems(entry: MixEntry, needs_share: bool) -> Iterator[_Problem]:
    given = [kind for kind in KINDS if getattr(entry, kind) is not None]
    if len(given) > 1 or len(given) < needs_share:
        yield f"has {' and '.join(given) or 'no weight'}", "", "give it one of weight, tokens and epochs"


def mixture_weights_are_right(facts: Facts) -> Violations:
    """The weights of data.mix are shares or a ratio, and stages of data.stage begin one after the other."""
    data = facts.config.data
    tables = _tables(data.mix)
    kinds = sorted({kind for table in tables for kind in KINDS if kind in table})
    said = " and ".join(kinds)
    if data.alpha is not None and kinds:
        what = f"data.alpha gives the weights, and entries of data.mix have {said}."
        yield facts.error(what, "data.alpha", "data.mix", fix="leave out one of them")
    elif "weight" in kinds and len(kinds) > 1:
        why = "a weight is a share of the run, tokens and epochs are sizes"
        fix = "weights for all entries, or tokens and epochs for all"
        yield facts.error(f"entries of data.mix have {said}.", "data.mix", why=why, fix=fix)
    last = 0
    with contextlib.suppress(ValueError):  # ``entries_are_right`` reports it
        weights = {entry.name: entry.weight for entry in map(read_entry, data.mix) if entry.weight}
        yield from _sum_problems(facts, weights, "data.mix")
    for number, text in enumerate(data.stage, start=1):
        try:
            first, weights = read_stage(text)
        except ValueError as error:
            fix = "such as from = 1000, weights = { web = 0.2, code = 0.8 }"
            yield facts.error(f"entry {number} of data.stage {error}.", "data.stage", fix=fix)
            continue
        name = f"the stage from {first} of data.stage"
        if first <= last:
            yield facts.error(f"{name} comes after one from {last}.", "data.stage", fix="order them by their steps")
        last = max(last, first)
        names = [table.get("name") for table in tables]
        if unknown := [one for one in weights if one not in names]:
            fix = f"one of {', '.join(map(str, names)) or 'the names in [[data.mix]]'}"
            yield facts.error(f"{name} has {unknown[0]}, which data.mix lacks.", "data.stage", fix=fix)
        yield from _sum_problems(facts, weights, "data.stage")


def _sum_problems(facts: Facts, weights: Mapping[str, float], name: str) -> Violations:
    if weights and not sums_up(weights.values()):
        ratio = zip(weights, integers(list(map(exact, weights.values()))), strict=True)
        yield facts.error(
            f"the weights {', '.join(f'{one} {weight:g}' for one, weight in weights.items())} do not sum to 1.",
            name,
            why="they are shares that sum to 1, or whole numbers that stand for a ratio",
            fix=f"the same ratio: {', '.join(f'{one} {weight}' for one, weight in ratio)}",
        )


def mixture_settings_have_effect(facts: Facts) -> Violations:
    """Stages, alpha, epochs and validation data go with a mixture, or with one corpus."""
    data = facts.config.data
    given = [] if data.mix else facts.changed(["data.stage", "data.alpha"])
    for name in given:
        yield facts.error(f"{name} has no effect without data.mix.", name, fix="give [[data.mix]], or leave it out")
    if data.alpha is not None and not 0 <= data.alpha <= 10:
        yield facts.error(f"data.alpha {data.alpha:g} is not between 0 and 10.", "data.alpha", fix="--data.alpha 0.5")
    if data.mix and facts.config.training.epochs > 0:
        why = "each source of a mixture has epochs of its own"
        fix = "--training.epochs -1 and a number of steps, or epochs in each [[data.mix]]"
        yield facts.error("training.epochs does not go with data.mix.", "training.epochs", why=why, fix=fix)
    names = [table.get("name") for table in _tables(data.mix)]
    for title in facts.config.validation.sets if names and facts.config.validation.path else ():
        if title not in names:
            why = "validation data of a mixture is read as the source of its name"
            fix = f"--validation.path {names[0]}=PATH"
            what = f"validation.path has the set {title!r}, which data.mix lacks."
            yield facts.error(what, "validation.path", why=why, fix=fix)


def _tables(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [table for table in tables_of(texts) if isinstance(table, dict)]

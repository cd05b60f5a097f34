"""Rules about ``[[data.mix]]`` and ``[[data.stage]]``: what can be said before a file is read."""

import glob
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from crius.config.data import check_source
from crius.config.facts import Facts, Rule, Violations
from crius.config.mixture import (
    KINDS,
    ONE_CORPUS,
    MixEntry,
    StageEntry,
    exact,
    integers,
    read_entry,
    read_stage,
    sum_problem,
)
from crius.errors import ConfigError, CriusError

_FILES = "docs/mixtures.md has an example"


def entries_are_right(facts: Facts, rules: Sequence[Rule]) -> Violations:
    """Errors of the entries of data.mix.

    Args:
        facts: facts.
        rules: rules of a single corpus, which hold for each entry.
    """
    data = facts.config.data
    if not data.mix:
        return
    given = facts.changed(ONE_CORPUS)
    if given:
        yield facts.error(
            f"data.mix and {given[0]} both say what the data is.",
            "data.mix",
            *given,
            fix=f"leave out {given[0]}: each [[data.mix]] has its own path, source, format, field and columns",
        )
    names = dict[str, int]()
    paths = dict[str, str]()
    entries = list[MixEntry]()
    for number, text in enumerate(data.mix, start=1):
        try:
            entry = read_entry(text)
        except ValueError as error:
            yield facts.error(f"entry {number} of data.mix {error}.", "data.mix", fix=_FILES)
            continue
        entries.append(entry)
        where = f"[[data.mix]] {entry.name or number} ({facts.origin('data.mix')})"
        if not entry.name.replace("_", "a").replace("-", "a").replace(".", "a").isalnum():
            fix = 'name = "web": letters, digits, _, - and .'
            yield ConfigError(f"entry {number} of data.mix has the name {entry.name!r}.", where=where, fix=fix)
        elif entry.name in names:
            what = f"entries {names[entry.name]} and {number} of data.mix are both called {entry.name}."
            yield ConfigError(what, where=where, fix=f'name = "{entry.name}{number}"')
        names.setdefault(entry.name, number)
        yield from _data_problems(entry, where, paths, is_dry=facts.is_dry)
        yield from _share_problems(entry, where, is_free=_has_first_stage(data.stage) or data.alpha is not None)
        of_entry = replace(facts, config=replace(facts.config, data=entry.corpus(data)))
        for problem in (problem for rule in rules for problem in rule(of_entry)):
            problem.where = where
            yield problem
    yield from _weights_problems(facts, entries)


def _data_problems(entry: MixEntry, where: str, paths: dict[str, str], *, is_dry: bool) -> Violations:
    """Errors in the source and the paths of an entry; ``paths`` are those of earlier entries, with their names."""
    if entry.source == "huggingface":
        yield ConfigError(
            f"{entry.name} of data.mix is a stream, source huggingface.",
            where=where,
            why="a mixture must know the sizes of its sources before it runs",
            fix="a local copy: hf download --repo-type dataset NAME --local-dir DIR, and path = DIR",
        )
        return
    try:
        check_source(entry.source or "text", where)
    except ConfigError as error:
        yield error
    if not entry.path and entry.source != "stdlib":
        yield ConfigError(f"{entry.name} of data.mix has no path.", where=where, fix='path = "FILE or FOLDER"')
    for path in entry.path:
        expanded = os.path.expanduser(path)
        if not is_dry and not glob.glob(expanded):
            fix = "correct the path, or leave the entry out"
            yield ConfigError(f"{path} of {entry.name} in data.mix does not exist.", where=where, fix=fix)
        other = paths.setdefault(os.path.realpath(expanded), entry.name)
        if other != entry.name:
            yield ConfigError(
                f"{other} and {entry.name} of data.mix both read {path}.",
                where=where,
                why="its sequences would be read twice, with two counts of epochs",
                fix="one entry for it, with the sum of both weights",
            )


def _share_problems(entry: MixEntry, where: str, *, is_free: bool) -> Violations:
    given = [kind for kind in KINDS if getattr(entry, kind) is not None]
    if len(given) > 1 or (not given and not is_free):
        has = f"has {' and '.join(given)}" if given else "has no weight"
        yield ConfigError(f"{entry.name} of data.mix {has}.", where=where, fix="one of weight, tokens and epochs")


def _has_first_stage(texts: Sequence[str]) -> bool:
    return any(stage.first == 1 for stage in _stages(texts))


def _stages(texts: Sequence[str]) -> list[StageEntry]:
    found = []
    for text in texts:
        try:
            found.append(read_stage(text))
        except ValueError:  # ``mixture_stages_are_right`` reports it
            continue
    return found


def _weights_problems(facts: Facts, entries: Sequence[MixEntry]) -> Violations:
    """Errors of the weights together."""
    kinds = {entry.share[0] for entry in entries if entry.share[0]}
    alpha = facts.config.data.alpha
    if alpha is not None and kinds:
        yield facts.error(
            f"data.alpha {alpha:g} gives the weights, and entries of data.mix have {' and '.join(sorted(kinds))}.",
            "data.alpha",
            "data.mix",
            fix="leave out one of them",
        )
    elif "weight" in kinds and len(kinds) > 1:
        yield facts.error(
            f"entries of data.mix have {' and '.join(sorted(kinds))}.",
            "data.mix",
            why="a weight is a share of the run, tokens and epochs are sizes",
            fix="weights for all entries, or tokens and epochs for all",
        )
    elif kinds == {"weight"} and not _has_first_stage(facts.config.data.stage):
        yield from _sum_problems(facts, {entry.name: entry.share[1] for entry in entries if entry.share[0]}, "data.mix")


def _sum_problems(facts: Facts, weights: Mapping[str, float], name: str, of: str = "") -> Violations:
    if problem := sum_problem(weights):
        ratio = integers([exact(weight) for weight in weights.values()])
        shares = ", ".join(f"{one} {weight}" for one, weight in zip(weights, ratio, strict=True))
        yield facts.error(
            f"the weights of {name}{of} {problem}.",
            name,
            why="weights are shares that sum to 1, or whole numbers that stand for a ratio",
            fix=f"the same ratio in whole numbers: {shares}",
        )


def mixture_stages_are_right(facts: Facts) -> Violations:
    """Stages of data.stage begin one after the other, with weights for sources of data.mix."""
    data = facts.config.data
    names = [entry.get("name") for entry in map(_table, data.mix)]
    last = 0
    for number, text in enumerate(data.stage, start=1):
        try:
            stage = read_stage(text)
        except ValueError as error:
            yield facts.error(f"entry {number} of data.stage {error}.", "data.stage", fix=_FILES)
            continue
        if stage.first <= last:
            yield facts.error(
                f"the stage from {stage.first} of data.stage comes after the stage from {last}.",
                "data.stage",
                fix="stages in the order of their steps, each step once",
            )
        last = max(last, stage.first)
        for name in stage.weights:
            if name not in names:
                yield facts.error(
                    f"the stage from {stage.first} of data.stage has a weight for {name}, which data.mix lacks.",
                    "data.stage",
                    fix=f"one of {', '.join(map(str, names)) or 'the names in [[data.mix]]'}",
                )
        yield from _sum_problems(facts, stage.weights, "data.stage", f" from {stage.first}")


def _table(text: str) -> Mapping[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def mixture_settings_have_effect(facts: Facts) -> Violations:
    """Stages, alpha and epochs go with the kind of data that they are for."""
    data = facts.config.data
    if not data.mix:
        for name in ("data.stage", "data.alpha"):
            if facts.changed([name]):
                yield facts.error(
                    f"{name} has no effect without data.mix.", name, fix="give [[data.mix]], or leave it out"
                )
        return
    if data.alpha is not None and not 0 <= data.alpha <= 10:
        yield facts.error(f"data.alpha {data.alpha:g} is not between 0 and 10.", "data.alpha", fix="--data.alpha 0.5")
    if facts.config.training.epochs > 0:
        yield facts.error(
            f"training.epochs {facts.config.training.epochs} does not go with data.mix.",
            "training.epochs",
            why="each source of a mixture has epochs of its own",
            fix="--training.epochs -1 and a number of steps, or epochs in each [[data.mix]]",
        )
    names = set(_named(data.mix))
    for title in facts.config.validation.sets if facts.config.validation.path else ():
        if title not in names:
            problem: CriusError = facts.error(
                f"validation.path has the set {title!r}, which is not a source of data.mix.",
                "validation.path",
                why="validation data of a mixture is read like the source of its name",
                fix=f"--validation.path {next(iter(names), 'NAME')}=PATH",
            )
            yield problem


def _named(texts: Sequence[str]) -> list[str]:
    return [str(table["name"]) for table in map(_table, texts) if "name" in table]

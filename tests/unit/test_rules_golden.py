"""Every error about the settings of a run, word by word, as ``tests/golden/rules.txt`` has it."""

import importlib.metadata
import importlib.util
import json
import resource
import shlex
import sys
from types import SimpleNamespace

import pytest
import sigmoid_moe
from harness import GOLDEN
from test_rules import facts_of, repairs

from crius.config import rules
from crius.config.facts import Rule
from crius.config.rules_pipeline import schedule_file_runs
from crius.errors import ConfigError, CriusError
from crius.models import registry

RULES = GOLDEN / "rules.txt"
WHY, *PRINTED = RULES.read_text(encoding="utf-8").removesuffix("\n").split("\n\n$ ")
COMMANDS = [block.split("\n", 1)[0] for block in PRINTED]


def given(command: str, machine: pytest.MonkeyPatch) -> tuple[list[str], dict]:
    """The flags of a command, and what ``facts_of`` takes beside them; the machine gets what else is known.

    Args:
        command: flags, and after a # what else is known: arguments of ``facts_of``; ``torch``, the version installed;
            ``missing``, packages that are not installed; ``files``, the limit of open files.
    """
    flags, _, facts = command.partition("  # ")
    known = json.loads(facts or "{}")
    torch = SimpleNamespace(version=known.pop("torch", "2.13.0"))
    missing = known.pop("missing", ())
    files = known.pop("files", resource.RLIM_INFINITY)
    machine.setattr(importlib.metadata, "distributions", lambda name: [torch])
    machine.setattr(importlib.util, "find_spec", lambda name: None if name in missing else torch)
    machine.setattr(resource, "getrlimit", lambda kind: (0, files))
    return shlex.split(flags), known


def broken_by(flags: list[str], known: dict) -> dict[Rule, list[CriusError]]:
    """The rules that a run breaks, as ``rules.check`` finds them, and the errors of each."""
    facts = facts_of(flags, **known)
    first = {rules.sizes: list(rules.sizes(facts))}
    found = first if first[rules.sizes] else {rule: list(rule(facts)) for rule in rules.RULES}
    return {rule: errors for rule, errors in found.items() if errors}


def printed(command: str, broken: dict[Rule, list[CriusError]]) -> str:
    return f"{command}\n{ConfigError.together(sum(broken.values(), []))}"


def anywhere(machine: pytest.MonkeyPatch) -> None:
    """What this installation adds to the messages is the same everywhere; a model has groups of experts."""
    machine.setattr(importlib.metadata, "entry_points", lambda **_: importlib.metadata.EntryPoints())
    machine.setattr(sys, "executable", "python")
    machine.setitem(registry.SPECS, sigmoid_moe.SPEC.name, sigmoid_moe.SPEC)
    machine.setattr(registry, "FLAVORS", {*registry.FLAVORS, *sigmoid_moe.SPEC.flavors})


def test_every_rule_has_its_golden_messages_and_the_fix_of_each_works(monkeypatch):
    """After a deliberate change this module, run with ``tests`` on the path, writes them anew; give the reason."""
    anywhere(monkeypatch)
    seen = {schedule_file_runs}  # it reads files
    for command, block in zip(COMMANDS, PRINTED, strict=True):
        flags, known = given(command, monkeypatch)
        broken = broken_by(flags, known)
        assert printed(command, broken) == block
        seen |= broken.keys()
        for rule, [error, *others] in broken.items():
            for mended in repairs(flags, error.fix) if not others else []:
                assert list(rule(facts_of(mended, **known))) == [], f"{mended} is what the fix of {command} says"
    assert seen == set(rules.RULES)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as here:
        anywhere(here)
        found = [printed(command, broken_by(*given(command, here))) for command in COMMANDS]
    RULES.write_text("\n\n$ ".join([WHY, *found]) + "\n", encoding="utf-8")

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
from test_rules import facts_of

from crius.config import rules
from crius.errors import ConfigError
from crius.models import registry

RULES = GOLDEN / "rules.txt"
WHY, *PRINTED = RULES.read_text(encoding="utf-8").split("\n\n$ ")


def printed(command: str, machine: pytest.MonkeyPatch) -> str:
    """``command``, and what is wrong with it.

    Args:
        command: flags, and after a # what else is known: arguments of ``facts_of``; ``torch``, the version installed;
            ``missing``, packages that are not installed; ``files``, the limit of open files.
    """
    flags, _, known = command.partition("  # ")
    facts = json.loads(known or "{}")
    torch = SimpleNamespace(version=facts.pop("torch", "2.13.0"))
    missing = facts.pop("missing", ())
    files = facts.pop("files", resource.RLIM_INFINITY)
    machine.setattr(importlib.metadata, "distributions", lambda name: [torch])
    machine.setattr(importlib.util, "find_spec", lambda name: None if name in missing else torch)
    machine.setattr(resource, "getrlimit", lambda kind: (0, files))
    with pytest.raises(ConfigError) as error:
        rules.check(facts_of(shlex.split(flags), **facts))
    return f"{command}\n{error.value}"


def anywhere(machine: pytest.MonkeyPatch) -> None:
    """What this installation adds to the messages is the same everywhere; a model has groups of experts."""
    machine.setattr(importlib.metadata, "entry_points", lambda **_: importlib.metadata.EntryPoints())
    machine.setattr(sys, "executable", "python")
    machine.setitem(registry.SPECS, sigmoid_moe.SPEC.name, sigmoid_moe.SPEC)
    machine.setattr(registry, "FLAVORS", {*registry.FLAVORS, *sigmoid_moe.SPEC.flavors})


def test_every_message_of_the_rules_is_the_golden_one(monkeypatch):
    """After a deliberate change this module, run with ``tests`` on the path, writes them anew; give the reason."""
    anywhere(monkeypatch)
    for block in PRINTED:
        command, _ = block.split("\n", 1)
        assert printed(command, monkeypatch) == block.rstrip("\n")


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as here:
        anywhere(here)
        found = [printed(block.split("\n", 1)[0], here) for block in PRINTED]
    RULES.write_text("\n\n$ ".join([WHY, *found]) + "\n", encoding="utf-8")

"""A command line, rewritten as cyclopts expects it."""

from collections.abc import Sequence
from typing import Any

from crius.config.names import PLAN_SHORT, SHORT
from crius.config.other_trainers import ALIASES
from crius.config.run import RunConfig
from crius.config.toml_file import flatten

OPTIONS = {
    "recipe": "",
    "nproc": 0,
    "layout": "",
    "strict": False,
    "dry_run": False,
    "dry_run_rank": 0,
    "dry_run_imbalance": 1.0,
}
"""Flags of ``crius train`` that are not settings and take at most one value, with their defaults."""


def normalized_argv(argv: Sequence[str]) -> list[str]:
    """``argv`` as cyclopts expects it.

    torchtitan's flag names are replaced, and ``--flag true`` is joined to ``--flag=true``. If a flag is given more than
    once, the last one stays, so that a script can append to common flags. Flags that take lists collect all values.
    """
    defaults: dict[str, Any] = flatten(RunConfig()) | OPTIONS
    aliases = ALIASES | _short_forms(argv[0] if argv else "")
    out: list[str] = []
    last: dict[str, int] = {}  # index in ``out`` of each flag that takes one value
    for token in argv:
        if out and out[-1] == "--vs":  # its value is flags
            out[-1] += f"={token}"
            continue
        if token.lower() in ("true", "false") and out and out[-1].startswith("--") and "=" not in out[-1]:
            out[-1] += f"={token.lower()}"
            continue
        if token.startswith("--"):
            flag, equals, value = token[2:].partition("=")
            name = aliases.get(flag.replace("-", "_"), flag.replace("-", "_"))
            token = f"--{name if name in defaults else flag}{equals}{value}"
            setting = name.replace(".no_", ".") if name.replace(".no_", ".") in defaults else name
            if setting in last:
                _forget(out, last, setting, defaults[setting])
            if not isinstance(defaults.get(setting, ()), tuple):
                last[setting] = len(out)
        out.append(token)
    return out


def _short_forms(verb: str) -> dict[str, str]:
    """Short names of flags of ``verb``; the verbs of ``verify`` have a ``--steps`` of their own."""
    if verb not in ("train", "plan", "config", "data", "verify", "bench", "doctor", "sweep"):
        return {}
    short = {name: flag for name, flag in SHORT.items() if verb != "verify" or name != "steps"}
    return short | PLAN_SHORT if verb == "plan" else short


def _forget(out: list[str], last: dict[str, int], setting: str, default: Any) -> None:
    """Remove the earlier ``setting`` and its value from ``out``."""
    start = last.pop(setting)
    has_value = "=" not in out[start] and not isinstance(default, bool) and start + 1 < len(out)
    count = 2 if has_value and not out[start + 1].startswith("--") else 1
    del out[start : start + count]
    for name, place in last.items():
        last[name] = place - count if place > start else place

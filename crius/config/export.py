"""A ``RunConfig`` as flat names, as TOML, and as a difference."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tomli_w

from crius.config.run import RunConfig
from crius.redact import HIDDEN, redact_value

COMMAND_LINE_ONLY = ("compile.cache_dir",)
"""Settings that a file may not give, for what they name is executed."""


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted field names of a config and their values, in the order of the sections."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat.update(flatten(value, f"{prefix}{field.name}."))
        else:
            flat[f"{prefix}{field.name}"] = value
    return flat


def _plain(value: Any) -> Any:
    """Dataclasses as tables and tuples as lists; None, which TOML cannot say, is left out."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return list(value) if isinstance(value, tuple) else value


def to_toml(config: RunConfig) -> str:
    """TOML that ``crius train --config`` reads back to the same run.

    ``[job]`` is left out, so that the repeated run has a name and a folder of its own, and so are the settings of
    ``COMMAND_LINE_ONLY``, which ``command_line_flags`` gives. A secret, such as the password
    in a URL, is left out too, and a comment says so; that setting has to be given again.
    """
    tree = dataclasses.asdict(config)
    del tree["job"]
    for name in COMMAND_LINE_ONLY:
        section, _, leaf = name.partition(".")
        del tree[section][leaf]
    plain = _plain(tree)
    shown = redact_value("", plain)
    note = "" if shown == plain else f"# {HIDDEN} stands for a secret: give the setting that has it again\n"
    return note + tomli_w.dumps(shown)


def command_line_flags(config: RunConfig) -> list[str]:
    """The settings of ``COMMAND_LINE_ONLY`` that have a value, as flags beside the TOML of ``config``."""
    values = flatten(config)
    return [f"--{name}={values[name]}" for name in COMMAND_LINE_ONLY if values[name]]


def shown(config: RunConfig) -> dict[str, Any]:
    """``flatten`` with secrets taken out, for what is written and compared."""
    return {name: redact_value(name, value) for name, value in flatten(config).items()}


def differences(left: RunConfig, right: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted names whose values differ, with the left and the right value."""
    a, b = flatten(left), flatten(right)
    return {name: (a[name], b[name]) for name in a if a[name] != b[name]}

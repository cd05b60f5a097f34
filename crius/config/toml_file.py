"""A run as TOML, as flat settings and as flags, and the way back."""

import contextlib
import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w

from crius.config.arguments import alternatives, choices_of, in_words
from crius.config.data import TABLES, tables_of
from crius.config.run import RunConfig
from crius.errors import ConfigError
from crius.redact import HIDDEN, redact_value
from crius.untrusted import open_named, parse_json, parse_toml, read_below, text_below

COMMAND_LINE_ONLY = ("compile.cache_dir",)
"""Settings that a file may not give, because code in the folder that they name is executed."""


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
    """Dataclasses as tables, and tuples as lists. None is left out, as TOML lacks it."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return list(value) if isinstance(value, tuple) else value


def to_toml(config: RunConfig) -> str:
    """TOML that ``crius train --config`` reads back to the same run.

    ``[job]`` is left out, so that the repeated run gets a name and a folder of its own. The settings of
    ``COMMAND_LINE_ONLY``, which ``command_line_flags`` gives, are left out, and so are the steps that follow from
    ``training.epochs``. A secret, such as the password in a URL, is left out with a comment; that setting must be given
    again.
    """
    tree = dataclasses.asdict(config)
    del tree["job"]
    for name in COMMAND_LINE_ONLY:
        section, _, leaf = name.partition(".")
        del tree[section][leaf]
    if config.training.epochs > 0:
        del tree["training"]["steps"]
    for name in TABLES:
        section, _, leaf = name.partition(".")
        tree[section][leaf] = tables_of(tree[section][leaf])
    plain = _plain(tree)
    shown = redact_value("", plain)
    note = "" if shown == plain else f"# {HIDDEN} stands for a secret: give that setting again\n"
    return note + tomli_w.dumps(shown)


def command_line_flags(config: RunConfig) -> list[str]:
    """Flags of the ``COMMAND_LINE_ONLY`` settings that have a value; the TOML of ``config`` lacks these."""
    values = flatten(config)
    return [f"--{name}={values[name]}" for name in COMMAND_LINE_ONLY if values[name]]


def shown(config: RunConfig) -> dict[str, Any]:
    """``flatten`` without secrets, for files and comparisons."""
    return {name: redact_value(name, value) for name, value in flatten(config).items()}


def differences(left: RunConfig, right: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted names whose values differ, with the left and the right value."""
    a = flatten(left)
    b = flatten(right)
    return {name: (a[name], b[name]) for name in a if a[name] != b[name]}


MAX_BYTES = 1 << 20
"""Largest size of a file. All settings of a run take 10 kB."""
_MAX_DEPTH = 50


def toml_table(path: Path) -> dict[str, Any]:
    """The tables of a TOML file that the user named.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not TOML, or is larger or nested deeper than a config can be; the message says which.
    """
    with open_named(path) as file:
        return _table(file.read(MAX_BYTES + 1))


def settings_of_run(run_dir: str | Path) -> dict[str, Any]:
    """The tables of the run.toml of a run folder.

    Raises:
        OSError, ValueError: see ``crius.untrusted.read_below`` and ``toml_table``.
    """
    return _table(read_below(run_dir, "run.toml", MAX_BYTES))


def _table(content: bytes) -> dict[str, Any]:
    if len(content) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES:,} bytes")
    try:
        table = parse_toml(content.decode("utf-8-sig"))  # editors on Windows write a byte order mark
    except ValueError as error:
        if type(error) is not ValueError or "nested" in str(error):
            raise
        raise ValueError("it has an integer of thousands of digits") from None  # Python's limit against slow parsing
    if _depth(table) > _MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
    return table


def _depth(table: dict[str, Any]) -> int:
    """Levels of tables and lists, without recursion."""
    depth = 0
    level: list[Any] = [table]
    while level:
        depth += 1
        children = [item for node in level for item in (node.values() if isinstance(node, dict) else node)]
        level = [item for item in children if isinstance(item, (dict, list))]
    return depth


def takes(hint: Any, value: Any) -> bool:
    """Whether a TOML value has the type of a setting. Ranges and choices are checked later."""
    kinds = alternatives(hint)
    if len(kinds) > 1:
        return any(takes(kind, value) for kind in kinds)
    origin = get_origin(hint)
    if origin is tuple:
        return all(takes(get_args(hint)[0], item) for item in (value if isinstance(value, list) else [value]))
    if origin is Literal or hint in (str, Path):
        return isinstance(value, str)
    if isinstance(value, bool) or hint is bool:
        return hint is bool and isinstance(value, bool)
    return hint in (int, float) and isinstance(value, (int, float))


def wrong_kind(name: str, value: Any, hint: Any, source: str) -> ConfigError:
    """Error about a value that the setting ``name`` does not take.

    Args:
        name: dotted field.
        value: TOML value.
        hint: type of the setting.
        source: origin of the value.
    """
    is_list = isinstance(value, list)
    shown = json.dumps(value, default=str) if is_list else tomli_w.dumps({"": value}).partition("=")[2].strip()
    what = f"{name} = {shown} is {in_words(type(value))}, and the setting takes {in_words(hint)}."
    leaf = name.rpartition(".")[2]
    fix = ""
    choices = choices_of(hint)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            fix = f"{leaf} = {value}" if takes(hint, parse_toml(f"x = {value}")["x"]) else ""
    elif choices and str(value) not in choices:
        fix = f"{leaf} = {' or '.join(map(json.dumps, choices))}"
    elif takes(hint, texts := [str(item) for item in value] if is_list else str(value)):
        fix = f"{leaf} = {json.dumps(texts, ensure_ascii=False)}"
    return ConfigError(what, where=source, fix=fix or f"crius config explain {name} says what it takes")


def imports_of(path: str) -> str:
    """The flags ``--import MODULE`` in the first lines of a run.toml; empty if one of them names no module."""
    try:
        text = text_below(Path(path).parent, Path(path).name, MAX_BYTES)
    except OSError:
        return ""
    lines = list(itertools.takewhile(lambda line: line.startswith("# --import "), text.splitlines()))
    is_plain = all(re.fullmatch(r"# --import [A-Za-z_]\w*(\.[A-Za-z_]\w*)*", line, re.ASCII) for line in lines)
    return " ".join(line[2:] for line in lines) if is_plain else ""


_LINE = re.compile(
    r"""(?P<indent> *)(?P<item>- +)?((?P<key>[A-Za-z_][\w.-]*):(?= |$))? *(?P<value>"[^"]*"|'[^']*'|[^#]*)"""
)


def other_format(file: Path) -> tuple[str, list[str]]:
    """JSON or YAML, and the settings of ``file`` as flags; no flags if it is neither.

    Raises:
        OSError: the file cannot be read.
    """
    with open_named(file) as opened:
        text = opened.read(MAX_BYTES).decode("utf-8-sig", "replace")
    with contextlib.suppress(ValueError):
        table = parse_json(text)
        return "JSON", list(_flags_of(table)) if isinstance(table, dict) else []
    if file.suffix in (".yaml", ".yml") or re.search(r"^\s*[\w.-]+:( |$)", text, re.MULTILINE):
        return "YAML", list(_flags_of_yaml(text))
    return "", []


def _flags_of(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flags_of(value, f"{name}.")
            continue
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                yield f"--{name}={str(item).lower() if isinstance(item, bool) else item}"


def _flags_of_yaml(text: str) -> Iterator[str]:
    """The flags of lines such as ``key: value`` and ``- value``, with the names of the sections around them."""
    sections: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if not match or not line.strip() or line.lstrip().startswith(("#", "---")):
            continue
        indent = len(match["indent"]) + len(match["item"] or "")
        value = (match["value"] or "").strip().strip("\"'")
        if match["key"]:
            sections = [*(outer for outer in sections if outer[0] < indent), (indent, match["key"])]
        name = ".".join(key for _, key in sections)
        if value not in ("", "null", "~") and name:
            yield f"--{name}={value}"

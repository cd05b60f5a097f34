"""Flags and TOML to a ``RunConfig``, with the origin of every value.

Order: defaults < recipe (``--recipe NAME``) < ``--config a.toml`` (repeatable, the last one wins) < flags.
"""

import difflib
import importlib.resources
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from cyclopts import App, ArgumentCollection, CycloptsError
from cyclopts.argument import Argument, Token
from cyclopts.exceptions import UnknownOptionError, UnusedCliTokensError

from crius.config.export import flatten
from crius.config.run import RunConfig
from crius.errors import ConfigError

DEFAULT_RECIPE = "llama3_debug"
VERIFY_RECIPE = "verify"
"""What ``crius verify`` trains unless told otherwise."""
PRECISION_RECIPE = "precision"
"""What ``crius verify precision`` does: a run long enough to learn something."""

# torchtitan's names of flags that Crius spells otherwise; accepted wherever a flag or a TOML key is.
ALIASES = {
    "job.dump_folder": "job.run_dir",
    "metrics.log_freq": "metrics.log_interval",
    "parallelism.fsdp_reshard_after_forward": "parallelism.reshard_after_forward_mode",
    "profiling.enable_profiling": "profiler.enable",
    "quantize.dense.float8.exclude": "quantize.dense.exclude",
    "quantize.dense.float8.pad_inner_dim": "quantize.dense.pad_inner_dim",
    "quantize.dense.float8.recipe_name": "quantize.dense.float8.recipe",
    "quantize.dense.mxfp8.exclude": "quantize.dense.exclude",
    "quantize.dense.float8.precompute_float8_dynamic_scale_for_fsdp": "quantize.dense.float8.precompute_scale",
    "reproducible": "training.reproducible",
    "checkpoint.async_mode": "checkpoint.mode",
    "checkpoint.keep_latest_k": "checkpoint.keep_last",
    "checkpoint.initial_load_path": "checkpoint.load_path",
    "training.dataset_path": "data.path",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "validation.freq": "validation.interval",
}

# Names people try that mean a flag of another place: only suggested, never applied.
MOVED = {
    "float8.enable": "quantize.dense.float8.enable",
    "mx.enable": "quantize.dense.mxfp8.enable",
    "training.compile": "compile.enable",
    "training.dataset": "data.source",
    "training.batch_size": "training.local_batch_size",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "model.tokenizer_path": "tokenizer.path",
    "optimizer.fused": "optimizer.implementation",
}

# Short names of flags, for crius plan.
PLAN_SHORT = {
    "model": "model.name",
    "flavor": "model.flavor",
    "seq_len": "training.seq_len",
    "global_batch_size": "training.global_batch_size",
    "local_batch_size": "training.local_batch_size",
}

# Other people's spellings of a choice that differ by more than case, hyphens and underscores.
CHOICE_ALIASES = {"interleaved1f1b": "interleave_1f1b", "interleavedzerobubble": "interleave_zero_bubble"}


def recipe_names() -> list[str]:
    """Names of the recipes that come with Crius, sorted."""
    folder = importlib.resources.files("crius") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``, did you mean X?`` for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {near[0]}?" if near else ""


class RunSources:
    """A cyclopts config hook: fills what the command line left open from TOML and remembers where values came from.

    Attributes:
        origins: dotted field name to a phrase such as ``command line`` or ``recipe llama3_debug``, of every value that
            is not a default.
        recipe: name of the recipe that was used; empty when only ``--config`` files were.
    """

    def __init__(self) -> None:
        self.origins: dict[str, str] = {}
        self.recipe = ""

    def origin(self, name: str) -> str:
        """Where the value of the dotted field ``name`` came from; ``default`` when nobody set it."""
        return self.origins.get(name, "default")

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Called by cyclopts between reading the command line and converting values."""
        named = {argument.name: argument for argument in arguments}
        if "--recipe" not in named:
            return
        self.origins = {}  # of this command line alone
        files = [token.value for token in named["--config"].tokens]
        recipes = [token.value for token in named["--recipe"].tokens]
        if not recipes and "verify" in commands:  # below a --config too: what that leaves open stays small
            recipes = [PRECISION_RECIPE if "precision" in commands else VERIFY_RECIPE]
        elif not recipes and not files and "plan" not in commands:  # a plan is of a model, not of the debug run
            recipes = [DEFAULT_RECIPE]
        self.recipe = recipes[0] if recipes else ""
        for source, table in [*((path, read_toml(Path(path))) for path in reversed(files)), *map(_recipe, recipes)]:
            _fill(named, _settings(table, source), source)
        for argument in arguments:
            if not argument.tokens:
                continue
            for token in argument.tokens:
                _refuse_fraction(argument, token)
            argument.tokens = [token.evolve(value=_canonical(token.value, argument.hint)) for token in argument.tokens]
            source = argument.tokens[0].source
            self.origins[argument.name.lstrip("-")] = "command line" if source == "cli" else source


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ConfigError: no such file, or not TOML; names the file and, where known, the line.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}."
        raise ConfigError(what, where="--config", fix="give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.", fix="mend that line") from None


def recipe_settings(name: str) -> dict[str, Any]:
    """Dotted names and values of a recipe, as its file has them.

    Raises:
        ConfigError: there is no such recipe.
    """
    source, table = _recipe(name)
    return _settings(table, source)


def _recipe(name: str) -> tuple[str, dict[str, Any]]:
    names = recipe_names()
    if name not in names:
        raise ConfigError(
            f"no recipe is called {name}{did_you_mean(name, names)}",
            where="--recipe",
            fix=f"use one of {', '.join(names)}, or --config FILE.toml",
        )
    text = (importlib.resources.files("crius") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    return f"recipe {name}", tomllib.loads(text)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = f"{prefix}{key}".replace("-", "_")
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _settings(table: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Dotted names and values of ``table``, torchtitan's names replaced by ours."""
    settings: dict[str, Any] = {}
    for written, value in _flat(table):
        name = ALIASES.get(written, written)
        if name in settings:
            raise ConfigError(f"{name} is given twice, once under another spelling.", where=source, fix="keep one")
        settings[name] = value
    return settings


def _fill(named: Mapping[str, Argument], settings: Mapping[str, Any], source: str) -> None:
    """Give each setting to its argument, unless a stronger source has spoken.

    cyclopts' own ``Dict`` would drop a section that is called like a verb (``[data]``) and read ``no_enable = true``
    as ``enable = true``.
    """
    fields = {name[2:]: argument for name, argument in named.items() if "." in name and not argument.children}
    for name, value in settings.items():
        if name not in fields:
            raise _unknown("key", name, fields, source)
        argument = fields[name]
        if argument.tokens:
            continue
        items = value if isinstance(value, list) and get_origin(argument.hint) is tuple else [value]
        if not items:
            argument.append(Token(keyword=name, source=source, implicit_value=()))
        for index, item in enumerate(items):
            argument.append(Token(keyword=name, value=str(item), source=source, index=index))


def _refuse_fraction(argument: Argument, token: Token) -> None:
    """cyclopts rounds 1.5 to 2 where a whole number is asked for."""
    kinds = (argument.hint, *get_args(argument.hint))
    try:
        is_fraction = int in kinds and not float(token.value).is_integer()
    except ValueError:
        return  # no number at all: a choice, or an error that cyclopts reports
    if is_fraction:
        where = "command line" if token.source == "cli" else token.source
        raise ConfigError(f"{argument.name[2:]} {token.value} is no whole number.", where=where, fix="give an integer")


def _choices(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [choice for choice in get_args(hint) if isinstance(choice, str)]
    if get_origin(hint) in (Union, types.UnionType):
        return [choice for part in get_args(hint) for choice in _choices(part)]
    return []


def _canonical(value: str, hint: Any) -> str:
    """``value`` in the spelling of the choice that it equals when case, ``-`` and ``_`` are ignored."""
    plain = value.lower().replace("_", "").replace("-", "")
    for choice in _choices(hint):
        if plain == choice.replace("_", "").replace("-", "") or CHOICE_ALIASES.get(plain) == choice:
            return choice
    return value


def normalized_argv(argv: Sequence[str]) -> list[str]:
    """``argv`` as cyclopts takes it.

    torchtitan's flag names are replaced, ``--flag true`` is joined to ``--flag=true``, and of a flag that is given
    more than once the last one stays, so that a script can append to common flags. Flags that take lists collect.
    """
    options = {"recipe": "", "nproc": 0, "strict": False, "dry_run": False, "dry_run_rank": 0}
    defaults: dict[str, Any] = flatten(RunConfig()) | options
    aliases = ALIASES | PLAN_SHORT if argv and argv[0] == "plan" else ALIASES
    out: list[str] = []
    last: dict[str, int] = {}  # where in ``out`` each flag that takes one value stands
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


def _forget(out: list[str], last: dict[str, int], setting: str, default: Any) -> None:
    """Take the earlier ``setting`` and its value out of ``out``."""
    start = last.pop(setting)
    has_value = "=" not in out[start] and not isinstance(default, bool) and start + 1 < len(out)
    count = 2 if has_value and not out[start + 1].startswith("--") else 1
    del out[start : start + count]
    for name, place in last.items():
        last[name] = place - count if place > start else place


def explain(error: CycloptsError) -> ConfigError:
    """A parsing error of cyclopts as a ``ConfigError`` of one clear sentence."""
    if isinstance(error, UnusedCliTokensError):
        unused = " ".join(error.unused_tokens or ())
        fix = "repeat a flag for each of its values: --flag A --flag B"
        return ConfigError(f"{unused} belongs to no flag.", where="command line", fix=fix)
    if not isinstance(error, UnknownOptionError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return ConfigError(" ".join(lines), fix="see crius COMMAND --help for what each flag takes")
    written = error.token.keyword or error.token.value
    known = [name for argument in error.argument_collection for name in argument.names if not argument.children]
    return _unknown("flag", written, known, "command line")


def _unknown(kind: str, written: str, known: Iterable[str], where: str) -> ConfigError:
    """An unknown flag (``--a.b``) or TOML key (``a.b``), with the known name that was most likely meant."""
    dashes = "--" if kind == "flag" else ""
    name = written.removeprefix("--").partition("=")[0]
    moved = MOVED.get(name.replace("-", "_"))
    hint = f", did you mean {dashes}{moved}?" if moved else did_you_mean(f"{dashes}{name}", known)
    fix = f"write {hint.removeprefix(', did you mean ').rstrip('?')}" if hint else "crius train --help lists every flag"
    return ConfigError(f"unknown {kind} {written}{hint or '.'}", where=where, fix=fix)

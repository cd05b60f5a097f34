"""Flags and TOML to a ``RunConfig``, with the origin of every value.

Order: defaults < recipe (``--recipe NAME``) < ``--config a.toml`` (repeatable, the last one wins) < flags.
"""

import contextlib
import functools
import importlib.resources
import re
import shlex
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from cyclopts import App, ArgumentCollection, CycloptsError
from cyclopts.argument import Argument, Token

from crius import plugins
from crius.config.data import check_source
from crius.config.layout import spread_layout, spread_microbatches
from crius.config.names import WrongSettings, conversion, did_you_mean, unknown
from crius.config.other_trainers import ALIASES
from crius.config.toml_file import COMMAND_LINE_ONLY, choices_of, other_format, takes, toml_table, wrong_kind
from crius.errors import ConfigError, CriusError
from crius.untrusted import parse_toml, text_named

DEFAULT_RECIPE = "llama3_debug"
VERIFY_RECIPE = "verify"
"""Recipe that ``crius verify`` trains unless another is given."""
PRECISION_RECIPE = "precision"
"""Recipe of ``crius verify precision``: a run that is long enough to learn something."""

TAKEN = (
    *("dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size", "rope_theta"),
    *("rope_scaling", "norm_eps", "tied_embeddings", "words"),
)
"""Sizes that a file of ``model.from_hf`` gives. The run.toml of such a run has all of them."""

OF_EXPERTS = ("num_experts", "top_k", "expert_ffn_dim")
"""Further sizes of a model with experts."""

LENGTHS = ("training.steps", "training.epochs")
"""Settings of a run's length: one of them in a stronger source replaces the other in a weaker source."""
COUNTED = {"training.epochs": "1", "training.global_batch_size": "-1"}
"""Settings that may be ``auto``: what follows from the number of sequences. Their values until these are counted."""
FROM_HF = "--model.from_hf"
OF_MODEL = " (model.from_hf)"
"""End of the origin of a value that ``model.from_hf`` gave."""
INIT_FROM = "--checkpoint.init_from"
OF_WEIGHTS = " (checkpoint.init_from)"
"""End of the origin of a value that came with weights."""
OF_DATA = "what data.path has"
"""Origin of a value that was inferred from the data."""
DATA_DECIDES = ("data.source", "data.format", "model.attention_mask")
CUSTOM = "custom"
"""The flavor without sizes of its own."""

MOST_UNKNOWN = 20
"""Unknown keys of a file that are reported one by one."""

# Other people's spellings of a choice that differ by more than case, hyphens and underscores.
CHOICE_ALIASES = {"interleaved1f1b": "interleave_1f1b", "interleavedzerobubble": "interleave_zero_bubble"}


def recipe_names() -> list[str]:
    """Names of the recipes that come with Crius, sorted."""
    folder = importlib.resources.files("crius") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


class RunSources:
    """A cyclopts config hook: fills open settings from TOML, and records the origin of every value.

    Args:
        spellings: dotted names of settings, and the known values of each; case is ignored.
        read_model: reads ``model.from_hf``: (path, name of the model or empty, origin of the path) to the file and
            values of the fields of ``[model]``. Raises ConfigError.
        read_weights: reads settings that come with weights: (path, run folder or empty, origin) to values by dotted
            name. Raises CriusError.
        read_data: infers settings from the data: arguments by flag to values by dotted name. Raises ConfigError.
        locate: maps (dotted name of a setting, its value, known settings, origin) to a path, where the value is a name
            of the hub. Raises CriusError.

    Attributes:
        origins: dotted field name to a phrase such as ``recipe debug``, for every value that is not a default.
        recipe: name of the recipe that was used; empty if only ``--config`` files were used.
        counted: the settings of ``COUNTED`` that are ``auto``.
    """

    def __init__(
        self,
        spellings: Mapping[str, Collection[str]] = types.MappingProxyType({}),
        read_model: Callable[[str, str, str], tuple[str, dict[str, Any]]] = lambda path, name, where: (path, {}),
        read_weights: Callable[[str, str, str], Mapping[str, Any]] = lambda path, run_dir, where: {},
        read_data: Callable[[Mapping[str, Argument]], Mapping[str, Any]] = lambda named: {},
        locate: Callable[[str, str, Mapping[str, str], str], str] = lambda name, path, settings, where: path,
    ) -> None:
        self.origins: dict[str, str] = {}
        self.recipe = ""
        self.counted: set[str] = set()
        self._spellings = spellings
        self._read_model, self._read_weights = read_model, read_weights
        self._read_data = read_data
        self._locate = locate
        self._model_file = ""

    def origin(self, name: str) -> str:
        """Origin of the value of the dotted field ``name``; ``default`` if no source set it."""
        return self.origins.get(name, "default")

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill and check ``arguments``; cyclopts calls this before it converts values.

        Raises:
            WrongSettings: some keys or values of the files or of the command line are wrong.
        """
        problems = list(self._problems(commands, arguments))
        if problems or any(argument.children and argument.tokens for argument in arguments):  # a section has no value
            raise WrongSettings(problems, arguments)

    def _problems(self, commands: Collection[str], arguments: ArgumentCollection) -> Iterator[CriusError]:
        """Fill ``arguments``; yields the errors in keys and values of files and command line."""
        named = {argument.name: argument for argument in arguments}
        for argument in arguments:
            if int in (argument.hint, *get_args(argument.hint)):
                argument.tokens = [token.evolve(value=_whole(token.value)) for token in argument.tokens]
        self.origins, self._model_file = {}, ""  # of this command line alone
        self.counted.clear()
        if "--recipe" not in named:
            yield from self._find("--tokenizer.path", named)
            yield from self._find("--data.path", named)
            yield from self._spread_data(named, DATA_DECIDES)
            return
        files = [token.value for token in named["--config"].tokens]
        recipes = [token.value for token in named["--recipe"].tokens]
        if not recipes and "verify" in commands:  # also with a --config: settings that it leaves open stay small
            recipes = [PRECISION_RECIPE if "precision" in commands else VERIFY_RECIPE]
        elif not recipes and not files and "plan" not in commands:  # a plan is of a model, not of the debug run
            recipes = [DEFAULT_RECIPE]
        self.recipe = recipes[0] if recipes else ""
        takes_layout = "verify" not in commands  # verify has a --layout of its own
        if takes_layout:
            yield from spread_layout(named)
        yield from self._spread_model(named, {})
        for file in reversed(files):
            yield from self._take(functools.partial(_config_file, file), named, commands)
        yield from self._spread_weights(named)
        reads_data = not {"plan", "doctor"}.intersection(commands)
        if reads_data:
            yield from self._find("--data.path", named)
        yield from self._spread_data(named, DATA_DECIDES[:1])  # the format is what a recipe is for
        for recipe in recipes:
            yield from self._take(functools.partial(_recipe, recipe), named, commands)
        if reads_data:
            yield from self._find("--tokenizer.path", named)
            yield from self._find("--data.path", named)  # a path that a recipe names
        yield from self._spread_data(named, DATA_DECIDES)
        if takes_layout:
            yield from spread_microbatches(named)
        for argument in arguments:
            if argument.tokens and not argument.children:
                yield from self._settle(argument, commands)

    def _take(
        self,
        read: Callable[[], tuple[str, dict[str, Any]]],
        named: Mapping[str, Argument],
        commands: Collection[str],
    ) -> Iterator[CriusError]:
        """Give the settings of a file to arguments that are not set yet; ``read`` returns its name and its table."""
        try:
            source, table = read()
        except ConfigError as error:
            yield error
            return
        settings, twice = _settings(table)
        for name in twice:
            yield ConfigError(f"{name} is given twice, in two spellings.", where=source, fix="keep one")
        if settings.get("model.from_hf"):
            _leave_open(named)
        for name, other in (LENGTHS, LENGTHS[::-1]):
            if f"--{other}" in named and named[f"--{other}"].tokens:  # set by a stronger source
                settings.pop(name, None)
        yield from _fill(named, settings, source, is_read_only="config" in commands)
        yield from self._spread_model(named, settings)

    def _spread_model(self, named: Mapping[str, Argument], settings: Mapping[str, Any]) -> Iterator[CriusError]:
        """Give the values of the file of ``model.from_hf`` to arguments of ``[model]`` that are not set yet.

        Args:
            named: arguments by their flag.
            settings: settings of the file that was read last. If it is a run.toml with ``flavor custom`` and all sizes,
                the file of ``model.from_hf`` is not read again.
        """
        token = next(iter(named[FROM_HF].tokens), None) if FROM_HF in named else None
        if token is None or not token.value or self._model_file:
            return
        self._model_file = token.value
        said = {field: next(iter(named[f"--model.{field}"].tokens), None) for field in ("name", "flavor")}
        name = said["name"].value if said["name"] else ""
        where = f"{FROM_HF} ({'command line' if token.source == 'cli' else token.source})"
        has_sizes = settings.get("model.flavor") == CUSTOM and settings.keys() >= {f"model.{size}" for size in TAKEN}
        found: dict[str, Any] = {"name": str(settings.get("model.name")), "flavor": CUSTOM}
        file = ""
        if not (has_sizes and settings.get("model.from_hf") == token.value):
            try:
                file, found = self._read_model(token.value, self._spelled("model.name", name) or name, where)
            except ConfigError as error:
                yield error
                return
        for field, one in said.items():
            if one and _plain(one.value) != _plain(found[field]):
                yield ConfigError(
                    f"model.{field} {one.value or ascii('')} conflicts with model.from_hf {token.value}, "
                    f"a {found['name']} model with sizes of its own.",
                    where="command line" if one.source == "cli" else one.source,
                    fix=f"leave out model.{field}, or model.from_hf",
                )
        if file:
            _leave_open(named)
            values = {f"model.{name}": value for name, value in found.items()}
            yield from _fill(named, values, f"{file}{OF_MODEL}", is_read_only=False)

    def _spread_weights(self, named: Mapping[str, Argument]) -> Iterator[CriusError]:
        """Give the model and the tokenizer of ``checkpoint.init_from`` to arguments that are not set; a recipe is
        weaker. If a flavor was given, the sizes are the flavor's; rotary frequencies are those of the weights.
        """
        if INIT_FROM not in named or not named[INIT_FROM].tokens:
            return
        if problems := list(self._find(INIT_FROM, named)):
            yield from problems
            return
        token = named[INIT_FROM].tokens[0]
        if not token.value:
            return
        _leave_open(named)
        brought = ["model.name", "model.flavor", *(f"model.{size}" for size in (*TAKEN, *OF_EXPERTS))]
        if named["--model.flavor"].tokens:
            brought = ["model.name", "model.rope_scaling"]
        if not named["--tokenizer.path"].tokens:
            brought += ["tokenizer.path", "tokenizer.eos_token"]
        wanted = [name for name in brought if not named[f"--{name}"].tokens]
        if not wanted:
            return
        folder = next(iter(named["--job.run_dir"].tokens), None)
        where = f"{INIT_FROM} ({'command line' if token.source == 'cli' else token.source})"
        try:
            found = self._read_weights(token.value, folder.value if folder else "", where)
        except CriusError as error:
            yield error
            return
        values = {name: found[name] for name in wanted if name in found}
        yield from _fill(named, values, f"{token.value}{OF_WEIGHTS}", is_read_only=False)

    def _spread_data(self, named: Mapping[str, Argument], names: Collection[str]) -> Iterator[CriusError]:
        """Give what the data looks like to those arguments of ``names`` that are not set."""
        wanted = [name for name in names if f"--{name}" in named and not named[f"--{name}"].tokens]
        if not wanted:
            return
        try:
            inferred = self._read_data(named)
        except ConfigError as error:
            yield error
            return
        values = {name: inferred[name] for name in wanted if name in inferred}
        self.origins |= dict.fromkeys(values, OF_DATA)
        yield from _fill(named, values, OF_DATA, is_read_only=False)

    def _find(self, flag: str, named: Mapping[str, Argument]) -> Iterator[CriusError]:
        """Replace names of the hub in the values of ``flag`` by paths; yields the errors."""
        if flag not in named:
            return
        argument = named[flag]
        known = {flag.removeprefix("--"): one.tokens[0].value for flag, one in named.items() if one.tokens}
        name = argument.name.removeprefix("--")
        found = []
        for token in argument.tokens:
            where = f"{argument.name} ({'command line' if token.source == 'cli' else token.source})"
            try:
                found.append(token.evolve(value=self._locate(name, token.value, known, where)))
            except CriusError as error:
                yield error
                return
        argument.tokens = found

    def rows_are_given(self) -> bool:
        """Whether a source other than ``model.from_hf`` and ``checkpoint.init_from`` gave ``model.vocab_size``."""
        origin = self.origin("model.vocab_size")
        return origin != "default" and not origin.endswith((OF_MODEL, OF_WEIGHTS))

    def _spelled(self, name: str, value: str) -> str:
        """The known value that equals ``value`` if case, ``-`` and ``_`` are ignored; empty if there is none."""
        known = self._spellings.get(name, ())
        if value in known or (name not in self._spellings and name not in plugins.GROUPS):
            return value if value in known else ""
        plain = _plain(value)
        ours = next((one for one in known if _plain(one) == plain), "")
        others = plugins.installed(plugins.GROUPS[name]) if not ours and name in plugins.GROUPS else []
        return (
            ours
            or next((one for one in others if one == value), "")
            or next((one for one in others if _plain(one) == plain), "")
        )

    def _settle(self, argument: Argument, commands: Collection[str]) -> Iterator[CriusError]:
        """Rewrite the value of ``argument`` in its canonical spelling and record its origin; yields its errors."""
        name = argument.name.lstrip("-")
        source = argument.tokens[0].source
        self.origins[name] = source = "command line" if source == "cli" else source
        argument.tokens = [
            token.evolve(value=self._spelled(name, token.value) or _canonical(token.value, argument.hint))
            for token in argument.tokens
        ]
        if name in COUNTED and argument.tokens[0].value.lower() == "auto":
            self.counted.add(name)
            argument.tokens = [argument.tokens[0].evolve(value=COUNTED[name])]
        wrong = next(filter(None, (_wrong_number(argument, token.value) for token in argument.tokens)), "")
        if wrong:
            yield ConfigError(f"{name} {wrong}", where=source, fix="give an integer")
            return
        try:
            if name == "data.source":
                check_source(argument.tokens[0].value, f"--{name} ({source})")
            argument.convert()
        except ConfigError as error:
            yield error
        except CycloptsError as error:
            yield conversion(error, commands)


def _leave_open(named: Mapping[str, Argument]) -> None:
    """Unset model sizes that are -1, and an empty ``rope_scaling``: these leave the value to ``model.from_hf``."""
    for name, argument in named.items():
        if argument.tokens and name.startswith("--model."):
            text = argument.tokens[0].value
            with contextlib.suppress(ValueError):
                if (name in ("--model.rope_scaling", "--model.words") and not text) or float(text) == -1:
                    argument.tokens = []


def _plain(text: str) -> str:
    return text.lower().replace("_", "").replace("-", "")


def _config_file(path: str) -> tuple[str, dict[str, Any]]:
    """The name of a TOML file and its tables.

    Raises:
        ConfigError: the file is missing or not TOML; the message names the file and, if known, the line.
    """
    file = Path(path)
    try:
        return path, toml_table(file)
    except OSError as error:
        what = f"{file} cannot be read: {error.strerror}."
        inner = file / "run.toml"
        fix = f"--config {shlex.quote(str(inner))}" if inner.is_file() else "give a TOML file"
        raise ConfigError(what, where="--config", fix=fix) from None
    except ValueError as error:
        kind, flags = other_format(file)
        if flags:
            fix = f"write {shlex.join(flags)} in place of --config {shlex.quote(path)}"
            raise ConfigError(f"{file} is {kind}, and not TOML.", where="--config", fix=fix) from None
        raise ConfigError(f"{file} is not valid TOML: {error}.", where="--config", fix="correct that line") from None


def recipe_settings(name: str) -> dict[str, Any]:
    """Dotted names and values of a recipe, as its file has them.

    Raises:
        ConfigError: there is no such recipe.
    """
    return _settings(_recipe(name)[1])[0]


def _recipe(name: str) -> tuple[str, dict[str, Any]]:
    names = recipe_names()
    if name not in names:
        raise ConfigError(
            f"no recipe is called {name}{did_you_mean(name, names) or '.'}",
            where="--recipe",
            fix=f"use one of {', '.join(names)}, or --config FILE.toml",
        )
    text = text_named(Path(__file__).parents[1] / "recipes" / f"{name}.toml")
    return f"recipe {name}", parse_toml(text)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = f"{prefix}{key}".replace("-", "_")
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _settings(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Dotted names and values of ``table``, by Crius's names; then the names that are given twice."""
    settings: dict[str, Any] = {}
    twice = []
    for written, value in _flat(table):
        name = ALIASES.get(written, written)
        if name in settings:
            twice.append(name)
        settings[name] = value
    return settings, twice


def _fill(
    named: Mapping[str, Argument], settings: Mapping[str, Any], source: str, *, is_read_only: bool
) -> Iterator[CriusError]:
    """Give each setting to its argument, unless a stronger source has set it; yields the errors of the settings.

    A verb that ``is_read_only`` runs nothing, so a setting that only the command line may give causes a warning there.
    cyclopts' own ``Dict`` would drop a section with the name of a verb (``[data]``) and read ``no_enable = true`` as
    ``enable = true``.
    """
    fields = {name[2:]: argument for name, argument in named.items() if "." in name and not argument.children}
    strange = [name for name in settings if name not in fields]
    for name in strange[:MOST_UNKNOWN]:
        value = settings[name]
        yield unknown("key", name, fields, source, value=str(value).lower() if isinstance(value, bool) else str(value))
    if len(strange) > MOST_UNKNOWN:
        yield ConfigError(f"{len(strange) - MOST_UNKNOWN} more keys are unknown.", where=source)
    for name, value in settings.items():
        argument = fields.get(name)
        if argument is None or argument.tokens:
            continue
        if not takes(argument.hint, value) and not (name in COUNTED and value == "auto"):
            yield wrong_kind(name, value, argument.hint, source)
            continue
        if name in COMMAND_LINE_ONLY and value and is_read_only:
            sys.stderr.write(f"warning: {name} in {source} is left out: only the command line may give it\n")
            continue
        if name in COMMAND_LINE_ONLY and value:
            yield ConfigError(
                f"{name} {value} is in a file, and only the command line may give it.",
                where=source,
                why="code in that folder is executed, and a stranger may have written the file",
                fix=f"--{name} {shlex.quote(value)}, if you trust that folder",
            )
            continue
        items = value if isinstance(value, list) else [value]
        if not items:
            argument.append(Token(keyword=name, source=source, implicit_value=()))
        for index, item in enumerate(items):
            argument.append(Token(keyword=name, value=str(item), source=source, index=index))


def _wrong_number(argument: Argument, text: str) -> str:
    """Why ``text`` is not an integer, for an integer setting: cyclopts rounds 1.5 to 2, and takes many digits."""
    if int not in (argument.hint, *get_args(argument.hint)):
        return ""
    shown = f"{text[:40]}..." if len(text) > 40 else text
    try:
        value = float(text)
    except (ValueError, OverflowError):
        return ""  # not a number: a choice, or an error that cyclopts reports
    if abs(value) >= 2**63:
        return f"{shown} does not fit into 64 bits."
    return "" if value.is_integer() else f"{shown} is not a whole number."


def _whole(text: str) -> str:
    """A count such as 1e6 in digits; any other text as it is."""
    if re.fullmatch(r"\d+(\.\d+)?e\+?\d{1,2}", text, re.IGNORECASE) and float(text).is_integer():
        return str(int(float(text)))
    return text


def _canonical(value: str, hint: Any) -> str:
    """The choice that equals ``value`` if case, ``-`` and ``_`` are ignored; else ``value``."""
    plain = _plain(value)
    for choice in choices_of(hint):
        if plain == _plain(choice) or CHOICE_ALIASES.get(plain) == choice:
            return choice
    return value

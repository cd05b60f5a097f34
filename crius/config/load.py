"""Flags and TOML to a ``RunConfig``, with the origin of every value.

Order: defaults < recipe (``--recipe NAME``) < ``--config a.toml`` (repeatable, the last one wins) < flags.
"""

import contextlib
import functools
import importlib.resources
import shlex
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from crius import plugins
from crius.config.arguments import Argument, Arguments
from crius.config.data import ONE_CORPUS, TABLES, check_source, table_text, tables_of
from crius.config.layout import spread_layout, spread_microbatches
from crius.config.names import did_you_mean, refused_value, unknown
from crius.config.other_trainers import ALIASES
from crius.config.toml_file import COMMAND_LINE_ONLY, other_format, takes, toml_table, wrong_kind
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
FROM_HF = "model.from_hf"
OF_MODEL = " (model.from_hf)"
"""End of the origin of a value that ``model.from_hf`` gave."""
INIT_FROM = "checkpoint.init_from"
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
    """Fills the settings that a command line leaves open, and records the origin of every value.

    Args:
        spellings: dotted names of settings, and the known values of each; case is ignored.
        read_model: reads ``model.from_hf``: (path, name of the model or empty, origin of the path) to the file and
            values of the fields of ``[model]``. Raises ConfigError.
        read_weights: reads settings that come with weights: (path, run folder or empty, origin) to values by dotted
            name. Raises CriusError.
        read_data: infers settings from the data: arguments to values by dotted name. Raises ConfigError.
        locate: maps (dotted name of a setting, its value, known settings, origin) to a path, where the value is a name
            of the hub. Raises CriusError.

    Attributes:
        origins: dotted field name to a phrase such as ``recipe debug``, for every value that is not a default.
        recipe: name of the recipe that was used; empty if only ``--config`` files were used.
        counted: the settings of ``COUNTED`` that are ``auto``.
        notes: collects what was decided, for a log; None: it is printed.
    """

    def __init__(
        self,
        spellings: Mapping[str, Collection[str]] = types.MappingProxyType({}),
        read_model: Callable[[str, str, str], tuple[str, dict[str, Any]]] = lambda path, name, where: (path, {}),
        read_weights: Callable[[str, str, str], Mapping[str, Any]] = lambda path, run_dir, where: {},
        read_data: Callable[[Arguments], Mapping[str, Any]] = lambda arguments: {},
        locate: Callable[[str, str, Mapping[str, str], str], str] = lambda name, path, settings, where: path,
    ) -> None:
        self.origins: dict[str, str] = {}
        self.recipe = ""
        self.counted: set[str] = set()
        self.notes: list[str] | None = None
        self._spellings = spellings
        self._read_model = read_model
        self._read_weights = read_weights
        self._read_data = read_data
        self._locate = locate
        self._model_file = ""

    def origin(self, name: str) -> str:
        """Origin of the value of the dotted field ``name``; ``default`` if no source set it."""
        return self.origins.get(name, "default")

    def fill(self, verb: Sequence[str], arguments: Arguments) -> Iterator[CriusError]:
        """Give values to the arguments of a verb that the command line leaves open, and spell all values canonically.

        Yields the errors in keys and values of files and command line.
        """
        self.origins, self._model_file = {}, ""  # of this command line alone
        self.counted.clear()
        if "recipe" in arguments:
            yield from self._fill_run(verb, arguments)
        else:
            yield from self._find("tokenizer.path", arguments)
            yield from self._find("data.path", arguments)
            yield from self._spread_data(arguments, DATA_DECIDES)
        for argument in arguments.values():
            if argument.source:
                yield from self._settle(argument, " ".join(verb))

    def _fill_run(self, verb: Sequence[str], arguments: Arguments) -> Iterator[CriusError]:
        """``fill`` for the settings of a run."""
        files = arguments["config"].texts
        recipes = arguments["recipe"].texts
        if not recipes and "verify" in verb:  # also with a --config: settings that it leaves open stay small
            recipes = [PRECISION_RECIPE if "precision" in verb else VERIFY_RECIPE]
        elif not recipes and not files and "plan" not in verb:  # a plan is of a model, not of the debug run
            recipes = [DEFAULT_RECIPE]
        self.recipe = recipes[0] if recipes else ""
        takes_layout = "layout" in arguments and "verify" not in verb  # verify has a --layout of its own
        is_read_only = "config" in verb
        if takes_layout:
            yield from spread_layout(arguments)
        yield from self._spread_model(arguments, {})
        for file in reversed(files):
            yield from self._take(functools.partial(_config_file, file), arguments, is_read_only=is_read_only)
        yield from self._spread_weights(arguments)
        reads_data = not {"plan", "doctor"}.intersection(verb)
        if reads_data:
            yield from self._find("data.path", arguments)
        yield from self._spread_data(arguments, DATA_DECIDES[:1])  # the format is what a recipe is for
        for recipe in recipes:
            yield from self._take(functools.partial(_recipe, recipe), arguments, is_read_only=is_read_only)
        if reads_data:
            yield from self._find("tokenizer.path", arguments)
            yield from self._find("data.path", arguments)  # a path that a recipe names
        yield from self._spread_data(arguments, DATA_DECIDES)
        if takes_layout:
            yield from spread_microbatches(arguments)

    def _take(
        self, read: Callable[[], tuple[str, dict[str, Any]]], arguments: Arguments, *, is_read_only: bool
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
        if settings.get(FROM_HF):
            _leave_open(arguments)
        for name, other in (LENGTHS, LENGTHS[::-1]):
            if other in arguments and arguments[other].source:  # set by a stronger source
                settings.pop(name, None)
        if "data.mix" in arguments and arguments["data.mix"].source:
            settings = {name: value for name, value in settings.items() if name not in ONE_CORPUS}
        yield from _fill(arguments, settings, source, is_read_only=is_read_only)
        yield from self._spread_model(arguments, settings)

    def _spread_model(self, arguments: Arguments, settings: Mapping[str, Any]) -> Iterator[CriusError]:
        """Give the values of the file of ``model.from_hf`` to arguments of ``[model]`` that are not set yet.

        Args:
            arguments: of the verb.
            settings: settings of the file that was read last. If it is a run.toml with ``flavor custom`` and all sizes,
                the file of ``model.from_hf`` is not read again.
        """
        path = arguments[FROM_HF].text
        if not path or self._model_file:
            return
        self._model_file = path
        has_sizes = settings.get("model.flavor") == CUSTOM and settings.keys() >= {f"model.{size}" for size in TAKEN}
        found: dict[str, Any] = {"name": str(settings.get("model.name")), "flavor": CUSTOM}
        file = ""
        if not (has_sizes and settings.get(FROM_HF) == path):
            name = arguments["model.name"].text
            try:
                file, found = self._read_model(
                    path, self._spelled("model.name", name) or name, arguments[FROM_HF].where
                )
            except ConfigError as error:
                yield error
                return
        for field in ("name", "flavor"):
            said = arguments[f"model.{field}"]
            if said.source and _plain(said.text) != _plain(found[field]):
                yield ConfigError(
                    f"model.{field} {said.text or ascii('')} conflicts with model.from_hf {path}, "
                    f"a {found['name']} model with sizes of its own.",
                    where=said.source,
                    fix=f"leave out model.{field}, or model.from_hf",
                )
        if file:
            _leave_open(arguments)
            values = {f"model.{name}": value for name, value in found.items()}
            yield from _fill(arguments, values, f"{file}{OF_MODEL}", is_read_only=False)

    def _spread_weights(self, arguments: Arguments) -> Iterator[CriusError]:
        """Give the model and the tokenizer of ``checkpoint.init_from`` to arguments that are not set; a recipe is
        weaker. If a flavor was given, the sizes are the flavor's; rotary frequencies are those of the weights.
        """
        weights = arguments[INIT_FROM]
        if not weights.source:
            return
        if problems := list(self._find(INIT_FROM, arguments)):
            yield from problems
            return
        if not weights.text:
            return
        _leave_open(arguments)
        brought = ["model.name", "model.flavor", *(f"model.{size}" for size in (*TAKEN, *OF_EXPERTS))]
        if arguments["model.flavor"].source:
            brought = ["model.name", "model.rope_scaling"]
        if not arguments["tokenizer.path"].source:
            brought += ["tokenizer.path", "tokenizer.eos_token"]
        wanted = [name for name in brought if not arguments[name].source]
        if not wanted:
            return
        try:
            found = self._read_weights(weights.text, arguments["job.run_dir"].text, weights.where)
        except CriusError as error:
            yield error
            return
        values = {name: found[name] for name in wanted if name in found}
        yield from _fill(arguments, values, f"{weights.text}{OF_WEIGHTS}", is_read_only=False)

    def _spread_data(self, arguments: Arguments, names: Collection[str]) -> Iterator[CriusError]:
        """Give what the data looks like to those arguments of ``names`` that are not set."""
        wanted = [name for name in names if name in arguments and not arguments[name].source]
        if "data.mix" in arguments and arguments["data.mix"].texts:  # each entry has a source and a format of its own
            wanted = [name for name in wanted if not name.startswith("data.")]
        if not wanted:
            return
        try:
            inferred = self._read_data(arguments)
        except ConfigError as error:
            yield error
            return
        values = {name: inferred[name] for name in wanted if name in inferred}
        self.origins |= dict.fromkeys(values, OF_DATA)
        yield from _fill(arguments, values, OF_DATA, is_read_only=False)

    def _find(self, name: str, arguments: Arguments) -> Iterator[CriusError]:
        """Replace names of the hub in the values of an argument by paths; yields the errors."""
        if name not in arguments:
            return
        argument = arguments[name]
        known = {other: one.text for other, one in arguments.items() if one.texts}
        try:
            argument.texts = [self._locate(name, text, known, argument.where) for text in argument.texts]
        except CriusError as error:
            yield error

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

    def _settle(self, argument: Argument, verb: str) -> Iterator[CriusError]:
        """Rewrite the value of ``argument`` in its canonical spelling and record its origin; yields its errors."""
        name = argument.name
        source = argument.source
        self.origins[name] = source
        choices = argument.setting.choices
        argument.texts = [self._spelled(name, text) or _canonical(text, choices) for text in argument.texts]
        if name in COUNTED and argument.text.lower() == "auto":
            self.counted.add(name)
            argument.texts = [COUNTED[name]]
        if name in TABLES:  # one spelling, so that a resumed run finds its own
            tables = tables_of(argument.texts)
            argument.texts = [table_text(one) if isinstance(one, dict) else str(one) for one in tables]
        try:
            if name == "data.source":
                check_source(argument.text, argument.where)
            argument.value()
        except ConfigError as error:
            yield error
        except ValueError as error:
            yield refused_value(argument, str(error), verb)


def _leave_open(arguments: Arguments) -> None:
    """Unset model sizes that are -1, and an empty ``rope_scaling``: these leave the value to ``model.from_hf``."""
    for name, argument in arguments.items():
        if argument.source and name.startswith("model."):
            is_empty = name in ("model.rope_scaling", "model.words") and not argument.text
            with contextlib.suppress(ValueError):
                if is_empty or float(argument.text) == -1:
                    argument.leave_open()


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
    folder = Path(__file__).parents[1] / "recipes"
    settings = parse_toml(text_named(folder / f"{name}.toml"))
    tokenizer = settings.get("tokenizer", {})
    if tokenizer.get("path") == name:  # it comes with the recipe
        tokenizer["path"] = str(folder / name)
    return f"recipe {name}", settings


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = f"{prefix}{key}".replace("-", "_")
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif name in TABLES and isinstance(value, list):
            yield name, [table_text(item) if isinstance(item, dict) else item for item in value]
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
    arguments: Arguments, settings: Mapping[str, Any], source: str, *, is_read_only: bool
) -> Iterator[CriusError]:
    """Give each setting to its argument, unless a stronger source has set it; yields the errors of the settings.

    A verb that ``is_read_only`` runs nothing, so a setting that only the command line may give causes a warning there.
    """
    fields = {name: argument for name, argument in arguments.items() if "." in name}
    strange = [name for name in settings if name not in fields]
    for name in strange[:MOST_UNKNOWN]:
        value = settings[name]
        yield unknown("key", name, fields, source, value=str(value).lower() if isinstance(value, bool) else str(value))
    if len(strange) > MOST_UNKNOWN:
        yield ConfigError(f"{len(strange) - MOST_UNKNOWN} more keys are unknown.", where=source)
    for name, value in settings.items():
        argument = fields.get(name)
        if argument is None or argument.source:
            continue
        hint = argument.setting.hint
        if not takes(hint, value) and not (name in COUNTED and value == "auto"):
            yield wrong_kind(name, value, hint, source)
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
        argument.give([str(item) for item in (value if isinstance(value, list) else [value])], source)


def _canonical(value: str, choices: Collection[str]) -> str:
    """The choice that equals ``value`` if case, ``-`` and ``_`` are ignored; else ``value``."""
    plain = _plain(value)
    for choice in choices:
        if plain == _plain(choice) or CHOICE_ALIASES.get(plain) == choice:
            return choice
    return value

"""``Verb``, a function with flags of its own, and ``Verbs``, a group of them: how words become a call."""

import functools
import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, TypeVar, get_type_hints

from crius.config.arguments import REQUIRED, Argument, Setting, settings_of, split_hint
from crius.config.command_line import SOURCE, Reader
from crius.config.load import RunSources
from crius.config.names import nearest_typo
from crius.config.run import replace_fields
from crius.errors import ConfigError

HELP_FLAGS = ("--help", "-h")

Function = TypeVar("Function", bound=Callable[..., int])


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of a verb's function.

    Attributes:
        name: in the function.
        section: default of a parameter whose fields are flags; None: the parameter itself is a flag.
        settings: its flag, or those of its fields.
    """

    name: str
    section: Any
    settings: tuple[Setting, ...]


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A function of the command line. Its parameters are its flags, its docstring is its help.

    Attributes:
        words: what a user types.
        function: returns the exit code.
        is_listed: whether help and completion show it.
        takes_all: whether any word may follow, so that it has no help.
        train: for a verb whose last words are flags of ``crius train``: that verb.
        moved: flags that became verbs, and the words of these.
    """

    words: tuple[str, ...]
    function: Callable[..., int]
    is_listed: bool = True
    takes_all: bool = False
    train: "Callable[[], Verb] | None" = None
    moved: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def about(self) -> str:
        """What it does: paragraphs."""
        return inspect.getdoc(self.function) or ""

    @functools.cached_property
    def parameters(self) -> list[Parameter]:
        """Parameters of the function, in their order."""
        hints = get_type_hints(self.function, include_extras=True)
        return [_parameter(one, hints[one.name]) for one in inspect.signature(self.function).parameters.values()]

    def arguments(self) -> dict[str, Argument]:
        """Its arguments by name; nothing is given yet."""
        return {one.name: Argument(one) for parameter in self.parameters for one in parameter.settings}

    def call(self, words: Sequence[str], sources: RunSources) -> "Call":
        """The call that ``words`` after the verb stand for. ``sources`` fills what they leave open.

        Raises:
            ConfigError: lists all that is wrong with the words, and with the files that they name.
        """
        arguments = self.arguments()
        words_of = [one.setting for one in arguments.values() if one.setting.takes_word]
        rest = next((one.name for one in words_of if one.is_list), "")
        reader = Reader(
            verb=" ".join(self.words),
            arguments=arguments,
            positional=[one.name for one in words_of if not one.is_list],
            rest=rest,
            settings=self.train().arguments() if self.train else {},
        )
        for word in words:
            flag, equals, value = word.partition("=")
            if flag in self.moved:
                others = [other for other in words if other is not word]
                command = shlex.join(["crius", *self.moved[flag], *([value] if equals else []), *others])
                what = f"{flag} of crius {' '.join(self.words)} is a verb of its own now."
                raise ConfigError(what, where=SOURCE, fix=command)
        if self.takes_all:
            arguments[rest].give(words, SOURCE)
        else:
            problems = [*reader.read(words), *sources.fill(self.words, arguments)]
            if problems:
                error = ConfigError.together(problems)
                error.exit_code = ConfigError.exit_code  # also of a file that a flag names
                raise error
        return Call(self, {one.name: _value(one, arguments) for one in self.parameters if _is_given(one, arguments)})


@dataclass(frozen=True)
class Call:
    """A verb and the values of those parameters for which something was given."""

    verb: Verb
    values: dict[str, Any]

    def __call__(self) -> int:
        """Run the verb; returns its exit code."""
        signature = inspect.signature(self.verb.function)
        bound = inspect.BoundArguments(signature, dict(self.values))
        return self.verb.function(*bound.args, **bound.kwargs)


@dataclass
class Verbs:
    """A group of verbs.

    Attributes:
        words: what a user types in front of each of them.
        about: help.
        members: verbs and groups by their own word.
    """

    words: tuple[str, ...]
    about: str
    members: "dict[str, Verb | Verbs]" = field(default_factory=dict)

    def group(self, name: str, about: str) -> "Verbs":
        """Add a group."""
        added = Verbs((*self.words, name), about)
        self.members[name] = added
        return added

    def verb(self, function: Function | None = None, *, name: str = "", **options: Any) -> Any:
        """Add a function as a verb; ``options`` are fields of ``Verb``. A decorator, with or without options."""
        if function is None:
            return functools.partial(self.verb, name=name, **options)
        word = name or function.__name__
        self.members[word] = Verb(words=(*self.words, *word.split()), function=function, **options)
        return function

    def find(self, words: Sequence[str]) -> "tuple[Verb | Verbs, list[str]]":
        """The verb that ``words`` begin with, or a group if they end there, and the words after it.

        Raises:
            ConfigError: the group has no such verb.
        """
        if not words or words[0] in HELP_FLAGS:
            return self, list(words)
        first, *rest = words
        found = self.members.get(first)
        if " ".join(words[:2]) in self.members:  # plan check, beside plan
            found = self.members[" ".join(words[:2])]
            rest = rest[1:]
        if found is None:
            names = [name for name, member in self.members.items() if not isinstance(member, Verb) or member.is_listed]
            prefix = " ".join(["crius", *self.words])
            near = nearest_typo(first, names)
            fix = " ".join([prefix, near, *rest]) if near else f"{prefix} with one of {', '.join(names)}"
            raise ConfigError(f"{first} is not a verb of {prefix}.", where=SOURCE, fix=fix)
        return (found, rest) if isinstance(found, Verb) else found.find(rest)

    def __iter__(self) -> "Iterator[Verb | Verbs]":
        """The members that help lists, by name."""
        for _, member in sorted(self.members.items()):
            if isinstance(member, Verbs) or member.is_listed:
                yield member


def _parameter(parameter: inspect.Parameter, annotation: Any) -> Parameter:
    hint, option = split_hint(annotation)
    section = None
    if is_dataclass(hint):
        section = parameter.default
        settings = settings_of(hint, option.name)  # type: ignore[arg-type]
    else:
        is_rest = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        default = () if is_rest else parameter.default
        setting = Setting(
            name=option.name or parameter.name,
            hint=tuple[hint, ...] if is_rest else hint,  # type: ignore[valid-type]
            default=REQUIRED if default is inspect.Parameter.empty else default,
            option=option,
            has_flag=not is_rest and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY,
            takes_word=parameter.kind is not inspect.Parameter.KEYWORD_ONLY,
        )
        settings = (setting,)
    return Parameter(name=parameter.name, section=section, settings=settings)


def _is_given(parameter: Parameter, arguments: dict[str, Argument]) -> bool:
    return any(arguments[setting.name].source for setting in parameter.settings)


def _value(parameter: Parameter, arguments: dict[str, Argument]) -> Any:
    """The value of a parameter for which something was given."""
    if parameter.section is None:
        return arguments[parameter.settings[0].name].value()
    given = {one.path: arguments[one.name].value() for one in parameter.settings if arguments[one.name].source}
    return replace_fields(parameter.section, given)

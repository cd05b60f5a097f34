"""Settings read off the dataclasses of a run, and ``Argument``: what was given for one of them, or for an option of a
verb."""

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import re
import textwrap
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

REQUIRED = object()
"""Default of an argument that must be given."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """What an annotation says beyond the type: ``Annotated[int, Option(...)]``. A text is ``Option(help=text)``.

    Attributes:
        help: explanation; empty: the docstring of the field.
        name: the flag without its dashes, or what stands in front of the names of a section; empty: the own name.
        takes_hyphen: whether a value may begin with a hyphen, as text of a person may.
        known: gives values for the shell to complete; any other value is possible too.
        check: raises ConfigError, or ValueError with a sentence about the value, for one that is not possible.
    """

    help: str = ""
    name: str = ""
    takes_hyphen: bool = False
    known: Callable[[], Collection[str]] | None = None
    check: Callable[[Any], object] = lambda value: None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of a run, or an option of a verb.

    Attributes:
        name: dotted name of a setting; name of an option.
        hint: type.
        default: value where nothing is given; ``REQUIRED``: there is none.
        option: see there.
        has_flag: whether ``--NAME`` gives it.
        takes_word: whether a word without a flag gives it.
        owner: dataclass with the docstring; None for an option of a verb.
        path: dotted name of the field in the section that was read.
    """

    name: str
    hint: Any
    default: Any
    option: Option = Option()
    has_flag: bool = True
    takes_word: bool = False
    owner: type | None = None
    path: str = ""

    @property
    def help(self) -> str:
        """Explanation: one or more paragraphs."""
        return self.option.help or (docstrings(self.owner)[self.path.rpartition(".")[2]] if self.owner else "")

    @property
    def is_required(self) -> bool:
        """Whether it must be given."""
        return self.default is REQUIRED

    @property
    def is_switch(self) -> bool:
        """Whether the flag alone means true."""
        return bool in (self.hint, *get_args(self.hint))

    @property
    def is_list(self) -> bool:
        """Whether the flag may be repeated for several values."""
        return get_origin(self.hint) is tuple

    @property
    def negative(self) -> str:
        """Name of the flag that means false; empty if there is none."""
        section, dot, leaf = self.name.rpartition(".")
        return f"{section}{dot}no_{leaf}" if self.is_switch and self.owner else ""

    @property
    def choices(self) -> list[str]:
        """The words that it takes; empty if it is not a choice among words."""
        return choices_of(self.hint)


@functools.cache
def settings_of(section: type, prefix: str = "", path: str = "") -> tuple[Setting, ...]:
    """All settings of a section, a dataclass, and of the sections in it, in their order.

    Args:
        section: the dataclass.
        prefix: stands in front of their names: empty, or ends in a dot.
        path: likewise for their paths.
    """
    hints = get_type_hints(section, include_extras=True)
    found: list[Setting] = []
    for part in dataclasses.fields(section):
        hint, option = split_hint(hints[part.name])
        name = option.name or f"{prefix}{part.name}"
        if dataclasses.is_dataclass(hint):
            found += settings_of(hint, f"{name}.", f"{path}{part.name}.")  # type: ignore[arg-type]
        else:
            found.append(
                Setting(
                    name=name,
                    hint=hint,
                    default=part.default,
                    option=option,
                    owner=section,
                    path=f"{path}{part.name}",
                )
            )
    return tuple(found)


def split_hint(hint: Any) -> tuple[Any, Option]:
    """A type without its annotations, and what these say."""
    if get_origin(hint) is not Annotated:
        return hint, Option()
    kind, said = get_args(hint)
    return kind, said if isinstance(said, Option) else Option(help=said)


def positive(value: float) -> None:
    """A check: the value is a number above 0."""
    if not value > 0:
        raise ValueError(f"{value} is not positive.")


Positive = Annotated[int, Option(check=positive)]
"""Type of an option that is a whole number above 0."""


@functools.cache
def docstrings(section: type) -> Mapping[str, str]:
    """The docstring below each field of a dataclass, and of the dataclasses that it inherits from."""
    texts: dict[str, str] = {}
    for base in section.__bases__:
        if dataclasses.is_dataclass(base):
            texts |= docstrings(base)
    (declared,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(declared, ast.ClassDef)
    for node, below in itertools.pairwise(declared.body):
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(node.target, ast.Name)
            texts[node.target.id] = inspect.cleandoc(str(below.value.value))
    return texts


@dataclass
class Argument:
    """What was given for a setting.

    Attributes:
        texts: the values as they were written: one, or for a list any number.
        source: where they are from, such as ``command line``; empty: nothing was given.
    """

    setting: Setting
    texts: list[str] = field(default_factory=list)
    source: str = ""

    @property
    def name(self) -> str:
        """Name of the setting."""
        return self.setting.name

    @property
    def shown(self) -> str:
        """The name as a user knows it: of a setting, a flag or a word."""
        if "." in self.name:
            return self.name
        return self.name.upper() if self.setting.takes_word else f"--{self.name}"

    @property
    def text(self) -> str:
        """The value as it was written; empty if there is none."""
        return self.texts[0] if self.texts else ""

    @property
    def where(self) -> str:
        """The flag and where it is from, for errors."""
        written = self.shown if self.setting.takes_word else f"--{self.name}"
        return f"{written} ({self.source})"

    def give(self, texts: Sequence[str], source: str) -> None:
        """Replace what was given."""
        self.texts = list(texts)
        self.source = source

    def leave_open(self) -> None:
        """Forget what was given."""
        self.give((), "")

    def value(self) -> Any:
        """The value.

        Raises:
            ValueError: a text is not one of the type; the message is the end of a sentence about the text.
        ConfigError: see ``Option.check``.
        """
        setting = self.setting
        if setting.is_list:
            (kind, *_) = get_args(setting.hint)
            return tuple(converted(kind, text) for text in self.texts)
        value = converted(setting.hint, self.text)
        setting.option.check(value)
        return value


Arguments = Mapping[str, Argument]
"""Arguments of a verb by name."""

WORDS_OF_BOOL = {
    **dict.fromkeys("true t yes y 1 on".split(), True),
    **dict.fromkeys("false f no n 0 off".split(), False),
}
_SHOWN = 40


def converted(hint: Any, text: str) -> Any:
    """The value of type ``hint`` that ``text`` spells.

    Raises:
        ValueError: there is none; the message is a sentence with the text.
    """
    kinds = [kind for kind in alternatives(hint) if kind is not types.NoneType]
    for kind in sorted(kinds, key=lambda kind: get_origin(kind) is not Literal):
        if get_origin(kind) is Literal:
            if text in get_args(kind):
                return text
        elif kind is bool:
            if text.lower() in WORDS_OF_BOOL:
                return WORDS_OF_BOOL[text.lower()]
        elif kind is int:
            if (number := whole_number(text)) is not None:
                return number
        elif kind is float:
            try:
                return float(text)
            except ValueError:
                continue
        else:
            return kind(text)
    raise ValueError(f"{_shown(text)} is not {in_words(hint)}.")


def whole_number(text: str) -> int | None:
    """The integer that ``text`` spells, such as 4, 1_000, 1e6 or 2.0; None if it is not a number.

    Raises:
        ValueError: it is another number, or does not fit into 64 bits.
    """
    try:
        value = float(text)
    except (ValueError, OverflowError):
        return int(text, 16) if re.fullmatch(r"0x[0-9a-f]{1,15}", text, re.IGNORECASE) else None
    if abs(value) >= 2**63 and not math.isnan(value):
        raise ValueError(f"{_shown(text)} does not fit into 64 bits.")
    if not value.is_integer():
        raise ValueError(f"{_shown(text)} is not a whole number.")
    return int(text) if re.fullmatch(r"[+-]?[\d_]+", text.strip()) else int(value)


def _shown(text: str) -> str:
    short = f"{text[:_SHOWN]}..." if len(text) > _SHOWN else text
    return short or repr("")


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union; else the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def choices_of(hint: Any) -> list[str]:
    """The words that a setting of this type may have; empty if it is not a choice among words."""
    literals = (kind for kind in alternatives(hint) if get_origin(kind) is Literal)
    return [choice for kind in literals for choice in get_args(kind) if isinstance(choice, str)]


def in_words(hint: Any) -> str:
    """A type in words."""
    kinds = alternatives(hint)
    if len(kinds) > 1:
        return " or ".join(in_words(kind) for kind in kinds if kind is not types.NoneType)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(str(choice) for choice in get_args(hint) if choice != '')}"
    if get_origin(hint) is tuple:
        return f"a list whose items are each {in_words(get_args(hint)[0])}"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "text", list: "a list"}
    return words.get(hint, "a date or a time")

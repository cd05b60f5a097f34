"""Words of a command line to the arguments of a verb. All mistakes are found, not only the first."""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from crius.config.arguments import WORDS_OF_BOOL, Argument, Arguments
from crius.config.names import PLAN_SHORT, SHORT, explained, stray, unknown
from crius.config.other_trainers import ALIASES
from crius.errors import ConfigError, CriusError

SOURCE = "command line"
_NEGATED = {word: str(not value) for word, value in WORDS_OF_BOOL.items()}


def named(flag: str, arguments: Arguments) -> tuple[Argument | None, bool]:
    """The argument of a flag, and whether the flag is its negative form.

    A flag is the name of an argument, a short form of it, or torchtitan's name for it; hyphens count as underscores.
    """
    name = flag.removeprefix("--").replace("-", "_")
    if name not in arguments:
        name = (ALIASES | _short_forms(arguments)).get(name, name)
    section, dot, leaf = name.rpartition(".")
    positive = f"{section}{dot}{leaf.removeprefix('no_')}"
    argument = arguments.get(name) or arguments.get(positive)
    is_negative = name not in arguments
    if argument is None or not argument.setting.has_flag or (is_negative and not argument.setting.negative):
        return None, False
    return argument, is_negative


def _short_forms(arguments: Arguments) -> dict[str, str]:
    """Short names of flags that a verb takes besides its own."""
    if "gpus" in arguments:
        return SHORT | PLAN_SHORT
    return SHORT if "recipe" in arguments else {}


def last_of_each(words: Sequence[str], arguments: Arguments) -> list[str]:
    """``words`` without values that a later flag replaces, and with the own name of each flag."""
    part: list[str] = []
    parts = {"": part}
    for number, word in enumerate(words):
        if not is_flag(word):
            part.append(word)
            continue
        flag, equals, value = word.partition("=")
        argument, is_negative = named(flag, arguments)
        key = str(number)
        if argument:
            flag = f"--{argument.setting.negative if is_negative else argument.name}"
            key = key if argument.setting.is_list else argument.name
        parts.pop(key, None)
        part = [f"{flag}{equals}{value}"]
        parts[key] = part
    return [word for part in parts.values() for word in part]


def is_flag(word: str) -> bool:
    """Whether a word begins a flag; a negative number and ``-``, standard input, do not."""
    if not word.startswith("-") or word == "-":
        return False
    with contextlib.suppress(ValueError):
        float(word)
        return False
    return True


@dataclass
class Reader:
    """Reads the words after a verb.

    Attributes:
        verb: its words, joined by spaces.
        arguments: what may be given, by name. Receives what is given.
        positional: arguments that words without a flag are for, in their order.
        rest: name of the argument for all further words; empty: there is none.
        settings: settings of a run if ``rest`` takes them with their flags, as they are; else empty.
    """

    verb: str
    arguments: Arguments
    positional: Sequence[str] = ()
    rest: str = ""
    settings: Arguments = field(default_factory=dict)

    def read(self, words: Sequence[str]) -> Iterator[CriusError]:
        """Give the words to their arguments; yields what is wrong with them."""
        self._left = deque(words)
        self._open = list(self.positional)
        self._words: set[str] = set()  # arguments that a word without a flag was given for
        self._unknown: dict[str, list[str]] = {}  # flag to values
        strays: list[ConfigError] = []
        empty: list[ConfigError] = []
        while self._left:
            word = self._left.popleft()
            if word == "--":
                continue
            if not is_flag(word):
                if not self._place(word):
                    argument, _ = named(word, self.arguments)
                    if argument and self._left and not is_flag(self._left[0]):
                        argument.give([self._left.popleft()], SOURCE)
                        strays.append(stray(word, self.verb, argument.text))
                    else:
                        strays.append(stray(word, self.verb))
                continue
            flag, equals, value = word.partition("=")
            argument, is_negative = named(flag, self.arguments)
            if argument is None:
                self._take_unknown(word)
                continue
            text = value if equals else self._value_after(argument)
            if text is None and argument.setting.is_switch:
                text = "true"
            if text is None:
                fix = explained(argument.name, self.verb)
                empty.append(ConfigError(f"--{argument.name} has no value.", where=SOURCE, fix=fix))
                continue
            if is_negative:
                text = _NEGATED.get(text.lower(), text)
            if argument.name in self._words:
                strays.append(stray(argument.text, self.verb))
            argument.give([*argument.texts, text] if argument.setting.is_list else [text], SOURCE)
        yield from empty
        for flag, values in self._unknown.items():
            yield unknown("flag", flag, self._names(), SOURCE, self.verb, " ".join(values))
        yield from strays
        for argument in self.arguments.values():
            if argument.setting.is_required and not argument.source and not self._unknown:
                fix = f"crius {self.verb} --help says what it takes"
                yield ConfigError(f"{argument.shown} is missing.", where=SOURCE, fix=fix)

    def _value_after(self, argument: Argument) -> str | None:
        """Take the next word if it is the value of ``argument``."""
        following = self._left[0] if self._left else "--"
        if argument.setting.is_switch:
            words = ("true", "false") if self.positional or self.rest else WORDS_OF_BOOL
            is_value = following.lower() in words
        else:
            is_value = following != "--" and (argument.setting.option.takes_hyphen or not is_flag(following))
        return self._left.popleft() if is_value else None

    def _place(self, word: str) -> bool:
        """Give a word without a flag to its argument; whether there is one."""
        while self._open and self.arguments[self._open[0]].source:  # given by its flag
            self._open.pop(0)
        if not self._open and not self.rest:
            return False
        argument = self.arguments[self._open.pop(0) if self._open else self.rest]
        argument.give([*argument.texts, word], SOURCE)
        self._words.add(argument.name)
        return True

    def _take_unknown(self, word: str) -> None:
        """Take a flag that is not the verb's own, and the words after it that are meant as its value."""
        flag, equals, value = word.partition("=")
        setting, _ = named(flag, self.settings)
        if setting or (self.settings and not self._open):
            rest = self.arguments[self.rest]
            own = self._value_after(setting) if setting and not equals else None
            rest.give([*rest.texts, word, *([own] if own is not None else [])], SOURCE)
            return
        following: list[str] = []
        takes_several = "recipe" in self.arguments
        while self._left and not is_flag(self._left[0]) and not equals and (takes_several or not following):
            following.append(self._left.popleft())
        self._unknown.setdefault(flag, []).extend([value] if equals else following)

    def _names(self) -> list[str]:
        """Names of the flags that there are, with short forms."""
        names = [name for name, argument in self.arguments.items() if argument.setting.has_flag]
        return [*names, *_short_forms(self.arguments)]

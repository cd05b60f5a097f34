"""Pickles of other trainers, read as data: there is nothing here that a pickle could call.

A pickle is a program for a small stack machine, and Python's ``pickle`` lets it call what it names. This reader runs
the few operations that torch's checkpoints need; a name on the allow-list becomes a ``Name``, "call this" becomes a
``Record`` of the name and its arguments, and nobody ever calls it. All else is an error. Time and memory grow with the
length of the pickle alone: keys are not hashed, nothing is compared, and no number in it is a size to allocate.
"""

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from crius.errors import CheckpointError

MAX_BYTES = 1 << 30
"""Longest pickle that is read; the metadata of a checkpoint of 10,000 ranks has about 0.3 GiB."""


@dataclass(frozen=True, eq=False)
class Name:
    """A class or function that a pickle names; only its name.

    Attributes:
        name: module and name, with a space between.
    """

    name: str


@dataclass(eq=False)
class Record:
    """What a pickle says is made by calling something.

    Attributes:
        name: of what would be called.
        args: its arguments.
        state: what would be set on it afterwards.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None


@dataclass(eq=False)
class Reference:
    """Something that is kept outside the pickle, such as the numbers of a tensor.

    Attributes:
        to: what the pickle says of it.
    """

    to: Any


@dataclass(eq=False)
class Table:
    """A dict, as pairs in the order of the pickle."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)


class _Mark:
    """Where a collection begins on the stack."""


class _Machine:
    """The stack machine.

    Args:
        allowed: names that may occur, ``module name`` each.
    """

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = allowed
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """The value that a pickle makes."""
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                break
            do = _OPERATIONS.get(opcode.name)
            if do is None:
                raise ValueError(f"the operation {opcode.name} is none that a torch checkpoint needs")
            do(self, argument)
        (value,) = self._stack
        return _checked(value)

    def push(self, value: Any) -> None:
        """Put a constant on the stack."""
        self._stack.append(value)

    def mark(self, _: Any) -> None:
        """Begin a collection."""
        self._stack.append(_Mark())

    def _taken(self, count: int | None) -> list[Any]:
        """The top ``count`` values, the first one deepest; None for those above the last mark, which goes too."""
        values: list[Any] = []
        while len(values) != count:
            value = self._stack.pop()
            if isinstance(value, _Mark) and count is None:
                break
            values.append(_checked(value))
        return values[::-1]

    def _top(self, kind: type) -> Any:
        if not isinstance(self._stack[-1], kind):
            raise ValueError(f"{type(self._stack[-1]).__name__} where {kind.__name__} belongs")
        return self._stack[-1]

    def tuple_of(self, count: int | None) -> None:
        """Make a tuple of the top values; ``count`` as in ``_taken``, here and below."""
        self._stack.append(tuple(self._taken(count)))

    def append(self, count: int | None) -> None:
        """Extend the list below."""
        values = self._taken(count)
        self._top(list).extend(values)

    def set_items(self, count: int | None) -> None:
        """Extend the table below."""
        values = self._taken(count)
        self._top(Table).pairs.extend(zip(values[::2], values[1::2], strict=True))

    def put(self, index: int | None) -> None:
        """Remember the top value."""
        self._memo[len(self._memo) if index is None else index] = _checked(self._stack[-1])

    def get(self, index: int) -> None:
        """Bring back a value."""
        self._stack.append(self._memo[index])

    def name(self, text: str | None) -> None:
        """A name, given or from two strings on the stack."""
        if text is None:
            parts = self._taken(2)
            if not all(isinstance(part, str) for part in parts):
                raise ValueError("a name that is no text")
            text = " ".join(parts)
        if text not in self._allowed:
            raise ValueError(f"it names {text[:100]!r}, which is not on the list of harmless names")
        self._stack.append(Name(text))

    def call(self, _: Any) -> None:
        """Note a call."""
        what, args = self._taken(2)
        if not isinstance(what, Name) or not isinstance(args, tuple):
            raise ValueError("a call of something that is no name")
        is_table = what.name == "collections OrderedDict" and not args
        self._stack.append(Table() if is_table else Record(what.name, args))

    def build(self, _: Any) -> None:
        """Note a state; that of a table (``_metadata`` of a state dict) is of no use."""
        (state,) = self._taken(1)
        if isinstance(self._stack[-1], Table):
            return
        record = self._top(Record)
        if record.state is not None:
            raise ValueError("a state that is set twice")
        record.state = state

    def reference(self, _: Any) -> None:
        """Note that something is kept elsewhere."""
        self._stack.append(Reference(*self._taken(1)))


def _checked(value: Any) -> Any:
    if isinstance(value, _Mark):
        raise ValueError("a mark where a value belongs")
    return value


def _constant(value: Any) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.push(value)


def _with(method: Callable[[_Machine, Any], None], argument: Any) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: method(machine, argument)


_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, argument: None),
    **{"NONE": _constant(None), "NEWTRUE": _constant(True), "NEWFALSE": _constant(False)},
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES"), _Machine.push),
    "MARK": _Machine.mark,
    "EMPTY_TUPLE": _constant(()),
    **{"TUPLE": _with(_Machine.tuple_of, None), "TUPLE1": _with(_Machine.tuple_of, 1)},
    **{"TUPLE2": _with(_Machine.tuple_of, 2), "TUPLE3": _with(_Machine.tuple_of, 3)},
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    **{"APPEND": _with(_Machine.append, 1), "APPENDS": _with(_Machine.append, None)},
    "EMPTY_DICT": lambda machine, _: machine.push(Table()),
    **{"SETITEM": _with(_Machine.set_items, 2), "SETITEMS": _with(_Machine.set_items, None)},
    **dict.fromkeys(("MEMOIZE", "BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL"), _Machine.name),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.call),
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.reference,
}


def read_pickle(data: bytes, allowed: Collection[str], where: str) -> Any:
    """What a pickle says, in ``Record``, ``Table``, ``Name``, ``Reference``, lists, tuples and constants.

    Args:
        data: the pickle.
        allowed: names of classes and functions that may occur, ``module name`` each.
        where: the file, for messages.

    Raises:
        CheckpointError: it is damaged, too long, or names or does something that is not allowed.
    """
    if len(data) > MAX_BYTES:
        raise refusal(where, f"it has {len(data):,} bytes, more than {MAX_BYTES:,}")
    try:
        return _Machine(allowed).run(data)
    except (ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
        # what pickletools raises for a damaged one, and the machine for an empty stack
        said = str(error) if type(error) is ValueError else f"it is damaged ({type(error).__name__})"
        raise refusal(where, said) from None


def refusal(where: str, why: str) -> CheckpointError:
    """The error for a foreign file that is damaged or hostile."""
    return CheckpointError(
        f"{where} is not read.",
        why=f"{why}; nothing of it was executed",
        fix="get the checkpoint again from where it was written, or leave it",
    )

"""Reads pickles of other trainers as data: this module has no function that a pickle could call.

A pickle is a program for a small stack machine, and Python's ``pickle`` calls whatever it names. This reader runs only
the few operations that torch's checkpoints need. A name on the allow-list becomes a ``Name``. A call becomes a
``Record`` of the name and its arguments, and is never made. Everything else is an error. Time and memory only depend on
the length of the pickle: keys are not hashed, nothing is compared, and no number in the pickle is a size to allocate.
"""

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from crius.errors import CheckpointError

MAX_BYTES = 1 << 30
"""Most bytes of a pickle; the metadata of a checkpoint of 10,000 ranks has about 0.3 GiB."""


@dataclass(frozen=True, eq=False)
class Name:
    """The name of a class or function in a pickle.

    Attributes:
        name: module and name, separated by a space.
    """

    name: str


@dataclass(eq=False)
class Record:
    """A call in a pickle, which is not made.

    Attributes:
        name: name of the class or function.
        args: its arguments.
        state: state that would be set on the result.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None


@dataclass(eq=False)
class Reference:
    """Data outside of the pickle, such as the numbers of a tensor.

    Attributes:
        to: the pickle's description of the data.
    """

    to: Any


@dataclass(eq=False)
class Table:
    """A dict, as pairs in the order of the pickle."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)


class _Mark:
    """Start of a collection on the stack."""


class _Machine:
    """The stack machine.

    Args:
        allowed: allowed names, each as ``module name``.
    """

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = allowed
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """Run a pickle and return its value."""
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                break
            do = _OPERATIONS.get(opcode.name)
            if do is None:
                raise ValueError(f"it has the operation {opcode.name}, which torch checkpoints do not need")
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
        """Take the top ``count`` values, the deepest first; None: all above the last mark, and the mark."""
        values: list[Any] = []
        while len(values) != count:
            value = self._stack.pop()
            if isinstance(value, _Mark) and count is None:
                break
            values.append(_checked(value))
        return values[::-1]

    def _top(self, kind: type) -> Any:
        if not isinstance(self._stack[-1], kind):
            raise ValueError(f"it has a {type(self._stack[-1]).__name__} instead of a {kind.__name__}")
        return self._stack[-1]

    def tuple_of(self, count: int | None) -> None:
        """Make a tuple of the top values; ``count`` as in ``_taken``, here and in the other methods."""
        self._stack.append(tuple(self._taken(count)))

    def append(self, count: int | None) -> None:
        """Extend the list below the values."""
        values = self._taken(count)
        self._top(list).extend(values)

    def set_items(self, count: int | None) -> None:
        """Extend the table below the values."""
        values = self._taken(count)
        self._top(Table).pairs.extend(zip(values[::2], values[1::2], strict=True))

    def put(self, index: int | None) -> None:
        """Store the top value in the memo."""
        self._memo[len(self._memo) if index is None else index] = _checked(self._stack[-1])

    def get(self, index: int) -> None:
        """Push a value from the memo."""
        self._stack.append(self._memo[index])

    def name(self, text: str | None) -> None:
        """Push a name, given as text or as two strings on the stack."""
        if text is None:
            parts = self._taken(2)
            if not all(isinstance(part, str) for part in parts):
                raise ValueError("it has a name that is not text")
            text = " ".join(parts)
        if text not in self._allowed:
            raise ValueError(f"it names {text[:100]!r}, which is not on the list of harmless names")
        self._stack.append(Name(text))

    def call(self, _: Any) -> None:
        """Record a call."""
        what, args = self._taken(2)
        if not isinstance(what, Name) or not isinstance(args, tuple):
            raise ValueError("it calls something that is not a name")
        is_table = what.name == "collections OrderedDict" and not args
        self._stack.append(Table() if is_table else Record(what.name, args))

    def build(self, _: Any) -> None:
        """Record a state. The state of a table (``_metadata`` of a state dict) is not needed."""
        (state,) = self._taken(1)
        if isinstance(self._stack[-1], Table):
            return
        record = self._top(Record)
        if record.state is not None:
            raise ValueError("it sets a state twice")
        record.state = state

    def reference(self, _: Any) -> None:
        """Record a reference to data outside of the pickle."""
        self._stack.append(Reference(*self._taken(1)))


def _checked(value: Any) -> Any:
    if isinstance(value, _Mark):
        raise ValueError("it has a mark instead of a value")
    return value


def _constant(value: Any) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.push(value)


def _with(method: Callable[[_Machine, Any], None], argument: Any) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: method(machine, argument)


_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, argument: None),
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES"), _Machine.push),
    "MARK": _Machine.mark,
    "EMPTY_TUPLE": _constant(()),
    "TUPLE": _with(_Machine.tuple_of, None),
    "TUPLE1": _with(_Machine.tuple_of, 1),
    "TUPLE2": _with(_Machine.tuple_of, 2),
    "TUPLE3": _with(_Machine.tuple_of, 3),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "APPEND": _with(_Machine.append, 1),
    "APPENDS": _with(_Machine.append, None),
    "EMPTY_DICT": lambda machine, _: machine.push(Table()),
    "SETITEM": _with(_Machine.set_items, 2),
    "SETITEMS": _with(_Machine.set_items, None),
    **dict.fromkeys(("MEMOIZE", "BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL"), _Machine.name),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.call),
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.reference,
}


def read_pickle(data: bytes, allowed: Collection[str], where: str) -> Any:
    """The contents of a pickle, as ``Record``, ``Table``, ``Name``, ``Reference``, lists, tuples and constants.

    Args:
        data: the pickle.
        allowed: allowed names of classes and functions, each as ``module name``.
        where: path of the file, for messages.

    Raises:
        CheckpointError: the pickle is damaged or too long, or has a name or operation that is not allowed.
    """
    if len(data) > MAX_BYTES:
        raise refusal(where, f"it has {len(data):,} bytes, more than {MAX_BYTES:,}")
    try:
        return _Machine(allowed).run(data)
    except (ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
        # errors of pickletools for a damaged pickle, and of the machine for an empty stack
        said = str(error) if type(error) is ValueError else f"it is damaged ({type(error).__name__})"
        raise refusal(where, said) from None


def refusal(where: str, why: str) -> CheckpointError:
    """The error for a foreign file that is damaged or hostile."""
    return CheckpointError(
        f"{where} cannot be read.",
        why=f"{why}; no code of it was executed",
        fix="get the checkpoint again from its origin, or do not use it",
    )

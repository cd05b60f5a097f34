"""What processes write below a folder, as records in order: a layer under all file writers of Python."""

import multiprocessing
import os
import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import distributed as dist

from crius.untrusted import HUGE, read_named

_CALLS = ("fsync", "rename", "replace", "unlink", "remove", "mkdir", "rmdir")

State = dict[Any, Any]
"""A folder as a disk has it. Files and folders have numbers. ``(folder, name)`` is the number of an entry of a folder,
or None if it was removed. A number is the content of a file, or None for a folder."""

Tree = dict[str, bytes | None]
"""A folder as a user sees it: bytes of each file by its path, and None for each folder."""


class WriteRecord(NamedTuple):
    """A change of a folder, or a sync that makes changes durable.

    Attributes:
        what: the record in words: make, rename, remove, or write, which is all that was written to one file since the
            last record, also by a library.
        changes: what it changes; empty: a sync.
        numbers: files and folders whose sync makes it durable; of a sync, what was synced.
        is_list: whether it is the sync of a folder.
        rank: rank that told of it. What a library writes has the rank in the name of its file.
    """

    what: str
    changes: State
    numbers: set[int]
    is_list: bool = False
    rank: int = 0


class Journal:
    """The records of a folder, which is compared with what it was: so no writer has to say what it does.

    Args:
        folder: an empty folder.

    Attributes:
        records: the records so far.
        root: number of the folder.
        held: descriptors of all files and folders so far.
    """

    def __init__(self, folder: Path) -> None:
        self.records = list[WriteRecord]()
        self.root = folder.stat().st_ino
        self.held = list[int]()
        self._folder = folder
        self._state: State = {}

    def note(self, synced: int, rank: int = 0) -> None:
        """Record what has changed since the last call, and a sync of the file or folder with this number, by a rank."""
        before = self._state
        now = state_of(self._folder)
        for path in self._folder.rglob("*"):
            if path.stat().st_ino not in before:
                self.held.append(os.open(path, os.O_RDONLY))  # so that no later file gets its number
        self._state = now
        names = dict[int, str]()
        moved = defaultdict[Any, State](dict)
        for key, number in [*before.items(), *now.items()]:
            if isinstance(key, tuple):
                names[number] = key[1]
                if before.get(key) != now.get(key):
                    moved[now.get(key, number)][key] = now.get(key)
        for number, changes in moved.items():
            kind = "rename" if number in now else "remove"
            folders = {folder for (folder, _), to in changes.items() if to or kind == "remove"}  # of new names
            if number not in before:
                kind = "make"
                changes[number] = now[number] and b""
            elif now.get(number, b"") is None:  # a folder that was renamed was made
                changes[number] = None
            self._add(f"{kind} {names[number]}", changes, folders, rank)
        for number, data in now.items():
            if isinstance(data, bytes) and data != before.get(number, b""):
                self._add(f"write {names[number]}", {number: data}, {number}, rank)
        if synced:
            is_list = now.get(synced) is None
            self.records.append(WriteRecord("sync folder" if is_list else "sync file", {}, {synced}, is_list, rank))

    def _add(self, what: str, changes: State, numbers: set[int], rank: int) -> None:
        named = re.search("rank-([0-9]+)", what)
        self.records.append(WriteRecord(what, changes, numbers, rank=int(named[1]) if named else rank))


def watch(tell: Callable[[tuple[int, int]], object]) -> None:
    """Call ``tell`` before and after each change and sync of this process and of those that it will fork.

    Args:
        tell: gets the number of the file or folder that was synced, or 0, and the rank of the process.
    """
    lock = multiprocessing.get_context("fork").Lock()

    def told(call: Callable[..., Any], *words: Any, **named: Any) -> Any:
        rank = dist.get_rank() if dist.is_initialized() else 0
        with lock:
            tell((0, rank))
            done = call(*words, **named)
            tell((os.fstat(words[0]).st_ino if call.__name__ == "fsync" else 0, rank))
        return done

    for name in _CALLS:
        setattr(os, name, partial(told, getattr(os, name)))


def state_of(folder: Path) -> State:
    """The content of a folder."""
    found: State = {}
    for path in sorted(folder.rglob("*")):
        number = path.stat().st_ino
        found[path.parent.stat().st_ino, path.name] = number
        found[number] = read_named(path, HUGE) if path.is_file() else None
    return found


def tree_of(state: State, folder: int, path: str = "") -> Tree:
    """What is in a folder of ``state`` that has this number, and this path with a slash at its end."""
    found: Tree = {}
    for key, number in state.items():
        if isinstance(key, tuple) and key[0] == folder and number in state:
            content = state[number]
            found[path + key[1]] = content
            if content is None:
                found |= tree_of(state, number, f"{path}{key[1]}/")
    return found

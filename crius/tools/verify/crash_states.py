"""States of a folder after a crash: of the changes that no sync made durable, any may be missing."""

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from crius.tools.verify.crash_record import State, Tree, WriteRecord, tree_of

_BOUND = re.compile("(make|rename) (step-|logs|data|checkpoints)")
_COMMIT = re.compile("rename step-[0-9]+")


class Crash(NamedTuple):
    """A state that a crash can leave.

    Attributes:
        kind: prefix: of the records; loss: one of them is missing, or half of it; swap: one came before another; order:
            prefix of another order of the ranks.
        what: the state in words.
        tree: content of the folder.
        durable: paths of committed checkpoints that it cannot undo.
    """

    kind: str
    what: str
    tree: Tree
    durable: tuple[str, ...]


def crashes(records: Sequence[WriteRecord], root: int) -> Iterator[Crash]:
    """All states to try of a folder that was empty.

    Each prefix of the records; for each, the loss of each record between two syncs of folders, and before such a sync
    the loss of any record that is not durable; each swap of two records between two syncs of folders.

    Args:
        records: the records, in order.
        root: number of the folder.
    """
    begin = 0
    for count, last in enumerate(records, start=1):
        before = list(records[:count])
        if last.is_list:
            begin = count
        durable = tuple(
            f"checkpoints/{record.what.split()[1]}"
            for index, record in enumerate(before)
            if _COMMIT.fullmatch(record.what) and _is_durable(before, index)
        )

        def crash(kind: str, what: str, kept: list[WriteRecord]) -> Crash:
            return Crash(kind, f"record {count}{what}", tree_after(kept, root), durable)  # noqa: B023

        yield crash("prefix", f", {last.what}", before)
        is_last = count == len(records) or records[count].is_list
        for index, record in enumerate(before):
            is_near = index >= begin
            if _is_durable(before, index) or not (is_near or is_last):
                continue
            earlier = before[:index]
            later = before[index + 1 :]
            yield crash("loss", f" without {record.what}", earlier + later)
            if record.what.startswith("write"):
                halves = {number: data[: len(data) // 2] for number, data in record.changes.items()}
                yield crash("loss", f", half of {record.what}", [*earlier, record._replace(changes=halves), *later])
            if is_near and later and last.changes:
                yield crash("swap", f", {last.what} before {record.what}", [*earlier, last])


def _is_durable(records: Sequence[WriteRecord], index: int) -> bool:
    """Whether a crash after ``records`` cannot undo one of them; true of a sync."""
    synced = set[int]()
    for later in records[index:]:
        if not later.changes:
            synced |= later.numbers
    return records[index].numbers <= synced


def tree_after(records: Sequence[WriteRecord], root: int) -> Tree:
    """Content of an empty folder, with this number, after changes."""
    state: State = {}
    for record in records:
        state |= record.changes
    return tree_of(state, root)


def in_other_orders(records: Sequence[WriteRecord], root: int, drawn: random.Random) -> Iterator[Crash]:
    """Prefixes of 10 orders of the records of several ranks. Each rank keeps its order, and all keep theirs around a
    commit and around new folders, for which ranks wait.

    Args:
        records: the records, in the order in which they were told.
        root: number of the folder.
        drawn: random numbers.
    """
    for _ in range(10):
        order = list[WriteRecord]()
        for _, group in itertools.groupby(records, key=lambda record: bool(_BOUND.match(record.what))):
            waiting = list(group)
            ranks = [record.rank for record in waiting]
            drawn.shuffle(ranks)
            for rank in ranks:
                record = next(record for record in waiting if record.rank == rank)
                waiting.remove(record)
                order.append(record)
        for crash in crashes(order, root):
            if crash.kind == "prefix":
                yield crash._replace(kind="order", what=f"another order, {crash.what}")

"""What the ranks of a save tell each other while they wait: that the save moves, and whose part is missing."""

import time
from collections.abc import Callable

import torch.distributed as dist

SECONDS = 0.5
"""Shortest time between two words of a rank: a store serves all ranks of a run."""


class Progress:
    """The progress of the saves of one run, as one rank tells and hears it through the store.

    A rank that writes beats by itself. A rank that waits for others beats while any rank writes, so that a watchdog
    which knows only heartbeats sees neither of them hang.

    Args:
        rank: this one.
        store: key-value store of all ranks.
        prefix: of the keys, of no other start of the run.
        beat: called when this rank writes.
        wait: called while this rank waits, with the rank that it waits for and whether any rank wrote since the last
            call.
        clock: seconds.
    """

    def __init__(
        self,
        rank: int,
        store: dist.Store,
        prefix: str,
        beat: Callable[[], None],
        wait: Callable[[int, bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._store = rank, store
        self._writes, self._missing = f"{prefix}/writes", f"{prefix}/missing"
        self._beat, self._wait, self._clock = beat, wait, clock
        self._told = self._asked = clock() - SECONDS
        self._seen = b""

    def wrote(self) -> None:
        """This rank has written something."""
        self._beat()
        if self._clock() - self._told >= SECONDS:
            self._told = self._clock()
            self._store.add(self._writes, 1)

    def is_missing(self, rank: int) -> None:
        """The save waits for the part of ``rank``; for rank 0, which commits, where all others have written."""
        self._store.set(self._missing, str(rank))

    def wait(self) -> None:
        """This rank waits for another one. Call it at each poll."""
        if self._clock() - self._asked < SECONDS:
            return
        self._asked = self._clock()
        before, self._seen = self._seen, self._read(self._writes)
        missing = int(self._read(self._missing) or 0)
        self._wait(0 if missing == self._rank else missing, self._seen != before)  # rank 0 has not seen our part yet

    def _read(self, key: str) -> bytes:
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

"""Lifetimes: each storage of a step with the moments of its birth and death, and its purpose.

Kinds. ``parameters``, ``optimizer`` (its state) and ``buffers`` (the batch, and what a pipeline receives into) are
marked where they are created. ``gathered``: storages that were resized, which is how FSDP keeps and frees whole
weights. ``activations``: born in the forward of a microbatch and alive at its end, and kept between the halves of a
split backward. ``gradients``: born in a backward and alive at its end, sharded, or whole if they are reduced later.
``temporaries``: all others, with the copies in and out of collectives.
"""

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers", "temporaries")

Bytes = Counter[str]
"""Bytes by kind."""

Values = dict[tuple[str, ...], int]
"""All numbers of a measurement by name, so that two of them can be subtracted.

``parameters``; ``copied``, tied weights that another stage has too, ``start, phase, microbatch, kind`` and
``peak, phase, microbatch, block, kind`` in bytes;
``flops, phase, microbatch``; ``collective, phase, microbatch, kind, axis, count | bytes``."""


def kinds_of(values: Values, *key: str) -> Bytes:
    """The bytes by kind under ``key``."""
    return Counter({kind: values.get((*key, kind), 0) for kind in KINDS})


class _Storage:
    """One storage, with any sizes over time; ``kind`` is empty until it is known."""

    __slots__ = ("kind", "last", "reference")

    def __init__(self) -> None:
        self.kind = ""
        self.last: _Life
        self.reference: weakref.ref[Any]


class _Life:
    """A time in which a storage has one size; ``died`` is -1 while it lives."""

    __slots__ = ("born", "died", "nbytes", "storage")

    def __init__(self, storage: _Storage, nbytes: int, born: int) -> None:
        self.storage = storage
        self.nbytes = nbytes
        self.born = born
        self.died = -1


class MemoryTimeline:
    """Births and deaths of storages. Time is the number of events so far."""

    def __init__(self) -> None:
        self.now = 0
        self._segments: list[tuple[tuple[str, ...], int]] = []  # each with when it begins
        self._lives: list[_Life] = []
        self._storages: dict[int, _Storage] = {}

    def see(self, tensor: Tensor) -> None:
        """Record the storage of ``tensor``, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            new = _Storage()
            new.reference = weakref.ref(storage, functools.partial(self._died, key))
            self._storages[key] = new
            self._begin(new, storage.nbytes())

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of ``tensors``."""
        for tensor in tensors:
            self.see(tensor)
            self._storages[tensor.untyped_storage()._cdata].kind = kind

    def mark_living(self, kind: str, since: int, over: str = "") -> None:
        """Set the kind of all live storages born at ``since`` or later that have no kind yet, or the kind ``over``."""
        for storage in self._storages.values():
            if storage.kind in ("", over) and storage.last.born >= since:
                storage.kind = kind

    def segment(self, *label: str) -> None:
        """Begin a segment, which ends the one before."""
        self._segments.append((label, self.now))

    def peaks(self) -> Iterator[tuple[tuple[str, ...], Bytes, Bytes]]:
        """For each segment its label, the live bytes when it began, and the live bytes at its peak."""
        # a thread that sends may free a storage meanwhile
        now = self.now
        lives = list(self._lives)
        events: list[tuple[int, str]] = [(0, "temporaries")] * now
        for life in lives:
            kind = life.storage.kind or "temporaries"
            if life.born < now:
                events[life.born] = (life.nbytes, kind)
            if 0 <= life.died < now:
                events[life.died] = (-life.nbytes, kind)
        living: Bytes = Counter()
        for nbytes, kind in events[: self._segments[0][1]]:
            living[kind] += nbytes
        for (label, begin), (_, end) in itertools.pairwise([*self._segments, ((), now)]):
            start = peak = Counter(living)
            total = most = start.total()
            for nbytes, kind in itertools.islice(events, begin, end):
                living[kind] += nbytes
                total += nbytes
                if total > most:
                    most = total
                    peak = Counter(living)
            yield label, start, peak

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """FSDP frees and refills whole weights by resizing their storage, which no operator shows."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        known = self._storages.get(storage._cdata)
        if known is not None:
            known.kind = "gathered"
            self._end(known)
            self._begin(known, storage.nbytes())

    def _died(self, key: int, reference: object) -> None:
        storage = self._storages.pop(key, None)
        if storage is not None:
            self._end(storage)

    def _begin(self, storage: _Storage, nbytes: int) -> None:
        storage.last = _Life(storage, nbytes, self.now)
        self._lives.append(storage.last)
        self.now += 1

    def _end(self, storage: _Storage) -> None:
        storage.last.died = self.now
        self.now += 1

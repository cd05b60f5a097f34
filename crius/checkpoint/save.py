"""Saves checkpoints of a run: staged on the host, written by a thread, committed by rank 0. Failures are counted.

Ranks report the results of their writes through the key-value store, not by collectives. So a slow disk delays no
collective and triggers no timeout of a collective.
"""

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import Metadata, SavePlan

from crius.checkpoint.files import commit
from crius.checkpoint.folder import CheckpointFolder
from crius.checkpoint.kept import keep
from crius.checkpoint.manifest import Manifest
from crius.checkpoint.tensors import Gather, StagedPlanner, Written, listed, write_tensors
from crius.config.operation import CheckpointConfig
from crius.errors import CriusError
from crius.host import free_host_bytes
from crius.units import MIB
from crius.untrusted import parse_json

log = logging.getLogger("crius.checkpoint")


SECONDS = 0.5
"""Shortest time between two messages of a rank: one store serves all ranks of a run."""


class Progress:
    """The progress of the saves of one run, sent and received by one rank through the store.

    A rank that writes sends its own heartbeats. A rank that waits for others sends heartbeats while any rank writes. So
    a watchdog that only sees heartbeats does not take either for hung.

    Args:
        rank: this rank.
        store: key-value store of all ranks.
        prefix: prefix of the keys, unique to this start of the run.
        beat: called when this rank writes.
        wait: called while this rank waits, with the rank that it waits for, and whether any rank wrote since the last
            call.
        clock: function that returns the time in seconds.
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
        self._rank = rank
        self._store = store
        self._writes = f"{prefix}/writes"
        self._missing = f"{prefix}/missing"
        self._beat = beat
        self._wait = wait
        self._clock = clock
        self._told = self._asked = clock() - SECONDS
        self._seen = b""

    def wrote(self) -> None:
        """Record that this rank has written something."""
        self._beat()
        if self._clock() - self._told >= SECONDS:
            self._told = self._clock()
            self._store.add(self._writes, 1)

    def is_missing(self, rank: int) -> None:
        """Record that the save waits for the part of ``rank``; rank 0 means that all others have written."""
        self._store.set(self._missing, str(rank))

    def wait(self) -> None:
        """Record that this rank waits for another rank. Call it at each poll."""
        if self._clock() - self._asked < SECONDS:
            return
        self._asked = self._clock()
        before = self._seen
        self._seen = self._read(self._writes)
        missing = int(self._read(self._missing) or 0)
        self._wait(0 if missing == self._rank else missing, self._seen != before)  # rank 0 has not read our part yet

    def _read(self, key: str) -> bytes:
        return bytes(self._store.get(key)) if self._store.check([key]) else b""


POLL_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class PieceOnDisk:
    """This process among the processes that save together.

    Attributes:
        rank, size: rank of this process, and number of ranks of the run.
        ranks_here: number of processes on this host, which share its memory.
        store: key-value store of all ranks.
        gather: see ``crius.checkpoint.tensors.Gather``.
        attempt: word for this start of the run, the same on all ranks and different for each start.
    """

    rank: int
    size: int
    ranks_here: int
    store: dist.Store
    gather: Gather
    attempt: str


@dataclasses.dataclass
class _Pending:
    """A save that has not finished."""

    step: int
    key: str
    mode: str
    num_bytes: int
    began: float
    is_awaited: bool = False
    is_reported: bool = False  # this rank has reported its part
    blocked: float = 0.0
    thread: threading.Thread | None = None


class Saver:
    """Saves checkpoints into one folder. Every rank makes the same calls at the same steps.

    Args:
        folder: folder of checkpoints.
        config: the section.
        place: this process.
        beat: called when this rank writes, for the watchdog; a planted disk fault is also raised there.
        wait: called while this rank waits for others, for the watchdog; see ``crius.checkpoint.save.Progress``.
        committed: called on rank 0 after each commit, maybe in a thread.

    Attributes:
        kept: files that all checkpoints share, by name; rank 0's are written.
        failures: number of consecutive failed saves; known on rank 0.
        last_error: error of the last failed save.
        blocked_seconds: total time that training waited for saves.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        config: CheckpointConfig,
        place: PieceOnDisk,
        beat: Callable[[], None],
        wait: Callable[[int, bool], None] = lambda rank, has_moved: None,
        committed: Callable[[Manifest], None] = lambda manifest: None,
    ) -> None:
        self._folder = folder
        self._committed = committed
        self._config = config
        self._place = place
        self._progress = Progress(place.rank, place.store, f"save/{place.attempt}", beat, wait)
        self._planner = StagedPlanner()
        self._pending: _Pending | None = None
        self._count = 0
        self.kept: Mapping[str, bytes] = {}
        self.failures = 0
        self.last_error = ""
        self.blocked_seconds = 0.0

    def save(
        self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], head: Manifest, *, wait: bool = False
    ) -> None:
        """Save ``tensors`` and ``state`` as the checkpoint of ``step``.

        Waits for the previous save if it has not finished. Failures are counted and logged, not raised.

        Args:
            step: steps done.
            tensors: DTensors and whole tensors by name; each rank passes its own.
            state: everything that is not a tensor; rank 0's is written.
            head: manifest without files and tensors; rank 0's is written.
            wait: wait until the save is committed, in every mode.
        """
        begin = time.monotonic()
        self.wait()
        self._count += 1
        place = self._place
        plan, metadata = self._planner.agree(tensors, place.rank, place.gather)
        num_bytes = self._planner.num_bytes()
        pending = _Pending(step, f"save/{place.attempt}/{self._count}", self._config.mode, num_bytes, begin)
        self._pending = pending
        if problem := self._lacks_space(num_bytes):
            if place.rank == 0:
                place.store.set(f"{pending.key}/outcome", problem)
            pending.mode = "sync"
        elif self._config.mode == "async" and self._has_memory():
            self._planner.stage()
            pending.thread = threading.Thread(
                target=self._write, args=(pending, plan, metadata, head, state), name="crius-checkpoint", daemon=True
            )
            pending.thread.start()
        else:
            pending.mode = "sync"
            self._planner.drop_copies()
            self._write(pending, plan, metadata, head, state)
        pending.is_awaited = wait or pending.mode == "sync"
        if pending.is_awaited:
            self.wait()
        blocked = time.monotonic() - begin
        self.blocked_seconds += blocked
        pending.blocked += blocked

    def before_change(self) -> None:
        """Call before the saved tensors change: a GPU may still be copying them to the host."""
        self._planner.before_change()

    def poll(self) -> None:
        """If the current save has finished, log it. Cheap if there is no save."""
        if self._pending and self._place.store.check([f"{self._pending.key}/outcome"]):
            self._conclude(self._pending)

    def wait(self) -> None:
        """Wait until the current save has finished."""
        begin = time.monotonic()
        while self._pending:
            self.poll()
            if self._pending:
                if self._place.rank and self._pending.is_reported:
                    self._progress.wait()
                time.sleep(POLL_SECONDS)
                thread = self._pending.thread
                if self._place.rank == 0 and thread and not thread.is_alive():
                    self.poll()
                    if self._pending:
                        self._tell_outcome(self._pending, "the thread that writes has died")
        self.blocked_seconds += time.monotonic() - begin

    def prune(self) -> None:
        """Remove checkpoints that need not be kept. If this fails, they stay until the next save."""
        try:
            removed = self._folder.prune(self._config.keep_last, self._config.keep_every)
        except Exception as error:  # the new checkpoint is complete
            log.warning("checkpoint: old checkpoints could not be removed (%s)", error)
        else:
            if removed:
                log.info("checkpoint: removed step %s", ", ".join(map(str, removed)))

    def _write(
        self, pending: _Pending, plan: SavePlan, metadata: Metadata, head: Manifest, state: dict[str, Any]
    ) -> None:
        """Write this rank's part of a save, maybe in a thread; rank 0 also waits for the others and commits."""
        place = self._place
        disk = self._folder.disk
        folder = disk.stage(pending.step, place.attempt)
        try:
            self._progress.wrote()
            disk.prepare(folder)
            path = f"{folder}/{disk.file_name(f'rank-{place.rank:05d}', place.attempt)}.safetensors"
            verify = self._config.verify_on_save
            beat = self._progress.wrote
            report: dict[str, Any] = {
                "written": write_tensors(disk, path, plan, self._planner, verify=verify, beat=beat)
            }
        except BaseException as error:  # also MemoryError and errors of libraries: otherwise ranks would wait forever
            report = {"error": _words(error)}
        place.store.set(f"{pending.key}/{place.rank}", json.dumps(report))
        pending.is_reported = True
        if place.rank == 0:
            self._tell_outcome(pending, self._commit(pending, folder, metadata, head, state))

    def _commit(self, pending: _Pending, folder: str, metadata: Metadata, head: Manifest, state: dict[str, Any]) -> str:
        """Finish a save when all ranks have written. Returns the error, or an empty text."""
        place = self._place
        disk = self._folder.disk
        try:
            reports = [self._report(pending, rank) for rank in range(place.size)]
            errors = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if "error" in report]
            if errors:
                self._remove_quietly(folder)
                return "; ".join(errors[:3])
            written = [report["written"] and Written(*report["written"]) for report in reports]
            files, tensors = listed(metadata, self._planner.global_plan, written)
            manifest = dataclasses.replace(head, files=files, tensors=tensors, tokenizer=keep(disk, self.kept))
            manifest = commit(disk, folder, place.attempt, manifest, state, verify=self._config.verify_on_save)
        except BaseException as error:
            self._remove_quietly(folder)
            return _words(error)
        self._committed(manifest)
        self.prune()
        return ""

    def _report(self, pending: _Pending, rank: int) -> dict[str, Any]:
        """Wait for the report of ``rank`` about its writes."""
        key = f"{pending.key}/{rank}"
        store = self._place.store
        if not store.check([key]):
            self._progress.is_missing(rank)
            while not store.check([key]):
                self._progress.wait()
                time.sleep(POLL_SECONDS)
            self._progress.is_missing(0)
        found: dict[str, Any] = parse_json(store.get(key))
        store.delete_key(key)
        return found

    def _remove_quietly(self, folder: str) -> None:
        try:
            if folder in self._folder.disk.folders():
                self._folder.disk.sweep(folder)
        except Exception as error:  # the next start removes the folder
            log.warning("checkpoint: %s could not be removed (%s)", folder, error)

    def _tell_outcome(self, pending: _Pending, problem: str) -> None:
        self._place.store.set(f"{pending.key}/outcome", problem)

    def _conclude(self, pending: _Pending) -> None:
        problem = self._place.store.get(f"{pending.key}/outcome").decode()
        self._pending = None
        seconds = time.monotonic() - pending.began
        if problem:
            self.failures += 1
            self.last_error = problem
        else:
            self.failures = 0
        if self._place.rank:
            return
        if problem:
            log.warning(
                "checkpoint: step %d could not be saved (%s); consecutive failure %d of at most %d",
                pending.step,
                problem,
                self.failures,
                self._config.max_failures,
            )
        else:
            log.info(
                "checkpoint: step %d saved, %.1f MiB on rank 0, %.2f s in all, training waited %.2f s (%s)",
                pending.step,
                pending.num_bytes / MIB,
                seconds,
                seconds if pending.is_awaited else pending.blocked,
                pending.mode,
            )

    def _lacks_space(self, num_bytes: int) -> str:
        """Why the disk has too little space for what all ranks write; empty if it has enough or does not report it."""
        free = self._folder.disk.free_bytes() if self._place.rank == 0 else None
        wanted = self._place.gather([num_bytes, free])
        needed = sum(of_rank[0] for of_rank in wanted)
        free = wanted[0][1]
        if free is not None and free < needed:
            return f"{self._folder.disk.where} has {free / MIB:,.1f} MiB free, {needed / MIB:,.1f} MiB are needed"
        return ""

    def _has_memory(self) -> bool:
        if self._planner.has_copies:
            return True
        available = free_host_bytes()
        needed = self._planner.copy_bytes() * self._place.ranks_here
        if needed < available:
            return True
        log.warning(
            "checkpoint: the copies of an async save need %.1f GiB of host memory, %.1f GiB are free: saving in sync",
            needed / 2**30,
            available / 2**30,
        )
        return False


def _words(error: BaseException) -> str:
    return error.what.rstrip(".") if isinstance(error, CriusError) else f"{type(error).__name__}: {error}"

"""Standing workers: forked processes that run one row after another, in place of new processes for each row.

A row is a function of a ``Placement``, as for ``run_workers``, with its own process group. What tests patch reaches the
workers only at their start: a row that needs a patch makes it itself.
"""

import functools
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import Pipe, connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.tensor import _redistribute, debug

from crius.launch.crew import Crew, worker_processes
from crius.launch.environment import Placement
from crius.launch.report import failure_of_exit, failure_of_report, read_report, render

GRACE_SECONDS = 2.0  # after a failure, time for the other ranks to report
GROUPS_OF_A_ROW = 1000


class RowFailed(AssertionError):
    """A rank of a row raised, died or took too long; the message is the launcher's."""


class Workers:
    """``num_ranks`` processes, forked by the first row, and again by the row after one that failed."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.crew, self.rows = num_ranks, Crew(), 0
        self.folder = Path(tempfile.mkdtemp(prefix="crius-workers-"))
        self.pipes: list[connection.Connection] = []

    def run(self, row: Callable[[Placement], Any], folder: Path, seconds: float = 120) -> list[Any]:
        """What ``row`` returns on each rank.

        Args:
            row: can be pickled, and so can its result.
            folder: of its logs, in ``logs``.
            seconds: that it may take.

        Raises:
            RowFailed: the workers are ended.
        """
        if not self.crew.alive:
            self._start()
        try:
            return self._run(row, folder, seconds)
        except BaseException:  # they may be anywhere in the row
            self.end()
            raise

    def _run(self, row: Callable[[Placement], Any], folder: Path, seconds: float) -> list[Any]:
        log_dir = folder / "logs"
        log_dir.mkdir(parents=True, exist_ok=True)
        self.rows += 1
        for pipe in self.pipes:
            pipe.send((row, f"file:{self.folder / f'store-{self.rows}'}", log_dir))
        results: dict[int, Any] = {}
        until = time.monotonic() + seconds
        closed: set[int] = set()
        while len(results) < self.num_ranks and self.crew.alive and (left := until - time.monotonic()) > 0:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in results.keys() | closed}
            for ready in connection.wait([*waiting, *self._sentinels()], left):
                if ready in waiting:
                    try:
                        results[waiting[ready]] = ready.recv()
                    except EOFError:  # it died; how, its report or its exit code says
                        closed.add(waiting[ready])
            self.crew.poll(0)
            if self.crew.exits:
                until = min(until, min(end.monotonic for end in self.crew.exits.values()) + GRACE_SECONDS)
        if len(results) < self.num_ranks:
            raise RowFailed(self._reason(seconds))
        return [results[rank] for rank in range(self.num_ranks)]

    def _reason(self, seconds: float) -> str:
        failures = []
        for rank, end in self.crew.exits.items():
            report = read_report(self.folder, rank)
            failure = failure_of_exit(rank, end.code, (None, ""), end.monotonic)
            failures.append(failure_of_report(report) if report else failure)
        return render(failures, self.folder) if failures else f"not at its end after {seconds:.0f} s"

    def end(self) -> None:
        """Kill the workers, and wait for them."""
        self.crew.end()
        for pipe in self.pipes:
            pipe.close()
        self.pipes = []

    def _start(self) -> None:
        self.end()
        self.crew = Crew()
        self.pipes, theirs = map(list, zip(*(Pipe() for _ in range(self.num_ranks)), strict=True))
        for stale in self.folder.glob("rank-*"):
            stale.unlink()
        serve = functools.partial(_serve, theirs)
        self.crew.start(worker_processes(serve, self.num_ranks, self.folder, self.folder, threads=1))
        for pipe in theirs:
            pipe.close()

    def _sentinels(self) -> list[int]:
        return [process.sentinel for process in self.crew.alive.values()]


def _serve(pipes: list[connection.Connection], placement: Placement) -> None:
    """Run each row that comes. An error ends this process with a report; the end of the test process ends it too."""
    pipe = pipes[placement.rank]
    for number in itertools.count(1):
        row, meeting, log_dir = pipe.recv()
        _forget(number)
        pipe.send(row(replace(placement, rendezvous=meeting, log_dir=log_dir)))


def _forget(row: int) -> None:
    """Empty the caches of DTensor, which find a mesh by its ranks and then use the groups of an earlier row, and those
    of torch.compile, which gives up on a function that it compiled for some rows.

    Group names count from 0 in each row. They get other numbers here, so that an old name is an error.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    for module, name in ((debug, "_clear_sharding_prop_cache"), (_redistribute, "clear_redistribute_planner_cache")):
        getattr(module, name, lambda: None)()
    distributed_c10d._world.group_count = row * GROUPS_OF_A_ROW


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[[int], Workers]]:
    """Number of ranks to its standing workers, which live as long as the tests of a file."""
    made: dict[int, Workers] = {}

    def get(num_ranks: int) -> Workers:
        if num_ranks not in made:
            made[num_ranks] = Workers(num_ranks)
        return made[num_ranks]

    yield get
    for standing in made.values():
        standing.end()
        shutil.rmtree(standing.folder)

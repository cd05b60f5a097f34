"""Which samples each step trained on: a line a step in a file of each data-parallel rank, for ``crius data audit``.

An attempt is one start of the processes of a run: the first, one by the launcher after a failure, or one by a person
who goes on with the run. It begins with a line of its own, then has a line for each step that is done.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from crius.run_file import RunFile

_log = logging.getLogger("crius.data")
_MOST_ATTEMPTS = 1 << 32
_TAIL_BYTES = 1 << 16  # holds the last line: one of a step has about 60 bytes, that of an attempt a few hundred


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The line that an attempt begins with.

    Attributes:
        attempt: its number in this run folder, from 0.
        after: the step it starts after; 0 for a new run.
        sample: the first sample that it reads.
        ranks: data-parallel ranks, each of which has a file.
        batch: sequences in a step, over all ranks.
        epoch_samples: sequences in an epoch; 0 where that is not known, as of a stream.
        source: digest of the identity of the data. A sample id stands for the same sequence where it is equal.
        end: the samples of the run end before this one; 0 where the run ends by its steps alone.
    """

    attempt: int
    after: int
    sample: int
    ranks: int
    batch: int
    epoch_samples: int
    source: str
    end: int = 0


def source_digest(identity: str) -> str:
    """What ``Attempt.source`` says of data of this identity."""
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def samples_path(run_dir: Path, rank: int) -> Path:
    """The file of data-parallel rank ``rank``."""
    return run_dir / "data" / f"samples-rank-{rank}.jsonl"


def next_attempt(run_dir: Path) -> int:
    """The number of the attempt that begins now, as rank 0's file has it. One rank asks and tells the others."""
    found = [-1]
    with contextlib.suppress(OSError), samples_path(run_dir, 0).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        for line in file.read().splitlines():
            # the last line may be torn, and any may be damaged: the highest number is the one that is free above
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                number = json.loads(line)["attempt"]
                found += [number] if type(number) is int and number < _MOST_ATTEMPTS else []
    return max(found) + 1


class SampleLog:
    """Appends what one rank trained on to its file. A disk that fails is warned of once and never ends the run.

    Args:
        run_dir: folder of the run.
        rank: data-parallel rank; None where another rank of the same data writes the log.
        start: the attempt that begins.
    """

    def __init__(self, run_dir: Path, rank: int | None, start: Attempt) -> None:
        self._attempt = start.attempt
        self._file = None
        if rank is not None:
            loss = "crius data audit will miss steps"
            self._file = RunFile(samples_path(run_dir, rank), _log.warning, loss, head=_line(asdict(start)))

    def write(self, step: int, sample_ids: Sequence[int]) -> None:
        """Note that ``step`` is done and that this rank trained on ``sample_ids`` in it, in any order."""
        if self._file is not None:
            there = [number for number in sample_ids if number >= 0]  # the others are padding
            ids = [[part.start, part.stop, part.step] for part in to_ranges(there)]
            self._file.append(_line({"attempt": self._attempt, "step": step, "ids": ids}))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _line(record: dict[str, object]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"


def to_ranges(sample_ids: Sequence[int]) -> Iterator[range]:
    """``sample_ids`` in ascending order, as ranges; those of a rank that takes every n-th are one."""
    ids = sorted(sample_ids)
    begin = 0
    while begin < len(ids):
        step = max(1, ids[begin + 1] - ids[begin]) if begin + 1 < len(ids) else 1
        end = begin + 1
        while end < len(ids) and ids[end] == ids[end - 1] + step:
            end += 1
        yield range(ids[begin], ids[end - 1] + step, step)
        begin = end

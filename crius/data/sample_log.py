"""Records the samples of each step: one line per step in a file of each data-parallel rank, for ``crius data audit``.

An attempt is one start of the processes of a run: the first start, a restart by the launcher after a failure, or a
resume by a user. It begins with a line of its own, then has one line for each finished step.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from crius.data.mixture import Place, Plan
from crius.run_file import RunFile
from crius.untrusted import open_below, parse_json

_log = logging.getLogger("crius.data")
_MOST_ATTEMPTS = 1 << 32
_TAIL_BYTES = 1 << 16  # contains the last line: a step's line has about 60 bytes, an attempt's a few hundred


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The first line of an attempt.

    Attributes:
        attempt: number of the attempt in this run folder, from 0.
        after: step that it starts after; 0 for a new run.
        sample: first sample that it reads.
        ranks: number of data-parallel ranks, each of which has a file.
        batch: sequences per step, over all ranks.
        epoch_samples: sequences per epoch; 0 if unknown, as for a stream.
        source: digest of the identity of the data. If it is equal, a sample id stands for the same sequence.
        end: the samples of the run end before this id; 0 if only its steps end the run.
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
    """The digest for ``Attempt.source`` of data with this identity."""
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


MIXTURE = "mixture.jsonl"
"""File in the folder of the logs with the mixture at the start of each attempt."""


def log_mixture(run_dir: Path, attempt: int, plan: Plan, place: Place) -> None:
    """Record the mixture of an attempt, and its place in it: all that its choices follow from."""
    record = {"attempt": attempt, **plan._asdict(), "first": place.span.first}
    record |= {"weights": place.span.weights, "before": place.span.before, "counts": place.counts}
    file = RunFile(run_dir / "data" / MIXTURE, _log.warning, "crius data audit will not prove the shares")
    file.append(_line(record))
    file.close()


def samples_path(run_dir: Path, rank: int) -> Path:
    """The file of data-parallel rank ``rank``."""
    return run_dir / "data" / f"samples-rank-{rank}.jsonl"


def next_attempt(run_dir: Path) -> int:
    """The number of the attempt that begins now, from rank 0's file. One rank calls this and tells the others."""
    found = [-1]
    with contextlib.suppress(OSError), open_below(run_dir / "data", samples_path(run_dir, 0).name) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        for line in file.read().splitlines():
            # the last line may be incomplete, and any line may be damaged: the number after the highest one is free
            with contextlib.suppress(ValueError, KeyError, TypeError):
                number = parse_json(line)["attempt"]
                found += [number] if type(number) is int and number < _MOST_ATTEMPTS else []
    return max(found) + 1


class SampleLog:
    """Appends the samples that one rank trained on to its file. A failing disk is warned about once, and never ends
    the run.

    Args:
        run_dir: folder of the run.
        rank: data-parallel rank; None: another rank with the same data writes the log.
        start: attempt that begins.
    """

    def __init__(self, run_dir: Path, rank: int | None, start: Attempt) -> None:
        self._attempt = start.attempt
        self._file = None
        if rank is not None:
            loss = "crius data audit will miss steps"
            self._file = RunFile(samples_path(run_dir, rank), _log.warning, loss, head=_line(asdict(start)))

    def write(self, step: int, sample_ids: Sequence[int], sources: Sequence[int] | None = None) -> None:
        """Record that ``step`` is done and that this rank trained on ``sample_ids`` in it, in any order.

        ``sources`` has the number of the source of each sample, in a mixture.
        """
        if self._file is not None:
            there = [number for number in sample_ids if number >= 0]  # negative ids are padding
            ids = [[part.start, part.stop, part.step] for part in to_ranges(there)]
            record = {"attempt": self._attempt, "step": step, "ids": ids}
            if sources is not None:
                pairs = zip(sample_ids, sources, strict=True)
                record["mix"] = dict(sorted(Counter(source for number, source in pairs if number >= 0).items()))
            self._file.append(_line(record))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _line(record: dict[str, object]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"


def to_ranges(sample_ids: Sequence[int]) -> Iterator[range]:
    """``sample_ids`` in ascending order, as ranges. The ids of a rank that takes every n-th sample are one range."""
    ids = sorted(sample_ids)
    begin = 0
    while begin < len(ids):
        step = max(1, ids[begin + 1] - ids[begin]) if begin + 1 < len(ids) else 1
        end = begin + 1
        while end < len(ids) and ids[end] == ids[end - 1] + step:
            end += 1
        yield range(ids[begin], ids[end - 1] + step, step)
        begin = end

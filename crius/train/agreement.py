"""What all ranks have to decide alike although only some of them know the reason: to stop, to save now, to give up."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from crius.errors import LayoutError
from crius.launch.stop import StopRequest
from crius.parallel.dims import ParallelDims
from crius.parallel.runtime import World

SECONDS = 1.0
"""About how long several ranks train until they agree again."""

MOST_STEPS = 100
"""Steps until they agree again, at most: they may become slower."""


@dataclass(frozen=True)
class Decision:
    """What the ranks agreed on after a step.

    Attributes:
        stop: number of the signal that asks to stop; 0 for none.
        save: time for a checkpoint.
        give_up: too many saves failed.
    """

    stop: int
    save: bool
    give_up: bool


NOTHING = Decision(stop=0, save=False, give_up=False)


class Agreement:
    """What the ranks agree on, before the first step and then: one alone after each, several about each ``SECONDS``.

    Each time they also agree on the number of steps until they do so again, from the pace of the slowest.

    Args:
        num_ranks: of the run.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._steps, self._wait = 0, 0
        self._since = time.monotonic()

    def ask(self, stop: int | None, save: bool, give_up: bool) -> Decision:
        """The greatest of what the ranks say, the same on all; ``NOTHING`` after steps at which they do not ask.

        One small collective on the host. On a GPU the host is ahead of the device here, so that this costs no time.

        Args:
            stop: number of the signal that asks to stop.
            save: time for a checkpoint.
            give_up: too many saves failed.
        """
        if self._num_ranks == 1:
            return Decision(stop or 0, save, give_up)
        self._steps = min(self._steps + 1, self._wait)  # none before the first time
        if self._steps < self._wait:
            return NOTHING
        elapsed = max(time.monotonic() - self._since, 1e-6)
        wait = max(1, min(MOST_STEPS, int(self._steps / elapsed * SECONDS)))
        found, has_to_save, gives_up, least = _greatest([stop or 0, save, give_up, -wait], self._num_ranks)
        self._steps, self._wait, self._since = 0, -least, time.monotonic()
        return Decision(found, bool(has_to_save), bool(gives_up))


class Preempted(Exception):
    """The run was asked to stop.

    Args:
        signal: number of the signal that asked.
        step: the last one that was done; where the run saves, it is saved.
    """

    def __init__(self, signal: int, step: int) -> None:
        super().__init__(signal, step)
        self.signal, self.step = signal, step


def stop_number(request: StopRequest | None, num_ranks: int) -> int:
    """Number of the signal that asks one of the ranks to stop, the same on all; 0 for none, or where none is caught."""
    return 0 if request is None else _greatest([request.number or 0], num_ranks)[0]


def _greatest(words: list[int], num_ranks: int) -> list[int]:
    """Elementwise maximum over the ranks. One small collective on the host."""
    if num_ranks == 1:
        return words
    tensor = torch.tensor(words, dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def one_layout(dims: ParallelDims, ranks: World) -> ParallelDims:
    """``dims``, the same on all ranks. Others would hang: their flags, or what ``parallelism.auto`` found, differ.

    Raises:
        LayoutError: a rank has another layout than the others.
    """
    found: list[str] = ranks.gather_json(str(dims))
    if len(set(found)) > 1:
        first = "; ".join(f"{text} on {found.count(text)}, first rank {found.index(text)}" for text in sorted({*found}))
        raise LayoutError(
            f"the layout differs between ranks: {first}.",
            where="[parallelism]",
            why="each host reads its own flags and files; parallelism.auto looks at its own GPUs",
            fix="give all hosts the same degrees: crius config show prints those that parallelism.auto finds",
        )
    return dims

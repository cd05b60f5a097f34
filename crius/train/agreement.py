"""What all ranks have to decide alike although only some of them know the reason: to stop, to save now, to give up."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from crius.errors import LayoutError
from crius.launch.stop import StopRequest
from crius.parallel.dims import ParallelDims
from crius.parallel.runtime import World


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


def agree(stop: int | None, save: bool, give_up: bool) -> Decision:
    """The greatest of what the ranks say, the same on all of them. One small collective on the host.

    On a GPU the host is ahead of the device here, so that this costs it no time of its own.
    """
    words = torch.tensor([stop or 0, save, give_up], dtype=torch.int64)
    dist.all_reduce(words, op=dist.ReduceOp.MAX)
    found, has_to_save, gives_up = words.tolist()
    return Decision(found, bool(has_to_save), bool(gives_up))


def is_asked_to_stop(request: StopRequest | None) -> bool:
    """Whether one of the ranks is asked to stop, the same on all of them; False where no signal is caught."""
    return request is not None and agree(request.number, save=False, give_up=False).stop > 0


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

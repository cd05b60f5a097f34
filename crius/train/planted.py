"""What planted faults do, see fault.py.

Those of numbers are planted in the loss function: they go through the real backward pass, the real sums and the real
checks, under every layout. Those of a process happen where it says in which step and phase it is. Those of the disk
happen before a write of a checkpoint.
"""

import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from crius.errors import ConfigError
from crius.launch.status import status
from crius.parallel.runtime import World
from crius.train.fault import VARIABLE, DiskFault, DropoutFault, Fault, LossFault, ProcessFault
from crius.train.loss import LossSum

log = logging.getLogger("crius.train")


@contextlib.contextmanager
def planted_in_process(faults: Sequence[Fault], rank: int, attempt: int) -> Iterator[None]:
    """Let the process faults of this rank and attempt happen while the context is open.

    Rank 0 warns of the faults of this attempt at the start. At the end each rank warns of those that did not come, such
    as one in the save of a step that saves nothing.

    Args:
        faults: all that are planted.
        rank: this process.
        attempt: restarts of the run so far.

    Raises:
        RuntimeError: planted, from here or from where the process says that it comes to the step and phase.
    """
    for fault in faults:
        if rank == 0 and not (isinstance(fault, ProcessFault) and fault.attempt != attempt):
            log.warning("%s plants a fault: %s", VARIABLE, fault)
    waiting = [
        fault for fault in faults if isinstance(fault, ProcessFault) and (fault.rank, fault.attempt) == (rank, attempt)
    ]

    def happen(step: int | None, phase: str) -> None:
        for fault in [fault for fault in waiting if fault.is_at(step, phase)]:
            waiting.remove(fault)  # before: a stopped process may be continued
            log.warning("%s: %s", VARIABLE, fault)
            _happen(fault)

    if waiting:
        happen(status.step, status.phase)
        status.listen(happen)
    try:
        yield
        for fault in waiting:
            log.warning("%s planted a fault that did not come: %s", VARIABLE, fault)
    finally:
        waiting.clear()  # the status outlives this run


def _happen(fault: ProcessFault) -> None:
    if fault.kind == "raise":
        raise RuntimeError(f"planted: {fault}")
    if fault.kind == "hang":
        while True:  # a signal handler that returns does not end it
            time.sleep(3600)
    os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


class DiskFaults:
    """The disk faults of one rank. The saver calls ``begin_save`` once a save and ``before_write`` before each write.

    Args:
        faults: all that are planted.
        rank: this process.
    """

    def __init__(self, faults: Sequence[Fault], rank: int) -> None:
        self._faults = [fault for fault in faults if isinstance(fault, DiskFault) and fault.rank in (None, rank)]
        self._saves = 0

    def begin_save(self) -> None:
        """Count one more save of this process."""
        self._saves += 1

    def before_write(self) -> None:
        """Fail or sleep as a write would.

        Raises:
            OSError: planted.
        """
        for fault in self._faults:
            if fault.first <= self._saves <= fault.last:
                if fault.error == "slow":
                    time.sleep(fault.seconds)
                else:
                    number = errno.ENOSPC if fault.error == "enospc" else errno.EROFS
                    raise OSError(number, f"{os.strerror(number)} (planted)")


def planted_in_loss(faults: Sequence[Fault], loss: LossSum, has_loss: bool, world: World) -> LossSum:
    """``loss`` with the faults of numbers in it, on the ranks that they are for. Every rank calls this.

    Args:
        faults: all that are planted.
        loss: of logits and labels.
        has_loss: this rank computes the loss; under a pipeline others do not.
        world: all ranks.

    Raises:
        ConfigError: the rank of a fault does not compute the loss.
    """
    in_numbers = [fault for fault in faults if isinstance(fault, (LossFault, DropoutFault))]
    if not in_numbers:
        return loss
    holders = world.gather(torch.tensor(has_loss, dtype=torch.int64, device=world.device)).nonzero().flatten().tolist()
    for fault in in_numbers:
        if isinstance(fault, DropoutFault):
            loss = _with_dropout(fault, loss)
            continue
        if fault.rank is not None and fault.rank not in holders:
            raise ConfigError(
                f"{VARIABLE} is for rank {fault.rank}, which computes no loss.",
                where=f"environment variable {VARIABLE}",
                why=f"ranks that do: {', '.join(map(str, holders))}",
                fix=f"rank={holders[-1]}, or no rank for all of them",
            )
        if fault.rank in (None, world.rank):
            loss = _with_factor(fault, loss)
    return loss


def _is_training() -> bool:
    return status.phase in ("forward", "pipeline")


def _with_factor(fault: LossFault, loss: LossSum) -> LossSum:
    def faulty(logits: Tensor, labels_BT: Tensor) -> Tensor:
        value = loss(logits, labels_BT)
        if not _is_training() or status.step is None or not fault.first <= status.step <= fault.last:
            return value
        if fault.where == "loss":
            return value * fault.factor
        value = value.clone()
        value.register_hook(lambda gradient: gradient * fault.factor)
        return value

    return faulty


def _with_dropout(fault: DropoutFault, loss: LossSum) -> LossSum:
    def faulty(logits: Tensor, labels_BT: Tensor) -> Tensor:
        return loss(_dropped(logits, fault.p) if _is_training() else logits, labels_BT)

    return faulty


def _dropped(logits: Tensor, p: float) -> Tensor:
    """Dropout of ``logits``; each rank draws for its own part of a DTensor, whose own random state a CPU has not."""
    if not isinstance(logits, DTensor):
        return F.dropout(logits, p)
    return DTensor.from_local(
        F.dropout(logits.to_local(), p),
        logits.device_mesh,
        logits.placements,
        run_check=False,
        shape=logits.shape,
        stride=logits.stride(),
    )

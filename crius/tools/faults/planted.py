"""Effects of planted faults, see fault.py.

Faults of numbers are planted in the model's loss: they go through the real backward pass, the real sums and the real
checks, under every layout. Faults of a process happen when it reports the step and phase. Faults of the disk happen
before a write of a checkpoint.
"""

import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from crius.config.run import RunConfig
from crius.errors import ConfigError
from crius.launch.environment import FAULTS, Placement
from crius.launch.status import status
from crius.models.layers import loss_of
from crius.parallel.runtime import World
from crius.tools.faults.fault import DiskFault, DropoutFault, Fault, LossFault, ProcessFault, read_faults
from crius.train.loop import Loop

log = logging.getLogger("crius.train")

_IMPOSSIBLE_BYTES = 1 << 60


@contextlib.contextmanager
def planted_in_process(faults: Sequence[Fault], rank: int, attempt: int) -> Iterator[None]:
    """Let the process faults of this rank and attempt happen while the context is open.

    Rank 0 warns of the faults of this attempt at the start. At the end each rank warns of faults that did not happen,
    such as a fault in the save of a step that saves nothing.

    Args:
        faults: all planted faults.
        rank: rank of this process.
        attempt: restarts of the run so far.

    Raises:
        RuntimeError: planted, here or where the process reports the step and phase; also the allocator's own error.
    """
    for fault in faults:
        if rank == 0 and not (isinstance(fault, ProcessFault) and fault.attempt != attempt):
            log.warning("%s plants a fault: %s", FAULTS, fault)
    waiting = [
        fault for fault in faults if isinstance(fault, ProcessFault) and (fault.rank, fault.attempt) == (rank, attempt)
    ]

    def happen(step: int | None, phase: str) -> None:
        for fault in [fault for fault in waiting if fault.is_at(step, phase)]:
            waiting.remove(fault)  # removed first, because a stopped process may continue
            log.warning("%s: %s", FAULTS, fault)
            _happen(fault)

    happen(status.step, status.phase)
    with status.listening(happen):
        yield
        for fault in waiting:
            log.warning("%s planted a fault that did not happen: %s", FAULTS, fault)


def _happen(fault: ProcessFault) -> None:
    if fault.kind == "raise":
        raise RuntimeError(f"planted: {fault}")
    if fault.kind == "oom":  # the real error of the real allocator
        torch.empty(_IMPOSSIBLE_BYTES, dtype=torch.uint8, device="cuda" if torch.cuda.is_initialized() else "cpu")
    if fault.kind == "hang":
        while True:  # a signal handler that returns does not end the sleep
            time.sleep(3600)
    os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


class PlantedFaults:
    """The faults that the environment asks for, around one run of this process.

    Its methods are ``around`` and ``prepare`` of ``crius.train.tools.Tools``.
    """

    def __init__(self) -> None:
        self._faults: tuple[Fault, ...] = ()

    @contextlib.contextmanager
    def around(self, config: RunConfig, placement: Placement) -> Iterator[None]:
        """Read the faults, and let faults of the process happen while the context is open.

        Raises:
            ConfigError: a fault is not understood, or never happens.
        """
        steps = config.training.steps
        attempt = placement.attempt
        self._faults = read_faults(os.environ, steps, placement.world_size, attempt)
        with planted_in_process(self._faults, placement.rank, attempt):
            yield

    def prepare(self, loop: Loop) -> Loop:
        """Plant the faults of numbers and of the disk. Every rank calls this."""
        ends = [part for part in loop.state.parts if not isinstance(part.output, nn.Identity)]
        plant_in_loss(self._faults, loss_of(ends[0]) if ends else None, loop.world)
        if loop.checkpoints:
            loop.checkpoints.before_write = partial(before_write, self._faults, loop.world.rank)
        return loop


def before_write(faults: Sequence[Fault], rank: int, save: int) -> None:
    """Fail or sleep as a write of a checkpoint would.

    Args:
        faults: all planted faults.
        rank: rank of this process.
        save: number of the save in this process, from 1.

    Raises:
        OSError: planted.
    """
    for fault in faults:
        if isinstance(fault, DiskFault) and fault.rank in (None, rank) and fault.first <= save <= fault.last:
            if fault.error == "slow":
                time.sleep(fault.seconds)
            else:
                number = errno.ENOSPC if fault.error == "enospc" else errno.EROFS
                raise OSError(number, f"{os.strerror(number)} (planted)")


def plant_in_loss(faults: Sequence[Fault], loss: nn.Module | None, world: World) -> None:
    """Plant the faults of numbers, as hooks, on their ranks. Every rank calls this.

    Args:
        faults: all planted faults.
        loss: loss of the model, see ``crius.models.layers``; None if another rank of a pipeline has it.
        world: all ranks.

    Raises:
        ConfigError: the rank of a fault does not compute the loss.
    """
    in_numbers = [fault for fault in faults if isinstance(fault, (LossFault, DropoutFault))]
    if not in_numbers:
        return
    has_loss = torch.tensor(loss is not None, dtype=torch.int64, device=world.device)
    holders = world.gather(has_loss).nonzero().flatten().tolist()
    for fault in in_numbers:
        if isinstance(fault, LossFault) and fault.rank is not None and fault.rank not in holders:
            raise ConfigError(
                f"{FAULTS} is for rank {fault.rank}, which does not compute the loss.",
                where=f"environment variable {FAULTS}",
                why=f"ranks that compute it: {', '.join(map(str, holders))}",
                fix=f"rank={holders[-1]}, or no rank for all of them",
            )
        if loss is None:
            continue
        if isinstance(fault, DropoutFault):
            loss.register_forward_pre_hook(partial(_drop, fault))
        elif fault.rank in (None, world.rank):
            loss.register_forward_hook(partial(_multiply, fault))


def _is_training() -> bool:
    return status.phase in ("forward", "pipeline")


def _multiply(fault: LossFault, loss: nn.Module, inputs: tuple[Any, ...], value: Tensor) -> Tensor:
    if not _is_training() or status.step is None or not fault.first <= status.step <= fault.last:
        return value
    if fault.where == "loss":
        return value * fault.factor
    value = value.clone()
    value.register_hook(lambda gradient: gradient * fault.factor)
    return value


def _drop(fault: DropoutFault, loss: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Dropout of the hidden state; under tensor parallelism each rank draws for its part of the sequence."""
    hidden_BTD, *others = inputs
    if not _is_training():
        return inputs
    if not isinstance(hidden_BTD, DTensor):
        return F.dropout(hidden_BTD, fault.p), *others
    dropped = F.dropout(hidden_BTD.to_local(), fault.p)  # on a CPU a DTensor has no random numbers of its own
    return DTensor.from_local(dropped, hidden_BTD.device_mesh, hidden_BTD.placements, run_check=False), *others

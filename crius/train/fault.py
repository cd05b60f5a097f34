"""Faults that a user plants, to see what the run does: ``CRIUS_FAULT=nan:step=5``.

The loss function is where they are planted: the fault goes through the real backward pass, the real sums and the real
checks, under every layout.
"""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from crius.errors import ConfigError
from crius.launch.status import status
from crius.parallel.runtime import World
from crius.train.loss import LossSum

VARIABLE = "CRIUS_FAULT"
GRAMMAR = (
    "nan:step=N[,rank=R][,where=loss|grad] or spike:step=N,factor=F[,rank=R][,where=loss|grad]; N or N-M counts from 1"
)

log = logging.getLogger("crius.train")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is planted, and where.

    Attributes:
        kind: a NaN, or values that are ``factor`` times too large.
        first: step it begins in, from 1.
        last: step it ends in.
        factor: of the loss or of its gradient; NaN for a NaN.
        rank: the rank it appears on; None for all that compute the loss.
        where: loss: in the loss, and so in every gradient; grad: in the gradients alone.
    """

    kind: Literal["nan", "spike"]
    first: int
    last: int
    factor: float
    rank: int | None = None
    where: Literal["loss", "grad"] = "loss"

    def __str__(self) -> str:
        what = "NaN" if self.kind == "nan" else f"factor {self.factor:g}"
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        ranks = "every rank" if self.rank is None else f"rank {self.rank}"
        return f"{what} in the {'loss' if self.where == 'loss' else 'gradients'} of {steps} on {ranks}"


def read_fault(environ: Mapping[str, str], steps: int) -> Fault | None:
    """The fault that the environment asks for; None where it asks for none.

    Args:
        environ: variables of this process.
        steps: of the run.

    Raises:
        ConfigError: it does not follow the grammar, or is meant for a step that does not come.
    """
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    kind, _, rest = text.partition(":")
    given = dict(re.findall(r"(\w+)=([^,=]+)", rest))
    is_whole = ",".join(f"{name}={value}" for name, value in given.items()) == rest
    span = re.fullmatch(r"(\d+)(?:-(\d+))?", given.pop("step", ""))
    factor, rank, where = _number(given.pop("factor", "")), given.pop("rank", None), given.pop("where", "loss")
    is_right = (
        is_whole
        and not given
        and span is not None
        and ((kind == "nan" and factor is None) or (kind == "spike" and factor is not None))
        and (rank is None or rank.isdecimal())
        and where in ("loss", "grad")
    )
    if not is_right or span is None:
        raise ConfigError(
            f"{VARIABLE} {text} is not understood.",
            where=f"environment variable {VARIABLE}",
            why=f"the grammar is {GRAMMAR}",
            fix=f"unset {VARIABLE}, or e.g. {VARIABLE}=nan:step=5",
        )
    first, last = int(span[1]), int(span[2] or span[1])
    if not 1 <= first <= last <= steps:
        raise ConfigError(
            f"{VARIABLE} {text} never comes: the run has steps 1 to {steps}.",
            where=f"environment variable {VARIABLE}",
            fix=f"{VARIABLE}={text.replace(f'step={span[0]}', f'step={min(max(first, 1), steps)}')}",
        )
    return Fault(
        kind="nan" if kind == "nan" else "spike",
        first=first,
        last=last,
        factor=math.nan if factor is None else factor,
        rank=None if rank is None else int(rank),
        where="grad" if where == "grad" else "loss",
    )


def planted(fault: Fault, loss: LossSum, has_loss: bool, world: World) -> LossSum:
    """``loss`` with ``fault`` in it on the ranks that it is for. Every rank calls this.

    Args:
        fault: what to plant.
        loss: of logits and labels.
        has_loss: this rank computes the loss; under a pipeline others do not.
        world: all ranks.

    Raises:
        ConfigError: the rank of the fault does not compute the loss, or does not exist.
    """
    holders = world.gather(torch.tensor(has_loss, dtype=torch.int64, device=world.device)).nonzero().flatten().tolist()
    if fault.rank is not None and fault.rank not in holders:
        raise ConfigError(
            f"{VARIABLE} is for rank {fault.rank}, which computes no loss.",
            where=f"environment variable {VARIABLE}",
            why=f"ranks that do: {', '.join(map(str, holders))}",
            fix=f"rank={holders[-1]}, or no rank for all of them",
        )
    if world.rank == 0:
        log.warning("%s plants a fault: %s", VARIABLE, fault)
    if fault.rank not in (None, world.rank):
        return loss

    def faulty(logits: Tensor, labels_BT: Tensor) -> Tensor:
        value = loss(logits, labels_BT)
        if status.phase != "step" or status.step is None or not fault.first <= status.step <= fault.last:
            return value
        if fault.where == "loss":
            return value * fault.factor
        value = value.clone()
        value.register_hook(lambda gradient: gradient * fault.factor)
        return value

    return faulty


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None

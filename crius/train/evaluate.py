"""Validation: the same sequences every time, the same result under every layout, no effect on training."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from crius.data.batch import IGNORE_INDEX, Batch
from crius.launch.status import status
from crius.metrics.record import ValidationMetrics
from crius.parallel.dims import ParallelDims
from crius.parallel.fsdp import fsdp_modules
from crius.parallel.runtime import World
from crius.train.loss import count_valid
from crius.train.step import Runner

log = logging.getLogger("crius.train")


@torch.no_grad()
def evaluate(
    parts: Sequence[nn.Module],
    runner: Runner,
    batches: Iterable[Batch],
    place: Callable[[Batch], Batch],
    token_bytes: Tensor,
    world: World,
    dims: ParallelDims,
    step: int,
    must_stop: Callable[[], bool],
) -> ValidationMetrics | None:
    """Score ``batches``, of which every rank brings as many; None where the run was asked to stop meanwhile.

    Args:
        parts: this rank's stages; left in training mode, their gathered weights freed.
        runner: scores a batch with them.
        batches: this rank's rows; rows that only fill up have no valid label.
        place: gives this rank its tokens of the rows, on the device.
        token_bytes: bytes of text that each token id stands for, int ``(vocabulary,)`` on the host.
        world: ranks to sum over.
        dims: the degrees, to count once what several ranks have.
        step: the optimizer step after which this runs.
        must_stop: asked before each batch; all ranks get the same answer.
    """
    started = time.monotonic()
    nats = torch.zeros((), dtype=torch.float64, device=world.device)
    counts = torch.zeros(3, dtype=torch.float64)
    for part in parts:
        part.eval()
    is_whole = True
    for batch in batches:
        if must_stop():
            is_whole = False
            break
        status.update()  # a long validation is no hang
        labels = batch.labels_BT
        valid = labels != IGNORE_INDEX
        seen = (count_valid(labels), token_bytes[labels[valid]].sum(), valid.any(dim=1).sum())
        counts += torch.stack([count.to(torch.float64) for count in seen])
        nats += runner.score(place(batch))
    for part in parts:
        part.train()
        for module in fsdp_modules(part):
            module.reshard()
    if not is_whole:
        log.info("validation at step %d is given up: the run is asked to stop", step)
        return None
    same_rows = dims.num_ranks // dims.batch
    sums = world.sum(torch.cat((nats[None] / dims.tp, counts.to(world.device) / same_rows)))
    total, tokens, num_bytes, rows = sums.tolist()
    loss = total / tokens
    return ValidationMetrics(
        step=step,
        val_loss=loss,
        val_perplexity=math.exp(min(loss, 700.0)),
        val_bits_per_byte=total / math.log(2) / num_bytes if num_bytes else math.nan,
        val_samples=int(rows),
        val_seconds=time.monotonic() - started,
    )

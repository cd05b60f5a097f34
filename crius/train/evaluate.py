"""Validation: the same sequences every time, the same result under every layout, no effect on training."""

import math
import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from crius.data.batch import IGNORE_INDEX, Batch
from crius.metrics.record import ValidationMetrics
from crius.parallel.fsdp import fsdp_modules
from crius.parallel.runtime import World
from crius.train.loss import count_valid, loss_sum


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], token_bytes: Tensor, world: World, step: int
) -> ValidationMetrics:
    """Score ``batches``, of which every rank brings as many.

    Args:
        model: left in training mode, its gathered weights freed.
        batches: this rank's part; rows that only fill up have no valid label.
        token_bytes: bytes of text that each token id stands for, int ``(vocabulary,)`` on the device.
        world: ranks to sum over.
        step: the optimizer step after which this runs.
    """
    started = time.monotonic()
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)
    model.eval()
    for batch in batches:
        part = batch.to(world.device)
        valid = part.labels_BT != IGNORE_INDEX
        logits = model(part.tokens_BT, part.positions_BT)
        num_bytes = token_bytes[part.labels_BT[valid]].sum()
        num_rows = valid.any(dim=1).sum()
        parts = (loss_sum(logits, part.labels_BT), count_valid(part.labels_BT), num_bytes, num_rows)
        sums += torch.stack([part_sum.to(torch.float64) for part_sum in parts])
    model.train()
    for module in fsdp_modules(model):
        module.reshard()
    nats, tokens, num_bytes, rows = world.sum(sums).tolist()
    loss = nats / tokens
    return ValidationMetrics(
        step=step,
        val_loss=loss,
        val_perplexity=math.exp(min(loss, 700.0)),
        val_bits_per_byte=nats / math.log(2) / num_bytes if num_bytes else math.nan,
        val_samples=int(rows),
        val_seconds=time.monotonic() - started,
    )

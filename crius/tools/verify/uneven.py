"""Labels, documents and weights that show a wrong sum. They depend on sample and name, so no layout changes them.

B batch, T tokens
"""

from collections.abc import Sequence

import torch
from torch import nn

from crius.data.loader import IGNORE_INDEX, Batch
from crius.models.layers import CausalAttention
from crius.models.plan import match
from crius.parallel.init import Init, Normal
from crius.shards import local_tensor

KEPT = ((0.0, 1.0), (0.0, 0.06), (0.5, 1.0), (0.9, 1.0), (0.0, 0.7), (0.25, 0.3))
"""Which part of a row keeps its labels, by turns: from, to."""

ATTENTION_GAIN = 1.5
"""Size of a projection's output relative to its input. Attention scores then have a standard deviation of about 2."""


def uneven_labels(batch: Batch, global_batch_size: int) -> Batch:
    """``batch`` with most labels masked, unevenly over ranks, microbatches, parts of a sequence and steps.

    In odd steps the second quarter of the global batch has no label at all: under accumulation a whole microbatch. In
    even steps every odd sample has none: with an even number of data-parallel ranks that is half of the ranks.

    Args:
        batch: any rows of one step.
        global_batch_size: sequences of a step, over all ranks.
    """
    labels, length = batch.labels_BT.clone(), batch.labels_BT.shape[1]
    for row, sample in enumerate(batch.sample_ids):
        step, place = divmod(sample, global_batch_size)
        start, stop = (round(share * length) for share in KEPT[sample % len(KEPT)])
        stop = max(stop, start + 1)  # so that no step is without any label
        is_empty = place % 2 == 1 if step % 2 else global_batch_size // 4 <= place < global_batch_size // 2
        if is_empty:
            start = stop = 0
        labels[row, :start] = IGNORE_INDEX
        labels[row, stop:] = IGNORE_INDEX
    return Batch(batch.tokens_BT, labels, batch.positions_BT, batch.sample_ids)


def uneven_documents(batch: Batch) -> Batch:
    """``batch`` with positions that restart once or twice in each row, at places that differ between rows."""
    length = batch.tokens_BT.shape[1]
    positions = torch.arange(length, device=batch.tokens_BT.device).repeat(len(batch), 1)
    for row, sample in enumerate(batch.sample_ids):
        for start in sorted({1 + 7 * sample % max(1, length - 1), length // 2 + sample % 2}):
            positions[row, start:] = torch.arange(length - start, device=positions.device)
    return Batch(batch.tokens_BT, batch.labels_BT, positions, batch.sample_ids)


@torch.no_grad()
def uneven_attention(parts: Sequence[nn.Module], rules: Sequence[tuple[str, Init]]) -> None:
    """Enlarge the weights of attention in place, so that it depends on positions from the first step.

    A small model starts with attention scores near 0. Every token then sees all earlier tokens alike, and wrong rotary
    positions change the loss by less than the tolerance.

    Args:
        parts: the stages of this rank, with the weights that ``rules`` drew.
        rules: name patterns and how those weights start.
    """
    for part in parts:
        for prefix, module in part.named_modules():
            if any(isinstance(child, CausalAttention) for child in module.children()):
                for name, weight in module.named_parameters(prefix):
                    rule = next(rule for pattern, rule in rules if match(pattern, name))
                    if isinstance(rule, Normal):
                        local_tensor(weight).mul_(max(1.0, ATTENTION_GAIN / (rule.std * weight.shape[-1] ** 0.5)))

"""Label masks and documents that no layout splits evenly, by the number of the sample, so alike under every layout.

B batch, T tokens
"""

import torch

from crius.data.batch import IGNORE_INDEX, Batch

KEPT = ((0.0, 1.0), (0.0, 0.06), (0.5, 1.0), (0.9, 1.0), (0.0, 0.7), (0.25, 0.3))
"""Which part of a row keeps its labels, by turns: from, to."""


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

"""The loss of language models, summed, never averaged: the step divides once, by the global count of valid tokens."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from crius.data.batch import IGNORE_INDEX
from crius.parallel.tensor import whole_tensor

LossSum = Callable[[Tensor, Tensor], Tensor]
"""Of logits ``(B, T, V)`` and labels ``(B, T)``: the sum of the token losses, a float64 scalar."""


def token_losses(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Cross-entropy of each token in nats, float32 ``(B * T,)``; 0 where the label is ``IGNORE_INDEX``.

    Under tensor parallelism the logits stay split over the vocabulary: only maxima and sums are communicated.
    """
    logits = logits_BTV.flatten(0, 1).to(torch.float32)
    return F.cross_entropy(logits, labels_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none")


def loss_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Sum of the token losses, a float64 scalar: in float64 the order of the sum does not show."""
    return whole_tensor(token_losses(logits_BTV, labels_BT).sum(dtype=torch.float64))


def count_valid(labels_BT: Tensor) -> Tensor:
    """Number of labels that count, a float64 scalar (exact up to 2**53)."""
    return (labels_BT != IGNORE_INDEX).sum().to(torch.float64)

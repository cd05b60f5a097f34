"""One optimizer step: accumulate, sum, clip, update."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crius.data.batch import Batch
from crius.parallel.fsdp import GradientSync
from crius.parallel.gradients import Gradients
from crius.parallel.runtime import World
from crius.train.loss import count_valid, loss_sum


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step found out; tensors on the device, so that reading them can wait.

    Attributes:
        step: number of the step, from 1.
        loss: mean over the valid tokens of the global batch, float64 scalar, the same on all ranks.
        grad_norm: global L2 norm before clipping, float64 scalar, the same on all ranks.
        local_losses: this rank's share of the loss by microbatch, float64 ``(num microbatches,)``.
        squared_norms: this rank's share of the squared norm of each gradient, float64 ``(num parameters,)``.
        sample_ids: the sequences this rank trained on.
    """

    step: int
    loss: Tensor
    grad_norm: Tensor
    local_losses: Tensor
    squared_norms: Tensor
    sample_ids: tuple[int, ...]

    def is_finite(self) -> Tensor:
        """Whether loss and gradient are finite, a bool scalar, the same on all ranks."""
        return torch.isfinite(self.loss) & torch.isfinite(self.grad_norm)


ForwardBackward = Callable[[Batch, Tensor], Tensor]


def accumulate(model: nn.Module, sync: GradientSync, microbatch_size: int) -> ForwardBackward:
    """``forward_backward(batch, valid_tokens)``: gradients of the batch, summed over its microbatches.

    The result is each microbatch's loss sum divided by ``valid_tokens``, the global count of the step: the one place
    where the loss is normalised.
    """

    def forward_backward(batch: Batch, valid_tokens: Tensor) -> Tensor:
        microbatches = list(batch.microbatches(microbatch_size))
        losses = []
        for index, part in enumerate(microbatches, start=1):
            sync.start_microbatch(is_last=index == len(microbatches))
            loss = loss_sum(model(part.tokens_BT, part.positions_BT), part.labels_BT) / valid_tokens
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    return forward_backward


def train_step(
    step: int,
    batch: Batch,
    forward_backward: ForwardBackward,
    gradients: Gradients,
    world: World,
    max_norm: float,
) -> StepResult:
    """Forward, backward and clipping of one step; the update is the guard's.

    Two small sums over all ranks: the count of valid tokens before, loss and squared norm together after.
    """
    valid_tokens = world.sum(count_valid(batch.labels_BT))
    losses = forward_backward(batch, valid_tokens)
    squared_norms = gradients.squared_norms()
    totals = world.sum(torch.stack((losses.sum(), squared_norms.sum())))
    grad_norm = totals[1].sqrt()
    gradients.clip(grad_norm, max_norm)
    return StepResult(
        step=step,
        loss=totals[0],
        grad_norm=grad_norm,
        local_losses=losses,
        squared_norms=squared_norms,
        sample_ids=batch.sample_ids,
    )

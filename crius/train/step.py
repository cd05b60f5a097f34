"""One optimizer step: accumulate, sum, clip, update."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from crius.buffers import counters, zero
from crius.data.batch import Batch
from crius.launch.status import status
from crius.parallel.dims import ParallelDims
from crius.parallel.fsdp import GradientSync
from crius.parallel.gradients import Gradients
from crius.parallel.pipeline import Pipeline
from crius.parallel.runtime import World
from crius.train.loss import count_valid


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
        local_peak: largest number in the gradient that this rank's own backward passes brought to the embeddings,
            before any sum over ranks that have other data, a scalar; None where that is not watched.
    """

    step: int
    loss: Tensor
    grad_norm: Tensor
    local_losses: Tensor
    squared_norms: Tensor
    sample_ids: tuple[int, ...]
    local_peak: Tensor | None = None

    def is_finite(self) -> Tensor:
        """Whether loss and gradient are finite, a bool scalar, the same on all ranks."""
        return torch.isfinite(self.loss) & torch.isfinite(self.grad_norm)


class Runner(Protocol):
    """Runs the parts of the model that this rank holds over its batch: an accumulation loop, or a pipeline."""

    def forward_backward(self, batch: Batch, valid_tokens: Tensor) -> Tensor:
        """Gradients of ``batch``, summed over its microbatches; the model's counters count it and nothing else.

        Returns each microbatch's loss sum divided by ``valid_tokens``, the global count of the step, float64
        ``(num microbatches,)``: the one place where the loss is normalised. Zeros where another stage has the loss.
        """

    def score(self, batch: Batch) -> Tensor:
        """Loss sum of ``batch`` without gradients, float64 scalar; 0 where another stage has the loss."""


class Accumulation:
    """The whole model on each rank: microbatches one after the other.

    Args:
        model: laid out on the mesh; gives the loss sum of tokens, positions and labels.
        sync: when gradients meet.
        microbatch_size: sequences of a microbatch.
    """

    def __init__(self, model: nn.Module, sync: GradientSync, microbatch_size: int) -> None:
        self._model, self._sync, self._size = model, sync, microbatch_size
        self._counters = counters([model])

    def forward_backward(self, batch: Batch, valid_tokens: Tensor) -> Tensor:
        """See ``Runner``."""
        microbatches = list(batch.microbatches(self._size))
        losses = []
        zero(self._counters)
        for index, part in enumerate(microbatches, start=1):
            self._sync.start_microbatch(is_last=index == len(microbatches))
            losses.append(self._microbatch(part, valid_tokens))
        return torch.stack(losses)

    def rehearse(self, batch: Batch) -> Tensor:
        """The loss sum of the first microbatch alone, a float64 scalar; its gradients, summed over ranks, stay."""
        self._sync.start_microbatch(is_last=True)
        return self._microbatch(next(batch.microbatches(self._size)), torch.ones((), dtype=torch.float64))

    def _microbatch(self, part: Batch, valid_tokens: Tensor) -> Tensor:
        status.update(phase="forward")
        loss = self.score(part) / valid_tokens
        status.update(phase="backward")
        loss.backward()
        return loss.detach()

    def score(self, batch: Batch) -> Tensor:
        """See ``Runner``."""
        loss_sum: Tensor = self._model(batch.tokens_BT, batch.positions_BT, batch.labels_BT)
        return loss_sum


class Pipelined:
    """The stages of the model on several ranks, and a schedule over them.

    Args:
        pipeline: this rank's stages.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def forward_backward(self, batch: Batch, valid_tokens: Tensor) -> Tensor:
        """See ``Runner``."""
        status.update(phase="pipeline")
        return self._pipeline.forward_backward(batch.tokens_BT, batch.positions_BT, batch.labels_BT, valid_tokens)

    def score(self, batch: Batch) -> Tensor:
        """See ``Runner``."""
        return self._pipeline.evaluate(batch.tokens_BT, batch.positions_BT, batch.labels_BT)


def train_step(
    step: int, batch: Batch, runner: Runner, gradients: Gradients, world: World, dims: ParallelDims, max_norm: float
) -> StepResult:
    """Forward, backward and clipping of one step; the update is the guard's.

    Two small sums over all ranks: the count of valid tokens before, loss and squared norm together after. Ranks of one
    tensor-parallel group and of one pipeline have the same tokens, which count once.
    """
    valid_tokens = world.sum(count_valid(batch.labels_BT)) / (dims.tp * dims.pp)
    losses = runner.forward_backward(batch, valid_tokens)
    squared_norms = gradients.squared_norms()
    totals = gradients.totals(losses, squared_norms, world, dims)
    grad_norm = totals[1].sqrt()
    gradients.clip(grad_norm, max_norm)
    return StepResult(
        step=step,
        loss=totals[0],
        grad_norm=grad_norm,
        local_losses=losses,
        squared_norms=squared_norms,
        sample_ids=batch.sample_ids,
        local_peak=gradients.take_local_peak(),
    )


def largest_loss(result: StepResult, batch: Batch, world: World, dims: ParallelDims) -> Tensor:
    """The largest of the means over the valid tokens of one rank, float64 scalar; one small gather over all ranks.

    Ranks of a pipeline that do not have the loss count as 0.
    """
    parts = world.gather(torch.stack((result.local_losses.sum(), count_valid(batch.labels_BT))))
    shares, tokens = parts.unbind(1)
    valid_tokens = tokens.sum() / (dims.tp * dims.pp)
    return (shares * valid_tokens / tokens.clamp(min=1)).max()

"""One optimizer step: accumulate, sum, clip, update."""

import contextlib
import logging
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from crius.config.layout import Layout
from crius.data.loader import IGNORE_INDEX, Batch
from crius.errors import NonFiniteError
from crius.launch.status import status
from crius.metrics.record import ValidationMetrics
from crius.parallel.fsdp import GradientSync, fsdp_modules
from crius.parallel.gradients import Gradients
from crius.parallel.pipeline import Pipeline
from crius.parallel.runtime import World
from crius.shards import counters, zero

log = logging.getLogger("crius.train")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step. Its tensors stay on the device, so that reading them can wait.

    Attributes:
        step: number of the step, from 1.
        loss: mean over the valid tokens of the global batch, float64 scalar, the same on all ranks.
        grad_norm: global L2 norm before clipping, float64 scalar, the same on all ranks.
        local_losses: this rank's share of the loss by microbatch, float64 ``(num microbatches,)``.
        squared_norms: this rank's share of the squared norm of each gradient, float64 ``(num parameters,)``.
        sample_ids: sequences that this rank trained on.
        local_peak: largest number in the gradient of the embeddings from this rank's own backward passes, before any
            sum over ranks with other data, a scalar; None if it is not watched.
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
    """Runs this rank's parts of the model over its batch: an accumulation loop, or a pipeline."""

    def forward_backward(self, batch: Batch, valid_tokens: Tensor) -> Tensor:
        """Compute the gradients of ``batch``, summed over its microbatches; the model's counters count this batch only.

        Returns each microbatch's loss sum divided by ``valid_tokens``, the global count of the step, float64 ``(num
        microbatches,)``. The loss is normalised only here. Zeros if another stage has the loss.
        """

    def score(self, batch: Batch) -> Tensor:
        """Loss sum of ``batch`` without gradients, float64 scalar; 0 if another stage has the loss."""


class Accumulation:
    """The whole model on each rank: microbatches one after the other.

    Args:
        model: laid out on the mesh; returns the loss sum of tokens, positions and labels.
        sync: when gradients are synchronised.
        microbatch_size: sequences per microbatch.
    """

    def __init__(self, model: nn.Module, sync: GradientSync, microbatch_size: int) -> None:
        self._model = model
        self._sync = sync
        self._size = microbatch_size
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
        """The loss sum of the first microbatch alone, a float64 scalar; its gradients, summed over ranks, are kept."""
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
        loss_sum: Tensor = self._model(batch.tokens_BT, batch.positions_BT, batch.labels_BT, batch.ends_BM)
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
        tensors = (batch.tokens_BT, batch.positions_BT, batch.labels_BT)
        return self._pipeline.forward_backward(*tensors, valid_tokens, batch.ends_BM)

    def score(self, batch: Batch) -> Tensor:
        """See ``Runner``."""
        return self._pipeline.evaluate(batch.tokens_BT, batch.positions_BT, batch.labels_BT, batch.ends_BM)


def count_valid(labels_BT: Tensor) -> Tensor:
    """Number of labels that count, a float64 scalar (exact up to 2**53)."""
    return (labels_BT != IGNORE_INDEX).sum().to(torch.float64)


def train_step(
    step: int, batch: Batch, runner: Runner, gradients: Gradients, world: World, layout: Layout, max_norm: float
) -> StepResult:
    """Forward, backward and clipping of one step; the guard makes the update.

    Two small sums over all ranks: the count of valid tokens before, loss and squared norm together after. Ranks of one
    tensor-parallel group and of one pipeline have the same tokens, which count once.
    """
    valid_tokens = world.sum(count_valid(batch.labels_BT)) / (layout.tp * layout.pp)
    valid_tokens = valid_tokens.clamp(min=1)  # a batch without labels has loss and gradient 0
    with anomaly_named(step):
        losses = runner.forward_backward(batch, valid_tokens)
    squared_norms = gradients.squared_norms()
    totals = gradients.totals(losses, squared_norms, world, layout)
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


_NAN = re.compile(r"Function '(\w+)' returned nan values")
_FRAME = re.compile(r'  File "(?P<file>.*)", (line \d+, in .*)\n(.*)')


@contextlib.contextmanager
def anomaly_named(step: int) -> Iterator[None]:
    """Name the line of the forward pass that belongs to the first NaN of a backward pass in this context.

    Only under ``debug.detect_anomaly``: torch then ends the backward pass at the first NaN, and warns of that line.

    Raises:
        NonFiniteError: a gradient is NaN.
    """
    if not torch.is_anomaly_enabled():
        yield
        return
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield
    except RuntimeError as error:  # a pipeline's stage raises an error of its own from it
        found = _NAN.search(f"{error} {error.__cause__}")
        if found is None:
            raise
        frames = [frame for warning in seen for frame in _FRAME.finditer(str(warning.message))]
        own = [frame for frame in frames if "site-packages" not in frame["file"]]
        where = f"{own[-1]['file']}, {own[-1][2]}: {own[-1][3].strip()}" if own else ""
        raise NonFiniteError(
            f"the backward pass of step {step} has its first NaN in {found[1]}.",
            where=where or "an operation without a line of Python",
            why="debug.detect_anomaly looks at each gradient; the update was not applied",
            fix="look at the numbers on that line: the root or logarithm of 0, a division by 0, an overflow",
        ) from error


def largest_loss(result: StepResult, batch: Batch, world: World, layout: Layout) -> Tensor:
    """The largest mean loss over the valid tokens of any rank, float64 scalar; one small gather over all ranks.

    Ranks of a pipeline without the loss count as 0.
    """
    parts = world.gather(torch.stack((result.local_losses.sum(), count_valid(batch.labels_BT))))
    shares, tokens = parts.unbind(1)
    valid_tokens = tokens.sum() / (layout.tp * layout.pp)
    return (shares * valid_tokens / tokens.clamp(min=1)).max()


class Late:
    """Numbers on their way to the host. The device may continue before they are read.

    Args:
        values: float64, any shape; copied, for values on a GPU into page-locked memory.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if values.is_cuda else None
        if self._arrived:
            self._arrived.record()

    def has_arrived(self) -> bool:
        """Whether reading would not wait."""
        return self._arrived is None or self._arrived.query()

    def arrives_within(self, seconds: float) -> bool:
        """Wait for the numbers, at most this long; returns whether they have arrived."""
        end = time.monotonic() + seconds
        while not self.has_arrived():
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True

    def read(self) -> list[float]:
        """The numbers. Waits until the device has computed them, but not for later work in its queue."""
        if self._arrived:
            self._arrived.synchronize()
        values: list[float] = self._values.tolist()
        return values


@torch.no_grad()
def evaluate(
    parts: Sequence[nn.Module],
    runner: Runner,
    batches: Iterable[Batch],
    place: Callable[[Batch], Batch],
    token_bytes: Tensor,
    world: World,
    layout: Layout,
    step: int,
    must_stop: Callable[[], bool],
) -> ValidationMetrics | None:
    """Score ``batches``; None if the run was asked to stop meanwhile. Every rank has the same number of batches.

    Args:
        parts: this rank's stages; left in training mode, their gathered weights freed.
        runner: scores a batch with them.
        batches: this rank's rows; rows that only fill up a batch have no valid label.
        place: gives this rank its tokens of the rows, on the device.
        token_bytes: bytes of text that each token id stands for, int ``(vocabulary,)`` on the host.
        world: ranks to sum over.
        layout: the degrees, so that tokens that several ranks have count once.
        step: optimizer step after which this runs.
        must_stop: called before each batch; all ranks get the same answer.
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
        status.update()  # a long validation is not a hang
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
        log.info("validation at step %d is stopped, because the run is asked to stop", step)
        return None
    same_rows = layout.num_ranks // layout.batch
    sums = world.sum(torch.cat((nats[None] / layout.tp, counts.to(world.device) / same_rows)))
    total, tokens, num_bytes, rows = sums.tolist()
    loss = total / max(tokens, 1.0)
    return ValidationMetrics(
        step=step,
        val_loss=loss,
        val_perplexity=math.exp(min(loss, 700.0)),
        val_bits_per_byte=total / math.log(2) / num_bytes if num_bytes else math.nan,
        val_samples=int(rows),
        val_seconds=time.monotonic() - started,
    )

"""The for loop of training, and what is reported on the way."""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from crius.config.run import RunConfig
from crius.data.batch import Batch
from crius.data.loader import BatchLoader
from crius.data.sample_log import SampleLog
from crius.errors import NonFiniteError
from crius.launch.status import status
from crius.launch.stop import StopRequest
from crius.metrics.device import peak_memory_gib
from crius.metrics.ledger import TimeLedger
from crius.metrics.record import StepMetrics, ValidationMetrics
from crius.metrics.sinks.base import Sink
from crius.parallel.dims import ParallelDims
from crius.parallel.gradients import Gradients
from crius.parallel.runtime import World
from crius.train.agreement import agree
from crius.train.checkpoints import Checkpoints
from crius.train.evaluate import evaluate
from crius.train.guard import UpdateGuard
from crius.train.pace import Pace
from crius.train.sdc import SdcCheck
from crius.train.state import TrainState
from crius.train.step import Runner, StepResult, train_step

PACE_INTERVAL = 20
"""Steps between looks at how long a step takes."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What ``evaluate`` needs beside the model.

    Attributes:
        batches: makes this rank's batches anew for each validation.
        token_bytes: bytes of text that each token id stands for, int ``(vocabulary,)``, on the host.
    """

    batches: Callable[[], Iterable[Batch]]
    token_bytes: Tensor


class Preempted(Exception):
    """The run was asked to stop, and is saved.

    Args:
        signal: number of the signal that asked.
        step: that a run which goes on starts after.
    """

    def __init__(self, signal: int, step: int) -> None:
        super().__init__(signal, step)
        self.signal, self.step = signal, step


class Meter:
    """Rates over the steps since the last report."""

    def __init__(self, flops_per_token: float, peak_tflops: float | None, world: World) -> None:
        self._flops = flops_per_token
        self._peak = peak_tflops
        self._world = world
        self._tokens = self._steps = 0
        self._seconds = self._data_seconds = 0.0

    def count(self, tokens: int, seconds: float, data_seconds: float) -> None:
        """Add one step: tokens of all ranks, its seconds, and those of them spent waiting for data."""
        self._tokens += tokens
        self._steps += 1
        self._seconds += seconds
        self._data_seconds += data_seconds

    def report(self, state: TrainState, result: StepResult, lr: float, goodput: float) -> StepMetrics:
        """The record of the steps since the last one."""
        rate = self._tokens / self._seconds
        per_rank = rate / self._world.size
        tflops = per_rank * self._flops / 1e12
        record = StepMetrics(
            step=state.step,
            loss=result.loss.item(),
            grad_norm=result.grad_norm.item(),
            lr=lr,
            tokens=state.tokens,
            tokens_per_second=rate,
            tokens_per_second_per_rank=per_rank,
            mfu=tflops / self._peak if self._peak else None,
            tflops=tflops,
            step_seconds=self._seconds / self._steps,
            data_seconds=self._data_seconds / self._steps,
            memory_gib=peak_memory_gib(self._world.device),
            skipped_steps=state.skipped_steps,
            rolled_back_steps=state.rolled_back_steps,
            goodput=goodput,
        )
        self._tokens = self._steps = 0
        self._seconds = self._data_seconds = 0.0
        return record


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The parts of a training job, and the loop over its steps.

    Attributes:
        place: gives this rank its tokens of a batch, on the device.
        after_step: called after each step with its number and with how many this process has done.
        samples: notes what each step was trained on; None where no run goes on from this one.
        pace: tells the watchdog how long a step takes.
        checkpoints: saves the run; None where it does not.
        stop: the wish that the run ends; None where a signal ends it at once.
    """

    config: RunConfig
    dims: ParallelDims
    state: TrainState
    loader: BatchLoader
    place: Callable[[Batch], Batch]
    runner: Runner
    gradients: Gradients
    sdc: SdcCheck
    guard: UpdateGuard
    validation: Validation | None
    world: World
    meter: Meter
    ledger: TimeLedger
    after_step: Callable[[int, int], None]
    sinks: list[Sink]
    profiler: Callable[[], contextlib.AbstractContextManager[Callable[[], None]]]
    samples: SampleLog | None = None
    checkpoints: Checkpoints | None = None
    stop: StopRequest | None = None
    pace: Pace = field(default_factory=Pace)

    def run(self) -> ValidationMetrics | None:
        """Train until ``training.steps``; returns the last validation.

        Raises:
            Preempted: the run was asked to stop, and is saved.
            CheckpointError: it could not be saved.
            NonFiniteError: loss or gradients are not finite, and the policy is to stop; the update was not applied.
            SpikeError: likewise, one of them jumped.
            DataError: the data cannot be read.
        """
        config, state = self.config, self.state
        last_validation = None
        interval, first = config.validation.interval, state.step
        with _scheduled_gc(config.training.gc_interval, self.ledger) as collect, self.profiler() as profile:
            self._settle()  # a wish to stop may have come while all was built
            while state.step < config.training.steps:
                self._step()
                with self.ledger.phase("compute"):
                    self.after_step(state.step, state.step - first)
                with self.ledger.phase("profiler"):
                    profile()
                is_last = state.step == config.training.steps
                if self.validation and interval and (is_last or state.step % interval == 0):
                    last_validation = self._validate(self.validation)
                self._settle()
                collect(state.step)
        if self.checkpoints:
            with self.ledger.phase("save_blocked"):
                self.checkpoints.finish()
        return last_validation

    def _settle(self) -> None:
        """Save what is due, and stop where one of the ranks is asked to."""
        checkpoints, state = self.checkpoints, self.state
        if checkpoints is None:
            return
        checkpoints.saver.poll()
        limit, interval = self.config.checkpoint.max_failures, self.config.checkpoint.interval
        number = self.stop.number if self.stop else None
        with self.ledger.phase("compute"):  # waits for the slowest rank
            decision = agree(number, checkpoints.is_due(), checkpoints.saver.failures >= limit)
        is_last = state.step == self.config.training.steps
        is_due = decision.save or (interval > 0 and state.step > 0 and state.step % interval == 0)
        if decision.give_up:
            checkpoints.give_up()
        if is_due or is_last or decision.stop:
            with self.ledger.phase("save_blocked"):
                checkpoints.save(wait=is_last or bool(decision.stop))
        if decision.stop and not is_last:
            checkpoints.finish()
            raise Preempted(decision.stop, state.step)

    def _step(self) -> None:
        config, state = self.config, self.state
        step = state.step + 1
        begin = time.monotonic()
        status.update(step=step, phase="data")
        with self.ledger.phase("data"):
            batch = next(self.loader)
        data_seconds = time.monotonic() - begin
        lr = state.set_lr(config.optimizer.lr)
        is_reported = step in (1, config.training.steps) or step % config.metrics.log_interval == 0
        with self.ledger.phase("compute"):
            placed = self.place(batch)
            self.sdc.before_step(step, placed)
            result = train_step(
                step, placed, self.runner, self.gradients, self.world, self.dims, config.training.max_norm
            )
            status.update(phase="optimizer")
            self.guard.update(result)
            self.sdc.after_step(step)
            if is_reported:
                self.guard.check()  # waits for the device, so that the time of the reported steps is theirs
                if self.world.device.type == "cuda":
                    torch.cuda.synchronize()
        tokens = batch.tokens_BT.numel() * self.loader.num_ranks
        state.step, state.tokens = step, state.tokens + tokens
        if self.samples:
            self.samples.write(step, batch.sample_ids)
        self.meter.count(tokens, time.monotonic() - begin, data_seconds)
        self.pace.count(time.monotonic() - begin)
        if step % PACE_INTERVAL == 0 or not status.limit_seconds:
            status.limit_seconds = self.pace.limit_seconds()
        if is_reported:
            with self.ledger.phase("report"):
                record = self.meter.report(state, result, lr, self.ledger.goodput())
                for sink in self.sinks:
                    sink.write(record)

    def _validate(self, validation: Validation) -> ValidationMetrics:
        status.update(step=self.state.step, phase="validation")
        self.guard.check()
        with self.ledger.phase("validation"):
            record = evaluate(
                self.state.parts,
                self.runner,
                validation.batches(),
                self.place,
                validation.token_bytes,
                self.world,
                self.dims,
                self.state.step,
            )
            if not math.isfinite(record.val_loss):
                raise NonFiniteError(
                    f"the validation loss after step {record.step} is {record.val_loss}.",
                    why="the updates before it broke the weights",
                    fix="lower --optimizer.lr, or lengthen --lr_scheduler.warmup_steps",
                )
            for sink in self.sinks:
                sink.write(record)
        return record


@contextlib.contextmanager
def _scheduled_gc(interval: int, ledger: TimeLedger) -> Iterator[Callable[[int], None]]:
    """Collect garbage every ``interval`` steps, on all ranks at the same one; 0 leaves it to Python."""

    def collect(step: int) -> None:
        if interval and step % interval == 0:
            with ledger.phase("gc"):
                gc.collect(1)

    if interval:
        with ledger.phase("gc"):
            gc.collect()
        gc.disable()
    try:
        yield collect
    finally:
        gc.enable()

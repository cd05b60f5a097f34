"""The for loop of training, and what is reported on the way."""

import contextlib
import copy
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
from crius.host_memory import keep_freed_memory, keep_tensors_apart
from crius.launch.status import status
from crius.launch.stop import StopRequest
from crius.metrics.device import peak_memory
from crius.metrics.ledger import TimeLedger
from crius.metrics.record import StepMetrics, ValidationMetrics
from crius.metrics.sinks.base import Sink
from crius.parallel.dims import ParallelDims
from crius.parallel.gradients import Gradients
from crius.parallel.runtime import World
from crius.train.agreement import Agreement, Decision, Preempted, stop_number
from crius.train.checkpoints import Checkpoints
from crius.train.evaluate import evaluate
from crius.train.guard import UpdateGuard
from crius.train.late import Late
from crius.train.pace import Pace
from crius.train.sdc import SdcCheck
from crius.train.state import TrainState
from crius.train.step import Runner, largest_loss, train_step

PACE_INTERVAL = 20
"""Steps between looks at how long a step takes."""

RESCUE_SECONDS = 30.0
"""How long a run that fails waits for the numbers of its last step: a device that hangs must not hide the failure."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What ``evaluate`` needs beside the model.

    Attributes:
        batches: makes this rank's batches anew for each validation.
        token_bytes: bytes of text that each token id stands for, int ``(vocabulary,)``, on the host.
    """

    batches: Callable[[], Iterable[Batch]]
    token_bytes: Tensor


class Meter:
    """Rates over the steps since the last report."""

    def __init__(self, flops_per_token: float, peak_tflops: float | None, world: World) -> None:
        self._flops, self._peak, self._world = flops_per_token, peak_tflops, world
        self._tokens = self._steps = 0
        self._seconds = self._data_seconds = 0.0

    def count(self, tokens: int, seconds: float, data_seconds: float) -> None:
        """Add one step: tokens of all ranks, its seconds, and those of them spent waiting for data."""
        self._tokens += tokens
        self._steps += 1
        self._seconds += seconds
        self._data_seconds += data_seconds

    def wait(self, seconds: float) -> None:
        """Add time of the steps since the last report that ``count`` has not had."""
        self._seconds += seconds

    def report(
        self, state: TrainState, loss: float, grad_norm: float, lr: float, goodput: float, max_loss: float | None = None
    ) -> StepMetrics:
        """Metrics averaged over the steps since the last report; the arguments are those of the newest step."""
        per_rank = self._tokens / self._seconds / self._world.size
        tflops = per_rank * self._flops / 1e12
        record = StepMetrics(
            step=state.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=state.tokens,
            tokens_per_second=self._tokens / self._seconds,
            tokens_per_second_per_rank=per_rank,
            mfu=tflops / self._peak if self._peak else None,
            tflops=tflops,
            step_seconds=self._seconds / self._steps,
            data_seconds=self._data_seconds / self._steps,
            skipped_steps=state.skipped_steps,
            rolled_back_steps=state.rolled_back_steps,
            goodput=goodput,
            max_loss=max_loss,
            **vars(peak_memory(self._world.device)),
        )
        self._tokens = self._steps = 0
        self._seconds = self._data_seconds = 0.0
        return record


class _Clock:
    """Cuts the host's time into that of steps. It runs on between two steps where the device is at work on the first.

    There the host's work between steps costs the device nothing, and what it takes of a step's time must not be missing
    from it. Where the device has done its work, on a CPU always, a step's time is that of ``Loop._step``.
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def start(self) -> None:
        """Run from here, unless it runs already."""
        if self._since is None:
            self._since = time.monotonic()

    def lap(self) -> float:
        """Seconds since the last lap, or since the start."""
        assert self._since is not None
        before, self._since = self._since, time.monotonic()
        return self._since - before

    def stop(self) -> None:
        """What passes until the next start is nobody's."""
        self._since = None


@dataclass(frozen=True)
class _Report:
    """What is known of a reported step when its loss is not yet."""

    state: TrainState
    lr: float
    totals: Late


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
        is_complete: the run was at its end, with its last validation, before this command.
        clock: cuts time into that of steps.
        unwritten: reports whose numbers are on their way, or whose step the guard has not looked at yet.
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
    is_complete: bool = False
    pace: Pace = field(default_factory=Pace)
    clock: _Clock = field(default_factory=_Clock)
    unwritten: list[_Report] = field(default_factory=list)

    def run(self) -> ValidationMetrics | None:
        """Train until ``training.steps``; returns the last validation.

        Raises:
            Preempted: the run was asked to stop.
            CheckpointError: it could not be saved.
            NonFiniteError: loss or gradients are not finite, and the policy is to stop; the update was not applied.
            SpikeError: likewise, one of them jumped.
            DataError: the data cannot be read.
        """
        config, state = self.config, self.state
        last_validation = None
        interval, first = config.validation.interval, state.step
        tidied = _tidied(config.training.gc_interval, self.world.device, self.ledger)
        with tidied as tidy, self.profiler() as profile, self._rescued_reports():
            agreement = Agreement(self.world.size)
            self._settle(agreement)  # a wish to stop may have come while all was built
            while state.step < config.training.steps:
                self._step()
                with self.ledger.phase("compute"):
                    self.after_step(state.step, state.step - first)
                with self.ledger.phase("profiler"):
                    profile()
                if self.validation and interval and state.step < config.training.steps and state.step % interval == 0:
                    last_validation = self._validate(self.validation)
                self._settle(agreement)
                tidy(state.step)
            if self.checkpoints:
                with self.ledger.phase("save_blocked"):
                    self.checkpoints.finish()
            else:
                self.guard.check_weights()  # no save has looked at what the last update made of them
            if self.validation and interval and not self.is_complete:  # what goes wrong in it loses nothing
                last_validation = self._validate(self.validation)
                if last_validation is None:
                    raise Preempted(stop_number(self.stop, self.world.size), state.step)
        return last_validation

    def _settle(self, agreement: Agreement) -> None:
        """Save what is due, and stop where one of the ranks is asked to."""
        checkpoints, state = self.checkpoints, self.state
        if checkpoints is None and self.stop is None:
            return
        is_due, has_failed = checkpoints.poll() if checkpoints else (False, False)
        with self.ledger.phase("compute"):  # waits for the slowest rank
            decision = agreement.ask(self.stop.number if self.stop else None, is_due, has_failed)
        is_last = state.step == self.config.training.steps
        if checkpoints:
            self._save(checkpoints, decision, is_last)
        if decision.stop and not is_last:
            self.finish_reports()
            raise Preempted(decision.stop, state.step)

    def _save(self, checkpoints: Checkpoints, decision: Decision, is_last: bool) -> None:
        """Save where ``decision``, the interval or the end of the run asks for it."""
        interval, step = self.config.checkpoint.interval, self.state.step
        if decision.give_up:
            checkpoints.give_up()
        if decision.save or decision.stop or is_last or (interval > 0 and step > 0 and step % interval == 0):
            self.finish_reports()  # a run that goes on from here does not report these steps again
            with self.ledger.phase("save_blocked"):
                checkpoints.save(wait=is_last or bool(decision.stop))
        if decision.stop and not is_last:
            checkpoints.finish()

    def _step(self) -> None:
        config, state = self.config, self.state
        step = state.step + 1
        self.clock.start()
        started = time.monotonic()
        status.update(step=step, phase="data")
        with self.ledger.phase("data"):
            batch = next(self.loader)
        data_seconds = time.monotonic() - started
        lr = state.set_lr(config.optimizer.lr)
        is_reported = step in (1, config.training.steps) or step % config.metrics.log_interval == 0
        with self.ledger.phase("compute"):
            placed = self.place(batch)
            self.sdc.before_step(step, placed)
            result = train_step(
                step, placed, self.runner, self.gradients, self.world, self.dims, config.training.max_norm
            )
        status.update(phase="optimizer")
        self._catch_up()  # with the step before, while the device computes this one
        with self.ledger.phase("compute"):
            self.guard.update(result)
            self.sdc.after_step(step)
        tokens = batch.tokens_BT.numel() * self.loader.num_ranks
        state.step, state.tokens = step, state.tokens + tokens
        if self.samples:
            self.samples.write(step, batch.sample_ids)
        self.meter.count(tokens, self.clock.lap(), data_seconds)
        self.pace.count(time.monotonic() - started)
        if step % PACE_INTERVAL == 0 or not status.limit_seconds:
            status.limit_seconds = self.pace.limit_seconds()
        if is_reported:
            numbers = [result.loss, result.grad_norm]
            if config.metrics.enable_tensorboard:
                numbers.append(largest_loss(result, placed, self.world, self.dims))
            self.unwritten.append(_Report(copy.copy(state), lr, Late(torch.stack(numbers))))
        if step == config.training.steps:
            self.finish_reports()
        self._write_reports()
        if not self.unwritten and self.guard.passed_step == step:  # nothing waits for the device
            self.clock.stop()

    def finish_reports(self) -> None:
        """Wait for the device, look at its last result, and write the reports of all steps so far.

        Raises:
            NonFiniteError, SpikeError: as ``UpdateGuard.check``.
        """
        self.clock.start()
        self._catch_up()
        self.clock.stop()

    def _catch_up(self) -> None:
        """Look at the result of the last step, and write its report: its time ends where the device was done with it.

        Before the guard's next update, which on a GPU can wait for the step after.
        """
        with self.ledger.phase("compute"):
            self.guard.check()
            for report in self.unwritten:
                report.totals.read()
        self.meter.wait(self.clock.lap())
        self._write_reports()

    def _write_reports(self) -> None:
        """Write those whose numbers have arrived and whose step the guard let pass: a broken one is not a record."""
        while self.unwritten:
            report = self.unwritten[0]
            if report.state.step > self.guard.passed_step or not report.totals.has_arrived():
                return
            self._write_next()

    def _write_next(self) -> None:
        with self.ledger.phase("report"):
            report = self.unwritten.pop(0)
            loss, grad_norm, *largest = report.totals.read()
            goodput, max_loss = self.ledger.goodput(), largest[0] if largest else None
            record = self.meter.report(report.state, loss, grad_norm, report.lr, goodput, max_loss)
            for sink in self.sinks:
                sink.write(record)

    @contextlib.contextmanager
    def _rescued_reports(self) -> Iterator[None]:
        """Where an error ends the run, the healthy step before it is still reported."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the device or the disk may be what failed: the first error counts
                self._rescue()
            raise

    def _rescue(self) -> None:
        # the guard is not asked: its report of a broken step is a collective, and other ranks may be elsewhere. Where
        # it looks late it stops for what is not finite and for nothing else
        for report in tuple(self.unwritten):
            if not report.totals.arrives_within(RESCUE_SECONDS):
                return
            if report.state.step > self.guard.passed_step and not all(map(math.isfinite, report.totals.read())):
                return
            self.meter.wait(self.clock.lap())
            self._write_next()

    def _validate(self, validation: Validation) -> ValidationMetrics | None:
        status.update(step=self.state.step, phase="validation")
        self.finish_reports()
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
                lambda: stop_number(self.stop, self.world.size) > 0,
            )
            if record is None:
                return None
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
def _tidied(interval: int, device: torch.device, ledger: TimeLedger) -> Iterator[Callable[[int], None]]:
    """What is to be called after each step, for garbage and for what a CPU's tensors leave.

    In the first step Python collects as it likes, for compilers leave much, and tensors lie apart from what stays. Then
    garbage is collected every ``interval`` steps, on all ranks at the same one, or as Python likes where that is 0.
    """
    settled = False

    def tidy(step: int) -> None:
        nonlocal settled
        if not settled and device.type == "cpu":
            keep_freed_memory()
        if interval and (not settled or step % interval == 0):
            with ledger.phase("gc"):
                gc.collect(1 if settled else 2)
                gc.disable()
        settled = True

    if device.type == "cpu":
        keep_tensors_apart()
    try:
        yield tidy
    finally:
        gc.enable()

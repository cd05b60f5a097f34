"""The loop of training."""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from crius.config.layout import Layout
from crius.config.run import RunConfig
from crius.data.loader import Batch, BatchLoader
from crius.data.sample_log import SampleLog
from crius.errors import NonFiniteError
from crius.kernels.cpu.heap import keep_freed_memory, keep_tensors_apart
from crius.launch.status import status
from crius.launch.stop import StopRequest
from crius.metrics.ledger import TimeLedger
from crius.metrics.record import ValidationMetrics
from crius.parallel.gradients import Gradients
from crius.parallel.runtime import World
from crius.train.checkpoints import Checkpoints
from crius.train.guard import UpdateGuard
from crius.train.reports import MixtureReport, StepReports
from crius.train.sdc import SdcCheck
from crius.train.state import TrainState
from crius.train.step import Runner, evaluate, largest_loss, train_step

AGREE_SECONDS = 1.0
"""Seconds, about, that several ranks train between two agreements."""

MOST_STEPS = 100
"""Most steps until the next agreement, because steps may become slower."""


@dataclass(frozen=True)
class Decision:
    """Decision of the ranks after a step.

    Attributes:
        stop: number of the signal that asks to stop; 0 for none.
        save: whether a checkpoint is due.
        give_up: whether too many saves failed.
    """

    stop: int
    save: bool
    give_up: bool


NOTHING = Decision(stop=0, save=False, give_up=False)


class Agreement:
    """Agreement of the ranks before the first step and then after steps: one rank decides after each, several about
    once a second.

    At each agreement they also agree on the number of steps until the next, by the pace of the slowest rank.

    Args:
        num_ranks: ranks of the run.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._steps = 0
        self._wait = 0
        self._since = time.monotonic()

    def ask(self, stop: int | None, save: bool, give_up: bool) -> Decision:
        """The greatest value of any rank, the same on all; ``NOTHING`` after steps without an agreement.

        One small collective on the host. On a GPU the host is ahead of the device here, so it takes no time.

        Args:
            stop: number of the signal that asks to stop.
            save: whether a checkpoint is due.
            give_up: whether too many saves failed.
        """
        if self._num_ranks == 1:
            return Decision(stop or 0, save, give_up)
        self._steps = min(self._steps + 1, self._wait)  # no steps before the first agreement
        if self._steps < self._wait:
            return NOTHING
        elapsed = max(time.monotonic() - self._since, 1e-6)
        wait = max(1, min(MOST_STEPS, int(self._steps / elapsed * AGREE_SECONDS)))
        found, has_to_save, gives_up, least = _greatest([stop or 0, save, give_up, -wait], self._num_ranks)
        self._steps = 0
        self._wait = -least
        self._since = time.monotonic()
        return Decision(found, bool(has_to_save), bool(gives_up))


class Preempted(Exception):
    """The run was asked to stop.

    Args:
        signal: number of the signal that asked.
        step: last step that was done; it is saved if the run saves.
    """

    def __init__(self, signal: int, step: int) -> None:
        super().__init__(signal, step)
        self.signal = signal
        self.step = step


def stop_number(request: StopRequest | None, num_ranks: int) -> int:
    """Number of the signal that asks any rank to stop, the same on all; 0 for none, or if no signals are caught."""
    return 0 if request is None else _greatest([request.number or 0], num_ranks)[0]


def _greatest(words: list[int], num_ranks: int) -> list[int]:
    """Elementwise maximum over the ranks. One small collective on the host."""
    if num_ranks == 1:
        return words
    tensor = torch.tensor(words, dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Inputs of ``evaluate`` besides the model.

    Attributes:
        sets: names of the validation sets, in order.
        batches: creates this rank's batches of a set, again for each validation.
        token_bytes: bytes of text that each token id stands for, int ``(vocabulary,)``, on the host.
    """

    sets: Sequence[str]
    batches: Callable[[str], Iterable[Batch]]
    token_bytes: Tensor


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The parts of a training job, and the loop over its steps.

    Attributes:
        place: gives this rank its tokens of a batch, on the device.
        after_step: functions that are called after each step with its number and the number of steps of this process.
        profiler: context of the steps; gives a function that is called after each step with its number.
        mixture: reports of the sources; None without a mixture.
        samples: log of the samples of each step; None if no run resumes from this one.
        checkpoints: saves the run; None if the run does not save.
        stop: request to end the run; None if a signal ends it at once.
        is_complete: whether the run was at its end, with its last validation, before this command.
        texts: generates texts with the present weights and writes them; all ranks call it. None: no texts.
        reports: reports of the steps.
    """

    config: RunConfig
    layout: Layout
    state: TrainState
    loader: BatchLoader
    place: Callable[[Batch], Batch]
    runner: Runner
    gradients: Gradients
    sdc: SdcCheck
    guard: UpdateGuard
    validation: Validation | None
    world: World
    ledger: TimeLedger
    reports: StepReports
    after_step: list[Callable[[int, int], object]]
    profiler: contextlib.AbstractContextManager[Callable[[int], None]]
    mixture: MixtureReport | None = None
    samples: SampleLog | None = None
    checkpoints: Checkpoints | None = None
    stop: StopRequest | None = None
    is_complete: bool = False
    texts: Callable[[], object] | None = None

    def run(self) -> list[ValidationMetrics]:
        """Train until ``training.steps``; returns the last validation, a record for each set.

        Raises:
            Preempted: the run was asked to stop.
            CheckpointError: the run could not be saved.
            NonFiniteError: loss or gradients are not finite, and the policy is to stop; the update was not applied.
            SpikeError: loss or gradient norm jumped, likewise.
            DataError: the data cannot be read.
        """
        config = self.config
        state = self.state
        last_validation = list[ValidationMetrics]()
        interval = config.validation.interval
        first = state.step
        tidied = _tidied(config.training.gc_interval, self.world.device, self.ledger)
        with tidied as tidy, self.profiler as profile, self.reports.rescued():
            agreement = Agreement(self.world.size)
            self._settle(agreement)  # a request to stop may have come while the parts were built
            while state.step < config.training.steps:
                self._step()
                with self.ledger.phase("compute"):
                    for call in self.after_step:
                        call(state.step, state.step - first)
                with self.ledger.phase("profiler"):
                    profile(state.step)
                if self.validation and state.step < config.training.steps and state.step % interval == 0:
                    last_validation = self._validate(self.validation)
                if self.texts and state.step < config.training.steps and state.step % config.samples.every == 0:
                    self._write_texts(self.texts)
                self._settle(agreement)
                tidy(state.step)
            if self.checkpoints:
                with self.ledger.phase("save_blocked"):
                    self.checkpoints.finish()
            else:
                self.guard.check_weights()  # no save has checked them after the last update
            if self.validation and not self.is_complete:  # everything is saved, so an error in it loses nothing
                last_validation = self._validate(self.validation)
                if not last_validation:
                    raise Preempted(stop_number(self.stop, self.world.size), state.step)
            if self.texts and not self.is_complete:
                self._write_texts(self.texts)
        return last_validation

    def _settle(self, agreement: Agreement) -> None:
        """Save if a checkpoint is due, and stop if a rank is asked to."""
        checkpoints = self.checkpoints
        state = self.state
        if checkpoints is None and self.stop is None:
            return
        is_due, has_failed = checkpoints.poll() if checkpoints else (False, False)
        with self.ledger.phase("compute"):  # waits for the slowest rank
            decision = agreement.ask(self.stop.number if self.stop else None, is_due, has_failed)
        is_last = state.step == self.config.training.steps
        if checkpoints:
            self._save(checkpoints, decision, is_last)
        if decision.stop and not is_last:
            self.reports.finish()
            raise Preempted(decision.stop, state.step)

    def _save(self, checkpoints: Checkpoints, decision: Decision, is_last: bool) -> None:
        """Save where ``decision``, the interval or the end of the run asks for it."""
        interval = self.config.checkpoint.interval
        step = self.state.step
        if decision.give_up:
            checkpoints.give_up()
        if decision.save or decision.stop or is_last or (interval > 0 and step > 0 and step % interval == 0):
            self.reports.finish()  # a run that resumes from here does not report these steps again
            with self.ledger.phase("save_blocked"):
                checkpoints.save(wait=is_last or bool(decision.stop))
        if decision.stop and not is_last:
            checkpoints.finish()

    def _step(self) -> None:
        config = self.config
        state = self.state
        step = state.step + 1
        started = self.reports.start()
        status.update(step=step, phase="data")
        with self.ledger.phase("data"):
            batch = next(self.loader)
        data_seconds = time.monotonic() - started
        lr = state.set_lr(config.optimizer.lr)
        is_reported = step in (1, config.training.steps) or step % config.metrics.log_interval == 0
        with self.ledger.phase("compute"):
            placed = self.place(batch)
            self.sdc.before_step(step, placed)
            if self.mixture:
                self.mixture.begin()
            result = train_step(
                step, placed, self.runner, self.gradients, self.world, self.layout, config.training.max_norm
            )
            of_sources = self.mixture.losses(placed) if self.mixture and is_reported else {}
        status.update(phase="optimizer")
        self.reports.catch_up()  # of the step before, while the device computes this step
        with self.ledger.phase("compute"):
            self.guard.update(result)
            self.sdc.after_step(step)
        tokens = batch.tokens_BT.numel() * self.loader.num_ranks
        state.step = step
        state.tokens = state.tokens + tokens
        if self.samples:
            self.samples.write(step, batch.sample_ids, self.mixture.sources(batch) if self.mixture else None)
        loads = self.reports.loads(tokens)
        self.reports.count(step, tokens, started, data_seconds)
        if is_reported:
            numbers = {"loss": result.loss, "grad_norm": result.grad_norm}
            if config.metrics.enable_tensorboard or config.metrics.enable_wandb:
                numbers["max_loss"] = largest_loss(result, placed, self.world, self.layout)
            shares = self.mixture.shares() if self.mixture else {}
            self.reports.add(state, lr, numbers | loads | of_sources, shares)
        if step == config.training.steps:
            self.reports.finish()
        self.reports.settle(step)

    def _validate(self, validation: Validation) -> list[ValidationMetrics]:
        """Score all sets and report them; none where the run was asked to stop meanwhile."""
        status.update(step=self.state.step, phase="validation")
        self.reports.finish()
        records = []
        with self.ledger.phase("validation"):
            for name in validation.sets:
                record = self.score(validation, validation.batches(name))
                if record is None:
                    return []
                if not math.isfinite(record.val_loss):
                    loss = f"loss of {name}" if name else "loss"
                    raise NonFiniteError(
                        f"the validation {loss} after step {record.step} is {record.val_loss}.",
                        why="the updates before it broke the weights",
                        fix="lower --optimizer.lr, or lengthen --lr_scheduler.warmup_steps",
                    )
                records.append(replace(record, val_set=name))
            for record in records:  # all or none: a run that resumes after a stop repeats all
                self.reports.write(record)
        return records

    def _write_texts(self, write: Callable[[], object]) -> None:
        status.update(step=self.state.step, phase="samples")
        self.reports.finish()
        with self.ledger.phase("samples"):
            write()

    def score(self, validation: Validation, batches: Iterable[Batch]) -> ValidationMetrics | None:
        """Score ``batches`` with the present weights; None where the run was asked to stop meanwhile."""
        return evaluate(
            self.state.parts,
            self.runner,
            batches,
            self.place,
            validation.token_bytes,
            self.world,
            self.layout,
            self.state.step,
            lambda: stop_number(self.stop, self.world.size) > 0,
        )


@contextlib.contextmanager
def _tidied(interval: int, device: torch.device, ledger: TimeLedger) -> Iterator[Callable[[int], None]]:
    """Gives a function to call after each step, which frees garbage and memory that a CPU's tensors leave.

    In the first step Python collects as it likes, because compilers leave much garbage. On a CPU its tensors are kept
    apart from objects that stay. Then garbage is collected every ``interval`` steps, on all ranks at the same step; at
    0 as Python likes.
    """
    settled = False

    def tidy(step: int) -> None:
        nonlocal settled
        if not settled and device.type == "cpu":
            keep_freed_memory()
        if interval and (not settled or step % interval == 0):
            with ledger.phase("gc"), status.during("gc"):
                gc.collect(1 if settled else 2)
                gc.disable()
        settled = True

    if device.type == "cpu":
        keep_tensors_apart()
    try:
        yield tidy
    finally:
        gc.enable()

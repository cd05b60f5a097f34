"""Reports of a run: its steps, the cost of a restart, and its summary.

A step is reported when its numbers have arrived from the device and the guard has let it pass.
"""

import contextlib
import copy
import json
import logging
import math
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crius.config.layout import Layout
from crius.data.loader import IGNORE_INDEX, Batch, BatchLoader
from crius.data.mixture import MixedSource
from crius.launch.environment import Placement
from crius.launch.status import status
from crius.metrics.device import peak_memory
from crius.metrics.ledger import TimeLedger
from crius.metrics.loads import ExpertLoads
from crius.metrics.record import PlanSink, Record, Sink, StepMetrics, ValidationMetrics
from crius.models.layers import loss_of
from crius.parallel.runtime import World
from crius.run_file import open_log, write_run_file
from crius.shards import local_tensor
from crius.train.guard import UpdateGuard
from crius.train.state import TrainState
from crius.train.step import Late
from crius.untrusted import object_below, parse_json, read_below

log = logging.getLogger("crius.train")

FACTOR = 3.0
LEAST_SECONDS = {"cpu": 10.0, "cuda": 100.0}
"""Lowest limit of a phase in seconds: steps on GPUs may take a second, but a network or a file system may be gone for
ten."""
LEAST_STEPS = 10
_WARM_STEPS = 2  # they compile and allocate
_WINDOW = 1000


class Pace:
    """Times of the last steps.

    Args:
        device_type: type of the device that the steps run on.
    """

    def __init__(self, device_type: str) -> None:
        self._least_seconds = LEAST_SECONDS.get(device_type, LEAST_SECONDS["cuda"])
        self._done = 0
        self._seconds: deque[float] = deque(maxlen=_WINDOW)

    def count(self, seconds: float) -> None:
        """Add one step."""
        self._done += 1
        if self._done > _WARM_STEPS:
            self._seconds.append(seconds)

    def limit_seconds(self) -> float:
        """Limit of a phase: 3 times the 99th percentile, at least ``LEAST_SECONDS``; 0 before 10 steps are done."""
        if self._done < LEAST_STEPS:
            return 0.0
        ordered = sorted(self._seconds)
        return max(self._least_seconds, FACTOR * ordered[int(0.99 * (len(ordered) - 1))])


PACE_INTERVAL = 20
"""Steps between measurements of the time of a step."""

RESCUE_SECONDS = 30.0
"""Seconds that a failing run waits for the numbers of its last step: a hanging device must not hide the failure."""


class Meter:
    """Rates over the steps since the last report."""

    def __init__(self, flops_per_token: float, peak_tflops: float | None, world: World) -> None:
        self._flops = flops_per_token
        self._peak = peak_tflops
        self._world = world
        self.device_type = world.device.type
        self._tokens = self._steps = 0
        self._seconds = self._data_seconds = 0.0

    def count(self, tokens: int, seconds: float, data_seconds: float) -> None:
        """Add one step: tokens of all ranks, its seconds, and the seconds of them that it waited for data."""
        self._tokens += tokens
        self._steps += 1
        self._seconds += seconds
        self._data_seconds += data_seconds

    def wait(self, seconds: float) -> None:
        """Add time of the steps since the last report that ``count`` did not get."""
        self._seconds += seconds

    def report(self, state: TrainState, lr: float, goodput: float, numbers: Mapping[str, Any]) -> StepMetrics:
        """Metrics averaged over the steps since the last report; the arguments are those of the newest step.

        ``numbers`` are further fields of the record, loss and gradient norm among them.
        """
        per_rank = self._tokens / self._seconds / self._world.size
        tflops = per_rank * self._flops / 1e12
        record = StepMetrics(
            step=state.step,
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
            **numbers,
            **peak_memory(self._world.device),
        )
        self._tokens = self._steps = 0
        self._seconds = self._data_seconds = 0.0
        return record


class Clock:
    """Splits the host's time into steps. Between two steps it keeps running while the device works on the first.

    The host's work between steps then takes none of the device's time, but the time must not be missing from the step.
    If the device has finished its work (always on a CPU), the time of a step is the time of ``Loop._step``.
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def start(self) -> None:
        """Start the clock, unless it is running."""
        if self._since is None:
            self._since = time.monotonic()

    def lap(self) -> float:
        """Seconds since the last lap, or since the start."""
        assert self._since is not None
        before = self._since
        self._since = time.monotonic()
        return self._since - before

    def stop(self) -> None:
        """Stop the clock: time until the next start counts for no step."""
        self._since = None


@dataclass(frozen=True)
class _Report:
    """Facts about a reported step whose loss has not arrived yet."""

    state: TrainState
    lr: float
    names: tuple[str, ...]
    totals: Late
    shares: Mapping[str, float]


class StepReports:
    """Times the steps of one process, and writes its reports.

    Args:
        meter: rates over the steps.
        ledger: time ledger of this process.
        guard: decides whether a step passes.
        loads: loads of the experts, if the model has experts.

    Attributes:
        sinks: receive the records.
        experts: loads of the experts; None if the model has none.
    """

    def __init__(self, meter: Meter, ledger: TimeLedger, guard: UpdateGuard, loads: ExpertLoads | None = None) -> None:
        self.meter = meter
        self.sinks = list[Sink]()
        self.experts = loads
        self._ledger = ledger
        self._guard = guard
        self._clock = Clock()
        self._pace = Pace(meter.device_type)  # tells the watchdog how long a step takes
        self._unwritten: list[_Report] = []

    def start(self) -> float:
        """Begin a step; returns the time of the host's clock."""
        self._clock.start()
        return time.monotonic()

    def count(self, step: int, tokens: int, started: float, data_seconds: float) -> None:
        """End the step that ``start`` began: its ``tokens`` over all ranks, and the seconds that it waited for data."""
        self.meter.count(tokens, self._clock.lap(), data_seconds)
        self._pace.count(time.monotonic() - started)
        if step % PACE_INTERVAL == 0 or not status.limit_seconds:
            status.limit_seconds = self._pace.limit_seconds()

    def add(self, state: TrainState, lr: float, numbers: Mapping[str, Tensor], shares: Mapping[str, float]) -> None:
        """Report this step when its numbers have arrived: loss, gradient norm, and other metrics if there are any.

        ``shares`` are numbers of the sources of a mixture that the host knows already.
        """
        values = Late(torch.stack(list(numbers.values())))
        self._unwritten.append(_Report(copy.copy(state), lr, tuple(numbers), values, shares))

    def loads(self, tokens: int) -> dict[str, Tensor]:
        """Numbers of the experts' loads in a step of ``tokens`` over all ranks; empty if they are not known."""
        return self.experts.numbers(tokens) if self.experts else {}

    def settle(self, step: int) -> None:
        """Write the reports that can be written after ``step``."""
        self._write_arrived()
        if not self._unwritten and self._guard.passed_step == step:  # nothing waits for the device
            self._clock.stop()

    def finish(self) -> None:
        """Wait for the device, check its last result, and write the reports of all steps so far.

        Raises:
            NonFiniteError, SpikeError: as ``UpdateGuard.check``.
        """
        self._clock.start()
        self.catch_up()
        self._clock.stop()

    def catch_up(self) -> None:
        """Check the result of the last step and write its report; its time ends when the device has finished it.

        Call it before the guard's next update, which on a GPU can wait for the following step.
        """
        with self._ledger.phase("compute"):
            self._guard.check()
            for report in self._unwritten:
                report.totals.read()
        self.meter.wait(self._clock.lap())
        self._write_arrived()

    def write(self, record: Record) -> None:
        """Give a record to all sinks."""
        for sink in self.sinks:
            sink.write(record)

    @contextlib.contextmanager
    def rescued(self) -> Iterator[None]:
        """If an error ends the run, the healthy step before it is still reported."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the device or the disk may have failed: the first error counts
                self._rescue()
            raise

    def _write_arrived(self) -> None:
        """Write reports whose numbers have arrived and whose step the guard let pass: a broken step gets no record."""
        while self._unwritten:
            report = self._unwritten[0]
            if report.state.step > self._guard.passed_step or not report.totals.has_arrived():
                return
            self._write_next()

    def _write_next(self) -> None:
        with self._ledger.phase("report"):
            report = self._unwritten.pop(0)
            numbers = dict(zip(report.names, report.totals.read(), strict=True))
            numbers = self.experts.taken(numbers) if self.experts else numbers
            losses = {name: numbers.pop(name) for name in report.names if "/" in name}
            sources = {name: loss for name, loss in losses.items() if loss >= 0} | dict(report.shares)
            fields: dict[str, Any] = {**numbers, "sources": sources}
            self.write(self.meter.report(report.state, report.lr, self._ledger.goodput(), fields))

    def _rescue(self) -> None:
        # The guard is not asked: its report of a broken step is a collective, and other ranks may be elsewhere. A guard
        # that looks at results late stops only for values that are not finite.
        for report in tuple(self._unwritten):
            if not report.totals.arrives_within(RESCUE_SECONDS):
                return
            if report.state.step > self._guard.passed_step and not all(map(math.isfinite, report.totals.read())):
                return
            self.meter.wait(self._clock.lap())
            self._write_next()


class MixtureReport:
    """What the sources of a mixture give, and what the model makes of them.

    Args:
        loader: loader of a mixture.
        parts: this rank's stages of the model, whose losses of tokens are noted.
        world: all ranks.
        layout: the degrees, so that tokens that several ranks have count once.
    """

    def __init__(self, loader: BatchLoader, parts: Sequence[nn.Module], world: World, layout: Layout) -> None:
        assert isinstance(loader.source, MixedSource)
        self._source = loader.source
        self._plan = loader.source.plan
        self._loader = loader
        self._world = world
        self._layout = layout
        self._noted: list[Tensor] = []
        for part in parts:
            if not isinstance(part.output, nn.Identity):
                loss = loss_of(part)
                loss.note = self._noted.append
                loss.chunks = loss.chunks and replace(loss.chunks, note=loss.note)

    def sources(self, batch: Batch) -> list[int]:
        """Number of the source of each row; of padding, any number."""
        there = [sample for sample in batch.sample_ids if sample >= 0]
        chosen = dict(zip(there, self._source.found(there)[0].tolist(), strict=True))
        return [chosen.get(sample, 0) for sample in batch.sample_ids]

    def begin(self) -> None:
        """Call before the forward pass of a step."""
        self._noted.clear()

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Mean loss of the tokens of each source in the step, float64 scalars, the same on all ranks; -1 without any.

        One small sum over all ranks.

        Args:
            batch: the batch of the step, as the model got it.
        """
        number = len(self._plan.names)
        device = batch.labels_BT.device
        counts = (batch.labels_BT != IGNORE_INDEX).sum(1).double() / (self._layout.tp * self._layout.pp)
        losses = torch.zeros_like(counts)
        if self._noted:  # in the order of the rows
            tokens = torch.cat([local_tensor(noted) for noted in self._noted])
            losses = tokens.view(len(batch), -1).sum(1, dtype=torch.float64) / self._layout.tp
        rows = torch.tensor(self.sources(batch), device=device)
        sums = torch.zeros(2, number, dtype=torch.float64, device=device)
        sums.index_add_(1, rows, torch.stack((losses, counts)))
        total, tokens = self._world.sum(sums)
        means = torch.where(tokens > 0, total / tokens.clamp(min=1), -1.0)
        return {f"loss/{name}": mean for name, mean in zip(self._plan.names, means.unbind(), strict=True)}

    def shares(self) -> dict[str, float]:
        """Share of each source in all sequences so far, and its epochs, after the newest batch."""
        place = self._source.place(self._loader.next_sample)
        found: dict[str, float] = {}
        for name, total, size in zip(self._plan.names, place.totals, self._plan.sizes, strict=True):
            found[f"share/{name}"] = total / sum(place.totals)
            found[f"epochs/{name}"] = total / size
        return found


ATTEMPTS = "attempts.json"
LEDGER = "ledger.json"
RECOVERIES = "recoveries.jsonl"
"""File in the folder of the logs, with a line for each failure that the run has recovered from."""


class Recovery:
    """The failure before this attempt, and the time that it cost.

    Args:
        placement: place of this process; its launcher recorded the attempts.
        ledger: time ledger of this attempt; continues the ledger of the attempt before.
    """

    def __init__(self, placement: Placement, ledger: TimeLedger) -> None:
        self._ledger = ledger
        self._begin = time.monotonic()
        scratch = placement.scratch
        self._last = _last_attempt(scratch) if scratch and placement.attempt else None
        if scratch and self._last:
            ledger.take_over(scratch / LEDGER, self._last["ended"])
        if scratch and placement.rank == 0:
            ledger.mirror_to(scratch / LEDGER)
        self._attempt = placement.attempt
        self._file = placement.log_dir / RECOVERIES if placement.rank == 0 and placement.log_dir else None
        self._resumed = 0

    def resumed(self, kept: dict[str, float], step: int) -> None:
        """Call when the checkpoint is loaded.

        Args:
            kept: time ledger in the checkpoint, if the same command saved it.
            step: step of the checkpoint.
        """
        self._resumed = step
        if self._last:
            self._ledger.lose(kept)

    def step(self, number: int) -> None:
        """Call after each step; the first step that the failed attempt had not finished is logged as the recovery."""
        if not self._last or number < self._last["step"]:
            return
        last = self._last
        self._last = None
        if self._file is None:
            return
        found = {
            "attempt": self._attempt,
            "step": number,
            "seconds": time.monotonic() - last["failed"],
            "process_seconds": self._begin - last["failed"],
            "load_seconds": self._ready - self._begin,
            "steps_again": max(0, number - self._resumed - 1),
            "goodput": self._ledger.goodput(),
        }
        log.info(
            "recovered: step %(step)d done %(seconds).1f s after the failure: processes %(process_seconds).1f s, model "
            "and checkpoint %(load_seconds).1f s, %(steps_again)d steps again; goodput %(percent).1f %%",
            found | {"percent": 100 * found["goodput"]},
        )
        with contextlib.suppress(OSError), open_log(self._file) as file:  # ignore a full disk
            file.write(json.dumps(found) + "\n")

    def ready(self) -> None:
        """Call when the first step begins."""
        self._ready = time.monotonic()


def _last_attempt(scratch: Path) -> dict[str, Any] | None:
    try:
        attempts = parse_json(read_below(scratch, ATTEMPTS))
    except (OSError, ValueError):
        return None
    return attempts[-1] if attempts else None


SUMMARY = "summary.json"


def is_complete(run_dir: Path, step: int, steps: int) -> bool:
    """Whether the run in ``run_dir`` has ended after the last of ``steps`` steps, with its last validation.

    Args:
        run_dir: folder of the run.
        step: steps that are done.
        steps: steps of the run.
    """
    summary = object_below(run_dir, SUMMARY) or {}
    return step >= steps and summary.get("steps") == step and summary.get("stopped_by", "unknown") is None


def write_summary(
    run_dir: Path,
    ledger: TimeLedger,
    state: TrainState,
    validations: Sequence[ValidationMetrics],
    watch: PlanSink | None,
    stop_signal: int | None,
) -> None:
    """Log the use of time and the accuracy of the plan, and write ``summary.json``; for rank 0.

    With several validation sets, ``val_loss`` is that of the first one; ``validation_sets`` has all of them.
    """
    scores = {
        one.val_set: {"val_loss": one.val_loss, "val_bits_per_byte": one.val_bits_per_byte} for one in validations
    }
    log.info("time: %s", ledger.summary())
    if watch and (line := watch.line()):
        log.info("plan: %s", line)
    summary = {
        "steps": state.step,
        "stopped_by": signal.Signals(stop_signal).name if stop_signal else None,
        "tokens": state.tokens,
        "skipped_steps": state.skipped_steps,
        "rolled_back_steps": state.rolled_back_steps,
        **next(iter(scores.values()), dict.fromkeys(("val_loss", "val_bits_per_byte"))),
        **({"validation_sets": scores} if any(scores) else {}),
        "wall_seconds": ledger.wall(),
        "seconds": ledger.parts(),
        "goodput": ledger.goodput(),
        "plan": watch.as_dict() if watch else None,
    }
    write_run_file(run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n", log.warning)
    for name, score in scores.items():
        label = f"validation of {name}" if name else "validation"
        log.info("final %s: loss %.4f, %.4f bits per byte", label, *score.values())

"""A run and its plan: the comparison at the end, and one warning if its steps are much slower than planned."""

import json
import logging
import os
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from crius.config.run import RunConfig
from crius.errors import ConfigError
from crius.host import Machine
from crius.metrics.ledger import TimeLedger
from crius.metrics.record import Record, StepMetrics
from crius.models.description import ModelDescription
from crius.run_file import write_run_file
from crius.tools.plan.compare import PLAN, PlanComparison, Reports, RunPlan, hardware_of_machine, plan_run, summed
from crius.tools.plan.hardware import Hardware
from crius.units import GIB

SLOW = 1.3
"""Multiple of the planned step time that causes a warning."""

WINDOW_STEPS = 10
"""Number of steps that must be that slow on average, because a single step may be slow for any reason."""

WORTH_NAMING = 0.1
"""Share of the excess time below which a part is not named."""

log = logging.getLogger("crius.train")


def hardware_of(machine: Machine) -> Hardware | None:
    """Hardware of a rank; None if the machine is not known. A damaged hardware file is only logged."""
    try:
        return hardware_of_machine(machine)
    except ConfigError as error:
        log.warning("plan: %s", error)
        return None


@dataclass(frozen=True, kw_only=True)
class Load:
    """Work of this process and its host up to some moment; the difference of two is the work in between.

    Attributes:
        steps: trained steps.
        step_seconds: seconds of them together.
        data_seconds: part of these seconds spent waiting for batches.
        compile_seconds: part of these seconds spent compiling.
        save_seconds: seconds, in addition to these, spent waiting for checkpoints.
        wall_seconds: seconds of the clock.
        cpu_seconds: CPU seconds of the process, over all its threads.
        retries: retries of the GPU's allocator, which then returns its whole cache to the driver.
    """

    steps: int = 0
    step_seconds: float = 0.0
    data_seconds: float = 0.0
    compile_seconds: float = 0.0
    save_seconds: float = 0.0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    retries: int = 0

    def since(self, before: "Load") -> "Load":
        """Work after ``before``."""
        return Load(**{name: value - getattr(before, name) for name, value in asdict(self).items()})


class PlanWatch:
    """A sink of rank 0 that compares the records with the plan of the run.

    Args:
        plan: plan of the run.
        ledger: time ledger of this process.
        run_dir: gets ``plan.json``.
    """

    def __init__(self, plan: RunPlan, ledger: TimeLedger, run_dir: Path) -> None:
        self._plan = plan
        self._ledger = ledger
        self._reports = Reports()
        self._so_far = Load()
        self._window: deque[Load] = deque()
        self._has_warned = False
        write_run_file(run_dir / PLAN, json.dumps(plan.as_dict(), indent=2) + "\n", log.warning)

    def write(self, record: Record) -> None:
        """See ``Sink``."""
        if not isinstance(record, StepMetrics):
            return
        before = self._reports.measured().steps
        counted = self._reports.add(asdict(record))
        steps = counted or 1
        self._so_far = self._load(record, steps)
        if not counted:
            self._window.clear()
        self._window.append(self._so_far)
        if self._plan.time is None or self._has_warned or before + counted < WINDOW_STEPS:
            return
        while len(self._window) > 2 and self._so_far.steps - self._window[1].steps >= WINDOW_STEPS:
            self._window.popleft()
        spent = self._so_far.since(self._window[0])
        if spent.steps >= WINDOW_STEPS and spent.step_seconds > SLOW * self._plan.time.total * spent.steps:
            self._has_warned = True
            log.warning("%s", blame(self._plan, spent, os.getloadavg()[0], os.cpu_count() or 1))

    def close(self) -> None:
        """See ``Sink``."""

    def comparison(self) -> PlanComparison:
        """The plan and the measurements so far."""
        return PlanComparison(plan=self._plan, measured=self._reports.measured())

    def line(self) -> str:
        """See ``crius.metrics.record.PlanSink``."""
        return self.comparison().line() if self._plan.hardware else ""

    def as_dict(self) -> dict[str, Any] | None:
        """See ``crius.metrics.record.PlanSink``."""
        return self.comparison().as_dict() if self._plan.hardware else None

    def _load(self, record: StepMetrics, steps: int) -> Load:
        last = self._so_far
        seconds = self._ledger.seconds
        is_gpu = self._plan.machine.on_gpu
        return Load(
            steps=last.steps + steps,
            step_seconds=last.step_seconds + steps * record.step_seconds,
            data_seconds=last.data_seconds + steps * record.data_seconds,
            compile_seconds=seconds.get("compile", 0.0),
            save_seconds=seconds.get("save_blocked", 0.0),
            wall_seconds=time.monotonic(),
            cpu_seconds=time.process_time(),
            retries=int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if is_gpu else 0,
        )


def blame(plan: RunPlan, spent: Load, load_average: float, num_cores: int) -> str:
    """One line: how much slower than planned the steps of ``spent`` were, and the parts that may have caused it.

    Args:
        plan: plan of the run; it has a time.
        spent: work on the steps.
        load_average: load of this host: processes that want to run.
        num_cores: cores of this host.
    """
    assert plan.time is not None
    planned = plan.time.total
    measured = spent.step_seconds / spent.steps
    excess = measured - planned
    machine = plan.machine
    steps = spent.steps
    found = [
        (spent.data_seconds / steps, "waiting for data", "--data.prefetch"),
        (spent.compile_seconds / steps, "compiling again", "the log names the guard that failed"),
    ]
    if not machine.on_gpu:
        share = min(1.0, spent.cpu_seconds / max(1e-9, spent.wall_seconds * machine.threads))
        wanted = machine.threads * machine.local_ranks
        if load_average > max(num_cores, wanted) * 1.1:
            found.append(
                (
                    max(measured * (1 - share), WORTH_NAMING * excess),
                    "sharing the CPU",
                    f"load {load_average:.1f} on {num_cores} cores; this run uses {wanted}",
                )
            )
        elif wanted > num_cores:
            found.append((excess, "sharing the cores among its ranks", f"{wanted} threads on {num_cores} cores"))
    named = sorted((one for one in found if one[0] >= WORTH_NAMING * excess), reverse=True)
    reasons = [f"{what} {1e3 * seconds:,.1f} ms ({hint})" for seconds, what, hint in named]
    if spent.retries:
        reasons.append(f"{spent.retries} times the GPU's memory was full and its allocator restarted")
    if spent.save_seconds > WORTH_NAMING * excess * steps:
        reasons.append("a checkpoint was written during the steps")
    if not reasons:
        reasons.append(_by_elimination(plan))
    name = plan.hardware.name if plan.hardware else machine.name
    return (
        f"plan: a step takes {1e3 * measured:,.1f} ms, {measured / planned:.1f} times the {1e3 * planned:,.1f} ms "
        f"planned for {name}; of these {steps} steps: " + "; ".join(reasons)
    )


def _by_elimination(plan: RunPlan) -> str:
    assert plan.time is not None
    sent = {name.removeprefix("communication_"): value for name, value in plan.time.parts.items() if "comm" in name}
    most = max(sent, key=lambda name: sent[name])
    known = "neither data, compiling nor other programs took it"
    if sent[most] > 0:
        share = sum(sent.values()) / plan.time.total
        return f"{known}: look at the links ({most} is {share:.0%} of the plan), and at the slowest rank's clock"
    return f"{known}: the device is slower than at its calibration (clock, power, heat), or the plan is wrong here"


def watch_plan(
    config: RunConfig, facts: ModelDescription, machine: Machine, ledger: TimeLedger, run_dir: Path
) -> PlanWatch:
    """Plan the run, log the plan if the machine is known, and watch the run. On rank 0.

    Args:
        config: the run, with its decisions.
        facts: description of its model.
        machine: machine of the run.
        ledger: time ledger of this process.
        run_dir: gets ``plan.json``.
    """
    plan = plan_run(config, facts, machine, hardware_of(machine))
    if plan.time is not None and plan.hardware is not None:
        log.info(
            "plan: %s tokens/s/rank and %.2f GiB on %s; a step of %s ms = %s",
            f"{plan.tokens_per_second:,.0f}",
            plan.memory.total / GIB,
            plan.hardware.name,
            f"{1e3 * plan.time.total:,.1f}",
            summed(plan.time.parts, 1e-3, 1),
        )
    return PlanWatch(plan, ledger, run_dir)

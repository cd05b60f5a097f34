"""A run's measured speed and memory, and its plan. Torch-free."""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from crius.config.run import RunConfig
from crius.errors import ConfigError
from crius.host import Machine
from crius.models.description import ModelDescription
from crius.tools.plan.hardware import KNOWN, Hardware, of_machine, shared
from crius.tools.plan.holdings import model_parameters
from crius.tools.plan.memory import memory
from crius.tools.plan.time import step_time
from crius.tools.plan.workload import Estimate, Workload, from_config
from crius.units import GIB
from crius.untrusted import HUGE, parse_json, read_below, records_below

# Ranges of the rows of benchmarks/planner/measurements.csv
GENERATIONS = ("ampere", "hopper", "blackwell", "blackwell_ultra", "cdna3")
PARAMETERS = (0.3e9, 700e9)
GPUS = 2048
SEQ_LEN = (512, 262_144)
DEGREES = {"tp": 16, "cp": 8, "pp": 16, "ep": 64}
SHARDS = 512
WITHOUT_PIPELINE = {"ampere": 71e9, "hopper": 118e9, "blackwell": 203e9, "blackwell_ultra": 117e9, "cdna3": 8.4e9}
"""Most parameters of one tensor-parallel rank without a pipeline, by generation: networks and links differ by it."""
SCHEDULES = ("1f1b", "interleave_1f1b")
UNMEASURED = ("rtx-4090", "a10g", "l4", "cpu", "h100-pcie", "h100-nvl", "h800", "gh200")


def is_narrow_on_cpu(workload: Workload, hardware: Hardware) -> bool:
    """Whether a CPU computes in fewer bits than its calibration runs did: elementwise operations then convert."""
    return hardware.generation == "cpu" and workload.precision != "float32"


def validated_range(workload: Workload, hardware: Hardware) -> list[str]:
    """Why no published measurement supports a plan of ``workload`` on ``hardware``; empty if there are measurements."""
    model = workload.model
    layout = workload.layout
    reasons = []
    is_measured = hardware.generation in GENERATIONS and hardware.name not in UNMEASURED
    if not hardware.measured and not is_measured:
        reasons.append(f"no measurement on {hardware.name}: crius bench calibrate")
    parameters = model_parameters(model)
    if not PARAMETERS[0] <= parameters <= PARAMETERS[1] and not hardware.measured:
        reasons.append(f"{parameters / 1e9:.3g} billion parameters: the measured range is 0.3 to 700")
    if is_narrow_on_cpu(workload, hardware):
        reasons.append(f"{workload.precision} on a CPU, which was measured to be 2.5 times slower than planned")
    if layout.num_ranks > GPUS:
        reasons.append(f"{layout.num_ranks} GPUs: measured up to {GPUS}")
    if not SEQ_LEN[0] <= workload.seq_len <= SEQ_LEN[1] and not hardware.measured:
        reasons.append(f"sequences of {workload.seq_len} tokens: measured from {SEQ_LEN[0]} to {SEQ_LEN[1]}")
    for axis, most in DEGREES.items():
        degree = getattr(layout, axis)
        if degree > most:
            reasons.append(f"{axis} {degree}: measured up to {most}")
    if layout.fsdp > SHARDS:
        reasons.append(f"weights in {layout.fsdp} shards: measured up to {SHARDS}")
    whole = parameters / layout.tp
    most_whole = WITHOUT_PIPELINE.get(hardware.generation, 0.0)
    if layout.pp == 1 and whole > most_whole > 0:
        reasons.append(
            f"{whole / 1e9:.0f} billion parameters per tensor-parallel rank without a pipeline: measured up to "
            f"{most_whole / 1e9:.0f} on {hardware.generation.replace('_', ' ')}"
        )
    if layout.pp > 1 and workload.schedule not in SCHEDULES:
        reasons.append(f"no measurement of schedule {workload.schedule}")
    if workload.cpu_offload:
        reasons.append("no measurement with weights offloaded to the host")
    has_none = not hardware.float8_flops or (workload.precision == "mxfp8" and not hardware.has_mxfp8)
    if workload.precision in ("float8", "mxfp8", "nvfp4") and has_none:
        reasons.append(f"{hardware.name} has no {workload.precision}")
    elif workload.precision == "nvfp4" and not hardware.float4_flops:
        reasons.append(f"{hardware.name} has no nvfp4: planned as float8")
    elif workload.precision == "float8" and hardware.generation == "cdna3" and "rowwise" not in workload.float8_recipe:
        reasons.append(f"one measurement of tensorwise float8 on {hardware.name}, 1.4 times slower than planned")
    if hardware.generation != "cpu":
        if workload.reshard not in ("default", "always", "never"):
            reasons.append("no measurement of partial resharding")
        if model.num_experts:
            reasons.append("no measurement of Crius with experts: the planned time is torchtitan's")
    return reasons


LEAST_PART = 0.01
"""Share of the whole below which a part is left out of a line."""


def hardware_of_machine(machine: Machine) -> Hardware | None:
    """Hardware of a rank: as calibrated, or else as known by name; None if neither is known."""
    found = of_machine(machine.name)
    return shared(found, machine.local_ranks) if found else None


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Planned memory and time of a run.

    Attributes:
        machine: machine of the run.
        hardware: planned hardware; None if unknown, and then the time is unknown too.
        workload: work of a step.
        memory: bytes of the fullest rank, counted like the peak that the run reports.
        time: seconds of a step; None if the hardware, or its speed in this precision, is not known.
    """

    machine: Machine
    hardware: Hardware | None
    workload: Workload
    memory: Estimate
    time: Estimate | None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of one rank."""
        return self.workload.tokens_per_rank / self.time.total if self.time else None

    def as_dict(self) -> dict[str, Any]:
        """Data for ``plan.json``."""
        return {
            "machine": asdict(self.machine),
            "hardware": self.hardware.name if self.hardware else None,
            "activation_checkpoint": self.workload.activation_checkpoint,
            "microbatch": self.workload.microbatch,
            "memory_bytes": dict(self.memory.parts),
            "step_seconds": dict(self.time.parts) if self.time else None,
            "tokens_per_second_per_rank": self.tokens_per_second,
        }


def plan_run(config: RunConfig, facts: ModelDescription, machine: Machine, hardware: Hardware | None) -> RunPlan:
    """The plan of ``config``.

    Args:
        config: the run, with all decisions of the machine.
        facts: description of its model.
        machine: machine of the run.
        hardware: hardware of each rank; None if unknown.
    """
    workload = from_config(config, facts, machine.ranks, device="cuda" if machine.on_gpu else "cpu")
    timed = None if hardware and is_narrow_on_cpu(workload, hardware) else hardware
    return RunPlan(
        machine=machine,
        hardware=hardware,
        workload=workload,
        memory=memory(workload, hardware or (None if machine.on_gpu else KNOWN["cpu"]), counting="allocated"),
        time=step_time(workload, timed) if timed else None,
    )


def summed(parts: Mapping[str, float], unit: float, digits: int = 2) -> str:
    """``activations 40.10 + parameters 4.01``: parts from the largest down, in units of ``unit``."""
    total = sum(parts.values())
    large = {name: value for name, value in parts.items() if value >= LEAST_PART * total > 0}
    ordered = sorted(large.items(), key=lambda item: -item[1])
    return " + ".join(f"{name} {value / unit:.{digits}f}" for name, value in ordered)


PLAN = "plan.json"
"""File in the folder of a run with facts that its settings lack."""

WARM_STEPS = 5
"""Steps at the start and after a resume, which compile and allocate."""

LEAST_STEPS = 5
"""Fewest measured steps for a comparison of speed."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements that a run reported.

    Attributes:
        steps: counted steps: all except the first ones.
        tokens_per_second: tokens per second of one rank, the median of the reports; None if there are too few.
        memory_bytes: peak of rank 0; None if nothing was reported.
    """

    steps: int
    tokens_per_second: float | None
    memory_bytes: float | None


class Reports:
    """Collects speed and memory from the records of a run."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._ready = 0
        self._rates: list[float] = []  # one per step
        self._memory: float | None = None

    def add(self, record: Mapping[str, Any]) -> int:
        """Count one record of steps; returns how many of its steps are after the first ones: all or none."""
        step = int(record["step"])
        if self._last is None or step <= self._last:  # the run begins, or resumes from a checkpoint
            self._ready = step - 1 + WARM_STEPS
            self._last = step - 1
        steps = step - self._last
        first = self._last
        self._last = step
        self._memory = max(self._memory or 0.0, float(record["memory_gib"]) * GIB)
        if first < self._ready:
            return 0
        self._rates += [float(record["tokens_per_second_per_rank"])] * steps
        return steps

    def measured(self) -> Measured:
        """Measurements so far."""
        rate = statistics.median(self._rates) if len(self._rates) >= LEAST_STEPS else None
        return Measured(steps=len(self._rates), tokens_per_second=rate, memory_bytes=self._memory)


@dataclass(frozen=True, kw_only=True)
class PlanComparison:
    """A plan and the measurements of its run."""

    plan: RunPlan
    measured: Measured

    @property
    def speed_error(self) -> float | None:
        """Planned over measured tokens/s, minus 1; None if one of them is not known."""
        return _error(self.plan.tokens_per_second, self.measured.tokens_per_second)

    @property
    def memory_error(self) -> float | None:
        """The same for memory; also None if the machine is not known, because its processes have more than tensors."""
        return _error(self.plan.memory.total if self.plan.hardware else None, self.measured.memory_bytes)

    def lines(self) -> list[str]:
        """Lines with both, and the parts of the plan."""
        plan = self.plan
        found = [self.line(), f"planned memory: {summed(plan.memory.parts, GIB)} GiB ({plan.memory.note})"]
        if plan.time:
            found.append(f"planned step: {1e3 * plan.time.total:,.1f} ms = {summed(plan.time.parts, 1e-3, 1)}")
        return found

    def line(self) -> str:
        """Both on one line, for a log."""
        plan = self.plan
        measured = self.measured
        hardware = self.plan.hardware
        if hardware is None:
            return f"unknown machine {plan.machine.name}: crius bench calibrate measures it"
        parts = []
        if plan.tokens_per_second is not None and measured.tokens_per_second is not None:
            rate = f"{measured.tokens_per_second:,.0f} tokens/s/rank measured"
            parts.append(f"{rate}, {plan.tokens_per_second:,.0f} planned ({self.speed_error:+.0%})")
        elif measured.memory_bytes is None:
            parts.append("no steps reported yet")
        elif plan.tokens_per_second is None:
            parts.append(f"the speed of {plan.workload.precision} on a CPU is not planned")
        elif measured.tokens_per_second is None:
            parts.append(f"{measured.steps} steps after the first {WARM_STEPS}, at least {LEAST_STEPS} are needed")
        if measured.memory_bytes is not None:
            peak = f"{measured.memory_bytes / GIB:.2f} GiB measured on rank 0"
            parts.append(f"{peak}, {plan.memory.total / GIB:.2f} planned ({self.memory_error:+.0%})")
        threads = plan.machine.threads * plan.machine.local_ranks
        if hardware.threads and hardware.threads != threads:
            parts.append(f"calibrated with {hardware.threads} threads, run with {threads}")
        return "; ".join([*parts, f"on {hardware.name}"])

    def as_dict(self) -> dict[str, Any]:
        """Data for JSON; errors are fractions."""
        return {
            "plan": self.plan.as_dict(),
            "measured": {
                "steps": self.measured.steps,
                "tokens_per_second_per_rank": self.measured.tokens_per_second,
                "memory_bytes": self.measured.memory_bytes,
            },
            "tokens_per_second_error": self.speed_error,
            "memory_error": self.memory_error,
        }


def _error(planned: float | None, measured: float | None) -> float | None:
    return planned / measured - 1 if planned and measured else None


def measured_of(records: Iterable[Mapping[str, Any]]) -> Measured:
    """Measurements in the records of ``metrics.jsonl``."""
    reports = Reports()
    for record in records:
        if "tokens_per_second_per_rank" in record:
            reports.add(record)
    return reports.measured()


def _undamaged(records: Iterable[dict[str, Any] | None]) -> Iterator[dict[str, Any]]:
    for record in records:
        if record is None:
            raise ValueError("metrics.jsonl has a damaged line")
        yield record


def compare_run(
    run_dir: Path, config: RunConfig, facts: ModelDescription, hardware: Hardware | None = None
) -> PlanComparison:
    """The plan of the run in ``run_dir`` and its measurements.

    Args:
        run_dir: folder with ``plan.json`` and ``metrics.jsonl``.
        config: config in its ``run.toml``.
        facts: description of its model.
        hardware: planned hardware; None: the machine that the run used.

    Raises:
        ConfigError: the folder lacks these files, or they are damaged.
    """
    try:
        told = parse_json(read_below(run_dir, PLAN))
        machine = Machine(**told["machine"])
        mode = told["activation_checkpoint"]
        microbatch = told.get("microbatch", -1)
        measured = measured_of(_undamaged(records_below(run_dir, "metrics.jsonl", HUGE)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{run_dir} cannot be compared with its plan: {error}.",
            where="command line",
            why=f"a run writes {PLAN} when it starts and metrics.jsonl after its steps",
            fix="give the folder of a run that has trained, such as runs/NAME",
        ) from None
    if config.activation_checkpoint.mode == "auto":
        config = replace(config, activation_checkpoint=replace(config.activation_checkpoint, mode=mode))
    if config.training.local_batch_size == -1:
        config = replace(config, training=replace(config.training, local_batch_size=microbatch))
    return PlanComparison(
        plan=plan_run(config, facts, machine, hardware or hardware_of_machine(machine)), measured=measured
    )

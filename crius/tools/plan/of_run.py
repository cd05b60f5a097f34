"""The plan of one run on one machine: what it should take of memory and time. Torch-free."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from crius.config.run import RunConfig
from crius.machine import Machine
from crius.models.description import ModelDescription
from crius.tools.plan.estimate import Estimate
from crius.tools.plan.from_config import from_config
from crius.tools.plan.hardware import KNOWN, Hardware
from crius.tools.plan.machine import of_machine, shared
from crius.tools.plan.memory import memory
from crius.tools.plan.time import step_time
from crius.tools.plan.validated_range import is_narrow_on_cpu
from crius.tools.plan.workload import Workload

LEAST_PART = 0.01
"""Share of the whole below which a part is left out of a line."""


def hardware_of_machine(machine: Machine) -> Hardware | None:
    """What a rank has: as calibrated, else as known by name; None where neither is."""
    found = of_machine(machine.name)
    return shared(found, machine.local_ranks) if found else None


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run should take.

    Attributes:
        machine: where it is.
        hardware: what the plan is for; None: unknown, and with it the time.
        workload: of a step.
        memory: bytes of the fullest rank, counted as the run reports its peak.
        time: seconds of a step; None where the hardware is not known, or not how fast it is in this precision.
    """

    machine: Machine
    hardware: Hardware | None
    workload: Workload
    memory: Estimate
    time: Estimate | None

    @property
    def tokens_per_second(self) -> float | None:
        """Of one rank."""
        return self.workload.tokens_per_rank / self.time.total if self.time else None

    def as_dict(self) -> dict[str, Any]:
        """For ``plan.json``."""
        return {
            "machine": asdict(self.machine),
            "hardware": self.hardware.name if self.hardware else None,
            "activation_checkpoint": self.workload.activation_checkpoint,
            "memory_bytes": dict(self.memory.parts),
            "step_seconds": dict(self.time.parts) if self.time else None,
            "tokens_per_second_per_rank": self.tokens_per_second,
        }


def plan_run(config: RunConfig, facts: ModelDescription, machine: Machine, hardware: Hardware | None) -> RunPlan:
    """The plan of ``config``.

    Args:
        config: the run, with everything decided that the machine decides.
        facts: of its model.
        machine: where it is.
        hardware: of each rank; None: unknown.
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

"""A real out-of-memory error becomes one that says where the memory went and which flags would help."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from crius.config.run import RunConfig
from crius.errors import CriusError, OutOfMemoryError
from crius.host_memory import free_host_bytes
from crius.launch.status import status
from crius.models.description import ModelDescription
from crius.planner.hardware import KNOWN
from crius.planner.memory import memory
from crius.planner.of_run import GIB, Machine, RunPlan, plan_run, summed
from crius.planner.remedies import LEAST_SAVED, Remedy, remedies
from crius.redact import redact
from crius.run_file import write_whole
from crius.train.incident import to_json
from crius.train.inputs import with_dtype
from crius.train.plan import hardware_of

USABLE = 0.9
"""Share of a device's memory that a remedy may plan with; the rest is for fragments and the kernels' workspaces."""

ENOUGH = 0.9
"""Share of its own plan, but for what is fixed, to which a run is to come down where that plan would have fitted."""

_CPU_WORDS = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|Cannot allocate memory|std::bad_alloc"
)
_GPU_WORDS = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED")
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ([KMG]iB|bytes)")
_UNITS = {"bytes": 1 / GIB, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}


@dataclass
class Story:
    """What is known of a run when its memory is used up; filled in as the run gets to know it.

    Attributes:
        run_dir: gets ``incidents/out-of-memory-rank-R.json``.
        rank: this process.
        device: its device, None until it is chosen.
        capacity: bytes that this rank can have.
        config: of the run, with what is decided decided.
        facts: of its model.
        machine: where it is.
    """

    run_dir: Path
    rank: int
    device: torch.device | None = None
    capacity: float = 0.0
    config: RunConfig | None = None
    facts: ModelDescription | None = None
    machine: Machine | None = None

    def begin(self, device: torch.device, machine: Machine, config: RunConfig, facts: ModelDescription) -> None:
        """Note what a run knows before it takes memory."""
        self.device, self.machine, self.facts = device, machine, facts
        self.config = with_dtype(config, on_gpu=machine.on_gpu)
        if machine.on_gpu:
            self.capacity = float(torch.cuda.get_device_properties(device).total_memory)
        else:
            self.capacity = free_host_bytes() / machine.local_ranks


@contextlib.contextmanager
def explained(run_dir: Path, rank: int) -> Iterator[Story]:
    """Turn an out-of-memory error from inside into one with the plan and its remedies.

    Args:
        run_dir: of the run.
        rank: this process.

    Raises:
        OutOfMemoryError: memory was used up inside.
    """
    story = Story(run_dir, rank)
    try:
        yield story
    except CriusError:
        raise
    except Exception as error:
        found = next((one for one in _causes(error) if is_out_of_memory(one)), None)
        if found is None:
            raise
        raise _explain(story, found) from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it came from: a pipeline's stage wraps what its model raised."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, had no memory left for what was asked."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return bool(_CPU_WORDS.search(text) or (re.search("CUDA|CUBLAS|CUDNN|NCCL|HIP", text) and _GPU_WORDS.search(text)))


def _explain(story: Story, error: BaseException) -> OutOfMemoryError:
    where = f"{status.phase} of step {status.step}" if status.step is not None else f"{status.phase}, before step 1"
    words = redact(str(error)).strip().splitlines()
    said = words[0][:300] if words else type(error).__name__
    asked = _ASKED.search(said)
    more = f": {float(asked[1]) * _UNITS[asked[2]]:,.2f} GiB more were asked for." if asked else "."
    what = f"out of memory on rank {story.rank} in {where}{more}"
    if story.config is None or story.facts is None or story.machine is None or story.device is None:
        return OutOfMemoryError(what, where=said, fix="a smaller model, or --training.local_batch_size 1")
    machine = story.machine
    known = hardware_of(machine)
    hardware = known or KNOWN["h100-80g" if machine.on_gpu else "cpu"]
    config = story.config
    if config.activation_checkpoint.mode == "auto":
        config = replace(config, activation_checkpoint=replace(config.activation_checkpoint, mode="none"))
    plan = plan_run(config, story.facts, machine, hardware)
    plan = replace(plan, memory=memory(plan.workload, hardware))  # with what the allocator keeps: that has to fit
    target = USABLE * story.capacity
    if plan.memory.total <= target:
        fixed = plan.memory.parts["overhead"]
        target = fixed + ENOUGH * (plan.memory.total - fixed)
    found = remedies(config, story.facts, machine.ranks, hardware, target, on_gpu=machine.on_gpu)
    path = _write(story, plan, found, where, said)
    lines = [line for one in found for line in (one.flags, f"  {one.effect}" + ("" if one.fits else ", not enough"))]
    if not found:
        lines.append(
            f"no setting saves {LEAST_SAVED / GIB:g} GiB of the {plan.memory.total / GIB:.2f} planned: end other "
            "programs on this machine, or use a larger one"
        )
    if known is None and found:
        lines.append(f"(times as on {hardware.name}: this machine is not calibrated)")
    if path:
        lines.append(f"all of it: {path}")
    return OutOfMemoryError(what, where=said, why=_why(story, plan), fix=_indented(lines))


def _why(story: Story, plan: RunPlan) -> str:
    total, capacity = plan.memory.total, story.capacity
    lines = [
        f"planned {total / GIB:.2f} GiB of {capacity / GIB:.2f} a rank, {plan.memory.note}:",
        f"  {summed(plan.memory.parts, GIB)}",
    ]
    others = _others(story)
    if others > GIB:
        lines.append(f"other programs hold {others / GIB:.1f} GiB of this device")
    elif total <= USABLE * capacity:
        lines.append(
            "that would fit: something else holds the memory, or it is in fragments, or the plan is wrong here"
        )
    return _indented(lines)


def _others(story: Story) -> float:
    """Bytes of the GPU that neither this process nor nobody has."""
    if story.device is None or story.device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(story.device)
    return float(total - free - torch.cuda.memory_reserved(story.device))


def _indented(lines: list[str]) -> str:
    return ("\n" + " " * 9).join(lines)


def _write(story: Story, plan: RunPlan, found: list[Remedy], where: str, said: str) -> Path | None:
    """The incident file; None where the disk does not take it either."""
    is_gpu = story.device is not None and story.device.type == "cuda"
    report: dict[str, Any] = {
        "kind": "out of memory",
        "rank": story.rank,
        "step": status.step,
        "phase": status.phase,
        "error": said,
        "capacity_bytes": story.capacity,
        "planned_bytes": plan.memory.total,
        "moment": plan.memory.note,
        "plan": [{"part": name, "bytes": value} for name, value in plan.memory.parts.items()],
        "remedies": [one.as_dict() for one in found],
    }
    if is_gpu:
        report["allocated_bytes"] = torch.cuda.memory_allocated(story.device)
        report["reserved_bytes"] = torch.cuda.memory_reserved(story.device)
        report["other_programs_bytes"] = _others(story)
    path = story.run_dir / "incidents" / f"out-of-memory-rank-{story.rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, redact(to_json(report)), is_private=True)
    except OSError:
        return None
    return path

"""Use of the memory of a run that ran out of it, and the flags that would help."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from crius.config.resolve import USABLE
from crius.errors import OutOfMemoryError
from crius.launch.status import status
from crius.redact import redact
from crius.run_file import write_whole
from crius.tools.plan.compare import RunPlan, plan_run, summed
from crius.tools.plan.hardware import KNOWN
from crius.tools.plan.memory import memory
from crius.tools.plan.remedies import LEAST_SAVED, Remedy, remedies
from crius.tools.plan.watch import hardware_of
from crius.train.stability import to_json
from crius.train.tools import Story
from crius.units import GIB

ENOUGH = 0.9
"""Share of its own plan, without fixed memory, that a run must come down to if that plan would have fitted."""


def explain(story: Story, what: str, said: str) -> OutOfMemoryError:
    """The error with the plan of its run and the remedies; it also writes them to the run's incidents.

    Args:
        story: facts about a run that has begun.
        what: description of the event.
        said: words of the error.
    """
    config = story.config
    machine = story.machine
    assert config is not None and machine is not None and story.facts is not None
    known = hardware_of(machine)
    hardware = known or KNOWN["h100-80g" if machine.on_gpu else "cpu"]
    if config.activation_checkpoint.mode == "auto":
        config = replace(config, activation_checkpoint=replace(config.activation_checkpoint, mode="none"))
    plan = plan_run(config, story.facts, machine, hardware)
    plan = replace(plan, memory=memory(plan.workload, hardware))  # with the allocator's cache, which must fit too
    target = USABLE * story.capacity
    if plan.memory.total <= target:
        fixed = plan.memory.parts["overhead"]
        target = fixed + ENOUGH * (plan.memory.total - fixed)
    found = remedies(config, story.facts, machine.ranks, hardware, target, on_gpu=machine.on_gpu)
    path = _write(story, plan, found, said)
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
    total = plan.memory.total
    capacity = story.capacity
    lines = [
        f"planned {total / GIB:.2f} GiB of {capacity / GIB:.2f} per rank, {plan.memory.note}:",
        f"  {summed(plan.memory.parts, GIB)}",
    ]
    others = _others(story)
    if others > GIB:
        lines.append(f"other programs use {others / GIB:.1f} GiB of this device")
    elif total <= USABLE * capacity:
        lines.append("that would fit: something else uses the memory, or it is fragmented, or the plan is wrong here")
    return _indented(lines)


def _others(story: Story) -> float:
    """Bytes of the GPU that other processes use."""
    if story.device is None or story.device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(story.device)
    return float(total - free - torch.cuda.memory_reserved(story.device))


def _indented(lines: list[str]) -> str:
    return ("\n" + " " * 9).join(lines)


def _write(story: Story, plan: RunPlan, found: list[Remedy], said: str) -> Path | None:
    """Path of the incident file; None if the disk cannot be written either."""
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

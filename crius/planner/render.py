"""A plan as lines to read and as data. Torch-free."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from crius.planner.estimate import Estimate
from crius.planner.explain import explain, in_words, spelled_layout
from crius.planner.memory import model_parameters
from crius.planner.plan import Plan
from crius.planner.rank import spelled
from crius.planner.remedies import Remedy
from crius.planner.search import Candidate, judge, usable_bytes
from crius.planner.workload import Workload
from crius.table import aligned

GIB = 2**30
_WIDTH = 116
_SMALL = 0.0005  # a part of which less than this share is left out


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Dotted fields as they are typed, one flag with its value an entry."""
    found: list[str] = []
    for name, value in settings.items():
        if isinstance(value, bool):
            found.append(f"--{name}" if value else "--" + ".no_".join(name.rsplit(".", 1)))
        elif isinstance(value, tuple):
            found += [f"--{name} {shlex.quote(str(item))}" for item in value]
        else:
            found.append(f"--{name} {shlex.quote(str(value))}")
    return found


def command(start: str, settings: Mapping[str, Any]) -> list[str]:
    """Lines of a command that can be pasted."""
    lines = [start]
    for flag in flags(settings):
        if len(lines[-1]) + len(flag) > _WIDTH - 3:
            lines.append("   ")
        lines[-1] += f" {flag}"
    return [line + " \\" * (number < len(lines) - 1) for number, line in enumerate(lines)]


def plan_lines(plan: Plan, start: str, settings: Mapping[str, Any], *, is_explained: bool) -> list[str]:
    """Everything for people.

    Args:
        plan: that was made; it has a winner.
        start: of the command: ``crius train`` with a recipe, if there is one.
        settings: that the command needs on top of ``start``.
        is_explained: with the decisions as sentences.
    """
    case, winner = plan.case, plan.winner
    assert winner is not None
    hardware = case.hardware
    lines = [heading(plan), ""]
    lines += [f"recommended: {described(winner.workload)}", f"  {figures(winner)}", ""]
    if case.facts is None:
        lines += [f"{case.shape.name} is not trainable yet: its layout as flags", ""]
    lines += [*command(start, settings), ""]
    if is_explained:
        lines += ["how it was decided", *_numbered(explain(plan.found, winner)), ""]
    lines += ["best layouts (a GPU's tokens/s and GiB)", *aligned(_rows(plan), left=range(6)), ""]
    if plan.rejected:
        rows = [
            [
                described(one.candidate.workload),
                f"{one.candidate.tokens_per_second:,.0f}",
                f"{one.candidate.memory.total / GIB:.1f} GiB",
                one.reason,
            ]
            for one in plan.rejected
        ]
        rows.insert(0, ["", "tokens/s", "", ""])
        lines += ["not taken", *(f"  {line}" for line in aligned(rows, left=(0, 3))), ""]
    lines += _side_by_side(
        [f"memory of the fullest rank, GiB ({winner.memory.note})", *_parts(winner.memory, GIB)],
        [f"time of a step, s ({winner.time.note})", *_parts(winner.time, 1)],
    )
    if plan.nearby:
        rows = [[one.text, one.effect(winner)] for one in plan.nearby]
        lines += ["", "what one change would do", *(f"  {line}" for line in aligned(rows, left=None))]
    lines += ["", _least(plan), *outside_lines(plan.outside)]
    lines.append(
        f"{plan.found.num_judged:,} candidates in {plan.seconds:.1f} s; {usable_bytes(hardware) / GIB:.1f} GiB of "
        f"{hardware.memory_bytes / GIB:.0f} count as usable"
    )
    return lines


def impossible_lines(plan: Plan, remedies: Iterable[Remedy]) -> list[str]:
    """What to say where nothing fits: the smallest layout, how many GPUs would do, and what to change."""
    case, smallest = plan.case, plan.smallest
    lines = [heading(plan), ""]
    if smallest is None:
        return [
            *lines,
            f"no layout is legal: degrees must divide {case.num_gpus} GPUs, the model's heads and "
            f"{case.global_batch_size} sequences a step; an integer reshard_after_forward_mode divides the shards and "
            "takes no TP and PP",
            _least(plan),
        ]
    need, most = smallest.memory.total / GIB, usable_bytes(case.hardware) / GIB
    lines += [
        f"does not fit: the smallest layout, {described(smallest.workload)}, needs {need:,.1f} GiB of {most:,.1f}",
        "",
        f"memory of the fullest rank, GiB ({smallest.memory.note})",
        *_parts(smallest.memory, GIB),
        "",
        _least(plan),
        "",
        "what to change, from this layout on",
    ]
    for one in remedies:
        lines.append(f"  {'fits' if one.fits else 'not enough'}: {one.flags}: {one.effect}")
    shorter = judge(replace(smallest.workload, seq_len=smallest.workload.seq_len // 2), case.hardware)
    lines.append(
        f"  {'fits' if shorter.fits else 'not enough'}: sequences half as long: {shorter.memory.total / GIB:.2f} GiB "
        f"planned ({(smallest.memory.total - shorter.memory.total) / GIB:.2f} less)"
    )
    return lines


def heading(plan: Plan) -> str:
    """Model, batch and machine."""
    case = plan.case
    yet = "" if case.facts is not None else ", not trainable yet"
    return (
        f"{case.shape.name} ({in_words(model_parameters(case.shape))} parameters{yet}), "
        f"{case.global_batch_size:,} sequences of {case.config.training.seq_len:,} tokens a step, on "
        f"{case.num_gpus:,} x {case.hardware.name}"
    )


def described(workload: Workload) -> str:
    """Layout, schedule, batch and options in a few words."""
    parts = [spelled_layout(workload)]
    if workload.layout.pp > 1:
        parts.append(workload.schedule + f" x {workload.stages_per_rank}" * (workload.stages_per_rank > 1))
    parts.append(f"{workload.num_microbatches} x {workload.microbatch} sequences")
    parts.append(f"recompute {workload.activation_checkpoint}")
    return ", ".join([*parts, *options_of(workload)])


def options_of(workload: Workload) -> list[str]:
    """What is switched on, in words."""
    named = {
        "compile": workload.compile,
        workload.precision: workload.precision != "bfloat16",
        "async TP": workload.async_tp,
        f"reshard {workload.reshard}": workload.reshard != "default",
        "deferred sync": workload.gradient_sync == "deferred" and workload.layout.pp == 1,
        "CPU offload": workload.cpu_offload,
    }
    return [name for name, is_on in named.items() if is_on]


def figures(one: Candidate) -> str:
    """Speed, step and memory."""
    speed = f"{one.tokens_per_second:,.0f} tokens/s a GPU, {one.time.total:,.3g} s a step"
    return f"{speed}, {one.memory.total / GIB:.1f} GiB a GPU"


def outside_lines(outside: Iterable[str]) -> list[str]:
    """Why no measurement supports a plan."""
    reasons = list(outside)
    return ["outside the validated range: " + "; ".join(reasons)] if reasons else []


def impossible_data(plan: Plan, remedies: Iterable[Remedy]) -> dict[str, Any]:
    """``impossible_lines`` as data."""
    smallest = candidate_data(plan.smallest) if plan.smallest else None
    return {**plan_data(plan, {}), "smallest": smallest, "remedies": [one.as_dict() for one in remedies]}


def plan_data(plan: Plan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same as data; bytes, seconds and tokens/s of a GPU."""
    case, winner = plan.case, plan.winner
    return {
        "model": {
            "name": case.shape.name,
            "parameters": model_parameters(case.shape),
            "trainable": case.facts is not None,
        },
        "gpu": case.hardware.name,
        "num_gpus": case.num_gpus,
        "seq_len": case.config.training.seq_len,
        "global_batch_size": case.global_batch_size,
        "memory_bytes": case.hardware.memory_bytes,
        "usable_bytes": usable_bytes(case.hardware),
        "fits": winner is not None,
        "recommended": candidate_data(winner) if winner else None,
        "flags": " ".join(flags(settings)),
        "settings": dict(settings),
        "best": [candidate_data(one) for one in plan.rows],
        "rejected": [{**candidate_data(one.candidate), "reason": one.reason} for one in plan.rejected],
        "sensitivity": [
            {"change": one.text, "result": candidate_data(one.candidate) if one.candidate else None}
            for one in plan.nearby
        ],
        "least_gpus": plan.least_gpus or None,
        "outside_validated_range": plan.outside,
        "explanation": explain(plan.found, winner),
        "num_judged": plan.found.num_judged,
        "seconds": plan.seconds,
    }


def candidate_data(one: Candidate) -> dict[str, Any]:
    """A candidate as data."""
    work = one.workload
    return {
        "layout": spelled_layout(work),
        "degrees": work.layout.degrees,
        "schedule": work.schedule if work.layout.pp > 1 else None,
        "stages_per_rank": work.stages_per_rank,
        "local_batch_size": work.microbatch,
        "num_microbatches": work.num_microbatches,
        "activation_checkpoint": work.activation_checkpoint,
        "compile": work.compile,
        "precision": work.precision,
        "async_tp": work.async_tp,
        "reshard": work.reshard,
        "gradient_sync": work.gradient_sync,
        "fits": one.fits,
        "tokens_per_second": one.tokens_per_second,
        "step_seconds": one.time.total,
        "memory_bytes": one.memory.total,
        "memory": dict(one.memory.parts),
        "time": dict(one.time.parts),
    }


def _rows(plan: Plan) -> list[list[str]]:
    rows = [["", "layout", "schedule", "microbatches", "recompute", "options", "tokens/s", "step s", "GiB"]]
    for number, one in enumerate(plan.rows, start=1):
        work = one.workload
        schedule = work.schedule + f" x {work.stages_per_rank}" * (work.stages_per_rank > 1)
        rows.append(
            [
                f"{number}",
                spelled_layout(work),
                schedule if work.layout.pp > 1 else "-",
                f"{work.num_microbatches} x {work.microbatch}",
                work.activation_checkpoint,
                ", ".join(options_of(work)) or "-",
                f"{one.tokens_per_second:,.0f}",
                f"{one.time.total:,.3g}",
                f"{one.memory.total / GIB:.1f}",
            ]
        )
    return rows


def _parts(estimate: Estimate, unit: float) -> list[str]:
    """Parts that count, with their shares, and the sum."""
    shown = [(spelled(name), value) for name, value in estimate.parts.items() if value > _SMALL * estimate.total]
    rows = [[name, f"{value / unit:,.3f}", f"{value / estimate.total:.1%}"] for name, value in shown]
    return [f"  {line}" for line in aligned([*rows, ["total", f"{estimate.total / unit:,.3f}", "100.0%"]], left=(0,))]


def _side_by_side(left: list[str], right: list[str]) -> list[str]:
    width = max(map(len, left)) + 4
    count = max(len(left), len(right))
    columns = [[*lines, *[""] * (count - len(lines))] for lines in (left, right)]
    return [f"{a:<{width}}{b}".rstrip() for a, b in zip(*columns, strict=True)]


def _least(plan: Plan) -> str:
    if not plan.least_gpus:
        return "no number of GPUs of this kind is enough"
    name, node = plan.case.hardware.name, plan.case.hardware.gpus_per_node
    whole = f", in whole nodes of {node}" if plan.least_gpus > node else ""
    degrees = "" if plan.least_keeps_degrees else ", with other degrees than those given"
    return f"fewest GPUs that fit{whole}{degrees}: {plan.least_gpus:,} x {name}"


def _numbered(sentences: Iterable[str]) -> list[str]:
    return [f"  {number}. {sentence}" for number, sentence in enumerate(sentences, start=1)]

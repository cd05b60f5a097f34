"""A plan as lines to read, and as data for ``--json``. Torch-free."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from crius.table import aligned
from crius.tools.plan.explain import explain, in_words
from crius.tools.plan.hardware import Hardware
from crius.tools.plan.holdings import model_parameters
from crius.tools.plan.plan import Plan
from crius.tools.plan.remedies import Remedy
from crius.tools.plan.search import NEAR, Candidate, judge, score, spelled, usable_bytes
from crius.tools.plan.workload import Estimate, Workload
from crius.units import GIB

MOST_LINES = 12
"""Most lines of a plan without ``--explain``; a command with many flags may exceed them."""

MOST_FITTING = 3
_WIDTH = 116
_SMALL = 0.0005  # parts below this share are left out


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Dotted fields as flags, one flag with its value per entry."""
    found: list[str] = []
    for name, value in settings.items():
        if isinstance(value, bool):
            found.append(f"--{name}" if value else "--" + ".no_".join(name.rsplit(".", 1)))
        elif isinstance(value, tuple):
            found += [f"--{name} {shlex.quote(str(item))}" for item in value]
        else:
            found.append(f"--{name} {shlex.quote(str(value))}")
    return found


def command(start: str, settings: Mapping[str, Any], end: str = " \\") -> list[str]:
    """Lines of a command that can be pasted; each except the last ends with ``end``."""
    lines = [start or "   "]
    for flag in flags(settings):
        if len(lines[-1]) + len(flag) > _WIDTH - 3:
            lines.append("   ")
        lines[-1] += f" {flag}"
    return [line + end * (number < len(lines) - 1) for number, line in enumerate(lines)]


def plan_lines(plan: Plan, card: str, start: str, settings: Mapping[str, Any], *, is_explained: bool) -> list[str]:
    """The recommended layout, its speed and its needs; with ``is_explained`` also the reasons and all other results.

    Args:
        plan: plan with a winner.
        card: card that a short name stands for; may be empty.
        start: start of the command: ``crius train`` with a recipe, if there is one.
        settings: settings that the command needs on top of ``start``.
        is_explained: return everything instead of the ``MOST_LINES`` that matter most.
    """
    case = plan.case
    winner = plan.winner
    assert winner is not None
    lines = first_lines(plan, card)
    lines += [
        f"recommended: {described(winner.workload)}",
        f"  {figures(winner, case.hardware)}{_faster(plan, winner)}",
    ]
    if case.facts is not None:
        lines += command(start, settings)
    else:
        typed = command("", settings, end="")
        lines += [f"Crius does not train {case.shape.name} yet; its layout as flags:", *typed]
    if is_explained:
        return [*lines, "", *_explained(plan, winner)]
    room = MOST_LINES - len(lines) - 2  # the header of the table and the last line
    table = _rows(plan, max(0, room)) if room > 1 and len(plan.rows) > 1 else []
    lines += aligned(table, left=range(6)) if table else []
    return [*lines, f"{_least(plan)}; --explain: why, and memory and time by part"]


def _faster(plan: Plan, winner: Candidate) -> str:
    """Why a faster layout of the table is not recommended; empty if there is none."""
    faster = [one for one in plan.rows if one.tokens_per_second > winner.tokens_per_second]
    gain = max((one.tokens_per_second / winner.tokens_per_second - 1 for one in faster), default=0.0)
    if gain < _SMALL or any(score(one) * (1 - NEAR) > score(winner) for one in faster):
        return ""
    return f"; others gain {gain:.1%} at most, too little for more axes, CP or less headroom"


def first_lines(plan: Plan, card: str) -> list[str]:
    """Model, batch and machine; the meant card; why no measurement supports the plan."""
    return [heading(plan), *filter(None, [card]), *outside_lines(plan.outside)]


def _explained(plan: Plan, winner: Candidate) -> list[str]:
    """The decisions, other layouts, memory and time by part, and effects of a change."""
    hardware = plan.case.hardware
    lines = ["how it was decided", *_numbered(explain(plan.found, winner)), ""]
    lines += ["best layouts (a GPU's tokens/s and GiB)", *aligned(_rows(plan, len(plan.rows)), left=range(6)), ""]
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
    usable = usable_bytes(hardware) / GIB
    whole = hardware.memory_bytes / GIB
    counts = f"{plan.found.num_judged:,} candidates in {plan.seconds:.1f} s"
    return [*lines, "", _least(plan), f"{counts}; {usable:.1f} GiB of {whole:.0f} count as usable"]


def impossible_lines(
    plan: Plan, card: str, remedies: Sequence[Remedy], fitting: Sequence[tuple[str, str]], *, is_explained: bool
) -> list[str]:
    """Lines if nothing fits: the smallest layout, what to change, and commands of cases that fit.

    Args:
        plan: plan without a winner.
        card: card that a short name stands for; may be empty.
        remedies: changes of the smallest layout.
        fitting: description of each case that fits, and the command that plans it; the last one ends the lines.
        is_explained: also show the memory of the smallest layout, and remedies that are not enough.
    """
    case = plan.case
    smallest = plan.found.smallest
    lines = first_lines(plan, card)
    if smallest is None:
        lines.append(
            f"no layout is legal: degrees must divide {case.num_gpus} GPUs, the model's heads and "
            f"{case.global_batch_size} sequences per step"
            + f", the expert degree the model's {case.shape.num_experts} experts" * (case.shape.num_experts > 0)
            + "; an integer reshard_after_forward_mode divides the shards and excludes TP and PP"
        )
    else:
        need = smallest.memory.total / GIB
        most = usable_bytes(case.hardware) / GIB
        lines.append(
            f"does not fit: the smallest layout, {described(smallest.workload)}, needs {need:,.1f} GiB of {most:,.1f}"
        )
        memory = _parts(smallest.memory, GIB)
        if is_explained:
            lines += ["", f"memory of the fullest rank, GiB ({smallest.memory.note})", *memory, ""]
        room = MOST_LINES - len(lines) - 2 - 2 * len(fitting)  # one for a header, one for the fewest GPUs
        lines += _changes(smallest, case.hardware, remedies, room, is_explained=is_explained)
    lines.append(_least(plan))
    for what, text in fitting:
        lines += [f"{what}:", *text.splitlines()]
    return lines


def _changes(
    smallest: Candidate, hardware: Hardware, remedies: Sequence[Remedy], room: int, *, is_explained: bool
) -> Iterator[str]:
    """Savings of each change of the smallest layout: of those after which it fits, in ``room`` lines, or of all."""
    shown = remedies if is_explained else [one for one in remedies if one.fits][: min(room, MOST_FITTING)]
    if shown:
        yield "what to change, from this layout on"
    for one in shown:
        yield f"  {'fits' if one.fits else 'not enough'}: {one.flags}: {one.effect}"
    if is_explained:
        shorter = judge(replace(smallest.workload, seq_len=smallest.workload.seq_len // 2), hardware)
        yield (
            f"  {'fits' if shorter.fits else 'not enough'}: sequences half as long: "
            f"{shorter.memory.total / GIB:.2f} GiB planned "
            f"({(smallest.memory.total - shorter.memory.total) / GIB:.2f} less)"
        )


def heading(plan: Plan) -> str:
    """Model, batch and machine."""
    case = plan.case
    yet = "" if case.facts is not None else ", not trainable yet"
    return (
        f"{case.shape.name} ({in_words(model_parameters(case.shape))} parameters{yet}), "
        f"{case.global_batch_size:,} sequences of {case.config.training.seq_len:,} tokens per step, on "
        f"{case.num_gpus:,} x {case.hardware.name} ({case.hardware.memory_bytes / GIB:.0f} GiB)"
    )


def described(workload: Workload) -> str:
    """Layout, schedule, batch and options in a few words."""
    parts = [str(workload.layout)]
    if workload.layout.pp > 1:
        parts.append(workload.schedule + f" x {workload.stages_per_rank}" * (workload.stages_per_rank > 1))
    parts.append(f"{workload.num_microbatches} x {workload.microbatch} sequences")
    parts.append(f"recompute {workload.activation_checkpoint}")
    return ", ".join([*parts, *options_of(workload)])


def options_of(workload: Workload) -> list[str]:
    """Options that are on, in words."""
    named = {
        "compile": workload.compile,
        workload.precision: workload.precision != "bfloat16",
        "async TP": workload.async_tp,
        f"reshard {workload.reshard}": workload.reshard != "default",
        "deferred sync": workload.gradient_sync == "deferred" and workload.layout.pp == 1,
        "CPU offload": workload.cpu_offload,
    }
    return [name for name, is_on in named.items() if is_on]


def figures(one: Candidate, hardware: Hardware) -> str:
    """Speed, MFU, step and memory."""
    speed = f"{one.tokens_per_second:,.0f} tokens/s per GPU, MFU {_share(one.mfu(hardware))}"
    return f"{speed}, {_seconds(one.time.total)} s per step, {one.memory.total / GIB:.1f} GiB per GPU"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:#.3g}"


def _share(mfu: float | None) -> str:
    return "n/a" if mfu is None else f"{mfu:.1%}"


def outside_lines(outside: Iterable[str]) -> list[str]:
    """Why no measurement supports a plan."""
    reasons = list(outside)
    return ["outside the validated range: " + "; ".join(reasons)] if reasons else []


def _rows(plan: Plan, most: int) -> list[list[str]]:
    rows = [["", "layout", "schedule", "microbatches", "recompute", "options", "tokens/s", "MFU", "step s", "GiB"]]
    for number, one in enumerate(plan.rows[:most], start=1):
        work = one.workload
        schedule = work.schedule + f" x {work.stages_per_rank}" * (work.stages_per_rank > 1)
        rows.append(
            [
                f"{number}",
                str(work.layout),
                schedule if work.layout.pp > 1 else "-",
                f"{work.num_microbatches} x {work.microbatch}",
                work.activation_checkpoint,
                ", ".join(options_of(work)) or "-",
                f"{one.tokens_per_second:,.0f}",
                _share(one.mfu(plan.case.hardware)),
                _seconds(one.time.total),
                f"{one.memory.total / GIB:.1f}",
            ]
        )
    return rows


def _parts(estimate: Estimate, unit: float) -> list[str]:
    """Parts that are large enough, with their shares, and the sum."""
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
    name = plan.case.hardware.name
    node = plan.case.hardware.gpus_per_node
    whole = f", in whole nodes of {node}" if plan.least_gpus > node else ""
    degrees = "" if plan.least_keeps_degrees else ", with other degrees than given"
    return f"fewest GPUs that fit{whole}{degrees}: {plan.least_gpus:,} x {name}"


def _numbered(sentences: Iterable[str]) -> list[str]:
    return [f"  {number}. {sentence}" for number, sentence in enumerate(sentences, start=1)]


def impossible_data(plan: Plan, remedies: Iterable[Remedy]) -> dict[str, Any]:
    """A plan in which nothing fits, as data: the smallest layout, and what to change."""
    smallest = plan.found.smallest
    return {
        **plan_data(plan, {}),
        "smallest": candidate_data(smallest, plan.case.hardware) if smallest else None,
        "remedies": [one.as_dict() for one in remedies],
    }


def plan_data(plan: Plan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A plan as data, with bytes, seconds and tokens/s per GPU."""
    case = plan.case
    winner = plan.winner
    hardware = plan.case.hardware
    return {
        "model": {
            "name": case.shape.name,
            "parameters": model_parameters(case.shape),
            "trainable": case.facts is not None,
        },
        "gpu": hardware.name,
        "num_gpus": case.num_gpus,
        "seq_len": case.config.training.seq_len,
        "global_batch_size": case.global_batch_size,
        "memory_bytes": hardware.memory_bytes,
        "usable_bytes": usable_bytes(hardware),
        "fits": winner is not None,
        "recommended": candidate_data(winner, hardware) if winner else None,
        "flags": " ".join(flags(settings)),
        "settings": dict(settings),
        "best": [candidate_data(one, hardware) for one in plan.rows],
        "rejected": [{**candidate_data(one.candidate, hardware), "reason": one.reason} for one in plan.rejected],
        "sensitivity": [
            {"change": one.text, "result": candidate_data(one.candidate, hardware) if one.candidate else None}
            for one in plan.nearby
        ],
        "least_gpus": plan.least_gpus or None,
        "outside_validated_range": plan.outside,
        "explanation": explain(plan.found, winner),
        "num_judged": plan.found.num_judged,
        "seconds": plan.seconds,
    }


def candidate_data(one: Candidate, hardware: Hardware) -> dict[str, Any]:
    """A candidate as data."""
    work = one.workload
    return {
        "layout": str(work.layout),
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
        "mfu": one.mfu(hardware),
        "step_seconds": one.time.total,
        "memory_bytes": one.memory.total,
        "memory": dict(one.memory.parts),
        "time": dict(one.time.parts),
    }

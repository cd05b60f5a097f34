"""``crius plan --explain``: the reasons for a layout, as sentences, and the effect of single changes. Torch-free.

It starts with pure FSDP and adds an axis only if a number requires it: without the axis no layout fits, or the fastest
layout that fits is slower by more than the model's error.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from crius.config.layout import DEGREES, Layout
from crius.config.resolve import ITEMSIZE
from crius.tools.plan.holdings import model_parameters
from crius.tools.plan.legal import LEAST_CONTEXT_SHARD, Case
from crius.tools.plan.search import (
    AXES,
    MEMORY_MARGIN,
    NAMES,
    TIE,
    Candidate,
    Family,
    SearchResult,
    axes_named,
    best,
    family_of,
    judge,
    search,
    usable_bytes,
    why_slower,
    why_too_large,
)
from crius.tools.plan.workload import MODES, MOMENT_BYTES, Workload
from crius.units import GIB

WHY = {
    "tp": "splits each layer within a node, if a rank's batch or a layer's own buffers are too large",
    "pp": "splits the layers over nodes, if gathering weights takes more time than the bubble",
    "cp": "splits a sequence, if its activations do not fit",
    "ep": "splits the experts, within a node's links if possible",
    "dp_replicate": "keeps gathers within a smaller group and reduces gradients over replicas",
}


# values of a workload with its options off
EAGER: dict[str, Any] = {"compile": False, "async_tp": False}
BFLOAT16: dict[str, Any] = {"precision": "bfloat16", "float8_recipe": "", "float8_all_gather": False}


def _may_take_float8(case: Case) -> bool:
    """Whether the GPU has float8 matmuls and the run may use them."""
    return bool(case.hardware.float8_flops) and not case.config.lora.is_on


def _in_float8(one: Workload) -> Workload:
    return replace(one, precision="float8", float8_recipe="tensorwise", float8_all_gather=one.layout.fsdp > 1)


def explain(found: SearchResult, winner: Candidate | None) -> list[str]:
    """Sentences, in the order of the decisions."""
    case = found.case
    lines = [*_size(case), *_start(found)]
    if winner is None:
        return [*lines, "No combination of axes and recomputation fits."]
    lines += _options(case, winner)
    lines += [_axis(found, winner, axis) for axis in AXES if axis != "ep" or case.shape.num_experts]
    workload = winner.workload
    pipeline = (
        f", {workload.schedule} with {workload.stages_per_rank} stages per rank" if workload.layout.pp > 1 else ""
    )
    return [
        *lines,
        f"Taken: {workload.layout}{pipeline}, microbatches x sequences {workload.num_microbatches} x "
        f"{workload.microbatch}, activation checkpointing {workload.activation_checkpoint}: "
        f"{winner.tokens_per_second:,.0f} tokens/s per GPU, {winner.memory.total / GIB:.1f} GiB.",
    ]


def in_words(count: int) -> str:
    """``8.03 billion``."""
    return f"{count / 1e9:,.2f} billion" if count >= 1e9 else f"{count / 1e6:,.1f} million"


def _size(case: Case) -> Iterator[str]:
    config = case.config
    parameters = model_parameters(case.shape)
    each = 2 * ITEMSIZE[config.training.dtype] + 2 * int(MOMENT_BYTES[config.optimizer.state_dtype])
    what = f"{case.shape.name} has {in_words(parameters)} parameters."
    trained = "Weights"
    if case.shape.adapted:
        parameters = case.shape.num_trained
        what += f" Adapters of {in_words(parameters)} more are trained, and these stay as they are."
        trained = "The adapters' weights"
    whole = each * parameters / GIB
    yield (
        f"{what} {trained}, gradients and the optimizer's state take {each} bytes of each: {whole:,.1f} GiB, "
        f"{whole / case.num_gpus:,.2f} GiB on each of {case.num_gpus} GPUs if FSDP splits them."
    )
    yield (
        f"A plan may take {usable_bytes(case.hardware) / GIB:.1f} of the {case.hardware.memory_bytes / GIB:.0f} GiB of "
        f"{case.hardware.name}: {MEMORY_MARGIN:.0%} stay free."
    )


def _start(found: SearchResult) -> Iterator[str]:
    """Pure FSDP, and how much recomputation it needs."""
    case = found.case
    pure = frozenset[str]()
    fitting = best([one for one in found.fitting if not family_of(one.workload.layout)], case.hardware)
    if fitting is None and pure not in found.too_large:
        yield (
            f"Pure FSDP is not possible: {case.global_batch_size} sequences of a step do not split over "
            f"{case.num_gpus} ranks."
            if case.global_batch_size % case.num_gpus
            else "Pure FSDP is not among what the given flags allow."
        )
        return
    if fitting is None:
        one = found.too_large[pure]
        yield (
            f"Pure FSDP does not fit, even with activation checkpointing {one.workload.activation_checkpoint} and "
            f"microbatches of {one.workload.microbatch}: it {why_too_large(one, case.hardware)} GiB."
        )
        return
    workload = fitting.workload
    needs = [
        f"{mode} {judge(replace(workload, activation_checkpoint=mode), case.hardware).memory.total / GIB:.1f}"
        for mode in MODES[: MODES.index(workload.activation_checkpoint) + 1]
    ]
    yield (
        f"Start with pure FSDP: it fits, with activation checkpointing {workload.activation_checkpoint}, the least "
        f"that does (GiB: {', '.join(needs)}), at {fitting.tokens_per_second:,.0f} tokens/s per GPU."
    )


def _options(case: Case, winner: Candidate) -> Iterator[str]:
    """compile, float8, resharding, async TP: the effect of each option."""
    one = winner.workload
    hardware = case.hardware
    if one.compile:
        yield _gain("Compile", winner, judge(replace(one, **EAGER), hardware))
    if one.precision == "float8":
        yield _gain("float8", winner, judge(replace(one, **BFLOAT16), hardware))
    elif one.precision == "bfloat16" and one.compile and _may_take_float8(case):
        speed = judge(_in_float8(one), hardware).tokens_per_second / winner.tokens_per_second - 1
        worth = "it changes numbers, so it must be asked for: --precision float8" if speed > 0 else "so it stays off"
        yield f"float8 would change the speed by {speed:+.1%}; {worth}."
    if one.async_tp:
        yield _gain("Async TP", winner, judge(replace(one, async_tp=False), hardware))
    if one.layout.pp == 1 and one.layout.fsdp > 1:
        if one.reshard == "never":
            yield _gain(
                "Weights stay gathered between forward and backward, which", winner, _other(one, case, "default")
            )
        elif one.reshard == "default":
            other_ = _other(one, case, "never")
            speed = other_.tokens_per_second / winner.tokens_per_second - 1
            fits = "" if other_.fits else " and does not fit"
            yield (
                f"Keeping weights gathered between forward and backward would gain {speed:.1%} and take "
                f"{(other_.memory.total - winner.memory.total) / GIB:.1f} GiB{fits}: weights are resharded."
            )


def _other(one: Workload, case: Case, reshard: str) -> Candidate:
    return judge(replace(one, reshard=reshard), case.hardware)


def _gain(what: str, winner: Candidate, without: Candidate) -> str:
    speed = winner.tokens_per_second / without.tokens_per_second - 1
    gib = (winner.memory.total - without.memory.total) / GIB
    return f"{what} is worth {speed:+.1%} tokens/s and changes memory by {gib:+.1f} GiB."


def _axis(found: SearchResult, winner: Candidate, axis: str) -> str:
    """Why an axis is taken or not."""
    taken = family_of(winner.workload.layout)
    name = NAMES[axis]
    families = {family_of(one.workload.layout) for one in found.fitting}
    if axis in taken:
        degree = getattr(winner.workload.layout, axis)
        without = _fastest(found, [family for family in families if family < taken and axis not in family])
        other = _fastest(found, [family for family in families if axis not in family and not family < taken])
        as_well = ""
        if other is not None and other.tokens_per_second >= winner.tokens_per_second * (1 - TIE):
            as_well = f" {other.workload.layout} would do as well."
        if without is None:
            smallest = _smallest(found, [family for family in found.too_large if family < taken and axis not in family])
            reason = f"the smallest {why_too_large(smallest, found.case.hardware)} GiB" if smallest else "none is legal"
            return f"{name} {degree} is forced: without it nothing fits ({reason}). It {WHY[axis]}.{as_well}"
        return (
            f"{name} {degree} is taken: without it the fastest that fits, {without.workload.layout}, is "
            f"{why_slower(without, winner)}.{as_well}"
        )
    family = taken | {axis}
    other = _fastest(found, [family])
    if other is None:
        smallest = found.too_large.get(family)
        reason = f"with {axes_named(family)} it {why_too_large(smallest, found.case.hardware)} GiB" if smallest else ""
        if axis == "cp" and found.case.config.training.seq_len < 2 * LEAST_CONTEXT_SHARD:
            reason = f"sequences of {found.case.config.training.seq_len:,} tokens are too short to be split"
        return f"{name} is not taken: {reason or 'it is not legal here'}."
    gain = other.tokens_per_second / winner.tokens_per_second - 1
    if gain > -TIE:
        return (
            f"{name} is not taken: {other.workload.layout} would change the speed by {gain:+.1%}, within the "
            f"{TIE:.0%} error of the model."
        )
    return f"{name} is not taken: {other.workload.layout} is {why_slower(other, winner)}."


def _fastest(found: SearchResult, families: Iterable[Family]) -> Candidate | None:
    wanted = set(families)
    pool = [one for one in found.fitting if family_of(one.workload.layout) in wanted]
    return max(pool, key=lambda one: one.tokens_per_second, default=None)


def _smallest(found: SearchResult, families: Iterable[Family]) -> Candidate | None:
    return min((found.too_large[family] for family in families), key=lambda one: one.memory.total, default=None)


@dataclass(frozen=True)
class Neighbour:
    """One change.

    Attributes:
        text: description of the change.
        candidate: resulting candidate, which may be too large; None: no such layout is legal.
    """

    text: str
    candidate: Candidate | None

    def effect(self, winner: Candidate) -> str:
        """Tokens/s, seconds and GiB, compared with the plan."""
        if self.candidate is None:
            return "not legal: it does not divide the model, the sequence or the batch"
        speed = self.candidate.tokens_per_second / winner.tokens_per_second - 1
        step = self.candidate.time.total / winner.time.total - 1
        gib = (self.candidate.memory.total - winner.memory.total) / GIB
        fits = "" if self.candidate.fits else ", does not fit"
        return f"tokens/s {speed:+.1%}, step {step:+.1%}, {gib:+.1f} GiB{fits}"


def neighbours(case: Case, winner: Candidate) -> list[Neighbour]:
    """Single changes: each axis one size up and down, each option switched, longer sequences, more GPUs. The rest is as
    in the plan; if the layout changes, recomputation and microbatches are chosen again.
    """
    return [*_of_degrees(case, winner), *_of_options(case, winner.workload), *_of_sizes(case, winner)]


def _of_degrees(case: Case, winner: Candidate) -> Iterator[Neighbour]:
    layout = winner.workload.layout
    for axis, name in NAMES.items():
        degree = getattr(layout, axis)
        if DEGREES[axis] in case.pinned or (axis == "ep" and not case.shape.num_experts):
            continue
        for other in (degree // 2, degree * 2) if degree > 1 else (2,):
            degrees = {**layout.degrees, axis: other}
            inner = degrees["tp"] * degrees["cp"] * degrees["pp"] * degrees["dp_replicate"]
            text = f"{name} {other} instead of {degree}"
            if case.num_gpus % inner:
                continue
            yield Neighbour(text, _on(case, {**degrees, "dp_shard": case.num_gpus // inner}))


def _on(case: Case, degrees: Mapping[str, int], num_gpus: int = 0) -> Candidate | None:
    """The best candidate on a mesh, or the smallest if no candidate fits."""
    fields = {DEGREES[axis]: degree for axis, degree in degrees.items()}
    found = search(replace(case.with_fields(fields), num_gpus=num_gpus or case.num_gpus))
    return best(found.fitting, case.hardware) or next(iter(found.too_large.values()), None)


def _of_options(case: Case, one: Workload) -> Iterator[Neighbour]:
    def changed(text: str, **fields: Any) -> Neighbour:
        return Neighbour(text, judge(replace(one, **fields), case.hardware))

    for mode in MODES:
        if mode != one.activation_checkpoint and one.activation_checkpoint in MODES:
            yield changed(f"activation checkpointing {mode}", activation_checkpoint=mode)
    if one.num_microbatches % 2 == 0 and (one.layout.pp == 1 or one.num_microbatches // 2 >= one.layout.pp):
        yield changed(
            f"microbatches of {2 * one.microbatch}",
            microbatch=2 * one.microbatch,
            num_microbatches=one.num_microbatches // 2,
        )
    if one.microbatch % 2 == 0:
        yield changed(
            f"microbatches of {one.microbatch // 2}",
            microbatch=one.microbatch // 2,
            num_microbatches=2 * one.num_microbatches,
        )
    if one.layout.fsdp > 1 and one.layout.pp == 1:
        other = "default" if one.reshard == "never" else "never"
        yield changed(f"reshard {other}", reshard=other)
    if one.async_tp:
        yield changed("without async TP", async_tp=False)
    if one.compile and one.precision == "bfloat16":
        yield changed("without compile", **EAGER)
        if _may_take_float8(case):
            yield Neighbour("float8", judge(_in_float8(one), case.hardware))
    elif one.compile and one.precision == "float8":
        yield changed("bfloat16 instead of float8", **BFLOAT16)


def _of_sizes(case: Case, winner: Candidate) -> Iterator[Neighbour]:
    one = winner.workload
    layout = winner.workload.layout
    yield Neighbour("sequences twice as long", judge(replace(one, seq_len=2 * one.seq_len), case.hardware))
    axis = "dp_shard" if layout.dp_shard > 1 or layout.dp_replicate == 1 else "dp_replicate"
    more: Layout = replace(layout, **{axis: 2 * getattr(layout, axis)})
    is_given = case.config.training.global_batch_size != -1
    batch = {"training.global_batch_size": case.global_batch_size * (1 if is_given else 2)}
    other = case.with_fields(batch)
    yield Neighbour(
        f"{more.num_ranks} GPUs and {'the same batch' if is_given else 'twice the batch'}",
        _on(other, more.degrees, num_gpus=more.num_ranks),
    )

"""``crius plan --explain``: why this layout, as sentences with the numbers of the case. Torch-free.

It starts with pure FSDP and takes an axis more only where a number forces it: without the axis nothing fits, or the
fastest that fits is slower than the model's error.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from crius.tools.plan.legal import LEAST_CONTEXT_SHARD, Case
from crius.tools.plan.memory import model_parameters
from crius.tools.plan.rank import NAMES, TIE, axes_named, best, why_slower, why_too_large
from crius.tools.plan.search import AXES, MEMORY_MARGIN, Candidate, Family, Found, family_of, judge, usable_bytes
from crius.tools.plan.variants import MODES
from crius.tools.plan.workload import Workload
from crius.units import GIB

WHY = {
    "tp": "splits each layer within a node, where a rank's batch or a layer's own buffers are too large",
    "pp": "splits the layers over nodes, where gathering weights costs more than the bubble",
    "cp": "splits a sequence, where its activations do not fit",
    "ep": "splits the experts, within a node's links where it can",
    "dp_replicate": "keeps gathers within a smaller group and reduces gradients over replicas",
}


def explain(found: Found, winner: Candidate | None) -> list[str]:
    """Sentences, in the order of the decisions."""
    case = found.case
    lines = [*_size(case), *_start(found)]
    if winner is None:
        return [*lines, "No combination of axes and recomputation fits."]
    lines += _options(case, winner)
    lines += [_axis(found, winner, axis) for axis in AXES if axis != "ep" or case.shape.num_experts]
    workload = winner.workload
    pipeline = f", {workload.schedule} with {workload.stages_per_rank} stages a rank" if workload.layout.pp > 1 else ""
    return [
        *lines,
        f"Taken: {workload.layout}{pipeline}, microbatches x sequences {workload.num_microbatches} x "
        f"{workload.microbatch}, activation checkpointing {workload.activation_checkpoint}: "
        f"{winner.tokens_per_second:,.0f} tokens/s a GPU, {winner.memory.total / GIB:.1f} GiB.",
    ]


def in_words(count: int) -> str:
    """``8.03 billion``."""
    return f"{count / 1e9:,.2f} billion" if count >= 1e9 else f"{count / 1e6:,.1f} million"


def _size(case: Case) -> Iterator[str]:
    parameters, config = model_parameters(case.shape), case.config
    stored = {"float32": 4, "bfloat16": 2}[config.training.dtype]
    moments = {"float32": 8, "bfloat16": 4, "8bit": 2}[config.optimizer.state_dtype]
    each = 2 * stored + moments
    whole = each * parameters / GIB
    yield (
        f"{case.shape.name} has {in_words(parameters)} parameters. Weights, gradients and the optimizer's "
        f"state take {each} bytes of each: {whole:,.1f} GiB, {whole / case.num_gpus:,.2f} GiB on each of "
        f"{case.num_gpus} GPUs where FSDP splits them."
    )
    yield (
        f"A plan may take {usable_bytes(case.hardware) / GIB:.1f} of the {case.hardware.memory_bytes / GIB:.0f} GiB of "
        f"{case.hardware.name}: {MEMORY_MARGIN:.0%} stay free."
    )


def _start(found: Found) -> Iterator[str]:
    """Pure FSDP, and how much recomputation it needs."""
    case, pure = found.case, frozenset[str]()
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
        f"that does (GiB: {', '.join(needs)}), at {fitting.tokens_per_second:,.0f} tokens/s a GPU."
    )


def _options(case: Case, winner: Candidate) -> Iterator[str]:
    """compile, float8, resharding, async TP: what each is worth here."""
    one, hardware = winner.workload, case.hardware
    if one.compile:
        yield _gain("Compile", winner, judge(replace(one, compile=False, async_tp=False), hardware))
    if one.precision == "float8":
        other = replace(one, precision="bfloat16", float8_recipe="", float8_all_gather=False)
        yield _gain("float8", winner, judge(other, hardware))
    elif one.precision == "bfloat16" and one.compile and hardware.float8_flops:
        other = replace(one, precision="float8", float8_recipe="tensorwise", float8_all_gather=one.layout.fsdp > 1)
        speed = judge(other, hardware).tokens_per_second / winner.tokens_per_second - 1
        worth = "it changes numbers, so it has to be asked for: --precision float8" if speed > 0 else "so it stays off"
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


def _axis(found: Found, winner: Candidate, axis: str) -> str:
    """Why an axis is taken, or not."""
    taken, name = family_of(winner.workload.layout), NAMES[axis]
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
            f"{TIE:.0%} that the model does not tell apart."
        )
    return f"{name} is not taken: {other.workload.layout} is {why_slower(other, winner)}."


def _fastest(found: Found, families: Iterable[Family]) -> Candidate | None:
    wanted = set(families)
    pool = [one for one in found.fitting if family_of(one.workload.layout) in wanted]
    return max(pool, key=lambda one: one.tokens_per_second, default=None)


def _smallest(found: Found, families: Iterable[Family]) -> Candidate | None:
    return min((found.too_large[family] for family in families), key=lambda one: one.memory.total, default=None)

"""``make_plan``: a search and its report; ``recommend``: its winner; ``alternatives``: cases that fit. Torch-free."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from crius.config.layout import DEGREES
from crius.config.rules import RULES, extras_installed, known_model, ranges
from crius.config.rules_experts import expert_parallel_divides
from crius.config.rules_layout import activation_checkpoint_options, sequence_divides, tensor_parallel_divides
from crius.config.rules_training import OPTIMIZER_RULES
from crius.config.run import replace_fields
from crius.errors import ConfigError, CriusError, LayoutError
from crius.tools.plan.compare import validated_range
from crius.tools.plan.explain import Neighbour, explain, neighbours
from crius.tools.plan.hardware import KNOWN
from crius.tools.plan.legal import Case, violations
from crius.tools.plan.remedies import MOST_HOST_BYTES, OFFLOAD, Remedy, remedies, remedies_of_shape
from crius.tools.plan.search import (
    Candidate,
    Reject,
    SearchResult,
    best,
    best_rows,
    fewest_gpus,
    fewest_with,
    power_below,
    rejects,
    search,
    state_bytes,
    usable_bytes,
)
from crius.tools.plan.variants import overrides

MOST_REMEDIES = 6
LORA_RANK = 16
"""Rank of the adapters that are proposed."""
MOST_TRIES = 20
"""Most winners that the rules of a run may refuse before the plan has no winner."""

PLAN_RULES = [rule for rule in RULES if rule is not extras_installed]
"""Rules that do not hold for a plan: packages on this machine do not matter for a run elsewhere."""

OPEN_RULES = (
    *(known_model, ranges, tensor_parallel_divides, sequence_divides, activation_checkpoint_options),
    *OPTIMIZER_RULES,
)
"""Rules that are meaningful for a run whose degrees are partly open."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Report about a case.

    Attributes:
        case: what was asked.
        found: results of the search.
        winner: recommended candidate; None: nothing fits.
        settings: dotted fields that turn a run into the winner.
        rows: the winner and the fastest other layouts.
        rejected: instructive other candidates, with reasons.
        nearby: effects of one change.
        least_gpus: smallest number of GPUs on which some layout fits; 0: no number is enough.
        least_keeps_degrees: whether that number is enough with the given degrees.
        outside: why measurements do not support the winner, or else the smallest layout; empty if they do.
        seconds: seconds that the plan took.
    """

    case: Case
    found: SearchResult
    winner: Candidate | None
    settings: dict[str, Any]
    rows: list[Candidate]
    rejected: list[Reject]
    nearby: list[Neighbour]
    least_gpus: int
    least_keeps_degrees: bool
    outside: list[str]
    seconds: float


def make_plan(case: Case, *, is_brief: bool = False) -> Plan:
    """Search ``case`` and report.

    Args:
        case: what is asked.
        is_brief: leave out sensitivity and the smallest number of GPUs.

    Raises:
        ConfigError: layouts fit, but the rules of a run refuse all of them for the given settings.
    """
    started = time.monotonic()
    found = search(case)
    winner = legal_best(found)
    rows = best_rows(found, winner) if winner else []
    shown = winner or found.smallest
    least, keeps_degrees = (0, True) if is_brief else fewest_with(case, fits=winner is not None)
    return Plan(
        case=case,
        found=found,
        winner=winner,
        settings=overrides(case, winner.workload) if winner else {},
        rows=rows,
        rejected=rejects(found, winner, rows) if winner else [],
        nearby=neighbours(case, winner) if winner and not is_brief else [],
        least_gpus=least,
        least_keeps_degrees=keeps_degrees,
        outside=validated_range(shown.workload, case.hardware) if shown else [],
        seconds=time.monotonic() - started,
    )


def check_case(case: Case, origin: Callable[[str], str]) -> None:
    """Check the given settings by the rules of a run, with open degrees at one rank.

    Args:
        case: what is asked.
        origin: gives the origin of a dotted field.

    Raises:
        ConfigError: all violations.
    """
    if case.config.activation_checkpoint.mode == "memory_budget" and "activation_checkpoint.mode" in case.pinned:
        raise ConfigError(
            "activation_checkpoint.mode memory_budget cannot be planned.",
            where=f"--activation_checkpoint.mode ({origin('activation_checkpoint.mode')})",
            why="torch.compile chooses the ops to recompute",
            fix="--activation_checkpoint.mode selective, or leave it out to let the plan choose",
        )
    if case.facts is not None:
        without = () if case.shape.num_experts else (expert_parallel_divides,)
        problems = violations(case.config, case.facts, case.num_gpus, (*OPEN_RULES, *without), origin)
        if problems:
            raise ConfigError.together(problems)
    _check_batch(case, origin)
    degrees = {name: case.given(name) or 1 for axis, name in DEGREES.items() if axis != "ep"}
    total = math.prod(degrees.values())
    if case.num_gpus % total:
        given = {name: degree for name, degree in degrees.items() if degree > 1}
        raise LayoutError(
            f"{case.num_gpus} GPUs are not a multiple of {total}, the product of the given degrees.",
            where=", ".join(f"--{name} {degree}" for name, degree in given.items()),
            why="the degrees multiply to the number of GPUs",
            fix=f"--gpus {-(-case.num_gpus // total) * total}, or leave a degree out",
        )


def _check_batch(case: Case, origin: Callable[[str], str]) -> None:
    """Check that the given batch sizes split into microbatches, for any layout.

    Raises:
        ConfigError: they do not.
    """
    name = "training.global_batch_size"
    training = case.config.training
    replicas = case.given(DEGREES["dp_replicate"]) or 1
    shards = case.given(DEGREES["dp_shard"]) or 1
    local = 1 if training.reproducible else case.given("training.local_batch_size") or 1
    total = training.global_batch_size
    unit = local * replicas * shards
    if total < 1 or total % unit == 0:
        return
    given = [field for field in (name, "training.local_batch_size") if case.given(field)]
    raise ConfigError(
        f"global_batch_size {total} is not a multiple of {unit}: local_batch_size {local} x the given ranks.",
        where=", ".join(f"--{field} ({origin(field)})" for field in given),
        why="each data-parallel rank takes whole microbatches",
        fix=f"--{name} {-(-total // unit) * unit}, or leave a size or a degree out",
    )


def legal_best(found: SearchResult) -> Candidate | None:
    """The best candidate that the rules of a run accept; None if nothing fits.

    Raises:
        ConfigError: some candidates fit, but the rules accept none: the errors of the best one.
    """
    case = found.case
    pool = found.fitting

    def origin(name: str) -> str:
        return "given" if name in case.pinned else "planned"

    refused: list[CriusError] = []
    for _ in range(MOST_TRIES):
        winner = best(pool, case.hardware)
        if winner is None or case.facts is None:
            break
        one = winner.workload
        config = replace_fields(case.config, overrides(case, one))
        problems = violations(config, case.facts, case.num_gpus, PLAN_RULES, origin)
        if not problems:
            return winner
        refused = refused or problems
        shape = (one.layout, one.schedule, one.microbatch)
        pool = [
            other
            for other in pool
            if (other.workload.layout, other.workload.schedule, other.workload.microbatch) != shape
        ]
    if refused:
        raise ConfigError.together(refused)
    return winner


def recommend(case: Case) -> tuple[Candidate, list[str]]:
    """The layout, recomputation and microbatch that a run should use, and why, as sentences.

    Raises:
        LayoutError: nothing fits, or nothing is legal.
        ConfigError: candidates fit, but given settings make the rules refuse them.
    """
    found = search(case)
    winner = legal_best(found)
    if winner is None:
        raise nothing_fits(found)
    return winner, explain(found, winner)


def remedies_of(plan: Plan) -> list[Remedy]:
    """Changes if nothing fits: of settings of the smallest layout, the cheapest that suffice first; second LoRA."""
    case = plan.case
    smallest = plan.found.smallest
    if smallest is None:
        return []
    target = usable_bytes(case.hardware)
    fixed = case.pinned & {OFFLOAD}
    if case.facts is None:
        return remedies_of_shape(smallest.workload, case.hardware, target, on_gpu=case.on_gpu, fixed=fixed)
    config = replace_fields(case.config, overrides(case, smallest.workload))
    found = remedies(
        config,
        case.facts,
        case.num_gpus,
        case.hardware,
        target,
        on_gpu=case.on_gpu,
        most=MOST_REMEDIES,
        rules=PLAN_RULES,
        fixed=fixed,
    )
    first = found[:1] if found and found[0].fits else []
    return [*first, *_adapters(plan.found), *found[len(first) :]]


def _adapters(found: SearchResult) -> Iterator[Remedy]:
    """LoRA if a layout then fits: on the weights as they are, or else in 4 bits."""
    case = found.case
    smallest = found.smallest
    if case.facts is None or smallest is None:
        return
    start: dict[str, Any] = {} if case.config.lora.is_on else {"lora.rank": LORA_RANK}
    for fields in (start, {**start, "lora.base": "nf4"}):
        winner = _winner(case.with_fields(fields))  # None if the case has them
        if winner is not None:
            yield Remedy(
                changes=fields,
                num_ranks=case.num_gpus,
                nbytes=winner.memory.total,
                saved=smallest.memory.total - winner.memory.total,
                slower=winner.time.total / smallest.time.total - 1,
                note="trains adapters alone",
                fits=True,
            )
            return


def _winner(case: Case) -> Candidate | None:
    """The winner of a plan; None if nothing fits, or the rules of a run refuse what does."""
    try:
        return make_plan(case, is_brief=True).winner
    except ConfigError:
        return None


def nothing_fits(found: SearchResult) -> LayoutError:
    """The error of a search that found nothing, with the smallest number of GPUs."""
    case = found.case
    smallest = found.smallest
    flags = ", ".join(f"--{name}" for name in sorted(case.pinned))
    if smallest is None:
        return LayoutError(
            f"no layout of {case.num_gpus} GPUs is legal for {case.shape.name} and {case.global_batch_size} sequences "
            "per step.",
            where=flags,
            why="degrees must divide the GPUs, the heads, the sequence and the batch",
            fix=f"--training.global_batch_size {-(-case.global_batch_size // case.num_gpus) * case.num_gpus}, or give "
            "fewer flags",
        )
    need = smallest.memory.total / 2**30
    most = usable_bytes(case.hardware) / 2**30
    least, keeps_degrees = fewest_with(case)
    more = f"use {least} GPUs{'' if keeps_degrees else ' with other degrees'}, or " if least else ""
    offload = f", --{OFFLOAD}" if state_bytes(case) / case.num_gpus <= MOST_HOST_BYTES else ""
    lora = "".join(f"; or {one.flags}, which fits and {one.note}" for one in _adapters(found))
    return LayoutError(
        f"{case.shape.name} does not fit on {case.num_gpus} x {case.hardware.name}: the smallest layout, "
        f"{smallest.workload.layout}, needs {need:,.1f} GiB of {most:,.1f}.",
        where=flags,
        fix=f"{more}less per number: --optimizer.state_dtype 8bit, "
        f"--training.dtype bfloat16{offload}; crius plan shows the savings of each{lora}",
    )


SHORTEST = 256
"""Shortest sequence in tokens that is tried."""

OTHER_GPU = "h100-80g"


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """An alternative case.

    Attributes:
        what: description, in words.
        case: a case that fits.
        changes: dotted fields whose value differs from the request.
        left_out: dotted fields that were given and are open now.
        gpu: name of other hardware; empty: the hardware of the case.
    """

    what: str
    case: Case
    changes: Mapping[str, Any]
    left_out: frozenset[str] = frozenset()
    gpu: str = ""


def alternatives(plan: Plan, remedies: Iterable[Remedy]) -> list[Alternative]:
    """Cases with a winner, near a case without one; a case that changes no numbers is the last. Empty if there are
    none.

    They are on the same GPUs without the given degrees, or with the cheapest remedy; and on the smallest sufficient
    number of GPUs. If neither exists: shorter sequences, and last other GPUs.

    Args:
        plan: plan without a winner.
        remedies: changes of its smallest layout, the cheapest first.
    """
    same = next((one for one in _on_the_same(plan.case, remedies) if _fits(one)), None)
    fewest = next((one for one in _on_the_fewest(plan) if _fits(one)), None)
    found = [one for one in (same, fewest) if one is not None]
    if len(found) == 2 and found[0].case == found[1].case:
        found.pop()
    return found or [one for one in _on_others(plan.case) if _fits(one)][:1]


def _fits(one: Alternative) -> bool:
    return _winner(one.case) is not None


def _given_degrees(case: Case) -> frozenset[str]:
    return case.pinned & set(DEGREES.values())


def _on_the_same(case: Case, remedies: Iterable[Remedy]) -> Iterator[Alternative]:
    degrees = _given_degrees(case)
    here = f"{case.num_gpus:,} x {case.hardware.name}"
    if degrees:
        what = f"fits on {here} with other degrees than those given"
        yield Alternative(what=what, case=case.with_any_degrees, changes={}, left_out=degrees)
    for one in remedies:
        if one.suffices and one.num_ranks == case.num_gpus:
            yield Alternative(
                what=f"fits on {here} with {one.flags}", case=case.with_fields(one.changes), changes=one.changes
            )


def _on_the_fewest(plan: Plan) -> Iterator[Alternative]:
    case = plan.case
    degrees = _given_degrees(plan.case)
    if not plan.least_gpus:
        return
    what = f"fits on {plan.least_gpus:,} x {case.hardware.name}, the fewest"
    if plan.least_keeps_degrees:
        yield Alternative(what=what, case=case.on(plan.least_gpus), changes={})
    else:
        yield Alternative(what=what, case=case.with_any_degrees.on(plan.least_gpus), changes={}, left_out=degrees)


def _on_others(case: Case) -> Iterator[Alternative]:
    """Alternatives with shorter and shorter sequences here, then on other GPUs with these and the whole sequence."""
    degrees = _given_degrees(case)
    wide = case.with_any_degrees
    length = power_below(wide.config.training.seq_len)
    while length >= SHORTEST:
        shorter = {"training.seq_len": length}
        what = f"fits on {case.num_gpus:,} x {case.hardware.name} with sequences of {length:,} tokens"
        yield Alternative(what=what, case=wide.with_fields(shorter), changes=shorter, left_out=degrees)
        length //= 2
    on_gpu = wide.with_fields({"training.device": "auto"})
    other = replace(on_gpu, hardware=KNOWN[OTHER_GPU], pinned=on_gpu.pinned - {"training.device"})
    least = fewest_gpus(other)
    if least:
        left_out = degrees | {"training.device"}
        what = f"fits on {least:,} x {OTHER_GPU}"
        yield Alternative(what=what, case=other.on(least), changes={}, left_out=left_out, gpu=OTHER_GPU)

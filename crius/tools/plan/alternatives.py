"""Cases that fit, in place of one that does not. Torch-free."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from crius.config.layout import DEGREES
from crius.config.run import replace_fields
from crius.errors import ConfigError
from crius.tools.plan.hardware import KNOWN
from crius.tools.plan.legal import Case
from crius.tools.plan.plan import Plan, make_plan
from crius.tools.plan.remedies import Remedy
from crius.tools.plan.search import fewest_gpus, power_below

SHORTEST = 256
"""Tokens of a sequence below which no shorter one is tried."""

OTHER_GPU = "h100-80g"


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What to ask for instead.

    Attributes:
        what: it is, in words.
        case: that fits.
        changes: dotted fields that have another value than was asked.
        left_out: dotted fields that were given and are open now.
        gpu: name of other hardware; empty: that of the case.
    """

    what: str
    case: Case
    changes: Mapping[str, Any]
    left_out: frozenset[str] = frozenset()
    gpu: str = ""


def alternatives(plan: Plan, remedies: Iterable[Remedy]) -> list[Alternative]:
    """Cases with a winner near one that has none, the one that changes no numbers last; empty where none is found.

    On the same GPUs without the degrees that were given, or with the cheapest remedy; on the fewest GPUs that are
    enough. Where there is neither: shorter sequences, and at last other GPUs.

    Args:
        plan: of which nothing fits.
        remedies: changes of its smallest layout, the cheapest first.
    """
    same = next((one for one in _on_the_same(plan.case, remedies) if _fits(one)), None)
    fewest = next((one for one in _on_the_fewest(plan) if _fits(one)), None)
    found = [one for one in (same, fewest) if one is not None]
    if len(found) == 2 and found[0].case == found[1].case:
        found.pop()
    return found or [one for one in _on_others(plan.case) if _fits(one)][:1]


def _fits(one: Alternative) -> bool:
    try:
        return make_plan(one.case, is_brief=True).winner is not None
    except ConfigError:  # its layouts fit, and the rules of a run refuse them
        return False


def _given_degrees(case: Case) -> frozenset[str]:
    return case.pinned & set(DEGREES.values())


def _on_the_same(case: Case, remedies: Iterable[Remedy]) -> Iterator[Alternative]:
    degrees, here = _given_degrees(case), f"{case.num_gpus:,} x {case.hardware.name}"
    if degrees:
        what = f"fits on {here} with other degrees than those given"
        yield Alternative(what=what, case=case.with_any_degrees, changes={}, left_out=degrees)
    for one in remedies:
        if one.suffices and one.num_ranks == case.num_gpus:
            yield Alternative(
                what=f"fits on {here} with {one.flags}", case=_with(case, one.changes), changes=one.changes
            )


def _on_the_fewest(plan: Plan) -> Iterator[Alternative]:
    case, degrees = plan.case, _given_degrees(plan.case)
    if not plan.least_gpus:
        return
    what = f"fits on {plan.least_gpus:,} x {case.hardware.name}, the fewest"
    if plan.least_keeps_degrees:
        yield Alternative(what=what, case=case.on(plan.least_gpus), changes={})
    else:
        yield Alternative(what=what, case=case.with_any_degrees.on(plan.least_gpus), changes={}, left_out=degrees)


def _on_others(case: Case) -> Iterator[Alternative]:
    """With ever shorter sequences here, then with these and with the whole sequence on other GPUs."""
    degrees, wide = _given_degrees(case), case.with_any_degrees
    length = power_below(wide.config.training.seq_len)
    while length >= SHORTEST:
        shorter = {"training.seq_len": length}
        what = f"fits on {case.num_gpus:,} x {case.hardware.name} with sequences of {length:,} tokens"
        yield Alternative(what=what, case=_with(wide, shorter), changes=shorter, left_out=degrees)
        length //= 2
    on_gpu = _with(wide, {"training.device": "auto"})
    other = replace(on_gpu, hardware=KNOWN[OTHER_GPU], pinned=on_gpu.pinned - {"training.device"})
    least = fewest_gpus(other)
    if least:
        left_out = degrees | {"training.device"}
        what = f"fits on {least:,} x {OTHER_GPU}"
        yield Alternative(what=what, case=other.on(least), changes={}, left_out=left_out, gpu=OTHER_GPU)


def _with(case: Case, fields: Mapping[str, Any]) -> Case:
    return replace(case, config=replace_fields(case.config, dict(fields)), pinned=case.pinned | set(fields))

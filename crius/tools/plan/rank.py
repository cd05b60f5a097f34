"""Which candidate to take, and which others are worth a look. Torch-free."""

from collections.abc import Iterable
from dataclasses import dataclass

from crius.config.layout import Layout
from crius.tools.plan.hardware import Hardware
from crius.tools.plan.search import AXES, Candidate, Family, Found, family_of, usable_bytes
from crius.units import GIB

TIE = 0.03
"""Share of tokens/s below which the model does not tell two layouts apart, and that each axis costs in the order: one
more has to gain twice as much, since equals go to fewer axes."""

ENOUGH_HEADROOM = 0.15
"""Share of the memory beyond which more of it free is worth no time."""

OPTION_STEP = 0.01
"""Share of tokens/s that an option has to gain to be taken."""

MOST_ROWS = 5


NAMES = {"tp": "TP", "pp": "PP", "cp": "CP", "ep": "EP", "dp_replicate": "replicas"}
"""Of the axes beside FSDP's shards."""


@dataclass(frozen=True)
class Reject:
    """A candidate that is not taken, with the reason."""

    candidate: Candidate
    reason: str


def score(one: Candidate) -> float:
    """Tokens/s, less ``TIE`` for each axis that a layout has beside FSDP's shards."""
    axes = len(family_of(one.workload.layout))
    return one.tokens_per_second * (1.0 - TIE) ** axes


def best(candidates: Iterable[Candidate], hardware: Hardware) -> Candidate | None:
    """The one to take: of those whose ``score`` is within ``TIE`` of the highest the one with the fewest axes.

    Then without CP if that is a choice, for fewer measurements support it, with more headroom as far as that is worth
    something, and without options that gain next to nothing. None of none.
    """
    pool = list(candidates)
    if not pool:
        return None
    highest = max(map(score, pool))
    tied = [one for one in pool if score(one) >= highest * (1 - TIE)]
    fastest = max(one.tokens_per_second for one in tied)

    def key(one: Candidate) -> tuple[object, ...]:
        work, speed = one.workload, one.tokens_per_second
        headroom = min(one.headroom(hardware), ENOUGH_HEADROOM)
        options = (work.reshard == "never") + (work.gradient_sync == "deferred") + (work.stages_per_rank > 2)
        slower = int((1 - speed / fastest) / OPTION_STEP)
        family = family_of(work.layout)
        return len(family), "cp" in family, -round(headroom, 2), slower, options, -speed

    return min(tied, key=key)


def best_of_families(found: Found) -> dict[Family, Candidate]:
    """The best candidate of each set of axes of which one fits."""
    pools: dict[Family, list[Candidate]] = {}
    for one in found.fitting:
        pools.setdefault(family_of(one.workload.layout), []).append(one)
    chosen = {family: best(pool, found.case.hardware) for family, pool in pools.items()}
    return {family: one for family, one in chosen.items() if one is not None}


def best_rows(found: Found, winner: Candidate) -> list[Candidate]:
    """The winner, and after it the fastest of other layouts, one of each."""
    fastest: dict[tuple[Layout, str], Candidate] = {}
    for one in found.fitting:
        key = (one.workload.layout, one.workload.schedule)
        if key not in fastest or one.tokens_per_second > fastest[key].tokens_per_second:
            fastest[key] = one
    fastest.pop((winner.workload.layout, winner.workload.schedule), None)
    others = sorted(fastest.values(), key=lambda one: -one.tokens_per_second)
    return [winner, *others[: MOST_ROWS - 1]]


def rejects(found: Found, winner: Candidate, shown: Iterable[Candidate]) -> list[Reject]:
    """Of each set of axes that the table lacks its best candidate and why it is worse, the instructive ones first."""
    families, fitting = {family_of(one.workload.layout) for one in shown}, best_of_families(found)
    chosen = [Reject(one, why_slower(one, winner)) for family, one in fitting.items() if family not in families]
    chosen += [
        Reject(one, why_too_large(one, found.case.hardware))
        for family, one in found.too_large.items()
        if family not in families and family not in fitting
    ]
    # pure FSDP first, then what is nearest to the winner
    target = family_of(winner.workload.layout)
    chosen.sort(key=lambda one: (bool(axes := family_of(one.candidate.workload.layout)), len(axes ^ target), len(axes)))
    return chosen[:MOST_ROWS]


def why_slower(one: Candidate, winner: Candidate) -> str:
    """How much slower a candidate is, and the part of its step that grows most against the winner's, for one token."""
    share = 1 - one.tokens_per_second / winner.tokens_per_second
    if share < TIE:
        return "as fast within the model's error, but with more axes or less headroom"

    def extra(part: str) -> float:
        mine, other = (of.time.parts.get(part, 0.0) / of.workload.tokens_per_rank for of in (one, winner))
        return mine - other

    part = max(one.time.parts, key=extra)
    shares = [of.time.parts.get(part, 0.0) / of.time.total for of in (one, winner)]
    mode, other = (of.workload.activation_checkpoint for of in (one, winner))
    if part in ("matmul", "attention", "elementwise") and mode != other:
        return f"{share:.0%} slower: it recomputes {mode}, the plan {other}"
    return f"{share:.0%} slower: {spelled(part)} is {shares[0]:.0%} of the step, in the plan {shares[1]:.0%}"


def why_too_large(one: Candidate, hardware: Hardware) -> str:
    """How much memory a candidate needs, and what for."""
    part = max(one.memory.parts, key=lambda name: one.memory.parts[name])
    need, most = one.memory.total / GIB, usable_bytes(hardware) / GIB
    return f"needs {need:,.1f} GiB of {most:,.1f}: {spelled(part)} {one.memory.parts[part] / GIB:,.1f}"


def spelled(part: str) -> str:
    """A part of an estimate in words."""
    kind, _, axis = part.partition("_")
    if kind == "communication":
        return f"{ {'fsdp': 'FSDP', 'dp': 'replica'}.get(axis, axis.upper()) } communication"
    return part.replace("_", " ")


def axes_named(family: Family) -> str:
    """``FSDP x TP x PP``."""
    return " x ".join(["FSDP", *(NAMES[axis] for axis in AXES if axis in family)])

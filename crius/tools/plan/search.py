"""The search: every legal layout of a case with its memory and time, the best, and instructive others. Torch-free."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from crius.config.layout import Layout
from crius.config.resolve import ITEMSIZE
from crius.tools.plan.hardware import Hardware
from crius.tools.plan.holdings import model_parameters
from crius.tools.plan.legal import Case, layouts
from crius.tools.plan.memory import memory
from crius.tools.plan.time import step_time
from crius.tools.plan.variants import Variants
from crius.tools.plan.workload import MOMENT_BYTES, Estimate, Workload
from crius.units import GIB

MEMORY_MARGIN = 0.08
"""Share of the memory that a plan leaves free: a plan that wrongly fits costs more than one that wrongly does not."""

MOST_GPUS = 2**17
"""Number of GPUs at which the search for the smallest number ends."""

Family = frozenset[str]
"""Axes that a layout uses besides FSDP's shards."""

AXES = ("tp", "pp", "cp", "ep", "dp_replicate")


@lru_cache(maxsize=4096)
def family_of(layout: Layout) -> Family:
    """The axes besides FSDP's shards that ``layout`` uses."""
    return frozenset(axis for axis in AXES if getattr(layout, axis) > 1)


@dataclass(frozen=True)
class Candidate:
    """One layout with all its options.

    Attributes:
        workload: layout and options.
        memory: bytes of the fullest rank.
        time: seconds of a step, also for a layout that does not fit.
        fits: whether it fits with ``MEMORY_MARGIN``.
    """

    workload: Workload
    memory: Estimate
    time: Estimate
    fits: bool

    @cached_property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU."""
        return self.workload.tokens_per_rank / self.time.total

    def mfu(self, hardware: Hardware) -> float | None:
        """Model FLOPs utilisation in [0, 1] of the bfloat16 peak, as a run logs it; None on a CPU."""
        if hardware.generation == "cpu":
            return None
        # a token of a run sees (seq_len + 1) / 2 tokens on average, with itself
        flops = self.workload.model.flops_per_token(self.workload.seq_len)
        return self.tokens_per_second * flops / hardware.bfloat16_flops

    def headroom(self, hardware: Hardware) -> float:
        """Share of a GPU's memory that stays free."""
        return 1 - self.memory.total / hardware.memory_bytes


@dataclass(frozen=True)
class SearchResult:
    """Results of a search.

    Attributes:
        case: task of the search.
        fitting: candidates that fit, in no order.
        too_large: for each family of layouts without a fitting option, its smallest candidate.
        num_judged: candidates whose memory was computed.
    """

    case: Case
    fitting: list[Candidate]
    too_large: dict[Family, Candidate]
    num_judged: int

    @property
    def smallest(self) -> Candidate | None:
        """The candidate that does not fit but needs least memory; None if all fit, or nothing is legal."""
        return min(self.too_large.values(), key=lambda one: one.memory.total, default=None)


def usable_bytes(hardware: Hardware) -> float:
    """Bytes of a GPU's memory that a plan may use."""
    return hardware.memory_bytes * (1 - MEMORY_MARGIN)


def judge(workload: Workload, hardware: Hardware) -> Candidate:
    """``workload`` with its memory and time."""
    need = memory(workload, hardware)
    return Candidate(workload, need, step_time(workload, hardware), need.total <= usable_bytes(hardware))


def search(case: Case) -> SearchResult:
    """All legal layouts of ``case``, each with the least recomputation that fits.

    Recomputation always costs time, so more of it is judged only if less does not fit.
    """
    hardware = case.hardware
    variants = Variants(case)
    limit = usable_bytes(case.hardware)
    fitting: list[Candidate] = []
    too_large: dict[Family, tuple[float, Workload]] = {}
    num_judged = 0
    for layout in layouts(case):
        for group in variants.groups(layout):
            smallest = group.smallest
            least = memory(smallest, hardware).total
            num_judged += 1
            if least > limit:
                family = family_of(layout)
                if family not in too_large or least < too_large[family][0]:
                    too_large[family] = (least, smallest)
                continue
            for mode in group.modes:
                needs = [(one, memory(one, hardware)) for one in group.of(mode)]
                num_judged += len(needs)
                found = [
                    Candidate(one, need, step_time(one, hardware), fits=True)
                    for one, need in needs
                    if need.total <= limit
                ]
                fitting += found
                if found:
                    break
    return SearchResult(
        case, fitting, {family: judge(one, hardware) for family, (_, one) in too_large.items()}, num_judged
    )


def fits_on(case: Case) -> bool:
    """Whether some layout of ``case`` fits."""
    variants = Variants(case)
    limit = usable_bytes(case.hardware)
    if state_bytes(case) / case.num_gpus > limit and not case.config.training.enable_cpu_offload:
        return False
    return any(
        memory(one, case.hardware).total <= limit for layout in layouts(case) for one in variants.smallest(layout)
    )


def state_bytes(case: Case) -> float:
    """Bytes of trained weights and optimizer state of the whole model, which every layout needs."""
    training = case.config.training
    optimizer = case.config.optimizer
    moments = 1 if optimizer.name == "muon" else 2
    each = ITEMSIZE[training.dtype] + moments * MOMENT_BYTES[optimizer.state_dtype]
    return (case.shape.num_trained if case.shape.adapted else model_parameters(case.shape)) * each


def fewest_gpus(case: Case, *, fits: bool = False) -> int:
    """The smallest number of GPUs on which some layout fits: any number within a node, then whole nodes.

    Args:
        case: task, for any number of GPUs.
        fits: whether a layout was found on ``case.num_gpus``, so that no more are needed.

    Returns:
        The number; 0 if ``MOST_GPUS`` are not enough.
    """
    node = case.hardware.gpus_per_node
    most = case.num_gpus if fits else MOST_GPUS
    unit = 1
    while not fits_on(case.on(unit)):
        unit *= 2
        if unit > most:
            break
    if unit > most and not fits:
        return 0
    unit = min(unit, most)
    lower = power_below(unit)
    for number in range(lower + 1, min(unit - 1, node) + 1):
        if fits_on(case.on(number)):
            return number
    too_few = max(lower // node, 1)
    enough = -(-unit // node)
    while enough - too_few > 1:  # with whole nodes, fewer than a power of two may be enough
        middle = (too_few + enough) // 2
        if fits_on(case.on(middle * node)):
            enough = middle
            unit = middle * node
        else:
            too_few = middle
    return unit


def fewest_with(case: Case, *, fits: bool = False) -> tuple[int, bool]:
    """``fewest_gpus`` with the given degrees, else with any; and whether the given degrees were possible."""
    found = fewest_gpus(case, fits=fits)
    return (found, True) if found else (fewest_gpus(case.with_any_degrees), False)


def power_below(number: int) -> int:
    """The largest power of two below ``number``; 0 below 1."""
    return 1 << (number - 1).bit_length() - 1 if number > 1 else 0


TIE = 0.03
"""Share of tokens/s below which the model cannot tell two layouts apart. Each axis costs as much in the ranking: one
more axis must gain twice as much, because ties go to fewer axes."""

ENOUGH_HEADROOM = 0.15
"""Share of the memory above which further free memory is worth no time."""

NEAR = 0.05
LIGHTER = 0.10
"""Where memory is short, a layout within ``NEAR`` of the fastest is taken if it needs ``LIGHTER`` less memory:
published repetitions of one configuration differ by 6 % in speed, and a run that does not fit has none."""

OPTION_STEP = 0.01
"""Share of tokens/s that an option must gain to be used."""

MOST_ROWS = 5


NAMES = {"tp": "TP", "pp": "PP", "cp": "CP", "dp_replicate": "replicas", "ep": "EP"}
"""Order of the axes besides FSDP's shards."""


@dataclass(frozen=True)
class Reject:
    """A candidate that is not recommended, with the reason."""

    candidate: Candidate
    reason: str


def score(one: Candidate) -> float:
    """Tokens/s, less ``TIE`` for each axis that a layout has besides FSDP's shards."""
    axes = len(family_of(one.workload.layout))
    return one.tokens_per_second * (1.0 - TIE) ** axes


def best(candidates: Iterable[Candidate], hardware: Hardware) -> Candidate | None:
    """The best candidate; None if there are no candidates.

    It is the preferred one. If that leaves less than ``ENOUGH_HEADROOM``, it is the preferred one among those within
    ``NEAR`` of the fastest that need at least ``LIGHTER`` less memory, if there are any.
    """
    pool = list(candidates)
    chosen = _preferred(pool, hardware)
    if chosen is None or chosen.headroom(hardware) >= ENOUGH_HEADROOM:
        return chosen
    least = max(one.tokens_per_second for one in pool) * (1 - NEAR)
    most = chosen.memory.total * (1 - LIGHTER)
    lighter = [one for one in pool if one.tokens_per_second >= least and one.memory.total <= most]
    return _preferred(lighter, hardware) or chosen


def _preferred(pool: Sequence[Candidate], hardware: Hardware) -> Candidate | None:
    """The candidate with the fewest axes among those whose ``score`` is within ``TIE`` of the highest.

    Ties are broken by: no CP, because fewer measurements support it; more headroom, as far as that is worth something;
    no options that gain next to nothing. None if the pool is empty.
    """
    if not pool:
        return None
    highest = max(map(score, pool))
    tied = [one for one in pool if score(one) >= highest * (1 - TIE)]
    fastest = max(one.tokens_per_second for one in tied)

    def key(one: Candidate) -> tuple[object, ...]:
        work = one.workload
        speed = one.tokens_per_second
        headroom = min(one.headroom(hardware), ENOUGH_HEADROOM)
        options = (work.reshard == "never") + (work.gradient_sync == "deferred") + (work.stages_per_rank > 2)
        slower = int((1 - speed / fastest) / OPTION_STEP)
        family = family_of(work.layout)
        return len(family), "cp" in family, -round(headroom, 2), slower, options, -speed

    return min(tied, key=key)


def best_of_families(found: SearchResult) -> dict[Family, Candidate]:
    """The best candidate of each set of axes with a fitting candidate."""
    pools: dict[Family, list[Candidate]] = {}
    for one in found.fitting:
        pools.setdefault(family_of(one.workload.layout), []).append(one)
    chosen = {family: best(pool, found.case.hardware) for family, pool in pools.items()}
    return {family: one for family, one in chosen.items() if one is not None}


def best_rows(found: SearchResult, winner: Candidate) -> list[Candidate]:
    """The winner, then the fastest candidate of each other layout."""
    fastest: dict[tuple[Layout, str], Candidate] = {}
    for one in found.fitting:
        key = (one.workload.layout, one.workload.schedule)
        if key not in fastest or one.tokens_per_second > fastest[key].tokens_per_second:
            fastest[key] = one
    fastest.pop((winner.workload.layout, winner.workload.schedule), None)
    others = sorted(fastest.values(), key=lambda one: -one.tokens_per_second)
    return [winner, *others[: MOST_ROWS - 1]]


def rejects(found: SearchResult, winner: Candidate, shown: Iterable[Candidate]) -> list[Reject]:
    """For each set of axes that the table lacks, its best candidate and why it is worse; the instructive ones first."""
    families = {family_of(one.workload.layout) for one in shown}
    fitting = best_of_families(found)
    chosen = [Reject(one, why_slower(one, winner)) for family, one in fitting.items() if family not in families]
    chosen += [
        Reject(one, why_too_large(one, found.case.hardware))
        for family, one in found.too_large.items()
        if family not in families and family not in fitting
    ]
    # pure FSDP first, then the sets nearest to the winner's
    target = family_of(winner.workload.layout)
    chosen.sort(key=lambda one: (bool(axes := family_of(one.candidate.workload.layout)), len(axes ^ target), len(axes)))
    return chosen[:MOST_ROWS]


def why_slower(one: Candidate, winner: Candidate) -> str:
    """How much slower a candidate is, and the part of its step that grows most over the winner's, per token."""
    share = 1 - one.tokens_per_second / winner.tokens_per_second
    if share < TIE and winner.memory.total <= one.memory.total * (1 - LIGHTER):
        return f"as fast within the model's error, but needs {one.memory.total / GIB:.1f} GiB"
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
    return f"{share:.0%} slower: {spelled(part)} is {shares[0]:.0%} of the step, {shares[1]:.0%} in the plan"


def why_too_large(one: Candidate, hardware: Hardware) -> str:
    """Memory that a candidate needs, and its largest part."""
    part = max(one.memory.parts, key=lambda name: one.memory.parts[name])
    need = one.memory.total / GIB
    most = usable_bytes(hardware) / GIB
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

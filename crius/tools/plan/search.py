"""The search: every legal layout of a case with its memory and time, and the one to take. Torch-free."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from crius.config.layout import Layout
from crius.config.resolve import ITEMSIZE
from crius.tools.plan.hardware import Hardware
from crius.tools.plan.legal import Case, layouts
from crius.tools.plan.memory import memory, model_parameters
from crius.tools.plan.time import step_time
from crius.tools.plan.variants import Variants
from crius.tools.plan.workload import MOMENT_BYTES, Estimate, Workload

MEMORY_MARGIN = 0.08
"""Share of the memory that a plan leaves free: what is said to fit and does not costs more than the reverse."""

MOST_GPUS = 2**17
"""Where the search for the smallest number of GPUs ends."""

Family = frozenset[str]
"""Axes that a layout uses beside FSDP's shards."""

AXES = ("tp", "pp", "cp", "ep", "dp_replicate")


@lru_cache(maxsize=4096)
def family_of(layout: Layout) -> Family:
    """The axes beside FSDP's shards that ``layout`` uses."""
    return frozenset(axis for axis in AXES if getattr(layout, axis) > 1)


@dataclass(frozen=True)
class Candidate:
    """One layout with all its options.

    Attributes:
        workload: what it is.
        memory: bytes of the fullest rank.
        time: seconds of a step, of one that does not fit too.
        fits: with ``MEMORY_MARGIN``.
    """

    workload: Workload
    memory: Estimate
    time: Estimate
    fits: bool

    @cached_property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.workload.tokens_per_rank / self.time.total

    def mfu(self, hardware: Hardware) -> float | None:
        """Model FLOPs utilisation in [0, 1] as a run logs it: of the bfloat16 peak; None on a CPU."""
        if hardware.generation == "cpu":
            return None
        # a token of a run sees (seq_len + 1) / 2 tokens in the mean, itself among them
        flops = self.workload.model.flops_per_token((self.workload.seq_len + 1) / 2)
        return self.tokens_per_second * flops / hardware.bfloat16_flops

    def headroom(self, hardware: Hardware) -> float:
        """Share of a GPU's memory that stays free."""
        return 1 - self.memory.total / hardware.memory_bytes


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        case: what was looked for.
        fitting: candidates that fit, in no order.
        too_large: of each family of layouts of which some fit with no option, the smallest such candidate.
        num_judged: candidates whose memory was computed.
    """

    case: Case
    fitting: list[Candidate]
    too_large: dict[Family, Candidate]
    num_judged: int


def usable_bytes(hardware: Hardware) -> float:
    """What a plan may take of a GPU's memory."""
    return hardware.memory_bytes * (1 - MEMORY_MARGIN)


def judge(workload: Workload, hardware: Hardware) -> Candidate:
    """``workload`` with its memory and time."""
    need = memory(workload, hardware)
    return Candidate(workload, need, step_time(workload, hardware), need.total <= usable_bytes(hardware))


def search(case: Case) -> Found:
    """All legal layouts of ``case``, each with the least recomputation that fits.

    Recomputation costs time whatever the rest, so that what recomputes more is judged only where less does not fit.
    """
    hardware, variants, limit = case.hardware, Variants(case), usable_bytes(case.hardware)
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
    return Found(case, fitting, {family: judge(one, hardware) for family, (_, one) in too_large.items()}, num_judged)


def fits_on(case: Case) -> bool:
    """Whether some layout of ``case`` fits."""
    variants, limit = Variants(case), usable_bytes(case.hardware)
    if state_bytes(case) / case.num_gpus > limit and not case.config.training.enable_cpu_offload:
        return False
    return any(
        memory(one, case.hardware).total <= limit for layout in layouts(case) for one in variants.smallest(layout)
    )


def state_bytes(case: Case) -> float:
    """Weights and the optimizer's state of the whole model: what no layout does without."""
    training, optimizer = case.config.training, case.config.optimizer
    moments = 1 if optimizer.name == "muon" else 2
    return model_parameters(case.shape) * (ITEMSIZE[training.dtype] + moments * MOMENT_BYTES[optimizer.state_dtype])


def fewest_gpus(case: Case, *, fits: bool = False) -> int:
    """The smallest number of GPUs on which some layout fits: any number within a node, then whole nodes.

    Args:
        case: what is asked, on any number of GPUs.
        fits: a layout was found on ``case.num_gpus``, so that no more are needed.

    Returns:
        0 where ``MOST_GPUS`` are not enough.
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
    too_few, enough = max(lower // node, 1), -(-unit // node)
    while enough - too_few > 1:  # of whole nodes, fewer than a power of two may do
        middle = (too_few + enough) // 2
        if fits_on(case.on(middle * node)):
            enough, unit = middle, middle * node
        else:
            too_few = middle
    return unit


def fewest_with(case: Case, *, fits: bool = False) -> tuple[int, bool]:
    """``fewest_gpus`` with the degrees that were given or, where none is enough, with any; and whether with those."""
    found = fewest_gpus(case, fits=fits)
    return (found, True) if found else (fewest_gpus(case.with_any_degrees), False)


def power_below(number: int) -> int:
    """The largest power of two below ``number``; 0 below 1."""
    return 1 << (number - 1).bit_length() - 1 if number > 1 else 0

"""The arithmetic of a pipeline: stages, microbatches, modules of each stage. No torch, so that the rules can use it."""

import difflib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from crius.config.parallelism import ParallelismConfig
from crius.config.schedule import PREFIX, read_schedule
from crius.errors import LayoutError

V_SCHEDULES = ("zbv_zero_bubble", "dualpipev")
"""Schedules in which each rank has one stage on the way down and one on the way up: rank 0 has the first and the
last."""

SPLIT_BACKWARD = ("interleave_zero_bubble", "zbv_zero_bubble", "dualpipev")
"""Schedules that compute the gradients of inputs and of weights at different times."""

EMBEDDING_COST = 0.5
"""FLOPs per token that count for each number of a module without matmuls. The gradient of an embedding is dense:
zeroing, filling and reading it moves the whole weight. It is a twelfth of the cost of an output layer of the same
size."""


class Module(Protocol):
    """A module that a stage can hold: ``crius.models.description.ModuleFacts``."""

    @property
    def name(self) -> str:
        """Name in the model."""

    @property
    def parameters(self) -> int:
        """Number of trained numbers."""

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token of the module's forward and backward."""


def stages_per_rank(parallelism: ParallelismConfig) -> int:
    """Stages that a pipeline rank holds.

    Raises:
        LayoutError: the schedule file is wrong, see ``read_schedule``.
    """
    if parallelism.pipeline_parallel_schedule_csv:
        return len({action.stage for action in read_schedule(parallelism)[0]})
    if parallelism.pipeline_parallel_stages_per_rank != -1:
        return parallelism.pipeline_parallel_stages_per_rank
    return 1 if parallelism.pipeline_parallel_schedule in ("gpipe", "1f1b") else 2


def settle_stages(parallelism: ParallelismConfig, num_layers: int) -> ParallelismConfig:
    """``parallelism``, with one stage per rank if interleave_1f1b may choose and there are too few layers for two."""
    degree = parallelism.pipeline_parallel_degree
    is_chosen = parallelism.pipeline_parallel_stages_per_rank == -1 and not parallelism.pipeline_parallel_schedule_csv
    is_interleaved = parallelism.pipeline_parallel_schedule == "interleave_1f1b"
    if is_chosen and is_interleaved and 1 < degree <= num_layers < 2 * degree:
        return replace(parallelism, pipeline_parallel_stages_per_rank=1)
    return parallelism


def describe_stages(parallelism: ParallelismConfig) -> str:
    """Note about the stages per rank, for the log; empty if there is nothing to note."""
    if parallelism.pipeline_parallel_schedule_csv or stages_per_rank(parallelism) > 1:
        return ""
    if parallelism.pipeline_parallel_schedule != "interleave_1f1b":
        return ""
    degree = parallelism.pipeline_parallel_degree
    return f"interleave_1f1b has nothing to interleave: {degree} ranks have one stage each, with the bubble of 1f1b"


def num_stages(parallelism: ParallelismConfig) -> int:
    """Stages of the whole pipeline; 1 without a pipeline."""
    degree = parallelism.pipeline_parallel_degree
    return degree * stages_per_rank(parallelism) if degree > 1 else 1


def placement(parallelism: ParallelismConfig) -> list[list[int]]:
    """The stages of each rank, ascending: as in the schedule file, or by ``stages_of_ranks``."""
    degree = parallelism.pipeline_parallel_degree
    if degree > 1 and parallelism.pipeline_parallel_schedule_csv:
        return [sorted({action.stage for action in row}) for row in read_schedule(parallelism)]
    return stages_of_ranks(parallelism.pipeline_parallel_schedule, degree, num_stages(parallelism))


def stages_of_ranks(schedule: str, degree: int, stages: int) -> list[list[int]]:
    """The stages of each rank, ascending. They are dealt round the ranks, or for ``V_SCHEDULES`` down and up again."""
    if degree > 1 and schedule in V_SCHEDULES:
        return [[rank, stages - 1 - rank] for rank in range(degree)]
    return [list(range(rank, stages, degree)) for rank in range(degree)]


def microbatch_unit(parallelism: ParallelismConfig) -> int:
    """The fewest microbatches per step that keep the pipeline busy. Every multiple of them is legal too."""
    if parallelism.pipeline_parallel_degree <= 1:
        return 1
    if parallelism.pipeline_parallel_schedule_csv:
        return 1 + max(action.microbatch for action in read_schedule(parallelism)[0])
    if parallelism.pipeline_parallel_schedule in V_SCHEDULES:
        return num_stages(parallelism)
    return parallelism.pipeline_parallel_degree


def microbatches_allowed(parallelism: ParallelismConfig, count: int) -> bool:
    """Whether the schedule can run ``count`` microbatches per step."""
    return count >= 1 and count % _microbatch_divisor(parallelism, count) == 0


def _microbatch_divisor(parallelism: ParallelismConfig, count: int) -> int:
    """Number that must divide ``count``; ``count + 1`` if there are too few microbatches."""
    degree = parallelism.pipeline_parallel_degree
    schedule = parallelism.pipeline_parallel_schedule
    if degree <= 1:
        return 1
    if parallelism.pipeline_parallel_schedule_csv:
        return microbatch_unit(parallelism)  # the file's schedule is repeated
    if schedule in ("interleave_1f1b", "interleave_zero_bubble"):
        return max(1, count // degree)  # rounds of equal size, at least ``degree`` microbatches each
    least = {"1f1b": degree, "dualpipev": 2 * degree}.get(schedule, 1)
    return 1 if count >= least else count + 1


def legal_microbatches(parallelism: ParallelismConfig, share: int) -> list[int]:
    """Counts of microbatches that the schedule can run and that divide ``share``, a rank's sequences per step."""
    return [n for n in range(1, share + 1) if share % n == 0 and microbatches_allowed(parallelism, n)]


def describe_microbatches(parallelism: ParallelismConfig, count: int, local_batch_size: int, is_asked: bool) -> str:
    """The number of microbatches and its reason, for the log.

    Args:
        parallelism: the section.
        count: microbatches per step.
        local_batch_size: sequences per microbatch.
        is_asked: whether the size of a microbatch was given; otherwise it was chosen to keep the pipeline busy.
    """
    unit = microbatch_unit(parallelism)
    why = "as --training.local_batch_size asks" if is_asked else f"chosen: a multiple of {unit} keeps all stages busy"
    return f"{count} microbatches of {local_batch_size} sequences per step ({why})"


def cost(module: Module) -> float:
    """Cost of a module when stages are balanced, in FLOPs per token: see ``EMBEDDING_COST``."""
    return module.flops_per_token or EMBEDDING_COST * module.parameters


def is_layer(name: str) -> bool:
    """Whether a module is one of the repeated layers, such as ``layers.7``."""
    return name.rpartition(".")[2].isdecimal()


def split_stages(modules: Sequence[Module], stages: int, parallelism: ParallelismConfig) -> list[tuple[str, ...]]:
    """The modules of each stage, in forward order. Every stage has a layer, and the norm stays with the output layer.

    By default the greatest cost of a stage is made as small as possible, then the costs are made as even as possible.

    Args:
        modules: all modules of the model, in forward order.
        stages: number of stages.
        parallelism: may give the modules of each stage, or how many layers fewer the first and the last stage have.

    Raises:
        LayoutError: there are more stages than layers, or an explicit list does not hold each module once and in order.
    """
    names = [module.name for module in modules]
    if stages > 1 and parallelism.pipeline_parallel_module_names_per_stage:
        return _explicit(names, stages, parallelism.pipeline_parallel_module_names_per_stage)
    layers = [index for index, name in enumerate(names) if is_layer(name)]
    if stages > len(layers):
        raise LayoutError(
            f"{stages} pipeline stages need at least as many layers; the model has {len(layers)}.",
            why="every stage has at least one layer",
            fix=f"use at most {len(layers)} stages: a lower --{PREFIX}degree, or fewer stages per rank",
        )
    # modules before the first layer stay with it, modules after the last layer stay with that
    bounds = [0, *layers[1:], len(names)]
    costs = [sum(map(cost, modules[start:stop])) for start, stop in zip(bounds, bounds[1:], strict=False)]
    less = (parallelism.pipeline_parallel_first_stage_less_layers, parallelism.pipeline_parallel_last_stage_less_layers)
    is_even = less == (-1, -1)
    sizes = _balanced(tuple(costs), stages) if is_even else _dealt(len(layers), stages, *(max(0, n) for n in less))
    found = []
    start = 0
    for size in sizes:
        found.append(tuple(names[bounds[start] : bounds[start + size]]))
        start += size
    return found


def layers_of_stages(stages: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Number of layers in each stage of ``split_stages``."""
    return tuple(sum(map(is_layer, names)) for names in stages)


@lru_cache(maxsize=1024)
def _balanced(costs: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """Sizes of ``stages`` runs of ``costs`` whose greatest sum is as small as possible, then with even sums."""
    low = max(costs)
    high = sum(costs)
    while high - low > 1e-12 * high:
        limit = (low + high) / 2
        low, high = (low, limit) if _runs_below(costs, limit) <= stages else (limit, high)
    limit = high * (1 + 1e-9)  # sums in another order differ in the last digits
    before = [0.0, *itertools.accumulate(costs)]
    # for each prefix of the costs: sum of squares and sizes; each round adds a stage
    row: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ()), *[None] * len(costs)]
    for stage in range(stages):
        fresh: list[tuple[float, tuple[int, ...]] | None] = [None] * (len(costs) + 1)
        for stop in range(stage + 1, len(costs) - (stages - stage - 1) + 1):
            for start in range(stop - 1, stage - 1, -1):
                earlier = row[start]
                own = before[stop] - before[start]
                if own > limit:
                    break
                known = fresh[stop]
                if earlier is not None and (known is None or earlier[0] + own * own < known[0]):
                    fresh[stop] = (earlier[0] + own * own, (*earlier[1], stop - start))
        row = fresh
    end = row[len(costs)]
    assert end is not None
    return end[1]


def _runs_below(costs: Sequence[float], limit: float) -> int:
    """The fewest runs of ``costs`` whose sums are at most ``limit``; no single cost is above ``limit``."""
    runs = 1
    total = 0.0
    for cost in costs:
        runs, total = (runs, total + cost) if total + cost <= limit else (runs + 1, cost)
    return runs


def _dealt(layers: int, stages: int, first_less: int, last_less: int) -> Sequence[int]:
    """Layers of each stage, dealt evenly except to the first and the last; the remainder goes to the middle stages."""
    each, over = divmod(layers + first_less + last_less, stages)
    sizes = [each] * stages
    for stage in [*range(1, stages - 1), 0][:over]:
        sizes[stage] += 1
    sizes[0] -= first_less
    sizes[-1] -= last_less
    if min(sizes) < 1:
        raise LayoutError(
            f"{layers} layers on {stages} stages, {first_less} fewer on the first and {last_less} on the last, leave a "
            f"stage with {min(sizes)}.",
            where=f"--{PREFIX}first_stage_less_layers, --{PREFIX}last_stage_less_layers",
            why="every stage has at least one layer",
            fix=f"--{PREFIX}first_stage_less_layers 0 --{PREFIX}last_stage_less_layers 0",
        )
    return sizes


def _explicit(names: Sequence[str], stages: int, given: Sequence[str]) -> list[tuple[str, ...]]:
    where = f"--{PREFIX}module_names_per_stage"
    found = [tuple(_expand(value, len(names))) for value in given]
    flat = [name for stage in found for name in stage]
    right = "one value per stage with every module once and in order, or leave it out to balance by cost"
    if len(found) != stages:
        raise LayoutError(
            f"{len(found)} lists of modules are given, but there are {stages} stages.", where=where, fix=f"give {right}"
        )
    unknown = next((name for name in flat if name not in names), None)
    doubled = next((name for name in flat if flat.count(name) > 1), None)
    missing = next((name for name in names if name not in flat), None)
    moved = next((name for name, expected in zip(flat, names, strict=False) if name != expected), None)
    empty = next((stage for stage, held in enumerate(found) if not any(map(is_layer, held))), None)
    what = ""
    if unknown is not None:
        near = difflib.get_close_matches(unknown, names, n=1, cutoff=0.6)
        what = f"the model has no module {unknown}" + (f", did you mean {near[0]}?" if near else ".")
    elif doubled is not None:
        what = f"module {doubled} is on {flat.count(doubled)} stages."
    elif missing is not None:
        what = f"no stage has module {missing}."
    elif moved is not None:
        what = f"module {moved} is out of order."
    elif empty is not None:
        what = f"stage {empty} has no layer."
    elif found[-1][-2:] != tuple(names[-2:]):
        what = f"{names[-2]} and {names[-1]} are on different stages."
    if what:
        raise LayoutError(what, where=where, why=f"the modules are, in order: {join_names(names)}", fix=f"give {right}")
    return found


def _expand(value: str, most: int) -> Iterable[str]:
    """The names that ``tok_embeddings,layers.0-3`` stands for; a range ends after ``most``, which exceeds any model."""
    for name in filter(None, (part.strip() for part in value.split(","))):
        ends = re.fullmatch(r"(.*\.)(\d+)-(\d+)", name)
        if ends:
            yield from (
                f"{ends[1]}{number}" for number in range(int(ends[2]), min(int(ends[3]), int(ends[2]) + most) + 1)
            )
        else:
            yield name


def join_names(names: Sequence[str]) -> str:
    """Names with runs of layers shortened, as ``_expand`` reads them: ``tok_embeddings, layers.0-7``."""
    runs: list[tuple[str, int, int]] = []
    for name in names:
        stem, _, number = name.rpartition(".")
        is_next = is_layer(name) and runs and runs[-1][0] == stem and runs[-1][2] + 1 == int(number)
        if is_next:
            runs[-1] = (stem, runs[-1][1], int(number))
        else:
            runs.append((stem, int(number), int(number)) if is_layer(name) else (name, -1, -1))
    return ", ".join(
        stem if first < 0 else f"{stem}.{first}" + f"-{last}" * (last > first) for stem, first, last in runs
    )


def splits_backward(parallelism: ParallelismConfig) -> bool:
    """Whether the gradients of inputs and of weights are computed apart, in two backward passes over one graph.

    Raises:
        LayoutError: the schedule file is wrong, see ``read_schedule``.
    """
    if parallelism.pipeline_parallel_degree <= 1:
        return False
    if parallelism.pipeline_parallel_schedule_csv:
        return any(action.kind == "I" for row in read_schedule(parallelism) for action in row)
    return parallelism.pipeline_parallel_schedule in SPLIT_BACKWARD

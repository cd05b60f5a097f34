"""The stages of a pipeline: the modules and actions of each rank, and its idle time."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from crius.config.parallelism import ParallelismConfig
from crius.config.pipeline import Module, cost, is_layer, join_names, num_stages, placement, stages_per_rank
from crius.config.schedule import Action, Order, needs, read_schedule, run_order
from crius.table import aligned

TORCH_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleave_1f1b": "Interleaved1F1B",
    "interleave_zero_bubble": "InterleavedZeroBubble",
    "zbv_zero_bubble": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Our name of a schedule, mapped to the name in ``torch.distributed.pipelining``."""


def stage_indices(parallelism: ParallelismConfig, pp_rank: int) -> list[int]:
    """The stages of one pipeline rank, ascending."""
    return placement(parallelism)[pp_rank]


def prune(model: nn.Module, names: Sequence[str]) -> None:
    """Turn a whole model on the meta device into the stage that has only the modules ``names``, in place.

    Other layers are removed from their container, and other modules become ``nn.Identity``. The model's own forward
    then takes token ids on the first stage and the hidden state ``(B, T, D)`` elsewhere, and parameters keep their
    names.
    """
    for name, child in list(model.named_children()):
        if name in names or next(child.parameters(), None) is None:  # every stage keeps modules such as masks
            continue
        if not isinstance(child, nn.ModuleDict):
            setattr(model, name, nn.Identity())
            continue
        for key in list(child):
            if f"{name}.{key}" not in names:
                del child[key]


def order_of(parallelism: ParallelismConfig, num_microbatches: int) -> Order:
    """The actions of each rank of the pipeline in a step, without a process group.

    Raises:
        LayoutError: the schedule file is not valid, see ``read_schedule``.
        ValueError: the schedule does not support this number of microbatches.
    """
    degree = parallelism.pipeline_parallel_degree
    schedule = parallelism.pipeline_parallel_schedule
    if parallelism.pipeline_parallel_schedule_csv:
        rows = read_schedule(parallelism)
        unit = 1 + max(action.microbatch for action in rows[0])
        firsts = range(0, num_microbatches, unit)
        return [
            [action._replace(microbatch=first + action.microbatch) for first in firsts for action in row]
            for row in rows
        ]
    if schedule in ("gpipe", "1f1b"):
        return [_single(schedule, rank, degree, num_microbatches) for rank in range(degree)]
    made = [
        SimpleNamespace(num_stages=num_stages(parallelism), group_size=degree, group_rank=0, submod=None, is_last=False)
        for _ in range(stages_per_rank(parallelism))
    ]
    table = get_schedule_class(TORCH_SCHEDULES[schedule])(made, num_microbatches).pipeline_order
    return [[action for cell in table[rank] if cell is not None for action in _flat(cell)] for rank in range(degree)]


def _single(schedule: str, rank: int, degree: int, num_microbatches: int) -> list[Action]:
    """One stage per rank. A rank runs ahead by one forward per stage from its own on; under gpipe by all forwards."""
    ahead = num_microbatches if schedule == "gpipe" else min(num_microbatches, degree - rank)
    forwards = [Action(rank, "F", microbatch) for microbatch in range(num_microbatches)]
    order = forwards[:ahead]
    for microbatch in range(num_microbatches):
        order += [Action(rank, "B", microbatch), *forwards[ahead + microbatch : ahead + microbatch + 1]]
    return order


def _flat(cell: Any) -> list[Action]:
    """A torch action as our actions. A forward that overlaps a backward becomes two actions: torch runs them so."""
    parts = getattr(cell, "sub_actions", None) or (cell,)
    return [Action(part.stage_index, part.computation_type.value, part.microbatch_index) for part in parts]


@dataclass(frozen=True)
class Timeline:
    """A simulated step of the pipeline, without time for communication.

    Attributes:
        order: actions of each rank.
        bubble: share of the step that a rank idles, the mean over the ranks, in [0, 1).
        in_flight: for each stage, the most microbatches whose activations it holds at once.
        step: length of the step, in the unit of the costs.
    """

    order: Order
    bubble: float
    in_flight: list[int]
    step: float

    def peak(self, rank: int, held: Sequence[float]) -> float:
        """The most that ``rank`` holds at once if each microbatch in flight takes ``held[stage]``."""
        now = most = 0.0
        for stage, kind, _ in self.order[rank]:
            now += {"F": 1, "I": 0}.get(kind, -1) * held[stage]
            most = max(most, now)
        return most


def simulate(order: Order, costs: Sequence[float]) -> Timeline:
    """Simulate ``order``. A forward takes a stage's cost; the gradients of inputs and of weights take as much each.

    Args:
        order: result of ``order_of``.
        costs: cost of each stage, in any unit.
    """
    last = len(costs) - 1
    free = [0.0] * len(order)
    busy = [0.0] * len(order)
    done: dict[Action, float] = {}
    flying = [0] * len(costs)
    most = [0] * len(costs)
    for rank, action in run_order(order):
        takes = costs[action.stage] * (2 if action.kind == "B" else 1)
        end = max([free[rank], *(done[need] for need in needs(action, last))]) + takes
        free[rank] = done[action._replace(kind="I") if action.kind == "B" else action] = end
        busy[rank] += takes
        flying[action.stage] += {"F": 1, "I": 0}.get(action.kind, -1)
        most[action.stage] = max(most[action.stage], flying[action.stage])
    step = max(free)
    return Timeline(order, 1 - sum(busy) / (step * len(order)), most, step)


def stage_costs(modules: Sequence[Module], stages: Sequence[Sequence[str]]) -> list[float]:
    """The cost of each stage in FLOPs per token; see ``crius.config.pipeline.cost``."""
    weights = {module.name: cost(module) for module in modules}
    return [sum(weights[name] for name in stage) for stage in stages]


def stage_table(
    modules: Sequence[Module], stages: Sequence[Sequence[str]], ranks: Sequence[Sequence[int]], timeline: Timeline
) -> list[str]:
    """Aligned lines: rank, modules, layers, parameters and share of the cost of each stage, then totals and bubble.

    Args:
        modules: modules of the whole model.
        stages: modules of each stage, from ``split_stages``.
        ranks: stages of each rank, from ``placement``.
        timeline: simulation of the schedule with the costs of these stages.
    """
    rank_of = {stage: rank for rank, held in enumerate(ranks) for stage in held}
    parameters = {module.name: module.parameters for module in modules}
    costs = stage_costs(modules, stages)
    rows = [("stage", "rank", "modules", "layers", "parameters", "cost", "in flight")]
    for stage, names in enumerate(stages):
        rows.append(
            (
                f"{stage}",
                f"{rank_of[stage]}",
                join_names(names),
                f"{sum(map(is_layer, names))}",
                f"{sum(parameters[name] for name in names):,}",
                f"{costs[stage] / sum(costs):.1%}",
                f"{timeline.in_flight[stage]}",
            )
        )
    num_layers = sum(is_layer(name) for names in stages for name in names)
    rows.append(("total", "", "", f"{num_layers}", f"{sum(parameters.values()):,}", "100.0%", ""))
    waits = f"bubble {timeline.bubble:.1%}: share of a step that a rank waits, without communication"
    return [*aligned(rows, left=(2,)), waits]

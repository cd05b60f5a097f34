"""The stages of a pipeline, and the memory of a rank: the schedule's own actions with their measured cost."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from crius.config.pipeline import num_stages, placement, split_stages
from crius.config.schedule import Action
from crius.parallel.stages import order_of, simulate, stage_costs
from crius.tools.dry_run.extrapolate import Extrapolation
from crius.tools.dry_run.measure import STAGE_MICROBATCHES, DryJob, hidden_shape, measure_stage
from crius.tools.dry_run.memory import Bytes, Values, kinds_of
from crius.tools.dry_run.table import RankReport, StageReport, Traffic
from crius.train.inputs import run_modules

_PLACES = ("0", "1", "-1")  # of the microbatches of a stage's measurement, as ``recorder.places`` names them
_AFTER = (("forward", "1"), ("forward", "-1"), ("sync", "0"))
_BATCH_TENSORS = 3  # tokens, labels and positions


def pipeline(
    job: DryJob, groups: dict[str, str], *, extrapolate: bool
) -> tuple[list[StageReport], list[RankReport], Extrapolation]:
    """Every stage of this rank's pipeline, and the memory of each of its ranks at the peak.

    Args:
        job: the run.
        groups: name of each process group to its axis.
        extrapolate: whether to extrapolate from a few blocks to many.
    """
    parallelism = job.config.parallelism
    count = job.sizes.accumulation
    modules = run_modules(job.config, job.facts)
    total = num_stages(parallelism)
    split = split_stages(modules, total, parallelism)
    timeline = simulate(order_of(parallelism, count), stage_costs(modules, split))
    splits = any(action.kind in "IW" for row in timeline.order for action in row)

    def measure(names: Sequence[str], _: int) -> Values:
        index = 1
        if modules[0].name in names:
            index = 0
        elif modules[-1].name in names:
            index = total - 1
        return measure_stage(job, names, index, total, groups, splits=splits)

    extrapolation = Extrapolation(measure, job.config, job.facts, full=not extrapolate)
    found = [extrapolation.of(names, 1) for names in split]
    held = placement(parallelism)
    rank_of = {stage: rank for rank, stages in enumerate(held) for stage in stages}
    reports = []
    received = {}
    for index, (names, values) in enumerate(zip(split, found, strict=True)):
        others = [side for side in (index - 1, index + 1) if 0 <= side < total and rank_of[side] != rank_of[index]]
        received[index] = len(others) * count * hidden_bytes(job)
        sent = {"count": len(others) * count, "bytes": received[index]}
        if values["copied",] and rank_of[0] != rank_of[total - 1]:  # the gradient of a tied weight
            sent = {"count": sent["count"] + 1, "bytes": sent["bytes"] + values["copied",]}
        traffic = Counter({(way, "pp", what): n for way in ("send", "recv") for what, n in sent.items() if n})
        times = {"1": min(1, count - 1), "2": max(0, count - STAGE_MICROBATCHES + 1)}
        reports.append(stage_report(index, rank_of[index], names, values, traffic, times, timeline.in_flight[index]))
    batch = _BATCH_TENSORS * torch.int64.itemsize * count * job.sizes.local * job.num_tokens
    ranks = []
    for rank, stages in enumerate(held):
        buffers = batch + sum(received[stage] for stage in stages)
        peak, moment = walk(timeline.order[rank], {stage: found[stage] for stage in stages}, buffers, splits=splits)
        ranks.append(RankReport(rank, list(stages), peak, moment))
    return reports, ranks, extrapolation


def hidden_bytes(job: DryJob) -> int:
    """Bytes that one stage sends the next per microbatch."""
    dtype: torch.dtype = getattr(torch, job.config.training.mixed_precision_param)
    return math.prod(hidden_shape(job)) * dtype.itemsize


def stage_report(
    index: int,
    rank: int,
    names: Sequence[str],
    values: Values,
    traffic: Traffic,
    times: Mapping[str, int] | None = None,
    in_flight: int = 1,
) -> StageReport:
    """The totals of one stage, or of the whole model.

    Args:
        index: index of the stage.
        rank: its pipeline rank.
        names: its modules.
        values: the measurement.
        traffic: traffic that was not measured; the collectives are added.
        times: how often a measured microbatch occurs in the step, if not once.
        in_flight: microbatches whose activations it has at once.
    """
    flops = 0
    for (what, *key), number in values.items():
        if what not in ("flops", "collective"):
            continue
        weighted = number * (times or {}).get(key[1], 1)
        if what == "flops":
            flops += weighted
        else:
            traffic[tuple(key[2:])] += weighted  # type: ignore[index]
    begin = kinds_of(values, "start", "begin", "0")
    held = kinds_of(values, "start", "backward", "0") + kinds_of(values, "start", "input", "0")  # exactly one of them
    return StageReport(
        stage=index,
        pp_rank=rank,
        modules=list(names),
        parameters=values["parameters",],
        parameter_bytes=begin["parameters"],
        gradient_bytes=kinds_of(values, "start", "clip", "0")["gradients"],
        optimizer_bytes=begin["optimizer"],
        activation_bytes=held["activations"],
        in_flight=in_flight,
        flops=flops,
        traffic=traffic,
    )


def walk(actions: Sequence[Action], stages: Mapping[int, Values], buffers: int, *, splits: bool) -> tuple[Bytes, str]:
    """Memory of a rank at the peak of its step, and the action in which the peak is.

    Each action adds, while it runs, the measured need of its phase, and leaves what that phase left. The first
    microbatch of a stage also gathers its weights and creates its gradients.

    Args:
        actions: actions of the rank, in order.
        stages: measurements of its stages.
        buffers: bytes of the batch and of received tensors, which the schedule allocates once for all microbatches.
        splits: whether the stages were measured with a split backward.
    """
    halves = ("input", "weight") if splits else ("backward",)
    phases = {"F": ("forward",), "I": halves[:1], "W": halves[-1:], "B": halves}
    following = dict(itertools.pairwise(("forward", *halves)))
    living: Bytes = Counter({"buffers": buffers})
    for values in stages.values():
        living.update({kind: n for kind, n in kinds_of(values, "start", "begin", "0").items() if kind != "buffers"})
    steps: list[tuple[str, Bytes, Bytes]] = []  # what it is called, needs beyond what lives, and leaves
    done: Counter[tuple[int, str]] = Counter()
    last = {action.stage: action for action in actions}
    for action in actions:
        stage, kind, microbatch = action
        for phase in phases[kind]:
            number = min(done[stage, phase], STAGE_MICROBATCHES - 1)
            done[stage, phase] += 1
            then = (following[phase], _PLACES[number]) if phase in following else _AFTER[number]
            steps.append((f"{stage}{kind}{microbatch}", *_cost(stages[stage], (phase, _PLACES[number]), then)))
        if action is last[stage]:
            steps.append((f"gradient sync of stage {stage}", *_cost(stages[stage], ("sync", "0"), ("clip", "0"))))
    update: Bytes = Counter()
    for values in stages.values():
        update.update(_cost(values, ("optimizer", "0"), ("end", "0"))[0])
    steps.append(("optimizer", update, Counter()))
    peak = Counter(living)
    moment = "begin"
    for name, needed, left in steps:
        if living.total() + needed.total() > peak.total():
            peak = Counter(living)
            moment = name
            peak.update(needed)
        living.update(left)
    return peak, moment


def _cost(values: Values, phase: tuple[str, str], then: tuple[str, str]) -> tuple[Bytes, Bytes]:
    """Bytes that a phase needs at its peak, and bytes that it leaves, both beyond the bytes at its start."""
    before = kinds_of(values, "start", *phase)
    places = dict.fromkeys(key[3] for key in values if key[:3] == ("peak", *phase))
    peak = max((kinds_of(values, "peak", *phase, place) for place in places), key=Counter.total)
    return _less(peak, before), _less(kinds_of(values, "start", *then), before)


def _less(after: Bytes, before: Bytes) -> Bytes:
    return Counter({kind: after[kind] - before[kind] for kind in after if kind != "buffers"})

"""Which layers a pipeline rank holds, and of how many microbatches it holds activations at once. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from crius.config.parallelism import ParallelismConfig
from crius.config.pipeline import SPLIT_BACKWARD, V_SCHEDULES, is_layer, split_stages, stages_of_ranks
from crius.models.description import ModelDescription
from crius.tools.plan.workload import Workload


@dataclass(frozen=True)
class RankLayers:
    """What one pipeline rank holds.

    Attributes:
        dense: layers with a dense feed-forward.
        experts: layers with experts.
        dense_spans: where in the model the dense ones of each stage begin and end.
        expert_spans: the same of those with experts.
        has_embedding: the embedding is among it.
        has_head: the last norm and the output layer are.
        in_flight: microbatches of whose activations it holds all at once; of several stages the mean over its layers.
        neighbours: stages next to its own on other ranks, from which it receives.
    """

    dense: int
    experts: int
    dense_spans: tuple[tuple[int, int], ...]
    expert_spans: tuple[tuple[int, int], ...]
    has_embedding: bool = True
    has_head: bool = True
    in_flight: float = 1.0
    neighbours: int = 0

    @property
    def layers(self) -> int:
        """Of both kinds."""
        return self.dense + self.experts


def rank_layers(workload: Workload, rank: int) -> RankLayers:
    """What pipeline rank ``rank`` holds."""
    model, degree = workload.model, workload.layout.pp
    total = degree * workload.stages_per_rank if degree > 1 else 1
    held = stages_of_ranks(workload.schedule, degree, total)[rank] if degree > 1 else [0]
    sizes = (workload.stage_layers or _sizes(workload, total)) if degree > 1 else (model.num_layers,)
    leading = model.dense[0] if model.num_experts else sum(sizes)  # the first ones are dense
    spans = [(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in held]
    dense = tuple((begin, min(end, leading)) for begin, end in spans if begin < leading)
    experts = tuple((max(begin, leading), end) for begin, end in spans if end > leading)
    beside = {near for stage in held for near in (stage - 1, stage + 1) if 0 <= near < total}
    return RankLayers(
        dense=sum(end - begin for begin, end in dense),
        experts=sum(end - begin for begin, end in experts),
        dense_spans=dense,
        expert_spans=experts,
        has_embedding=0 in held,
        has_head=total - 1 in held,
        in_flight=_in_flight(workload, rank, tuple(sizes[stage] for stage in held)) if degree > 1 else 1.0,
        neighbours=sum(near not in held for near in beside),
    )


def _sizes(workload: Workload, stages: int) -> tuple[int, ...]:
    model = workload.model
    if workload.trainer.balances_memory:
        return stage_layers(model, stages, workload.seq_len)
    return _even(model.num_layers, stages) or (1,) * stages


def _in_flight(workload: Workload, rank: int, sizes: tuple[int, ...]) -> float:
    """Microbatches of whose activations pipeline rank ``rank`` holds all at once.

    1F1B and its interleaved form: Narayanan et al. 2021 (arXiv:2104.04473); zero bubble and its V: Qi et al. 2023 and
    2024 (arXiv:2401.10241, 2405.15362); DualPipe: arXiv:2412.19437.
    """
    degree, microbatches, schedule = workload.layout.pp, workload.num_microbatches, workload.schedule
    if schedule == "gpipe":
        return microbatches
    if schedule in V_SCHEDULES:
        return min(microbatches, degree + (1 if schedule == "dualpipev" else 0.5))
    if schedule.startswith("interleave") and len(sizes) > 1:
        return _interleaved(degree, rank, microbatches, sizes, splits=schedule in SPLIT_BACKWARD) / sum(sizes)
    return min(microbatches, degree - rank)


@lru_cache(maxsize=4096)
def _interleaved(degree: int, rank: int, microbatches: int, sizes: tuple[int, ...], *, splits: bool) -> int:
    """The most layers, each once for every microbatch, whose activations a rank with stages of ``sizes`` layers holds.

    It takes a round of microbatches through its first stage, then through its second, ..., backwards in the same way.
    Where the backward is split, later ranks fill the time that they wait with forwards, so that all hold as many.
    """
    stages = len(sizes)
    rounds = max(1, microbatches // degree)
    each = -(-microbatches // rounds)
    warm_up = 2 * (degree - (0 if splits else rank) - 1) + (stages - 1) * each
    rounds = min(rounds, (warm_up + 1) // (stages * each) + 3)  # later ones are as one that follows the warm-up
    forwards = [size for _ in range(rounds) for size in sizes for _ in range(each)][: microbatches * stages]
    backwards = [size for _ in range(rounds) for size in reversed(sizes) for _ in range(each)]
    ahead = min(len(forwards), warm_up + 1 + (splits and rank > 0))
    held = most = sum(forwards[:ahead])
    for entering, leaving in zip(forwards[ahead:], backwards, strict=False):
        held += entering - leaving
        most = max(most, held)
    return most


@lru_cache(maxsize=1024)
def stage_layers(model: ModelDescription, stages: int, seq_len: int) -> tuple[int, ...]:
    """Layers of each of ``stages``, as a run balances them."""
    if stages > model.num_layers:
        return (1,) * stages
    return layers_of_stages(split_stages(model.modules((seq_len + 1) / 2), stages, ParallelismConfig()))


def layers_of_stages(stages: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Layers of each stage, of ``split_stages``."""
    return tuple(sum(map(is_layer, names)) for names in stages)


def _even(count: int, stages: int) -> tuple[int, ...] | None:
    """``count`` layers on ``stages``, at least one each; None where that is impossible."""
    if stages == 0:
        return () if count == 0 else None
    if count < stages:
        return None
    each, over = divmod(count, stages)
    return (each + 1,) * over + (each,) * (stages - over)

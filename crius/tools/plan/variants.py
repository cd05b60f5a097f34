"""The workloads that a search judges, and the flags that give each of them. Torch-free."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from crius.config.layout import DEGREES, Layout
from crius.config.pipeline import SPLIT_BACKWARD
from crius.config.run import RunConfig, replace_fields
from crius.models.description import ModelDescription
from crius.models.registry import SPECS
from crius.tools.plan.legal import PREFIX, Case, microbatches, schedules
from crius.tools.plan.workload import MODES, Checkpointing, Device, Workload, from_config

_MODE = "activation_checkpoint.mode"
_SYNC = "training.gradient_sync"
_RESHARD = f"{PREFIX}reshard_after_forward_mode"
_SCHEDULE = f"{PREFIX}pipeline_parallel_schedule"
_STAGES = f"{PREFIX}pipeline_parallel_stages_per_rank"
_FLOAT8 = "quantize.dense.float8."

STAND_IN: dict[str, Any] = {"model.name": "llama3", "model.flavor": "8b"}
"""Model whose config stands in for a shape that is not trainable yet."""


@dataclass(frozen=True)
class VariantGroup:
    """Workloads that differ only in recomputation, resharding and gradient sync.

    Attributes:
        common: workload with everything that they share.
        modes: modes of recomputation, from the fastest to the smallest.
        options: pairs of resharding and sync, the smallest last.
    """

    common: Workload
    modes: Sequence[Checkpointing]
    options: Sequence[tuple[str, Any]]

    def of(self, mode: Checkpointing) -> list[Workload]:
        """The workloads with recomputation ``mode``."""
        return [
            replace(self.common, activation_checkpoint=mode, reshard=reshard, gradient_sync=sync)
            for reshard, sync in self.options
        ]

    @property
    def smallest(self) -> Workload:
        """The workload that needs least memory."""
        reshard, sync = self.options[-1]
        return replace(self.common, activation_checkpoint=self.modes[-1], reshard=reshard, gradient_sync=sync)


class Variants:
    """Workloads of a case. Facts that candidates share are computed once, from a config as a run would have it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._bases: dict[tuple[int, bool, bool, str], Workload] = {}

    def groups(self, layout: Layout) -> Iterator["VariantGroup"]:
        """The workloads of each schedule and microbatch."""
        mode = self.case.given(_MODE)
        for schedule, stages in schedules(self.case, layout):
            modes = (mode,) if mode in MODES else ("none",) if schedule in SPLIT_BACKWARD else MODES
            base = self._base(layout, schedule)
            for size, count in microbatches(self.case, layout, schedule, stages):
                one = replace(
                    base,
                    layout=layout,
                    microbatch=size,
                    num_microbatches=count,
                    schedule=schedule,
                    stages_per_rank=stages,
                )
                options = [(reshard, sync) for sync in _syncs(self.case, one) for reshard in _reshards(self.case, one)]
                yield VariantGroup(one, modes, options)

    def smallest(self, layout: Layout) -> Iterator[Workload]:
        """For each schedule the workloads that may need least memory: with full recomputation, and with the smallest
        microbatch or, as accumulation takes memory too, with the fewest microbatches.
        """
        by_schedule: dict[tuple[str, int], list[VariantGroup]] = {}
        for group in self.groups(layout):
            by_schedule.setdefault((group.common.schedule, group.common.stages_per_rank), []).append(group)
        for first, *others in by_schedule.values():
            yield from (group.smallest for group in (first, *others[-1:]))

    def _base(self, layout: Layout, schedule: str) -> Workload:
        """A workload with the options that follow from the layout; its degrees and sizes must still be replaced."""
        key = (layout.tp, layout.pp > 1, layout.fsdp > 1, schedule)
        if key not in self._bases:
            few = Layout(tp=layout.tp, pp=min(layout.pp, 2), dp_shard=min(layout.fsdp, 2))
            fields = {name: getattr(few, axis) for axis, name in DEGREES.items()}
            virtual_shards = max(1, self.case.config.training.virtual_shards)
            fields |= {"training.local_batch_size": 1, "training.global_batch_size": 64 * virtual_shards}
            if self.case.facts is None:
                fields |= STAND_IN
            config = replace_fields(self.case.config, fields | settings(self.case, few, schedule))
            device: Device = "cuda" if self.case.on_gpu else "cpu"
            facts = self.case.facts or stand_in(self.case)
            workload = _of_config(config, facts, few.num_ranks, device)
            self._bases[key] = replace(workload, model=self.case.shape, stage_layers=())  # those are of two stages
        return self._bases[key]


@lru_cache(maxsize=256)
def _of_config(config: RunConfig, facts: ModelDescription, num_ranks: int, device: Device) -> Workload:
    return from_config(config, facts, num_ranks, device=device)


def settings(case: Case, layout: Layout, schedule: str) -> dict[str, Any]:
    """Dotted fields besides degrees and batch that follow from a layout, unless they are pinned."""
    config = case.config
    wanted: dict[str, Any] = {"compile.enable": case.on_gpu and not (layout.pp > 1 and schedule in SPLIT_BACKWARD)}
    compiles = config.compile.enable if "compile.enable" in case.pinned else wanted["compile.enable"]
    if layout.tp > 1 and compiles and case.on_gpu:
        wanted[f"{PREFIX}enable_async_tensor_parallel"] = True
    float8 = config.quantize.dense.float8
    if float8.enable and float8.recipe == "tensorwise" and layout.fsdp > 1:
        wanted[f"{_FLOAT8}enable_fsdp_float8_all_gather"] = True
        wanted[f"{_FLOAT8}precompute_scale"] = not config.training.enable_cpu_offload
    if layout.pp > 1:
        wanted[_SCHEDULE] = schedule
    return {name: value for name, value in wanted.items() if name not in case.pinned}


def overrides(case: Case, workload: Workload) -> dict[str, Any]:
    """The dotted fields that turn a run of ``case.config`` into ``workload``, in reading order.

    They are the fields that differ from ``case.config`` and the pinned ones, so that the flags show everything that a
    plan depends on.
    """
    layout = workload.layout
    config = case.config
    found: dict[str, Any] = {
        "model.name": config.model.name,
        "model.flavor": config.model.flavor,
        "training.seq_len": workload.seq_len,
        "training.global_batch_size": workload.microbatch * workload.num_microbatches * layout.batch,
        "training.local_batch_size": workload.microbatch,
        **{DEGREES[axis]: getattr(layout, axis) for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")},
        **settings(case, layout, workload.schedule),
        _MODE: workload.activation_checkpoint,
        _RESHARD: int(workload.reshard) if workload.reshard.isdecimal() else workload.reshard,
    }
    if layout.pp > 1 and workload.stages_per_rank != 1 and _STAGES not in case.pinned:
        found[_STAGES] = workload.stages_per_rank
    if layout.pp == 1 and workload.num_microbatches > 1 and workload.gradient_sync == "deferred":
        found[_SYNC] = "deferred"
    now = case.values
    always = {"model.flavor", DEGREES["dp_shard"], "training.local_batch_size"}
    kept = {name: value for name, value in found.items() if name in always or now[name] != value}
    given = {name: now[name] for name in sorted(case.pinned) if name not in kept}
    return kept | given


def stand_in(case: Case) -> ModelDescription:
    """Facts of a stand-in model with the vocabulary of a shape that is not trainable yet; a config depends on it."""
    return SPECS[STAND_IN["model.name"]].describe(STAND_IN["model.flavor"], vocab_size=case.shape.vocab_size)


def _reshards(case: Case, workload: Workload) -> tuple[str, ...]:
    """Reshard modes from the fastest to the smallest. A pipeline never reshards by default; one rank never does."""
    given = case.given(_RESHARD)
    if given is not None:
        return (str(given),)
    return ("never", "default") if workload.layout.pp == 1 and workload.layout.fsdp > 1 else ("default",)


def _syncs(case: Case, workload: Workload) -> tuple[Any, ...]:
    layout = workload.layout
    now = workload.gradient_sync
    if (
        layout.pp > 1
        or workload.num_microbatches == 1
        or case.given(_SYNC) is not None
        or case.config.training.reproducible
        or layout.batch * layout.cp == 1
    ):
        return (now,)
    return ("deferred", "immediate")

"""Results of a dry run, as tables to read and as data."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from crius.config.pipeline import join_names
from crius.table import aligned
from crius.tools.dry_run.memory import KINDS, Bytes
from crius.tools.dry_run.recorder import COLLECTIVES

Traffic = Counter[tuple[str, str, str]]
"""Collectives of a step: kind, mesh axis and ``count`` or ``bytes``, to the number."""


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """One pipeline stage, or the whole model, on one rank.

    Attributes:
        stage: index in the pipeline.
        pp_rank: pipeline rank of the stage.
        modules: names of its modules.
        parameters: local parameters, after all sharding.
        parameter_bytes: bytes of the parameters.
        gradient_bytes: bytes of the sharded gradients, as the optimizer sees them.
        optimizer_bytes: bytes of the optimizer's state.
        activation_bytes: bytes alive at the end of a microbatch's forward for its backward.
        in_flight: most microbatches whose activations it has at once.
        flops: FLOPs of this rank per step, with recomputed ones.
        traffic: its collectives per step.
    """

    stage: int
    pp_rank: int
    modules: list[str]
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    in_flight: int
    flops: int
    traffic: Traffic


@dataclass(frozen=True)
class RankReport:
    """Moment of the peak memory of one pipeline rank.

    Attributes:
        pp_rank: rank in its pipeline.
        stages: stages of the rank.
        peak: bytes by kind at that moment.
        moment: action at that moment.
    """

    pp_rank: int
    stages: list[int]
    peak: Bytes
    moment: str


@dataclass(frozen=True, kw_only=True)
class DryRunReport:
    """Cost of a step, by stage and by rank.

    Attributes:
        model: name and flavor.
        layout: the degrees.
        num_ranks: ranks of the layout.
        rank: simulated rank.
        num_microbatches: microbatches per step.
        microbatch: sequences and tokens of a microbatch.
        stages: one per pipeline stage.
        ranks: one per pipeline rank.
        model_flops: average FLOPs of one rank per step, without recomputation.
        notes: what was extrapolated and what was left out.
        seconds: seconds since the start of the command.
    """

    model: str
    layout: str
    num_ranks: int
    rank: int
    num_microbatches: int
    microbatch: str
    stages: list[StageReport]
    ranks: list[RankReport]
    model_flops: float
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """Tables for people."""
        many = "" if self.num_microbatches == 1 else "es"
        largest = max(rank.peak.total() for rank in self.ranks)
        unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
        return [
            f"dry run of {self.model} as rank {self.rank} of {self.num_ranks}: {self.layout}",
            f"a step is {self.num_microbatches} microbatch{many} of {self.microbatch} tokens per data-parallel rank",
            *self.notes,
            "",
            *aligned(self._stage_rows(unit, size), left=(2,)),
            "",
            f"memory at the peak, {unit}, by kind (temporaries: everything else)",
            *aligned(self._peak_rows(size), left=(9,)),
            "",
            f"collectives of a step: number, and {unit} of whole messages on this rank",
            *aligned(self._traffic_rows(size), left=()),
            "",
            f"model FLOPs per rank and step: {_tera(self.model_flops)} TFLOP on average, without recomputation",
            f"took {self.seconds:.1f} s",
        ]

    def as_dict(self) -> dict[str, Any]:
        """The same as data; bytes and FLOPs as whole numbers."""
        stages = [vars(stage) | {"collectives": _as_rows(stage.traffic)} for stage in self.stages]
        for stage in stages:
            del stage["traffic"]
        ranks = [
            {
                "pp_rank": rank.pp_rank,
                "stages": rank.stages,
                "moment": rank.moment,
                "peak_bytes": rank.peak.total(),
                "peak_bytes_by_kind": {kind: rank.peak[kind] for kind in KINDS},
            }
            for rank in self.ranks
        ]
        return vars(self) | {"stages": stages, "ranks": ranks}

    def _stage_rows(self, unit: str, size: int) -> list[tuple[str, ...]]:
        names = ("stage", "rank", "modules", "parameters", f"params {unit}", "grads", "optimizer")
        rows: list[tuple[str, ...]] = [(*names, "activations", "in flight", "TFLOP")]
        for stage in self.stages:
            place = (f"{stage.stage}", f"{stage.pp_rank}", join_names(stage.modules), f"{stage.parameters:,}")
            sizes = (stage.parameter_bytes, stage.gradient_bytes, stage.optimizer_bytes, stage.activation_bytes)
            shown = (_shown(nbytes, size) for nbytes in sizes)
            rows.append((*place, *shown, f"{stage.in_flight}", _tera(stage.flops)))
        return rows

    def _peak_rows(self, size: int) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("rank", "peak", *KINDS, "during")]
        for rank in self.ranks:
            kinds = (rank.peak.total(), *(rank.peak[kind] for kind in KINDS))
            rows.append((f"{rank.pp_rank}", *(_shown(nbytes, size) for nbytes in kinds), rank.moment))
        return rows

    def _traffic_rows(self, size: int) -> list[tuple[str, ...]]:
        found = {key[:2] for stage in self.stages for key in stage.traffic}
        names = sorted(found, key=lambda name: (COLLECTIVES.index(name[0]), name[1]))
        rows: list[tuple[str, ...]] = [("stage", *(f"{kind} {axis}" for kind, axis in names))]
        for stage in self.stages:
            cells = [(stage.traffic[kind, axis, "count"], stage.traffic[kind, axis, "bytes"]) for kind, axis in names]
            shown = (f"{count:,} x, {_shown(nbytes, size)}" if count else "-" for count, nbytes in cells)
            rows.append((f"{stage.stage}", *shown))
        return rows


def _as_rows(traffic: Traffic) -> list[dict[str, Any]]:
    names = sorted({key[:2] for key in traffic})
    return [
        {"kind": kind, "axis": axis, "count": traffic[kind, axis, "count"], "bytes": traffic[kind, axis, "bytes"]}
        for kind, axis in names
    ]


def _shown(nbytes: int, size: int) -> str:
    return f"{nbytes / size:,.2f}"


def _tera(flops: float) -> str:
    return f"{flops / 1e12:,.1f}" if flops >= 1e12 else f"{flops / 1e12:.6f}"

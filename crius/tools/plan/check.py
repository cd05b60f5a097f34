"""``crius plan --check``: the closed form beside the dry run of the real code. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crius.config.run import RunConfig
from crius.models.description import ModelDescription
from crius.table import aligned
from crius.tools.plan.memory import memory, rank_bytes
from crius.tools.plan.workload import from_config
from crius.units import GIB

ACTIVATIONS_WITHIN = 0.05
"""Share by which activations may differ. Parameters, gradients and the optimizer's state have to be the same."""

COUNTED = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
    "activations": "activation_bytes",
}
"""What a dry run calls each kind."""


@dataclass(frozen=True)
class CheckRow:
    """Bytes of one kind on one pipeline rank, planned and counted."""

    rank: int
    kind: str
    planned: float
    counted: float

    @property
    def agrees(self) -> bool:
        """Whether the two are as near as they have to be; the peaks are shown only."""
        if self.kind == "peak":
            return True
        within = ACTIVATIONS_WITHIN * self.counted if self.kind == "activations" else 0.5
        return abs(self.planned - self.counted) <= within

    @property
    def difference(self) -> float:
        """Of the plan from what was counted, as a share."""
        return self.planned / self.counted - 1 if self.counted else float(self.planned != 0)


@dataclass(frozen=True)
class CheckReport:
    """All rows, and how long the dry run took in seconds."""

    rows: list[CheckRow]
    seconds: float

    @property
    def agrees(self) -> bool:
        """All rows do."""
        return all(row.agrees for row in self.rows)

    def lines(self) -> list[str]:
        """A table."""
        cells = [["rank", "GiB", "closed form", "dry run", "difference", ""]]
        for row in self.rows:
            exact = "same" if row.kind not in ("peak", "activations") and row.agrees else f"{row.difference:+.2%}"
            sizes = [f"{nbytes / GIB:,.4f}" for nbytes in (row.planned, row.counted)]
            cells.append([f"{row.rank}", row.kind, *sizes, exact, "" if row.agrees else "DIFFERS"])
        return [
            "closed form beside the dry run of the real code, eager, of each pipeline rank",
            *(f"  {line}" for line in aligned(cells, left=(1,))),
            f"{'they agree' if self.agrees else 'THEY DIFFER'}: parameters, gradients and optimizer state to the byte, "
            f"activations of a microbatch within {ACTIVATIONS_WITHIN:.0%}; dry run {self.seconds:.1f} s",
        ]

    def as_dict(self) -> dict[str, Any]:
        """The same as data, in bytes."""
        rows = [{**vars(row), "agrees": row.agrees, "difference": row.difference} for row in self.rows]
        return {"agrees": self.agrees, "rows": rows, "seconds": self.seconds}


def compare_dry_run(
    config: RunConfig, facts: ModelDescription, num_ranks: int, report: Mapping[str, Any]
) -> CheckReport:
    """The closed form of ``config`` beside what a dry run of it counted.

    Args:
        config: the run.
        facts: of its model.
        num_ranks: ranks.
        report: of the dry run, as data (``DryRunReport.as_dict``).
    """
    workload = from_config(config, facts, num_ranks, device="dry_run")
    rows = []
    for found in report["ranks"]:
        rank = found["pp_rank"]
        stages = [stage for stage in report["stages"] if stage["pp_rank"] == rank]
        for kind, planned in rank_bytes(workload, rank).items():
            rows.append(CheckRow(rank, kind, planned, sum(stage[COUNTED[kind]] for stage in stages)))
    largest = max(report["ranks"], key=lambda found: found["peak_bytes"])
    peak = memory(workload, counting="tensors").total
    rows.append(CheckRow(largest["pp_rank"], "peak", peak, largest["peak_bytes"]))
    return CheckReport(rows, report["seconds"])

"""Errors of plans. Torch-free.

``crius plan validate`` compares plans with measured runs, ``crius plan check`` with the dry run of the real code.

A row of the file is a run of Crius. Columns with a dot are settings. The others are ``gpu``, ``num_gpus``,
``tokens_per_second_per_rank`` and ``memory_gib``, as in ``metrics.jsonl`` (one of the last two may be blank), and
``id``.
"""

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crius.config.resolve import USABLE
from crius.config.run import RunConfig, replace_fields
from crius.errors import ConfigError, CriusError
from crius.host import Machine
from crius.models.description import ModelDescription
from crius.table import aligned
from crius.tools.plan.fit import fit
from crius.tools.plan.hardware import hardware
from crius.tools.plan.memory import memory, rank_bytes
from crius.tools.plan.time import tokens_per_second
from crius.tools.plan.workload import Device, from_config
from crius.units import GIB
from crius.untrusted import text_named

SPEED = "tokens_per_second_per_rank"
MEMORY = "memory_gib"
NEEDED = ("gpu", "num_gpus", SPEED, MEMORY)
OTHERS = ("tps_per_gpu", "peak_mem_gib")
"""Columns of the tables of published runs of other trainers."""

Read = Callable[[Mapping[str, str]], tuple[RunConfig, ModelDescription]]
"""Settings, by dotted name, to a run and its model. Raises CriusError if they are wrong."""


Pair = tuple[float, float]  # predicted, measured


@dataclass(frozen=True)
class Errors:
    """Errors of predictions, relative to the measurement: ``abs(predicted / measured - 1)``.

    Attributes:
        n: rows.
        median: median of the errors; NaN without rows.
        mape: their mean.
        p90: nine of ten errors are at most this.
        bias: median of ``predicted / measured - 1``, with its sign.
    """

    n: int
    median: float
    mape: float
    p90: float
    bias: float

    @classmethod
    def of(cls, pairs: Iterable[Pair]) -> "Errors":
        """Errors of (predicted, measured)."""
        signed = [predicted / measured - 1 for predicted, measured in pairs]
        if not signed:
            return cls(0, math.nan, math.nan, math.nan, math.nan)
        sizes = sorted(map(abs, signed))
        ninth = sizes[math.ceil(0.9 * len(sizes)) - 1]
        return cls(len(sizes), statistics.median(sizes), statistics.fmean(sizes), ninth, statistics.median(signed))

    def as_json(self) -> dict[str, Any]:
        """The errors as data; unknown values are null."""
        values = {"median": self.median, "mape": self.mape, "p90": self.p90, "bias": self.bias}
        return {"n": self.n, **{name: round(value, 4) if self.n else None for name, value in values.items()}}


@dataclass(frozen=True)
class Judged:
    """A run: its measurements (None for missing ones) and its plan."""

    name: str
    speed: float | None
    planned_speed: float
    memory: float | None
    planned_memory: float

    def cells(self) -> list[str]:
        """A row of the table: tokens/s per rank, GiB, and the errors of the plan."""
        pairs = ((self.planned_speed, self.speed, ",.0f"), (self.planned_memory, self.memory, ".2f"))
        return [
            self.name,
            *(
                cell
                for plan, found, form in pairs
                for cell in (
                    (f"{plan:{form}}", f"{found:{form}}", f"{plan / found - 1:+.1%}")
                    if found
                    else (f"{plan:{form}}", "-", "-")
                )
            ),
        ]


@dataclass(frozen=True)
class PlanErrors:
    """All rows of a file.

    Attributes:
        judged: runs and their plans.
        not_judged: names of the other runs, and the reason.
    """

    judged: Sequence[Judged]
    not_judged: Sequence[tuple[str, str]]

    def errors(self) -> dict[str, Errors]:
        """Errors of tokens/s and of memory."""
        return {
            "tokens_per_second": Errors.of((one.planned_speed, one.speed) for one in self.judged if one.speed),
            "memory": Errors.of((one.planned_memory, one.memory) for one in self.judged if one.memory),
        }

    def as_json(self) -> dict[str, Any]:
        """Errors as shares of the measurements."""
        return {
            **{name: errors.as_json() for name, errors in self.errors().items()},
            "rows": [vars(one) for one in self.judged],
            "not_judged": [{"id": name, "reason": reason} for name, reason in self.not_judged],
        }

    def table(self) -> list[str]:
        """Lines to print."""
        head = ["run", "tokens/s planned", "measured", "error", "GiB planned", "measured", "error"]
        lines = aligned([head, *(one.cells() for one in self.judged)], left=(0,))
        for name, found in self.errors().items():
            if found.n:
                share = f"median {found.median:.1%}, mean {found.mape:.1%}, nine of ten at most {found.p90:.1%}"
                lines.append(f"{name.replace('_', ' ')}: {found.n} runs, {share}, bias {found.bias:+.1%}")
        return [*lines, *(f"not judged: {name}: {reason}" for name, reason in self.not_judged)]


def validate_file(path: Path, read: Read) -> PlanErrors:
    """The runs of a CSV file and their plans.

    Args:
        path: path of the file.
        read: reads the settings of a row.

    Raises:
        ConfigError: the file cannot be read, or lacks columns.
    """
    judged = []
    failed = []
    for number, row in enumerate(_rows(path), start=1):
        name = row.get("id") or f"row {number}"
        try:
            judged.append(_judged(name, row, read))
        except (CriusError, ArithmeticError, LookupError, ValueError) as error:
            failed.append((name, str(getattr(error, "what", error)).splitlines()[0]))
    return PlanErrors(judged, failed)


def _rows(path: Path) -> list[dict[str, str]]:
    where = str(path)
    try:
        lines = text_named(path).splitlines(keepends=True)
        rows = [
            {key.strip(): (value or "").strip() for key, value in row.items() if key and not isinstance(value, list)}
            for row in csv.DictReader(lines, skipinitialspace=True)
        ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        fix = "give a CSV file in UTF-8"
        raise ConfigError("the measurements cannot be read.", where=where, why=f"{error}", fix=fix) from None
    if not rows:
        raise ConfigError(
            "there are no measurements.", where=where, fix="give a CSV file with a header and one row per run"
        )
    if set(OTHERS) <= rows[0].keys():
        raise ConfigError(
            "these are measurements of other trainers.",
            where=where,
            why=f"the header has {' and '.join(OTHERS)}",
            fix=f"python benchmarks/planner/validate.py {path}, from the repository",
        )
    missing = [name for name in NEEDED if name not in rows[0]]
    if missing:
        raise ConfigError(
            f"the measurements lack the columns {', '.join(missing)}.",
            where=where,
            why="columns with a dot in their name are settings of the run, and these four are needed too",
            fix="add them: docs/planner.md has an example",
        )
    return rows


def _judged(name: str, row: Mapping[str, str], read: Read) -> Judged:
    if not (row[SPEED] or row[MEMORY]):
        raise ValueError(f"neither {SPEED} nor {MEMORY} is given")
    config, facts = read({key: value for key, value in row.items() if "." in key and value})
    machine = hardware(row["gpu"])
    ranks = int(row["num_gpus"])
    device: Device = "cpu" if machine.generation == "cpu" else "cuda"
    place = Machine(device=device, name=machine.device, ranks=ranks)
    changes, _ = fit(config, facts, place, USABLE * machine.memory_bytes)  # as a run decides it
    work = from_config(replace_fields(config, changes), facts, ranks, device=device)
    return Judged(
        name=name,
        speed=float(row[SPEED]) if row[SPEED] else None,
        planned_speed=tokens_per_second(work, machine),
        memory=float(row[MEMORY]) if row[MEMORY] else None,
        planned_memory=memory(work, machine, counting="allocated").total / GIB,
    )


ACTIVATIONS_WITHIN = 0.05
"""Share by which activations may differ. Parameters, gradients and the optimizer's state must be the same."""

COUNTED = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
    "activations": "activation_bytes",
}
"""Name of each kind in a dry run."""


@dataclass(frozen=True)
class CheckRow:
    """Bytes of one kind on one pipeline rank, planned and counted."""

    rank: int
    kind: str
    planned: float
    counted: float

    @property
    def agrees(self) -> bool:
        """Whether the two are as close as they must be; peaks are only shown."""
        if self.kind == "peak":
            return True
        within = ACTIVATIONS_WITHIN * self.counted if self.kind == "activations" else 0.5
        return abs(self.planned - self.counted) <= within

    @property
    def difference(self) -> float:
        """Difference of the plan from the count, as a share."""
        return self.planned / self.counted - 1 if self.counted else float(self.planned != 0)


@dataclass(frozen=True)
class CheckReport:
    """All rows, and how long the dry run took in seconds."""

    rows: list[CheckRow]
    seconds: float

    @property
    def agrees(self) -> bool:
        """Whether all rows agree."""
        return all(row.agrees for row in self.rows)

    def lines(self) -> list[str]:
        """A table."""
        cells = [["rank", "GiB", "closed form", "dry run", "difference", ""]]
        for row in self.rows:
            exact = "same" if row.kind not in ("peak", "activations") and row.agrees else f"{row.difference:+.2%}"
            sizes = [f"{nbytes / GIB:,.4f}" for nbytes in (row.planned, row.counted)]
            cells.append([f"{row.rank}", row.kind, *sizes, exact, "" if row.agrees else "DIFFERS"])
        return [
            "closed form and dry run of the real code, eager, for each pipeline rank",
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
    """The closed form of ``config`` and the counts of its dry run.

    Args:
        config: the run.
        facts: description of its model.
        num_ranks: number of ranks.
        report: report of the dry run, as data (``DryRunReport.as_dict``).
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

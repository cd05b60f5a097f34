"""How far plans are from runs that were measured: ``crius plan --validate FILE``. Torch-free.

A row of the file is a run of Crius. Columns with a dot are settings; the others are ``gpu``, ``num_gpus``,
``tokens_per_second_per_rank`` and ``memory_gib``, as ``metrics.jsonl`` has them, of which one may be blank, and ``id``.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crius.config.run import RunConfig
from crius.errors import ConfigError, CriusError
from crius.models.description import ModelDescription
from crius.table import aligned
from crius.tools.plan.errors import Errors
from crius.tools.plan.hardware import hardware
from crius.tools.plan.memory import memory
from crius.tools.plan.time import step_time
from crius.tools.plan.workload import from_config
from crius.units import GIB

SPEED, MEMORY = "tokens_per_second_per_rank", "memory_gib"
NEEDED = ("gpu", "num_gpus", SPEED, MEMORY)
OTHERS = ("tps_per_gpu", "peak_mem_gib")
"""Columns of the tables of published runs of other trainers."""

Read = Callable[[Mapping[str, str]], tuple[RunConfig, ModelDescription]]
"""Settings, by dotted name, to a run and its model. Raises CriusError where they are wrong."""


@dataclass(frozen=True)
class Judged:
    """A run: what was measured, None where it was not, and what the plan says."""

    name: str
    speed: float | None
    planned_speed: float
    memory: float | None
    planned_memory: float

    def cells(self) -> list[str]:
        """A row of the table: tokens/s of a rank, GiB, and how far off the plan is."""
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
class Report:
    """All rows of a file.

    Attributes:
        judged: runs and their plans.
        not_judged: names of the others, and why.
    """

    judged: Sequence[Judged]
    not_judged: Sequence[tuple[str, str]]

    def errors(self) -> dict[str, Errors]:
        """Of tokens/s and of memory."""
        return {
            "tokens_per_second": Errors.of((one.planned_speed, one.speed) for one in self.judged if one.speed),
            "memory": Errors.of((one.planned_memory, one.memory) for one in self.judged if one.memory),
        }

    def as_json(self) -> dict[str, Any]:
        """Errors as shares of what was measured."""
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


def validate_file(path: Path, read: Read) -> Report:
    """The runs of a CSV file beside their plans.

    Args:
        path: of the file.
        read: of the settings of a row.

    Raises:
        ConfigError: the file cannot be read, or lacks columns.
    """
    judged, failed = [], []
    for number, row in enumerate(_rows(path), start=1):
        name = row.get("id") or f"row {number}"
        try:
            judged.append(_judged(name, row, read))
        except (CriusError, ArithmeticError, LookupError, ValueError) as error:
            failed.append((name, str(getattr(error, "what", error)).splitlines()[0]))
    return Report(judged, failed)


def _rows(path: Path) -> list[dict[str, str]]:
    where = f"--validate {path}"
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [
                {
                    key.strip(): (value or "").strip()
                    for key, value in row.items()
                    if key and not isinstance(value, list)
                }
                for row in csv.DictReader(file, skipinitialspace=True)
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        fix = "give a CSV file in UTF-8"
        raise ConfigError("the measurements cannot be read.", where=where, why=f"{error}", fix=fix) from None
    if not rows:
        raise ConfigError(
            "there are no measurements.", where=where, fix="give a CSV file with a header and a row a run"
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
            why="columns with a dot in their name are settings of the run, and these four are needed beside them",
            fix="add them: docs/planner.md has an example",
        )
    return rows


def _judged(name: str, row: Mapping[str, str], read: Read) -> Judged:
    if not (row[SPEED] or row[MEMORY]):
        raise ValueError(f"neither {SPEED} nor {MEMORY} is given")
    config, facts = read({key: value for key, value in row.items() if "." in key and value})
    machine = hardware(row["gpu"])
    work = from_config(config, facts, int(row["num_gpus"]), device="cpu" if machine.generation == "cpu" else "cuda")
    return Judged(
        name=name,
        speed=float(row[SPEED]) if row[SPEED] else None,
        planned_speed=work.tokens_per_rank / step_time(work, machine).total,
        memory=float(row[MEMORY]) if row[MEMORY] else None,
        planned_memory=memory(work, machine, counting="allocated").total / GIB,
    )

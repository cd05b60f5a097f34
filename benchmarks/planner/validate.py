"""How far plans are from published measurements, of Crius and of other trainers.

    python benchmarks/planner/validate.py benchmarks/planner/measurements.csv [--json]

Exit code 1 where no row can be judged, 2 where the file cannot be read.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from crius.errors import CriusError
from crius.table import aligned
from crius.tools.plan.hardware import Hardware
from crius.tools.plan.memory import Counting
from crius.tools.plan.validate import Errors
from crius.tools.plan.workload import Workload

sys.path.insert(0, str(Path(__file__).parents[1]))
from planner.measurements import Measurement, Unjudged, read_measurements
from planner.trainers import planned_memory, planned_speed

GAP = 0.10
"""Two layouts whose tokens/s differ by less than this share are not put in order."""

WORST = 10


@dataclass(frozen=True)
class Ordering:
    """Pairs of layouts of a model on a GPU whose measured speeds differ by more than ``GAP``.

    Attributes:
        n: pairs.
        right: that the plan puts in the same order.
    """

    n: int
    right: int

    def as_json(self) -> dict[str, Any]:
        """The same, and the share that is right."""
        return {"n": self.n, "right": self.right, "accuracy": round(self.right / self.n, 4) if self.n else None}


@dataclass(frozen=True)
class Judged:
    """A row and what the plan says of it: tokens/s of a GPU by plan and by the baseline, and bytes.

    ``too_large_memory``: with the microbatch that is known to be too large; 0 where none is.
    """

    row: Measurement
    speed: float
    baseline: float
    memory: float
    too_large_memory: float = 0.0

    @property
    def error(self) -> float:
        """Of the speed, else of the memory, as a share with its sign."""
        if self.row.tokens_per_second is not None:
            return self.speed / self.row.tokens_per_second - 1
        return self.memory / (self.row.memory_bytes or math.nan) - 1


@dataclass(frozen=True)
class Report:
    """All rows of a file.

    Attributes:
        judged: rows with their predictions.
        unjudged: rows that cannot be planned.
    """

    judged: Sequence[Judged]
    unjudged: Sequence[Unjudged] = field(default_factory=list)

    def speed(self, wanted: Callable[[Judged], bool] = lambda _: True, *, baseline: bool = False) -> Errors:
        """Errors of tokens/s over the rows that are ``wanted``."""
        rows = [one for one in self.judged if one.row.tokens_per_second is not None and wanted(one)]
        return Errors.of((one.baseline if baseline else one.speed, one.row.tokens_per_second or 0.0) for one in rows)

    def memory(self, wanted: Callable[[Judged], bool] = lambda _: True) -> Errors:
        """Errors of peak memory over the rows that are ``wanted``."""
        rows = [one for one in self.judged if one.row.memory_bytes is not None and wanted(one)]
        return Errors.of((one.memory, one.row.memory_bytes or 0.0) for one in rows)

    def ordering(self, wanted: Callable[[Judged], bool] = lambda _: True) -> Ordering:
        """How often the faster of two layouts is known; repetitions of one layout are no pair."""
        groups: dict[tuple[str, str, str], list[Judged]] = {}
        for one in self.judged:
            if one.row.tokens_per_second is not None and wanted(one):
                groups.setdefault((one.row.workload.model.name, one.row.gpu, one.row.family), []).append(one)
        total = right = 0
        for group in groups.values():
            for a, b in combinations(group, 2):
                measured = (a.row.tokens_per_second or 0.0) / (b.row.tokens_per_second or 1.0)
                if 1 / (1 + GAP) <= measured <= 1 + GAP or _same_layout(a.row.workload, b.row.workload):
                    continue
                total += 1
                right += (measured - 1) * (a.speed - b.speed) > 0  # a tie is wrong
        return Ordering(total, right)

    def refused(self) -> tuple[int, int]:
        """Rows that ran although the plan says that they do not fit, and rows that ran and say what they recompute."""
        ran = [one for one in self.judged if one.row.says_checkpointing and not one.row.ran_out]
        return sum(one.memory > one.row.hardware.memory_bytes for one in ran), len(ran)

    def ran_out(self) -> tuple[int, list[str]]:
        """Number of runs that ran out of memory, and the names of those that the plan says to fit."""
        known = [one for one in self.judged if one.row.too_large]
        missed = [one.row.name for one in known if one.too_large_memory <= one.row.hardware.memory_bytes]
        return len(known), missed

    def worst(self) -> list[Judged]:
        """Rows that are furthest off."""
        measured = [one for one in self.judged if not one.row.ran_out]
        return sorted(measured, key=lambda one: -abs(math.log1p(max(one.error, -0.999))))[:WORST]

    def as_json(self) -> dict[str, Any]:
        """Errors as fractions, by kind of model."""
        kinds = {"dense": lambda one: not one.row.has_experts, "moe": lambda one: one.row.has_experts}
        by_kind = {
            name: {
                "tps": self.speed(wanted).as_json(),
                "memory": self.memory(wanted).as_json(),
                "constant_mfu": self.speed(wanted, baseline=True).as_json(),
            }
            for name, wanted in kinds.items()
        }
        orders = {name: self.ordering(wanted).as_json() for name, wanted in kinds.items()}
        (refused, ran), (ran_out, missed) = self.refused(), self.ran_out()
        calls = {"ran": ran, "refused": refused, "ran_out": ran_out, "flagged": ran_out - len(missed), "missed": missed}
        return {
            **by_kind,
            "ordering": {**self.ordering().as_json(), **orders},
            "families": {family: self._of_family(family) for family in sorted({one.row.family for one in self.judged})},
            "memory_calls": calls,
            "judged": len(self.judged),
            "not_judged": [{"id": one.name, "reason": one.reason} for one in self.unjudged],
        }

    def _of_family(self, family: str) -> dict[str, Any]:
        def wanted(one: Judged) -> bool:
            return one.row.family == family

        return {"tps": self.speed(wanted).as_json(), "memory": self.memory(wanted).as_json()}

    def table(self) -> list[str]:
        """Lines to print."""
        order, (refused, ran), (ran_out, missed) = self.ordering(), self.refused(), self.ran_out()
        lines = [
            *aligned([_HEADER, *self._rows()], left=(0, 1)),
            "",
            "error: share of what was measured; constant MFU: the median of the family's other rows on that GPU",
            f"ordering: {order.right} of {order.n} pairs of layouts right (same model, GPU and family, > 10 % apart)",
            f"memory: {refused} of {ran} runs that did run are said not to fit; "
            f"{ran_out - len(missed)} of {ran_out} that ran out of memory are",
            *([f"  said to fit although they ran out of memory: {', '.join(missed)}"] if missed else []),
            "",
            "furthest off:",
            *aligned([_worst_row(one) for one in self.worst()], left=(0, 1, 2)),
        ]
        if self.unjudged:
            lines += ["", f"not judged: {len(self.unjudged)}"]
            lines += aligned([(f"  {one.name}", one.reason) for one in self.unjudged], left=None)
        return lines

    def _rows(self) -> list[list[str]]:
        rows = []
        for kind, experts in (("dense", False), ("experts", True)):
            families = sorted({one.row.family for one in self.judged if one.row.has_experts == experts})
            for family in ("all", *families):

                def wanted(one: Judged, family: str = family, experts: bool = experts) -> bool:
                    return one.row.has_experts == experts and family in ("all", one.row.family)

                speed, baseline = self.speed(wanted), self.speed(wanted, baseline=True)
                rows += [[kind, family, "tokens/s", *_cells(speed), *_cells(baseline)[1:]]] if speed.n else []
                held = self.memory(wanted)
                rows += [[kind, family, "memory", *_cells(held), "", "", ""]] if held.n else []
        return rows


_HEADER = ["model", "family", "", "n", "median", "mean", "p90", "constant MFU: median", "mean", "p90"]


def _cells(errors: Errors) -> list[str]:
    return [str(errors.n), *(f"{100 * value:.1f} %" for value in (errors.median, errors.mape, errors.p90))]


def _worst_row(one: Judged) -> list[str]:
    row, layout = one.row, one.row.workload.layout
    return [
        f"  {row.name}",
        f"{row.workload.model.name} {row.gpu} {replace(layout, ep=1)}",
        row.notes[:60],
        f"{100 * one.error:+.0f} %",
    ]


def _same_layout(a: Workload, b: Workload) -> bool:
    """Published twice; a later release is no other layout."""
    return replace(a, compile=b.compile) == b if getattr(a, "framework", "crius") == "megatron" else a == b


def validate_file(path: str | Path) -> Report:
    """All rows of a CSV file against their plans with the committed constants.

    Raises:
        ConfigError: the file cannot be read, or columns are missing.
    """
    return validate(*read_measurements(path))


def validate(rows: Sequence[Measurement], unjudged: Sequence[Unjudged] = ()) -> Report:
    """The rows against their plans."""
    judged, failed = [], list(unjudged)
    for row in rows:
        try:
            judged.append(_judged(row))
        except (ArithmeticError, LookupError, ValueError) as error:  # sizes that no model has
            failed.append(Unjudged(row.name, f"cannot be planned: {error}"))
    found = baselines([one.row for one in judged])
    return Report([replace(one, baseline=baseline) for one, baseline in zip(judged, found, strict=True)], failed)


def _judged(row: Measurement) -> Judged:
    counting: Counting = "allocated" if row.memory_kind == "allocated" else "reserved"
    held = planned_memory(row.workload, row.hardware, counting=counting)
    larger = replace(row.workload, microbatch=row.too_large or row.workload.microbatch)
    too_large = planned_memory(larger, row.hardware) if row.too_large else 0.0
    baseline = _baseline(0, [row], [_mfu(row)])  # until the other rows are known
    return Judged(row, planned_speed(row.workload, row.hardware), baseline, held, too_large)


def baselines(rows: Sequence[Measurement]) -> list[float]:
    """Tokens/s of each row at the median MFU of the other rows of its family, GPU and width of numbers, else of all."""
    shares = [_mfu(row) for row in rows]
    return [_baseline(index, rows, shares) for index in range(len(rows))]


def _peak(workload: Workload, hardware: Hardware) -> float:
    return (
        hardware.bfloat16_flops
        if workload.precision == "bfloat16"
        else hardware.float8_flops or hardware.bfloat16_flops
    )


def _mfu(row: Measurement) -> float | None:
    if row.tokens_per_second is None:
        return None
    flops = row.tokens_per_second * row.workload.model.flops_per_token(row.workload.seq_len / 2)
    return flops / _peak(row.workload, row.hardware)


def _kind(row: Measurement) -> tuple[str, str, bool]:
    return row.family, row.hardware.name, row.workload.precision == "bfloat16"


def _baseline(index: int, rows: Sequence[Measurement], shares: Sequence[float | None]) -> float:
    row = rows[index]
    others = [(rows[i], share) for i, share in enumerate(shares) if share is not None and i != index]
    alike = [share for other, share in others if _kind(other) == _kind(row)]
    share = statistics.median(alike or [share for _, share in others] or [0.4])
    flops = row.workload.model.flops_per_token(row.workload.seq_len / 2)
    return share * _peak(row.workload, row.hardware) / flops


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(argv)
    try:
        report = validate_file(chosen.file)
    except CriusError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(report.as_json(), indent=2) if chosen.json else "\n".join(report.table()))
    return 0 if report.judged else 1


if __name__ == "__main__":
    sys.exit(main())

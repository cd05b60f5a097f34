"""Work of one process that is timed in turns, so that a machine with a drifting speed favours none."""

import argparse
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.command import publish, receipt
from crius.table import aligned
from crius.tools.bench.machine import BenchMachine
from crius.tools.bench.result import Samples


@dataclass
class Row:
    """One way to do something.

    Attributes:
        name: its name.
        work: does it once; returns how much was done, in the unit of the table.
        prepare: called before, outside of the time.
        parts: called after, outside of the time: numbers of this time by name, milliseconds or GiB.
        amount: how much was done the last time.
        samples: ``wall``, seconds of the clock; ``cpu``, CPU seconds of this process and of the processes that it
            waited for; then the parts.
    """

    name: str
    work: Callable[[], float]
    prepare: Callable[[], None] = lambda: None
    parts: Callable[[], Mapping[str, float]] = dict
    amount: float = 0.0
    samples: dict[str, Samples] = field(default_factory=dict)

    def measure(self, *, counts: bool) -> None:
        """Do the work once more, and note its time if it ``counts``."""
        self.prepare()
        wall = time.perf_counter()
        cpu = _cpu_seconds()
        self.amount = self.work()
        found = {"cpu": _cpu_seconds() - cpu, "wall": time.perf_counter() - wall, **self.parts()}
        if counts:
            for name, value in found.items():
                self.samples.setdefault(name, Samples()).seconds.append(value)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "name": self.name,
            "amount": self.amount,
            "wall": self.samples["wall"].as_dict(),
            "cpu": self.samples["cpu"].as_dict(),
            "parts": {name: part.seconds for name, part in self._parts()},
        }

    def cells(self) -> list[tuple[str, ...]]:
        """Lines of the table: this row, and one for each part."""
        first = [self.name]
        for samples in (self.samples["wall"], self.samples["cpu"]):
            first += [_shown(1e3 * samples.median), f"{samples.spread:.0%}", _shown(self.amount / samples.median)]
        return [tuple(first), *((f"  {name}", _shown(part.median), *[""] * 5) for name, part in self._parts())]

    def _parts(self) -> list[tuple[str, Samples]]:
        return [(name, part) for name, part in self.samples.items() if name not in ("wall", "cpu")]


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value > 99 else f"{value:.3g}"


def _cpu_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(rows: Sequence[Row], rounds: int) -> None:
    """Go ``rounds`` times through all rows, after a round that does not count; every other one in reverse order."""
    for number in range(rounds + 1):
        for row in rows if number % 2 == 0 else reversed(rows):
            row.measure(counts=number > 0)


def report(
    options: argparse.Namespace, name: str, rows: Sequence[Row], machine: BenchMachine, unit: str, *about: str
) -> None:
    """Print the table, or the JSON.

    Args:
        options: with ``json`` and ``out``.
        name: of the program.
        rows: all measured.
        machine: that measured them.
        unit: of the amounts of work.
        about: lines above the table.
    """
    record = {**receipt(name), "machine": machine.as_dict(), "about": about, "unit": unit}
    header = ("", "wall ms", "spread", f"{unit}/s", "CPU ms", "spread", f"{unit}/CPU-s")
    table = aligned([header, *(line for row in rows for line in row.cells())], left=(0,))
    head = f"{machine}; medians of {len(rows[0].samples['wall'].seconds)}, in turns"
    publish(options, {**record, "rows": [row.as_dict() for row in rows]}, [head, *about, *table])

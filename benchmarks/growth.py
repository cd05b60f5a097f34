"""How costs grow: the same work at several sizes, an exponent fitted to them, and whether it is the one of theory.

python benchmarks/growth.py --out benchmarks/results/<date>-<device>/growth.json

A cost y that grows as x**a is a line of slope a in logarithms. Times are CPU seconds, the least of several: what other
work on the machine adds to them is noise.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import growth_costs as costs
import torch

from crius.tools.bench.machine import BenchMachine

UNITS = {"ms": 1e3, "s": 1.0, "MiB": 2**-20, "GiB": 2**-30, "KiB": 2**-10, "": 1.0}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """How one cost grows.

    Attributes:
        cost: what it is of.
        unit: in which it is shown, a key of ``UNITS``.
        y: its values, in seconds or bytes, one for each size.
        theory: the exponent expected.
        tolerance: the most by which the fitted one may differ, or be above it.
        kind: the exponent ``equals`` that of theory, or is ``at most`` that.
        fitted: sizes that the exponent is fitted to, from the largest down; 0 for all.
        why: the theory.
    """

    cost: str
    unit: str
    y: list[float]
    theory: float
    tolerance: float
    why: str
    kind: Literal["equals", "at most"] = "equals"
    fitted: int = 0

    def exponent(self, x: Sequence[float]) -> float:
        """The slope of log y over log x."""
        return slope(x[-self.fitted :], self.y[-self.fitted :])

    def holds(self, x: Sequence[float]) -> bool:
        """Whether it grows as theory says."""
        difference = self.exponent(x) - self.theory
        return difference <= self.tolerance and (self.kind == "at most" or difference >= -self.tolerance)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of log y over log x.

    Raises:
        ValueError: fewer than two sizes, or a value that is not positive.
    """
    if len(x) != len(y) or len(x) < 2 or min(*x, *y) <= 0:
        raise ValueError(f"an exponent needs two or more positive pairs, got {list(x)} and {list(y)}")
    across, up = [math.log(value) for value in x], [math.log(value) for value in y]
    middle, height = sum(across) / len(across), sum(up) / len(up)
    spread = sum((value - middle) ** 2 for value in across)
    return sum((a - middle) * (b - height) for a, b in zip(across, up, strict=True)) / spread


@dataclass(frozen=True)
class Table:
    """Costs over one size."""

    name: str
    size: str
    x: list[float]
    claims: list[Claim]

    def as_dict(self) -> dict[str, Any]:
        """For the JSON, with the exponents and whether they are those of theory."""
        claims = [
            {**asdict(claim), "exponent": claim.exponent(self.x), "holds": claim.holds(self.x)} for claim in self.claims
        ]
        return {"name": self.name, "size": self.size, "x": self.x, "claims": claims}


def sequence_length(rounds: int) -> Table:
    x = [512, 1024, 2048, 4096]
    y = costs.sequence_length(x, rounds)
    return Table(
        "sequence length",
        "tokens of the one sequence of a step",
        x,
        [
            Claim(
                cost="attention",
                unit="ms",
                y=y["attention"],
                fitted=2,
                theory=2,
                tolerance=0.25,
                why="T queries see T / 2 keys",
            ),
            Claim(
                cost="rest of the step", unit="ms", y=y["rest"], theory=1, tolerance=0.25, why="alike for each token"
            ),
            Claim(cost="step", unit="ms", y=y["step"], theory=2, tolerance=0, kind="at most", why="their sum"),
        ],
    )


def model_size(rounds: int) -> Table:
    models = [("debug", 1), ("debug", 2), ("debug", 4), ("6m", 2), ("debug", 8), ("6m", 4), ("debug", 16), ("6m", 12)]
    x, y = costs.model_size(models, rounds)
    order = sorted(range(len(x)), key=x.__getitem__)
    step = [y["step"][index] for index in order]
    why = "multiplications are the work; wide ones run at a higher rate"
    return Table(
        "model size",
        "GFLOP of a step",
        [x[index] / 1e9 for index in order],
        [Claim(cost="step", unit="ms", y=step, theory=1, tolerance=0.2, why=why)],
    )


def ranks(rounds: int) -> Table:
    x = [1, 2, 4, 8]
    y = costs.ranks(x, rounds)
    added = [seconds - y["step"][0] for seconds in y["step"]]
    ring = "each of n ranks sends n - 1 messages a collective"
    most: dict[str, Any] = {"tolerance": 0, "kind": "at most"}
    return Table(
        "ranks",
        "ranks of FSDP, one batch of the same size",
        x,
        [
            Claim(cost="state of a rank", unit="MiB", y=y["state"], theory=-1, tolerance=0.02, why="shards"),
            Claim(cost="CPU of a step, all ranks", unit="ms", y=y["step"], theory=1, why="most is added", **most),
            Claim(cost="of it added by ranks", unit="ms", y=added, fitted=3, theory=2, why=ring, **most),
        ],
    )


def many_ranks(rounds: int) -> Table:
    x = [8, 64, 512, 4096]
    y = costs.dry_runs(x)
    sent = "(n - 1) / n of all weights, three times; a weight of fewer rows than ranks is padded"
    return Table(
        "many ranks, by dry run",
        "ranks of FSDP, 4 layers of 8B",
        x,
        [
            Claim(cost="weights of a rank", unit="MiB", y=y["weights"], theory=-1, tolerance=0.02, why="shards"),
            Claim(cost="bytes that a rank sends", unit="GiB", y=y["traffic"], theory=0, tolerance=0.05, why=sent),
            Claim(cost="the dry run", unit="s", y=y["seconds"], theory=0, tolerance=0.2, why="it builds one rank"),
        ],
    )


def corpus_files(rounds: int) -> Table:
    x = [10, 100, 1000, 10_000]
    y = costs.corpus_files(x, rounds)
    linear: dict[str, Any] = {"theory": 1, "tolerance": 0.1, "kind": "at most"}
    constant: dict[str, Any] = {"theory": 0, "tolerance": 0.1, "why": "a sample is found by its number"}
    hashed = "each is read, hashed and tokenised"
    return Table(
        "files of a corpus",
        "files of 2 KB",
        x,
        [
            Claim(cost="opened the first time", unit="ms", y=y["first"], fitted=2, why=hashed, **linear),
            Claim(
                cost="opened again", unit="ms", y=y["again"], fitted=2, why="each is looked at, none is read", **linear
            ),
            Claim(cost="a batch", unit="ms", y=y["batch"], **constant),
            Claim(cost="resumed, and a batch", unit="ms", y=y["resume"], **constant),
        ],
    )


def step_count(rounds: int) -> Table:
    x = [64, 128, 256, 512, 1024]
    y = costs.step_count(x)
    line = "a line a step"
    return Table(
        "steps",
        "steps of one run",
        x,
        [
            Claim(
                cost="memory of the process",
                unit="MiB",
                y=y["memory"],
                theory=0,
                tolerance=0.005,
                why="nothing is kept",
            ),
            Claim(cost="log of samples", unit="KiB", y=y["samples"], theory=1, tolerance=0.1, why=line),
            Claim(cost="metrics.jsonl", unit="KiB", y=y["metrics"], theory=1, tolerance=0.1, why=line),
        ],
    )


def checkpoint_size(rounds: int) -> Table:
    x, y = costs.checkpoint_size([1, 4, 16, 64])
    why = "12 bytes each: a weight and AdamW's two means in float32"
    return Table(
        "checkpoint",
        "parameters",
        x,
        [Claim(cost="size on disk", unit="MiB", y=y["bytes"], theory=1, tolerance=0.02, why=why)],
    )


TABLES: dict[str, Callable[[int], Table]] = {
    "steps": step_count,  # memory first: nothing ran in this process that a fork would inherit
    "checkpoint": checkpoint_size,
    "files": corpus_files,
    "ranks": ranks,
    "many_ranks": many_ranks,
    "model": model_size,
    "sequence": sequence_length,
}


def render(record: dict[str, Any]) -> str:
    """The table of ``docs/growth.md``, a row for each claim: its first and its last value, and how it grows."""
    lines = ["| cost | first | last | exponent | theory | |", "|---|---|---|---|---|---|"]
    for table in record["tables"].values():
        sizes = f"{table['size']}: {shown(table['x'][0])} to {shown(table['x'][-1])}"
        lines += [f"| **{sizes}** | | | | | |", *(_rendered(claim) for claim in table["claims"])]
    return "\n".join(lines) + "\n"


def shown(value: float) -> str:
    """A positive number with three significant digits, or with all before the point."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _rendered(claim: dict[str, Any]) -> str:
    scale = UNITS[claim["unit"]]
    bound = "at most " if claim["kind"] == "at most" else ""
    allowed = f" ± {claim['tolerance']:g}" if not bound else f" + {claim['tolerance']:g}" * (claim["tolerance"] > 0)
    fitted = f" of the last {claim['fitted']}" if claim["fitted"] else ""
    cells = [
        f"{claim['cost']}, {claim['unit']}",
        shown(claim["y"][0] * scale),
        shown(claim["y"][-1] * scale),
        f"{claim['exponent']:.2f}{fitted}",
        f"{bound}{claim['theory']:g}{allowed}: {claim['why']}",
        "PASS" if claim["holds"] else "FAIL",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, write and print; exit code 1 where a cost grows otherwise than it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write; tables in it that are not measured now stay.")
    parser.add_argument("--render", type=Path, help="JSON to print as tables; nothing is run.")
    parser.add_argument("--tables", default=",".join(TABLES), help=f"Of {', '.join(TABLES)}; joined by commas.")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.render:
        print(render(json.loads(options.render.read_text(encoding="utf-8"))), end="")
        return
    unknown = set(options.tables.split(",")) - set(TABLES)
    if unknown:
        parser.error(f"no table {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    command = ["benchmarks/growth.py", *sys.argv[1:]]
    tables = {
        name: {"command": command, **TABLES[name](options.rounds).as_dict()} for name in options.tables.split(",")
    }
    machine = BenchMachine.of(torch.device("cpu")).as_dict()  # after the last fork
    known = (
        json.loads(options.out.read_text(encoding="utf-8"))["tables"] if options.out and options.out.exists() else {}
    )
    kept = {name: {**known, **tables}[name] for name in TABLES if name in {**known, **tables}}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"machine": machine, "tables": kept}, indent=1) + "\n", encoding="utf-8")
    print(render({"tables": tables}), end="")
    sys.exit(0 if all(claim["holds"] for table in tables.values() for claim in table["claims"]) else 1)


if __name__ == "__main__":
    main()

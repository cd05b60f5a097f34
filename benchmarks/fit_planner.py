"""Fit the constants of the planner's closed form of time, and judge them on rows that they were not fitted on.

    python benchmarks/fit_planner.py            # judge: fit on half of the groups, judge on the other half, repeatedly
    python benchmarks/fit_planner.py --write    # and write the constants, fitted on all rows, and the judged figures

Rows of one model, GPU and layout are one group: they are on the same side of every split. Each constant has a prior,
from data sheets and papers where they say something; the fit is drawn to it, so that a constant that the rows say
nothing about keeps it. Needs SciPy: pip install crius[bench].
"""

import argparse
import json
import math
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import planner.trainers
from planner.measurements import Measurement, read_measurements
from planner.trainers import OthersMemory, OthersTime, as_known, planned_speed, trainers
from planner.validate import Judged, Report, baselines
from scipy.optimize import least_squares

from crius.tools.plan import rates
from crius.tools.plan.rates import TimeConstants

KEYS = ("n", "median", "mape", "p90")
KINDS = ("dense", "moe")
HERE = Path(__file__).parent / "planner"
ROWS, JUDGED = HERE / "measurements.csv", HERE / "judged.json"
NUM_SPLITS = 10
PULL = 0.12  # weight of a constant that is one standard deviation off its prior, beside a row that is 12 % off
TOLERANCE = 0.1  # rows further off than this pull linearly, not quadratically
REPEATED = 0.4  # see weights_of; rows of a group differ in batch and precision, and each says a little that is new

# constant: prior, standard deviation of its logarithm (of a bias: of itself), upper bound
PRIORS: dict[str, tuple[float, float, float]] = {
    "matmul_ampere": (0.82, 0.25, 0.95),
    "matmul_hopper": (0.75, 0.25, 0.95),
    "matmul_blackwell": (0.6, 0.25, 0.95),
    "matmul_blackwell_ultra": (0.7, 0.25, 0.95),
    "matmul_cdna3": (0.38, 0.25, 0.95),
    "power_exponent": (0.5, 0.25, 1.0),
    "power_exponent_blackwell": (0.8, 0.25, 1.2),
    "matmul_traffic": (1.0, 0.5, 5.0),
    "attention_ampere": (0.6, 0.25, 0.95),
    "attention_hopper": (0.5, 0.25, 0.95),
    "attention_blackwell": (0.45, 0.25, 0.95),
    "flash2_flops": (300e12, 0.25, 500e12),
    "attention_fsdp1": (0.8, 0.25, 1.2),
    "memory": (0.8, 0.15, 0.95),
    "elementwise_eager": (1.8, 0.3, 4.0),
    "elementwise_compiled": (0.5, 0.3, 3.0),
    "elementwise_fsdp1": (0.7, 0.25, 3.0),
    "elementwise_fused": (0.6, 0.25, 3.0),
    "float8_tensorwise": (0.9, 0.25, 1.3),
    "float8_rowwise": (0.6, 0.25, 1.3),
    "float8_fused": (1.0, 0.25, 1.3),
    "float8_fused_blackwell": (1.0, 0.25, 1.3),
    "mxfp8": (0.93, 0.04, 1.0),
    "nvfp4": (0.5, 0.25, 1.3),
    "cast_traffic": (0.7, 0.7, 5.0),
    "link": (0.75, 0.15, 0.95),
    "nic": (0.8, 0.15, 0.95),
    "hop_seconds": (4e-6, 0.7, 1e-4),
    "overlap_cost": (0.1, 0.7, 0.6),
    "overlap_cost_fsdp1": (0.1, 0.7, 0.6),
    "overlap_cost_megatron": (0.3, 0.7, 0.9),
    "tp_exposed": (1.15, 0.25, 2.0),
    "tp_async": (0.65, 0.15, 1.0),
    "tp_fused": (0.4, 0.25, 1.0),
    "cp_imbalance": (0.2, 0.7, 1.0),
    "cp_exposed": (0.3, 0.7, 1.2),
    "ep_exposed": (0.7, 0.15, 1.2),
    "ep_interleaved": (0.3, 0.4, 1.0),
    "dp_exposed": (0.3, 0.25, 1.0),
    "dp_exposed_nanotron": (0.8, 0.25, 1.0),
    "expert_efficiency": (0.75, 0.15, 1.0),
    "expert_traffic": (4.5, 0.35, 20.0),
    "expert_seconds": (6e-3, 0.3, 0.03),
    "expert_torch": (3.0, 0.35, 4.0),
    "graph_launch": (0.2, 0.4, 1.0),
    "op_seconds": (6e-6, 0.5, 3e-5),
    "step_seconds": (0.03, 0.7, 0.2),
    "bias": (0.0, 0.12, 0.5),
    "bias_megatron": (0.0, 0.12, 0.5),
    "bias_fsdp1": (0.0, 0.12, 0.5),
    "bias_nanotron": (0.0, 0.12, 0.5),
}
Constants = tuple[TimeConstants, OthersTime]
SHARED = [field.name for field in fields(TimeConstants)]
NAMES = [*SHARED, *(field.name for field in fields(OthersTime))]
assert set(NAMES) == set(PRIORS), set(NAMES) ^ set(PRIORS)


def to_vector(values: dict[str, float]) -> numpy.ndarray:
    """Logarithms, of biases the values."""
    return numpy.array([values[n] if n.startswith("bias") else math.log(values[n]) for n in NAMES])


def to_constants(vector: numpy.ndarray) -> Constants:
    """The reverse."""
    values = {
        name: float(value) if name.startswith("bias") else math.exp(value)
        for name, value in zip(NAMES, vector, strict=True)
    }
    shared = {name: values.pop(name) for name in SHARED}
    return TimeConstants(**shared), OthersTime(**values)


def speeds(rows: list[Measurement], constants: Constants) -> list[float]:
    """Tokens a second of a GPU of each row, as planned with ``constants``."""
    shared, others = constants
    known = trainers(others, OthersMemory())
    return [planned_speed(as_known(row.workload, known), row.hardware, shared) for row in rows]


def group_of(row: Measurement) -> tuple:
    """Rows that resemble each other too much to be fitted on and judged on."""
    work = row.workload
    return row.family, work.model.name, row.gpu, *work.layout.degrees.values()


def weights_of(rows: list[Measurement], repeated: float) -> numpy.ndarray:
    """Of the residuals: a group of n rows weighs ``n ** (1 - 2 * repeated)``, at 0.5 as much as one row."""
    sizes = Counter(map(group_of, rows))
    return numpy.array([sizes[group_of(row)] ** -repeated for row in rows])


def softened(errors: numpy.ndarray, tolerance: float) -> numpy.ndarray:
    """Residuals whose squares grow linearly where ``errors`` are beyond ``tolerance``."""
    off = errors / tolerance
    return numpy.sign(off) * numpy.sqrt(2 * (numpy.sqrt(1 + off**2) - 1)) * tolerance


def fit(rows: list[Measurement], most: int = 7) -> Constants:
    """Constants that explain ``rows`` and stay near their priors."""
    prior = to_vector({name: value for name, (value, _, _) in PRIORS.items()})
    spread = numpy.array([PRIORS[name][1] for name in NAMES])
    upper = to_vector({name: bound for name, (_, _, bound) in PRIORS.items()})
    weights = weights_of(rows, REPEATED)
    measured = numpy.log([row.tokens_per_second for row in rows])

    def residuals(vector: numpy.ndarray) -> numpy.ndarray:
        off = softened(numpy.log(speeds(rows, to_constants(vector))) - measured, TOLERANCE)
        return numpy.concatenate([weights * off, PULL * (vector - prior) / spread])

    found = least_squares(residuals, prior, bounds=(-numpy.inf, upper), max_nfev=most, diff_step=1e-3)
    return to_constants(found.x)


def halves(rows: list[Measurement], split: int) -> tuple[list[Measurement], list[Measurement]]:
    """Rows to fit on and rows to judge; split 2k + 1 is split 2k the other way round."""
    groups = sorted({group_of(row) for row in rows})
    random.Random(split // 2).shuffle(groups)
    fitted = set(groups[split % 2 :: 2])
    return [row for row in rows if group_of(row) in fitted], [row for row in rows if group_of(row) not in fitted]


def report(rows: list[Measurement], constants: Constants) -> Report:
    """``rows`` against plans with ``constants``."""
    planned = zip(rows, speeds(rows, constants), baselines(rows), strict=True)
    return Report([Judged(row, speed, mfu, memory=0.0) for row, speed, mfu in planned])


def judge(rows: list[Measurement], num_splits: int) -> dict:
    """Errors of all rows that were judged, each in half of the splits, and the mean ratio of each row's plans."""
    reports = []
    for split in range(num_splits):
        fitted, judged = halves(rows, split)
        reports.append(report(judged, fit(fitted)))
        found = reports[-1].as_json()
        brief = {kind: [found[kind]["tps"][key] for key in KEYS] for kind in KINDS}
        print(f"split {split}", brief, "ordering", found["ordering"], flush=True)
    every = Report([one for some in reports for one in some.judged])
    ratios: dict[str, list[float]] = {}
    for one in every.judged:
        ratios.setdefault(one.row.name, []).append(one.speed / one.row.tokens_per_second)
    pooled, orders = every.as_json(), [some.as_json()["ordering"] for some in reports]
    return {
        "splits": num_splits,
        **{kind: {what: pooled[kind][what] for what in ("tps", "constant_mfu")} for kind in KINDS},
        "ordering": {"all": share(orders), **{kind: share([one[kind] for one in orders]) for kind in KINDS}},
        "families": {family: found["tps"] for family, found in pooled["families"].items()},
        "rows": {name: geometric(found) for name, found in ratios.items()},
    }


def share(orders: list[dict]) -> float:
    """Pairs that are in the right order; both of a pair are of one split."""
    return round(sum(one["right"] for one in orders) / max(1, sum(one["n"] for one in orders)), 4)


def geometric(values: list[float]) -> float:
    """Mean of ratios."""
    return round(math.exp(statistics.fmean(map(math.log, values))), 4)


def three_digits(name: str, value: float) -> str:
    """A constant as it is written."""
    return repr(float(f"{value:.3g}"))


def write(module: ModuleType, constants: Any, shown: Callable[[str, float], str] = three_digits) -> None:
    """Replace the defaults in ``module``, the file of the dataclass of ``constants``."""
    path = Path(str(module.__file__))
    text = path.read_text(encoding="utf-8")
    for name, value in asdict(constants).items():
        text, count = re.subn(
            rf"^    {name}: float = .*$", f"    {name}: float = {shown(name, value)}", text, flags=re.M
        )
        assert count == 1, name
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, default=NUM_SPLITS)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows = [row for row in read_measurements(ROWS)[0] if row.tokens_per_second is not None]
    judged = judge(rows, args.splits) if args.splits else None
    if judged:
        print(json.dumps({key: value for key, value in judged.items() if key != "rows"}, indent=2))
    if args.write:
        shared, others = fit(rows, most=25)
        write(rates, shared)
        write(planner.trainers, others)
        print(asdict(shared) | asdict(others))
        if judged:
            JUDGED.write_text(json.dumps(judged, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Fit the constants of the planner's closed form of memory, and judge them on rows that they were not fitted on.

    python benchmarks/fit_planner_memory.py            # judge: fit on half of the groups, judge on the other half
    python benchmarks/fit_planner_memory.py --write    # and write the constants, fitted on all rows, and the figures

As ``fit_planner.py`` does for time: the same groups, splits and pull towards priors. Needs SciPy.
"""

import argparse
import json
import math
from dataclasses import asdict, fields

import numpy
import planner.trainers
from fit_planner import ROWS, geometric, halves, softened, three_digits, weights_of, write
from planner.measurements import Measurement, read_measurements
from planner.trainers import OthersMemory, OthersTime, as_known, planned_memory, trainers
from planner.validate import Errors
from scipy.optimize import least_squares

from crius.tools.plan import memory as memory_module
from crius.tools.plan.memory import Counting, MemoryConstants
from crius.units import GIB

NUM_SPLITS = 10
JUDGED = ROWS.with_name("judged_memory.json")
PULL = 0.06  # weight of a constant that is one standard deviation off its prior, beside a row that is 6 % off
TOLERANCE = 0.05  # rows further off than this pull linearly, not quadratically
REPEATED = 0.5  # see weights_of; rows of a group hold nearly the same

# constant: prior and standard deviation of its logarithm
PRIORS: dict[str, tuple[float, float]] = {
    "torchtitan_logit_bytes": (14.0, 0.2),  # 2 of the logits, 4 of each of log-probabilities and two gradients
    "graph_logit_bytes": (10.0, 0.3),
    "kempnerforge_logit_bytes": (10.0, 1.0),
    "in_place_logit_bytes": (10.0, 0.3),  # 4 of the probabilities, 4 of their gradient, 2 of the logits
    "compiled_logit_bytes": (4.0, 0.3),  # 2 of the logits and of their gradient
    "chunked_logit_bytes": (2.0, 0.5),
    "fused_logit_bytes": (4.0, 0.3),
    "reserved_share": (0.04, 0.5),
    "reserved_eager_share": (0.06, 0.5),
    "reserved_bytes": (1.0 * GIB, 0.3),  # context of NCCL's channels, workspaces
    "allocated_bytes": (0.5 * GIB, 0.5),
    "cdna3_bytes": (3.0 * GIB, 1.0),
    "nanotron_activations": (1.3, 0.5),
    "nvfp4_kept": (0.5, 0.3),
}
Constants = tuple[MemoryConstants, OthersMemory]
NAMES = tuple(PRIORS)
OTHERS = {field.name for field in fields(OthersMemory)}


def counting_of(row: Measurement) -> Counting:
    """What a row's figure counts; where it does not say, the allocator's cache too."""
    return "allocated" if row.memory_kind == "allocated" else "reserved"


def planned(rows: list[Measurement], constants: Constants) -> list[float]:
    """Bytes of each row by the closed form."""
    shared, others = constants
    known = trainers(OthersTime(), others)
    return [
        planned_memory(as_known(row.workload, known), row.hardware, shared, counting=counting_of(row)) for row in rows
    ]


def fit(rows: list[Measurement]) -> Constants:
    """Constants that explain ``rows`` and stay near their priors."""
    prior = numpy.log([PRIORS[name][0] for name in NAMES])
    spread = numpy.array([PRIORS[name][1] for name in NAMES])
    weights = weights_of(rows, REPEATED)
    measured = numpy.log([row.memory_bytes for row in rows])

    def residuals(vector: numpy.ndarray) -> numpy.ndarray:
        off = softened(numpy.log(planned(rows, _constants(vector))) - measured, TOLERANCE)
        return numpy.concatenate([weights * off, PULL * (vector - prior) / spread])

    return _constants(least_squares(residuals, prior, max_nfev=20, diff_step=1e-3).x)


def _constants(vector: numpy.ndarray) -> Constants:
    values = dict(zip(NAMES, map(float, numpy.exp(vector)), strict=True))
    others = {name: values.pop(name) for name in OTHERS}
    return MemoryConstants(**values), OthersMemory(**others)


def judge(rows: list[Measurement], num_splits: int) -> dict:
    """Errors of all rows that were judged, each in half of the splits, and the mean ratio of each row's plans."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    ratios: dict[str, list[float]] = {}
    for split in range(num_splits):
        fitted, judged = halves(rows, split)
        for row, nbytes in zip(judged, planned(judged, fit(fitted)), strict=True):
            pair = nbytes, row.memory_bytes or math.nan
            pairs.setdefault("moe" if row.has_experts else "dense", []).append(pair)
            ratios.setdefault(row.name, []).append(pair[0] / pair[1])
    errors = {kind: Errors.of(found).as_json() for kind, found in pairs.items()}
    return {"splits": num_splits, **errors, "rows": {name: geometric(found) for name, found in ratios.items()}}


def shown(name: str, value: float) -> str:
    """A constant as it is written, sizes in GiB."""
    is_size = name in ("reserved_bytes", "allocated_bytes", "cdna3_bytes")
    return f"{three_digits(name, value / GIB)} * GIB" if is_size else three_digits(name, value)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, default=NUM_SPLITS)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worst", type=int, default=0, help="rows to show")
    args = parser.parse_args()
    rows = [row for row in read_measurements(ROWS)[0] if row.memory_bytes is not None]
    if args.splits:
        judged = judge(rows, args.splits)
        if args.write:
            JUDGED.write_text(json.dumps(judged, indent=1) + "\n", encoding="utf-8")
        ratios = judged.pop("rows")
        print(json.dumps(judged, indent=2))
        for name in sorted(ratios, key=lambda name: -abs(math.log(ratios[name])))[: args.worst]:
            print(name, ratios[name])
    if args.write:
        shared, others = fit(rows)
        write(memory_module, shared, shown)
        write(planner.trainers, others)
        print(asdict(shared) | asdict(others))


if __name__ == "__main__":
    main()

"""Checks of single paths: how a check runs, what it prints, and how far results may be off. Loads torch only to run.

A check prints one line of JSON: ``{"check", "ok", "detail", "seconds", "figures"}``. ``ok`` null: this device cannot
tell. ``figures`` has the measured numbers by name; a number that is not finite is null there.
"""

import json
import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent.parent

GROUPS = ("attention", "loss", "experts", "low_precision", "system")
"""Groups of checks. Each is a process of its own: ``python -m benchmarks.gpu.kernels GROUP cuda|cpu``."""

LIMITS = {
    # one rounding of 8 bits is 1.7e-3; flash on a CPU rounds the gradient of shared heads per head, which gives 7e-3
    "bfloat16": 1.5e-2,
    # 5e-7 with float32 products; kernels of a GPU may multiply in TF32, whose 11 bits give up to 1e-3
    "float32": 2e-3,
    # E4M3 rounds a number by 2.6e-2 and E5M2, the dtype of gradients, by 5.2e-2: products are 3.8e-2 and 5.9e-2 off
    "float8": 8e-2,
    # E4M3 for all operands, whose scales are rounded up to powers of two: products are 3.8e-2 off
    "mxfp8": 8e-2,
}
"""Largest distance of a result from float64, relative to the norm of the float64 result, by the narrowest dtype."""

ROW = 6
"""A single row may be off by this many times the limit of its tensor. Flash on a CPU reaches 1.6 times: the gradients
of the first queries are small differences of large numbers. A row that a kernel forgets is off by 1, which the distance
of a tensor of thousands of rows does not show."""

NEEDS_GPU = "needs a GPU"
_MOST_DETAIL = 400


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
        ok: whether the path is right; None: this device cannot tell.
        detail: words for a reader, besides the figures.
        figures: measured numbers and their limits by name.
    """

    ok: bool | None
    detail: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One path.

    Attributes:
        name: name of the check.
        measure: function of the device type, ``cuda`` or ``cpu``.
        needs_gpu: whether only a GPU can tell.
    """

    name: str
    measure: Callable[[str], Outcome]
    needs_gpu: bool = False


def run_group(checks: Iterable[Check], device: str) -> None:
    """Run ``checks`` one after the other, and print the line of each as soon as it is known."""
    for check in checks:
        print(json.dumps(run_check(check, device)), flush=True)


def run_check(check: Check, device: str) -> dict[str, Any]:
    """Run one check with a fixed seed; an exception is a failed check. Returns the line that is printed."""
    import torch  # noqa: PLC0415  the program that starts the groups needs no torch

    begin = time.perf_counter()
    if check.needs_gpu and device != "cuda":
        outcome = Outcome(None, NEEDS_GPU)
    else:
        try:
            torch.manual_seed(0)
            outcome = check.measure(device)
            if device == "cuda":
                torch.cuda.synchronize()  # an error of a kernel shows here, and not in the next check
        except Exception as error:  # whatever a path raises, the next one is tried
            outcome = Outcome(False, describe(error))
    figures = outcome.figures.items()
    details = [outcome.detail] if outcome.detail else []
    details += [f"{name} {value:.3g}" for name, value in figures]
    return {
        "check": check.name,
        "ok": outcome.ok,
        "detail": ", ".join(details)[:_MOST_DETAIL],
        "seconds": round(time.perf_counter() - begin, 2),
        "figures": {name: value if math.isfinite(value) else None for name, value in figures},
    }


def describe(error: Exception) -> str:
    """Type and first line of an error, and the innermost place in Crius; without one, the innermost place."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT / "crius")]
    place = inside[-1] if inside else frames[-1]
    path = Path(place.filename)
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line[: _MOST_DETAIL // 2]} [{shown}:{place.lineno}]"


def compare(names: Sequence[str], got: "Sequence[Tensor]", want: "Sequence[Tensor]", limit: float) -> Outcome:
    """Compare tensors with their float64 references, as wholes and row by row. NaN fails.

    Args:
        names: names of the tensors, for the figures; ``<name>_row`` is the distance of the worst row.
        got: tensors to judge.
        want: references with the same shapes.
        limit: largest distance of a whole tensor; a row may be ``ROW`` times as far off.

    Raises:
        ValueError: a tensor does not have the shape of its reference.
    """
    figures = {"limit": limit, "row_limit": ROW * limit}
    is_close = True
    for name, result, reference in zip(names, got, want, strict=True):
        whole, row = distances(result, reference)
        is_close = is_close and whole < limit and row < ROW * limit
        figures[name] = whole
        figures[f"{name}_row"] = row
    return Outcome(is_close, figures=figures)


def distances(result: "Tensor", reference: "Tensor") -> tuple[float, float]:
    """Distance of ``result`` from ``reference``, relative to its norm: of the whole, and of the worst row.

    A row that is shorter than the average row is measured by the average: its own norm may be 0.
    """
    if result.shape != reference.shape:
        raise ValueError(f"the result has the shape {tuple(result.shape)}, not {tuple(reference.shape)}")
    reference = reference.detach().double().cpu()
    off = result.detach().double().cpu() - reference
    width = reference.shape[-1] if reference.dim() else 1
    lengths = reference.reshape(-1, width).norm(dim=1)
    average = lengths.square().mean().sqrt()
    worst = (off.reshape(-1, width).norm(dim=1) / lengths.clamp_min(float(average))).amax()
    return float(off.norm() / reference.norm()), float(worst)

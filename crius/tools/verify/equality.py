"""Whether a killed run equals the undisturbed one: each step, the last checkpoint, each sample. No torch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crius.checkpoint.contents import OF_LAYOUT, contents_hash, whole_tensor
from crius.checkpoint.disk import Disk, open_disk
from crius.checkpoint.folder import CheckpointFolder, damages, read_manifest
from crius.checkpoint.manifest import Manifest, TensorEntry
from crius.checkpoint.names import step_name
from crius.checkpoint.state import read_state
from crius.interop.casting import FLOATS, cast
from crius.tools.data_audit.audit import audit
from crius.untrusted import parse_json, text_below

COMPARED = ("loss", "grad_norm")
"""Numbers of each step in ``metrics.jsonl`` that are compared; the file has them to the last bit."""
STATE = ("train", "data", "stability")
"""Parts of ``state.json`` that belong to the run; the others describe its processes. The last one contains losses."""
WEIGHTS = "model."
"""Prefixes of the names in a checkpoint."""
_MOST_NAMED = 5
Records = list[dict[str, Any]]
Pair = tuple[int, Records, Records]
"""A step, and its records in both runs; each should have one."""


@dataclass(frozen=True, kw_only=True)
class Equality:
    """Result of a comparison.

    Attributes:
        steps: number of expected steps.
        same_steps: steps in both runs with the same loss and gradient norm, or a loss within the tolerance.
        first_difference: first step that differs; empty if none does.
        hash, hash_killed: hashes of weights and optimizer state of the two last checkpoints.
        tensors: names of differing tensors, with a limit.
        problems: other errors, such as a sample that came twice.
        steps_again: steps of the killed run that it repeated after failures.
        tolerance: relative tolerance of the loss of every step; 0: everything is compared to the last bit.
        apart: with a tolerance, the largest relative differences of loss and gradient norm, and that of the weights, by
            the L2 norm of their difference.
    """

    steps: int
    same_steps: int
    first_difference: str
    hash: str
    hash_killed: str
    tensors: tuple[str, ...]
    problems: tuple[str, ...]
    steps_again: int
    tolerance: float = 0.0
    apart: dict[str, float] = field(default_factory=dict)

    @property
    def has_same_contents(self) -> bool:
        """Whether weights and optimizer state are the same."""
        return self.hash == self.hash_killed

    def __bool__(self) -> bool:
        is_same = not self.tensors if self.tolerance else self.has_same_contents
        return self.same_steps == self.steps and is_same and not self.problems

    def lines(self) -> list[str]:
        """Differences, one per line; empty if there are none."""
        found = [self.first_difference] if self.first_difference else []
        return [*found, *(f"differs: {tensor}" for tensor in self.tensors), *self.problems]

    def verdict(self) -> str:
        """One line."""
        is_same = self.same_steps == self.steps
        if self.tolerance:
            losses = f"{'all' if is_same else 'not all'} within {self.tolerance:.0e}"
            contents = ", ".join(f"{name} {value:.1e}" for name, value in self.apart.items())
            line = f"losses {losses} ({self.same_steps}/{self.steps}), relative differences: {contents}"
        else:
            contents = "identical" if self.has_same_contents else "differs"
            losses = "identical" if is_same else "differ"
            line = f"losses {losses} ({self.same_steps}/{self.steps}), parameter hash {contents}"
        return f"{line}, but {len(self.problems)} problems" if self.problems else line

    def as_dict(self) -> dict[str, Any]:
        """For the JSON."""
        return {"identical": bool(self), **vars(self)}


def compare(expected: Path, got: Path, steps: int, tolerance: float = 0.0) -> Equality:
    """Compare two run folders of finished runs.

    Args:
        expected: folder of the undisturbed run.
        got: folder of the other run.
        steps: steps that both should have.
        tolerance: relative tolerance of the loss of every step; gradient norms and weights may then differ, and the
            difference is measured. 0: everything must be the same to the last bit.

    Raises:
        CriusError: a checkpoint or a log cannot be read.
    """
    want = _steps(expected)
    have = _steps(got)
    pairs: list[Pair] = [(step, want.get(step, []), have.get(step, [])) for step in range(1, steps + 1)]
    lines = [_difference(*pair, tolerance) for pair in pairs]
    apart = _furthest(pairs) if tolerance else {}
    disks = [open_disk(str(folder / "checkpoints")) for folder in (expected, got)]
    name = step_name(steps)
    problems = list(_damaged(disks[1]))
    if any(step_name(found) == name for found in CheckpointFolder(disks[1]).steps()):
        manifests = [read_manifest(disk, name) for disk in disks]
        hashes = [contents_hash(disk, name, manifest) for disk, manifest in zip(disks, manifests, strict=True)]
        tensors = list[str]()
        weights = 0.0
        if hashes[0] != hashes[1]:
            tensors, weights = _tensors(disks, name, manifests, is_exact=not tolerance)
        if tolerance:
            apart["parameters"] = weights
        problems += _states(disks, name, manifests, STATE[:-1] if tolerance else STATE)
    else:
        hashes = [contents_hash(disks[0], name, read_manifest(disks[0], name)), ""]
        tensors = []
        problems.append(f"the killed run has no checkpoint of step {steps}")
    report = audit(got)
    problems += [f"audit: {problem}" for problem in report.problems]
    if not report.problems and report.last_step != steps:
        problems.append(f"audit: the sample log ends with step {report.last_step}")
    return Equality(
        steps=steps,
        same_steps=sum(not line for line in lines),
        first_difference=next(filter(None, lines), ""),
        hash=hashes[0],
        hash_killed=hashes[1],
        tensors=tuple(tensors),
        problems=tuple(problems),
        steps_again=sum(attempt.redone for attempt in report.attempts),
        tolerance=tolerance,
        apart=apart,
    )


def _steps(run_dir: Path) -> dict[int, Records]:
    """The records of each step; each should have one."""
    found: dict[int, Records] = {}
    for line in text_below(run_dir, "metrics.jsonl").splitlines():
        record = parse_json(line)
        if "loss" in record:
            found.setdefault(record["step"], []).append(record)
    return found


def _difference(step: int, want: Records, have: Records, tolerance: float) -> str:
    """Difference of a step of the killed run; empty if there is none, or if the loss is within the tolerance."""
    if len(want) != 1 or len(have) != 1:
        return f"step {step} is {len(have)} times in metrics.jsonl of the killed run, {len(want)} times in the other's"
    values = [(name, want[0][name], have[0][name]) for name in (COMPARED[:1] if tolerance else COMPARED)]
    unlike = [
        f"{name} {got!r}, not {expected!r}" for name, expected, got in values if not _is_near(got, expected, tolerance)
    ]
    return f"step {step} is the first that differs: {' and '.join(unlike)}" if unlike else ""


def _is_near(got: float | None, expected: float | None, tolerance: float) -> bool:
    return got == expected or _relative(got, expected) <= tolerance


def _relative(got: float | None, expected: float | None) -> float:
    """Relative difference of two numbers; infinite if one is missing or not finite."""
    if got == expected:
        return 0.0
    apart = abs(got - expected) / abs(expected) if got is not None and expected else math.inf
    return math.inf if math.isnan(apart) else apart


def _furthest(pairs: list[Pair]) -> dict[str, float]:
    """The largest relative difference of each number of a step, over the steps in both runs."""
    both = [(want[0], have[0]) for _, want, have in pairs if want and have]
    return {
        name: max((_relative(got[name], expected[name]) for expected, got in both), default=0.0) for name in COMPARED
    }


def _damaged(disk: Disk) -> Iterator[str]:
    for step in CheckpointFolder(disk).steps():
        for damage in damages(disk, step_name(step), read_manifest(disk, step_name(step))):
            yield f"checkpoint of step {step}: {damage}"


def _tensors(disks: list[Disk], name: str, manifests: list[Manifest], is_exact: bool) -> tuple[list[str], float]:
    """Tensors that differ, with the count of differing numbers; and the difference of the weights.

    Args:
        disks: disks of both runs.
        name: name of the checkpoints.
        manifests: their manifests.
        is_exact: whether every bit counts; otherwise floating-point tensors may differ, and only others are named.
    """
    found = []
    apart = 0.0
    whole = 0.0
    for tensor in sorted({*manifests[0].tensors, *manifests[1].tensors}):
        if tensor.startswith(OF_LAYOUT[0]) or OF_LAYOUT[1] in tensor:
            continue
        entries = [manifest.tensors.get(tensor) for manifest in manifests]
        want, got = entries
        if want is None or got is None:
            found.append(f"{tensor} is only in one of them")
        elif (want.dtype, want.shape) != (got.dtype, got.shape):
            found.append(f"{tensor}: {got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}")
        elif is_exact or want.dtype not in FLOATS:
            one, other = (whole_tensor(disk, name, entry) for disk, entry in zip(disks, (want, got), strict=True))
            count = int(np.any(one != other, axis=-1).sum())
            if count:
                found.append(f"{tensor} in {count:,} of {one.size // one.shape[-1]:,} numbers")
        elif tensor.startswith(WEIGHTS):
            expected, reached = (_numbers(disk, name, entry) for disk, entry in zip(disks, (want, got), strict=True))
            apart = apart + float(np.square(reached - expected).sum())
            whole = whole + float(np.square(expected).sum())
    more = [f"and {len(found) - _MOST_NAMED} more"] if len(found) > _MOST_NAMED else []
    return [*found[:_MOST_NAMED], *more], math.sqrt(apart / whole) if whole else 0.0


def _numbers(disk: Disk, name: str, entry: TensorEntry) -> npt.NDArray[np.float64]:
    held = cast(whole_tensor(disk, name, entry).reshape(-1).data, entry.dtype, "F64")
    return np.frombuffer(held, dtype=np.float64)


def _states(disks: list[Disk], name: str, manifests: list[Manifest], parts: Sequence[str]) -> list[str]:
    """Differences in the counters, the data cursor and the stability monitor."""
    want, got = (read_state(disk, name, manifest) for disk, manifest in zip(disks, manifests, strict=True))
    unlike = [part for part in parts if want.get(part) != got.get(part)]
    return [f"state.json: {part} is {got.get(part)}, not {want.get(part)}"[:300] for part in unlike]

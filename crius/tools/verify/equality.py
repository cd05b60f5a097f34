"""Whether a run that was killed is the run that was not: each step, the last checkpoint, each sample. No torch."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crius.checkpoint.contents import OF_LAYOUT, contents_hash, whole_tensor
from crius.checkpoint.disk import Disk, open_disk
from crius.checkpoint.folder import CheckpointFolder, damages, read_manifest
from crius.checkpoint.manifest import Manifest
from crius.checkpoint.names import step_name
from crius.checkpoint.state import read_state
from crius.tools.data_audit.audit import audit

COMPARED = ("loss", "grad_norm")
"""Of each step, in ``metrics.jsonl``, where they are written to the last bit."""
STATE = ("train", "data", "stability")
"""Parts of ``state.json`` that belong to the run; the others tell of its processes."""
_MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Equality:
    """What a comparison found.

    Attributes:
        steps: there should be.
        same_steps: that are in both runs, with the same loss and gradient norm.
        first_difference: of the steps; empty where there is none.
        hash, hash_killed: over weights and optimizer state of the two last checkpoints.
        tensors: which of them differ, named: at most so many.
        problems: what else is wrong, such as a sample that came twice.
        steps_again: of the killed run, that were done and that a failure took back.
    """

    steps: int
    same_steps: int
    first_difference: str
    hash: str
    hash_killed: str
    tensors: tuple[str, ...]
    problems: tuple[str, ...]
    steps_again: int

    @property
    def has_same_contents(self) -> bool:
        """Whether weights and optimizer state are the same."""
        return self.hash == self.hash_killed

    def __bool__(self) -> bool:
        return self.same_steps == self.steps and self.has_same_contents and not self.problems

    def lines(self) -> list[str]:
        """What differs; none where nothing does."""
        found = [self.first_difference] if self.first_difference else []
        return [*found, *(f"differs: {tensor}" for tensor in self.tensors), *self.problems]

    def verdict(self) -> str:
        """One line."""
        losses = "identical" if self.same_steps == self.steps else "differ"
        contents = "identical" if self.has_same_contents else "differs"
        line = f"losses {losses} ({self.same_steps}/{self.steps}), parameter hash {contents}"
        return f"{line}, but {len(self.problems)} problems" if self.problems else line

    def as_dict(self) -> dict[str, Any]:
        """For the JSON."""
        return {"identical": bool(self), **vars(self)}


def compare(expected: Path, got: Path, steps: int) -> Equality:
    """Compare two run folders whose runs are at their end.

    Args:
        expected: of the run that nothing happened to.
        got: of the other.
        steps: that both should have.

    Raises:
        CriusError: a checkpoint or a log cannot be read.
    """
    want, have = _steps(expected), _steps(got)
    lines = [_difference(step, want.get(step, []), have.get(step, [])) for step in range(1, steps + 1)]
    disks = [open_disk(str(folder / "checkpoints")) for folder in (expected, got)]
    name = step_name(steps)
    problems = list(_damaged(disks[1]))
    if any(step_name(found) == name for found in CheckpointFolder(disks[1]).steps()):
        manifests = [read_manifest(disk, name) for disk in disks]
        hashes = [contents_hash(disk, name, manifest) for disk, manifest in zip(disks, manifests, strict=True)]
        tensors = _tensors(disks, name, manifests) if hashes[0] != hashes[1] else []
        problems += _states(disks, name, manifests)
    else:
        hashes, tensors = [contents_hash(disks[0], name, read_manifest(disks[0], name)), ""], []
        problems.append(f"the killed run has no checkpoint of step {steps}")
    report = audit(got)
    problems += [f"audit: {problem}" for problem in report.problems]
    if not report.problems and report.last_step != steps:
        problems.append(f"audit: the log of samples ends with step {report.last_step}")
    return Equality(
        steps=steps,
        same_steps=sum(not line for line in lines),
        first_difference=next(filter(None, lines), ""),
        hash=hashes[0],
        hash_killed=hashes[1],
        tensors=tuple(tensors),
        problems=tuple(problems),
        steps_again=sum(attempt.redone for attempt in report.attempts),
    )


def _steps(run_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """The records of each step; there should be one."""
    found: dict[int, list[dict[str, Any]]] = {}
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "loss" in record:
            found.setdefault(record["step"], []).append(record)
    return found


def _difference(step: int, want: list[dict[str, Any]], have: list[dict[str, Any]]) -> str:
    """How a step of the killed run differs; empty where it does not."""
    if len(want) != 1 or len(have) != 1:
        return f"step {step} is {len(have)} times in metrics.jsonl of the killed run, {len(want)} times in the other's"
    values = [(name, want[0][name], have[0][name]) for name in COMPARED]
    unlike = [f"{name} {got!r}, not {expected!r}" for name, expected, got in values if got != expected]
    return f"step {step} is the first that differs: {' and '.join(unlike)}" if unlike else ""


def _damaged(disk: Disk) -> Iterator[str]:
    for step in CheckpointFolder(disk).steps():
        for damage in damages(disk, step_name(step), read_manifest(disk, step_name(step))):
            yield f"checkpoint of step {step}: {damage}"


def _tensors(disks: list[Disk], name: str, manifests: list[Manifest]) -> list[str]:
    """Which tensors differ, and in how many of their numbers."""
    found = []
    for tensor in sorted({*manifests[0].tensors, *manifests[1].tensors}):
        if tensor.startswith(OF_LAYOUT[0]) or OF_LAYOUT[1] in tensor:
            continue
        entries = [manifest.tensors.get(tensor) for manifest in manifests]
        want, got = entries
        if want is None or got is None:
            found.append(f"{tensor} is in one of them only")
        elif (want.dtype, want.shape) != (got.dtype, got.shape):
            found.append(f"{tensor}: {got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}")
        else:
            one, other = (whole_tensor(disk, name, entry) for disk, entry in zip(disks, (want, got), strict=True))
            count = int(np.any(one != other, axis=-1).sum())
            if count:
                found.append(f"{tensor} in {count:,} of {one.size // one.shape[-1]:,} numbers")
    return [*found[:_MOST_NAMED], *([f"and {len(found) - _MOST_NAMED} more"] if len(found) > _MOST_NAMED else [])]


def _states(disks: list[Disk], name: str, manifests: list[Manifest]) -> list[str]:
    """What of the counters, the data cursor and the stability monitor differs."""
    want, got = (read_state(disk, name, manifest) for disk, manifest in zip(disks, manifests, strict=True))
    parts = [part for part in STATE if want.get(part) != got.get(part)]
    return [f"state.json: {part} is {got.get(part)}, not {want.get(part)}"[:300] for part in parts]

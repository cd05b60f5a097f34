"""Loads of a run: the newest checkpoint of which every byte is right, into any layout."""

import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, Metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from crius.checkpoint.disk import Disk
from crius.checkpoint.folder import CheckpointFolder, damages, extra_files, read_manifest
from crius.checkpoint.manifest import Chunk, Manifest, digest_of
from crius.checkpoint.names import step_name
from crius.checkpoint.state import read_state
from crius.checkpoint.tensors import DTYPES, Gather
from crius.errors import CheckpointError

SHOWN = 8
"""Tensors or damages that a message names; it counts the others."""

log = logging.getLogger("crius.checkpoint")


@dataclass(frozen=True)
class Found:
    """A checkpoint to load from.

    Attributes:
        folder: of the checkpoints.
        manifest: of this one.
        state: what is no tensor.
    """

    folder: CheckpointFolder
    manifest: Manifest
    state: dict[str, Any]

    @property
    def name(self) -> str:
        """Of its folder."""
        return step_name(self.manifest.step)


def find(
    folder: CheckpointFolder,
    load_step: int,
    *,
    rank: int,
    size: int,
    gather: Gather,
    verify: bool,
    beat: Callable[[], None] = lambda: None,
) -> Found | None:
    """The checkpoint to go on from; None where the folder has none. Every rank calls this and gets the same.

    Ranks share the files to verify. A damaged checkpoint is named loudly, with file and tensor, and the one before it
    is tried.

    Args:
        folder: of checkpoints.
        load_step: the one to take; -1 for the newest good one.
        rank, size: of this process.
        gather: see ``crius.checkpoint.tensors.Gather``.
        verify: hash every byte.
        beat: called while bytes move.

    Raises:
        CheckpointError: there are checkpoints and none is good, or ``load_step`` is not there or not good.
    """
    steps = gather(folder.steps() if rank == 0 else None)[0]
    if load_step >= 0 and load_step not in steps:
        raise CheckpointError(
            f"there is no checkpoint of step {load_step} in {folder.disk.where}.",
            where="--checkpoint.load_step",
            why=f"there are: {', '.join(map(str, steps)) or 'none'}",
            fix=f"--checkpoint.load_step {steps[-1]}" if steps else "leave out --checkpoint.load_step",
        )
    damaged: list[int] = []
    for step in [load_step] if load_step >= 0 else reversed(steps):
        own_problems, manifest, state = _look(folder.disk, step_name(step), rank, size, verify, beat)
        problems = list(dict.fromkeys(line for of_rank in gather(own_problems) for line in of_rank))
        if manifest and not problems:
            if damaged and rank == 0:
                log.warning("checkpoint: FALLING BACK to step %d; step %s damaged", step, _listed(damaged))
            return Found(folder, manifest, state)
        damaged.append(step)
        if rank == 0:
            for line in _shortened(problems):
                log.warning("checkpoint: step %d IS DAMAGED: %s", step, line)
    if not damaged:
        return None
    raise CheckpointError(
        f"no checkpoint in {folder.disk.where} is good; damaged: step {_listed(damaged)}.",
        where="--checkpoint.load_step" if load_step >= 0 else "--checkpoint.folder",
        why=problems[0],
        fix=f"crius checkpoint verify {folder.disk.where} says more; --checkpoint.folder NEW starts from the beginning",
    )


def _look(
    disk: Disk, name: str, rank: int, size: int, verify: bool, beat: Callable[[], None]
) -> tuple[list[str], Manifest | None, dict[str, Any]]:
    """What is wrong with this rank's share of a checkpoint; its manifest and its state."""
    manifest, state, problems = None, {}, []
    try:
        manifest = read_manifest(disk, name)
        if verify:
            found = damages(disk, name, manifest, sorted(manifest.files)[rank::size], beat)
            if rank == 0:
                found += extra_files(disk, name, manifest)
            problems = [str(damage) for damage in found]
        if not problems:
            state = read_state(disk, name, manifest)
    except CheckpointError as error:
        problems = [error.what.rstrip(".") + (f": {error.why}" if error.why else "")]
    except OSError as error:
        problems = [f"{type(error).__name__}: {error}"]
    return problems, manifest, state


def _listed(steps: Iterable[int]) -> str:
    return ", ".join(map(str, steps))


def _shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"]


def check_tensors(
    manifest: Manifest, wanted: dict[str, tuple[tuple[int, ...], str]], may_lack: Callable[[str], bool]
) -> list[str]:
    """Compare the tensors of a run with those of a checkpoint.

    Args:
        manifest: of the checkpoint.
        wanted: shape and dtype, as manifests name it, of every tensor that the run takes, by name.
        may_lack: names of which either side may have more.

    Returns:
        Dtypes that change, as ``name: F32 -> BF16``.

    Raises:
        CheckpointError: a tensor is missing, is too many, or has another shape; names all of them.
    """
    there = manifest.tensors
    missing = sorted(name for name in wanted.keys() - there.keys() if not may_lack(name))
    extra = sorted(name for name in there.keys() - wanted.keys() if not may_lack(name))
    both = sorted(wanted.keys() & there.keys())
    shapes = [
        f"{name}: {list(there[name].shape)} in the checkpoint, {list(wanted[name][0])} in the run"
        for name in both
        if there[name].shape != wanted[name][0]
    ]
    problems = [
        f"{len(names)} {what}: {', '.join(_shortened(names))}"
        for names, what in (
            (missing, "that the run has and the checkpoint lacks"),
            (extra, "that the checkpoint has and the run lacks"),
            (shapes, "of another shape"),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the tensors of the checkpoint of step {manifest.step} are not those of the run.",
            where="--checkpoint.folder or --checkpoint.load_path",
            why="; ".join(problems),
            fix="give the settings that it was saved with (they are in its manifest.json), or start in another folder",
        )
    return [
        f"{name}: {there[name].dtype} -> {wanted[name][1]}" for name in both if there[name].dtype != wanted[name][1]
    ]


def load_tensors(found: Found, tensors: dict[str, Tensor]) -> None:
    """Fill ``tensors``, laid out in any way, from a checkpoint, in place. No collective: each rank plans for itself.

    Each part of a tensor that this rank needs something of is read whole and hashed again.

    Args:
        found: the checkpoint.
        tensors: by name; all of them are in it, with the same shape.

    Raises:
        CheckpointError: a part is not what was written.
        OSError: the disk does not give it.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), _metadata(found.manifest), is_coordinator=True)
    needed: dict[MetadataIndex, list[ReadItem]] = {}
    for item in planner.create_local_plan().items:
        if item.lengths.numel():
            needed.setdefault(item.storage_index, []).append(item)
    chunks = {
        MetadataIndex(name, torch.Size(chunk.offset)): chunk
        for name, entry in found.manifest.tensors.items()
        for chunk in entry.chunks
    }
    order = sorted(needed, key=lambda index: (chunks[index].file, chunks[index].begin))
    for name, indices in itertools.groupby(order, key=lambda index: chunks[index].file):
        with found.folder.disk.open(f"{found.name}/{name}") as file:
            for index in indices:
                part = _read_part(found, file, index.fqn, chunks[index])
                for item in needed[index]:
                    _fill(part, item, planner)


def _metadata(manifest: Manifest) -> Metadata:
    """The tensors of a manifest, in DCP's words."""
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=DTYPES[entry.dtype]),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)) for chunk in entry.chunks],
            )
            for name, entry in manifest.tensors.items()
        }
    )


def _read_part(found: Found, file: BinaryIO, name: str, chunk: Chunk) -> Tensor:
    """A part of the tensor ``name``."""
    data = np.empty(chunk.end - chunk.begin, dtype=np.uint8)
    file.seek(chunk.begin)
    count = file.readinto(data.data)  # type: ignore[attr-defined]  # every binary file has it
    if count != data.nbytes or digest_of(data.data) != chunk.digest:
        raise CheckpointError(
            f"tensor {name} in {found.folder.disk.where}/{found.name}/{chunk.file} is not what was written.",
            where=f"bytes {chunk.begin:,} to {chunk.end:,}",
            why="its hash is another one",
            fix="resume from another step: --checkpoint.load_step N",
        )
    return torch.from_numpy(data).view(dtype_of(found.manifest, name)).reshape(chunk.shape)


def _fill(part: Tensor, item: ReadItem, planner: DefaultLoadPlanner) -> None:
    """Copy what ``item`` asks for out of a part into the tensor that it is for."""
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)


def dtype_of(manifest: Manifest, name: str) -> Any:
    """torch's dtype of a tensor of a checkpoint."""
    return DTYPES[manifest.tensors[name].dtype]

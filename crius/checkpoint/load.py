"""Loads the newest intact checkpoint of a run, into any layout."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from crius.checkpoint.manifest import Manifest
from crius.checkpoint.names import step_name
from crius.checkpoint.pieces import TensorSource, misfits, shortened, stored
from crius.checkpoint.plain import DTYPES, as_tensor
from crius.checkpoint.state import read_state
from crius.checkpoint.tensors import Gather
from crius.errors import CheckpointError

log = logging.getLogger("crius.checkpoint")


@dataclass(frozen=True)
class Found:
    """A checkpoint to load.

    Attributes:
        folder: folder of checkpoints.
        manifest: manifest of this checkpoint.
        state: everything that is not a tensor.
    """

    folder: CheckpointFolder
    manifest: Manifest
    state: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        return step_name(self.manifest.step)

    def sources(self, names: Iterable[str]) -> dict[str, TensorSource]:
        """Sources of the named tensors."""
        tensors = self.manifest.tensors
        return stored(self.folder.disk, self.name, {name: tensors[name] for name in names})


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
    """The checkpoint to resume from; None if the folder has none. Every rank calls this and gets the same checkpoint.

    Ranks share the verification of the files. A damaged checkpoint is reported with file and tensor, and the previous
    checkpoint is tried.

    Args:
        folder: folder of checkpoints.
        load_step: step to load; -1: the newest good checkpoint.
        rank, size: rank of this process, and number of ranks.
        gather: see ``crius.checkpoint.tensors.Gather``.
        verify: hash every byte.
        beat: called while bytes are read.

    Raises:
        CheckpointError: there are checkpoints but none is good, or that of ``load_step`` is missing or damaged.
    """
    steps = gather(folder.steps() if rank == 0 else None)[0]
    if load_step >= 0 and load_step not in steps:
        raise CheckpointError(
            f"there is no checkpoint of step {load_step} in {folder.disk.where}.",
            where="--checkpoint.load_step",
            why=f"steps with a checkpoint: {', '.join(map(str, steps)) or 'none'}",
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
            for line in shortened(problems):
                log.warning("checkpoint: step %d IS DAMAGED: %s", step, line)
    if not damaged:
        return None
    raise CheckpointError(
        f"no checkpoint in {folder.disk.where} is good; damaged: step {_listed(damaged)}.",
        where="--checkpoint.load_step" if load_step >= 0 else "--checkpoint.folder",
        why=problems[0],
        fix=f"crius checkpoint verify {folder.disk.where} shows more; a new run: --checkpoint.folder NEW "
        "--checkpoint.restart",
    )


def _look(
    disk: Disk, name: str, rank: int, size: int, verify: bool, beat: Callable[[], None]
) -> tuple[list[str], Manifest | None, dict[str, Any]]:
    """Problems of this rank's share of a checkpoint, its manifest and its state."""
    manifest = None
    state = {}
    problems = []
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


def check_tensors(
    manifest: Manifest, wanted: dict[str, tuple[tuple[int, ...], str]], may_lack: Callable[[str], bool]
) -> list[str]:
    """Compare the tensors of a run with those of a checkpoint.

    Args:
        manifest: manifest of the checkpoint.
        wanted: shape and dtype (as manifests name it) of every tensor that the run loads, by name.
        may_lack: whether a tensor of this name may be missing on either side.

    Returns:
        Changes of dtype, as ``name: F32 -> BF16``.

    Raises:
        CheckpointError: tensors are missing, unexpected, or have another shape; names all of them.
    """
    there = manifest.tensors
    shapes = {name: shape for name, (shape, _) in wanted.items()}
    problems = misfits(
        {name: entry.shape for name, entry in there.items()}, shapes, "the checkpoint", "the run", may_lack
    )
    if problems:
        raise CheckpointError(
            f"the tensors of the checkpoint of step {manifest.step} do not match the run.",
            where="--checkpoint.folder or --checkpoint.load_path",
            why=problems,
            fix="use the settings that it was saved with (they are in its manifest.json), or start in another folder",
        )
    return [
        f"{name}: {there[name].dtype} -> {wanted[name][1]}"
        for name in sorted(wanted.keys() & there.keys())
        if there[name].dtype != wanted[name][1]
    ]


def load_tensors(sources: Mapping[str, TensorSource], tensors: dict[str, Tensor]) -> None:
    """Fill ``tensors`` of any layout, in place. No collective: each rank plans its own reads.

    If this rank needs a part of a piece, it reads only the rows that it needs, or the whole piece if the piece has a
    hash.

    Args:
        sources: sources to read, by name.
        tensors: tensors by name; ``sources`` has all of them, with the same shape.

    Raises:
        CheckpointError: a piece differs from the written bytes.
        OSError: reading fails.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), _metadata({name: sources[name] for name in tensors}), is_coordinator=True)
    needed: dict[MetadataIndex, list[ReadItem]] = {}
    for item in planner.create_local_plan().items:
        if item.lengths.numel():
            needed.setdefault(item.storage_index, []).append(item)
    pieces = {
        MetadataIndex(name, torch.Size(piece.offset)): piece for name in tensors for piece in sources[name].pieces
    }
    for index in sorted(needed, key=lambda index: pieces[index].place):
        piece = pieces[index]
        dtype = DTYPES[sources[index.fqn].dtype]
        if piece.read_rows is None:
            part = as_tensor(piece.read(), dtype, piece.shape)
        for item in needed[index]:
            if piece.read_rows is None:
                _fill(part, item, item.storage_offsets, planner)
                continue
            starts = list(item.storage_offsets)
            dim = piece.row_dim
            first = starts[dim]
            count = item.lengths[dim]
            rows = as_tensor(
                piece.read_rows(first, first + count), dtype, (*piece.shape[:dim], count, *piece.shape[dim + 1 :])
            )
            starts[dim] = 0
            _fill(rows, item, starts, planner)


def _metadata(sources: Mapping[str, TensorSource]) -> Metadata:
    """The tensors as DCP's metadata."""
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=DTYPES[source.dtype]),
                torch.Size(source.shape),
                [ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)) for piece in source.pieces],
            )
            for name, source in sources.items()
        }
    )


def _fill(part: Tensor, item: ReadItem, starts: Sequence[int], planner: DefaultLoadPlanner) -> None:
    """Copy the numbers of ``item``, which begin at ``starts`` of ``part``, into the target tensor of ``item``."""
    for dim, (start, length) in enumerate(zip(starts, item.lengths, strict=True)):
        part = part.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)


def dtype_of(manifest: Manifest, name: str) -> Any:
    """torch's dtype of a tensor of a checkpoint."""
    return DTYPES[manifest.tensors[name].dtype]

"""DCP's ``StorageReader`` over Crius's format: what a rank needs, out of the files that the manifest names."""

import itertools
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from crius.checkpoint.digest import digest_of
from crius.checkpoint.disk import Disk
from crius.checkpoint.dtypes import DTYPES
from crius.checkpoint.manifest import Manifest
from crius.errors import CheckpointError


class ShardReader(StorageReader):
    """Reads one checkpoint; works with ``torch.distributed.checkpoint.load``.

    Each part of a tensor that a rank needs something of is read whole and hashed again.

    Args:
        disk: folder of the checkpoints.
        folder: of this one.
        manifest: of this one, checked.
        beat: called while bytes move.
    """

    def __init__(self, disk: Disk, folder: str, manifest: Manifest, beat: Callable[[], None] = lambda: None) -> None:
        self._disk, self._folder, self._manifest, self._beat = disk, folder, manifest, beat
        self._chunks = {
            MetadataIndex(name, torch.Size(chunk.offset)): chunk
            for name, entry in manifest.tensors.items()
            for chunk in entry.chunks
        }

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one load to the next."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors of the manifest, in DCP's words."""
        found: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=DTYPES[entry.dtype]),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)) for chunk in entry.chunks],
            )
            for name, entry in self._manifest.tensors.items()
        }
        return Metadata(found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan.

        Raises:
            CheckpointError: a part is not what was written.
            OSError: the disk does not give it.
        """
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            if item.lengths.numel():
                wanted.setdefault(item.storage_index, []).append(item)
        order = sorted(wanted, key=lambda index: (self._chunks[index].file, self._chunks[index].begin))
        for name, indices in itertools.groupby(order, key=lambda index: self._chunks[index].file):
            with self._disk.open(f"{self._folder}/{name}") as file:
                for index in indices:
                    self._fill(file, index, wanted[index], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(self, file: BinaryIO, index: MetadataIndex, items: list[ReadItem], planner: LoadPlanner) -> None:
        chunk = self._chunks[index]
        data = np.empty(chunk.end - chunk.begin, dtype=np.uint8)
        file.seek(chunk.begin)
        count = file.readinto(data.data)  # type: ignore[attr-defined]  # every binary file has it
        self._beat()
        if count != data.nbytes or digest_of(data.data) != chunk.digest:
            raise CheckpointError(
                f"tensor {index.fqn} in {self._disk.where}/{self._folder}/{chunk.file} is not what was written.",
                where=f"bytes {chunk.begin:,} to {chunk.end:,}",
                why="its hash is another one",
                fix="resume from another step: --checkpoint.load_step N",
            )
        part = torch.from_numpy(data).view(DTYPES[self._manifest.tensors[index.fqn].dtype]).reshape(chunk.shape)
        for item in items:
            source = part
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """A reader is made for its place; ids are not looked at."""
        return True

    def storage_meta(self) -> StorageMeta | None:
        """None: the manifest says it all."""
        return None

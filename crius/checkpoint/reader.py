"""DCP's ``StorageReader`` over Crius's format: what a rank needs, out of the files that the manifest names."""

import itertools
import math
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, LoadPlan, LoadPlanner, SavePlan, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.futures import Future

from crius.checkpoint.disk import Disk
from crius.checkpoint.manifest import Manifest, digest_of
from crius.errors import CheckpointError

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def host_bytes(tensor: Tensor) -> memoryview:
    """The numbers of a tensor in C order, little endian; waits for the device it is on. No copy on a host."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


Gather = Callable[[Any], list[Any]]
"""A JSON value of every rank, in the order of the ranks; a collective."""


class StagedPlanner(DefaultSavePlanner):
    """DCP's planner over a flat dict of tensors, which can be copied to the host and written from there later.

    Parts that several ranks hold are written by one of them, so that all have about as much to write.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies: dict[MetadataIndex, Tensor] = {}
        self._planned: list[Any] | None = None

    def agree(self, tensors: dict[str, Tensor], rank: int, gather: Gather) -> tuple[SavePlan, Metadata]:
        """What this rank writes of ``tensors``, and what all ranks write together. Every rank calls this.

        The plan of the last time is taken again while the tensors of no rank change, so that a save costs one small
        exchange.
        """
        self.set_up_planner(tensors)
        items = [_encode(item) for item in self.create_local_plan().items if _numel(item)]
        if any(gather(items != self._planned)):
            plans, self._metadata = self.create_global_plan(
                [SavePlan([_decode(item) for item in of_rank]) for of_rank in gather(items)]
            )
            self._plan = self.finish_plan(plans[rank])
            self._planned = items
        return self._plan, self._metadata

    def stage(self) -> int:
        """Copy this rank's part to host memory, over the copies of the last time; returns bytes. Waits for the device.

        From now on ``resolve_data`` gives the copies.
        """
        old, self._copies = self._copies, {}
        for item in self._plan.items:
            source = self.lookup_object(item.index)
            copy = old.pop(item.index, None)
            if copy is None or (copy.shape, copy.dtype) != (source.shape, source.dtype):
                copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            copies = copy.copy_(source, non_blocking=source.is_cuda)
            self._copies[item.index] = copies
        if any(copy.is_pinned() for copy in self._copies.values()):
            torch.cuda.current_stream().synchronize()
        return sum(copy.numel() * copy.element_size() for copy in self._copies.values())

    @property
    def has_copies(self) -> bool:
        """Whether ``stage`` was called: its memory is there already."""
        return bool(self._copies)

    def drop_copies(self) -> None:
        """Free the copies; ``resolve_data`` gives the tensors themselves again."""
        self._copies = {}

    def num_bytes(self) -> int:
        """Bytes that this rank writes."""
        return sum(_numel(item) * _data(item).properties.dtype.itemsize for item in self._plan.items)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The copy of a part where there is one, else the part."""
        copy = self._copies.get(index)
        return super().lookup_object(index).detach() if copy is None else copy


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "only tensors are planned"
    return item.tensor_data


def _numel(item: WriteItem) -> int:
    return math.prod(_data(item).chunk.sizes)


def _encode(item: WriteItem) -> list[Any]:
    data = _data(item)
    places = [list(data.chunk.offsets), list(data.chunk.sizes), list(data.size)]
    return [item.index.fqn, item.type.name, NAMES[data.properties.dtype], *places]


def _decode(record: list[Any]) -> WriteItem:
    name, kind, dtype, offsets, sizes, shape = record
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    return WriteItem(
        MetadataIndex(name, torch.Size(offsets)),
        WriteItemType[kind],
        tensor_data=TensorWriteData(chunk, TensorProperties(dtype=DTYPES[dtype]), torch.Size(shape)),
    )


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

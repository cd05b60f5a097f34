"""The tensors of a save: DCP plans which rank writes which part, and each rank writes its parts into one file."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from crius.checkpoint.disk import Disk
from crius.checkpoint.files import Part, check_written, write_shard
from crius.checkpoint.manifest import Chunk, FileEntry, TensorEntry
from crius.checkpoint.plain import DTYPES, NAMES


def host_bytes(tensor: Tensor) -> memoryview:
    """The numbers of a tensor in C order, little endian. Waits for the tensor's device. No copy on a host."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


Gather = Callable[[Any], list[Any]]
"""Collective that returns a JSON value of every rank, in the order of the ranks."""


class StagedPlanner(DefaultSavePlanner):
    """DCP's planner for a flat dict of tensors. The tensors can be copied to the host and written from there later.

    A part that several ranks hold is written by one of them, chosen so that all ranks write about the same amount.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies: dict[MetadataIndex, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._arrived: torch.cuda.Event | None = None
        self._awaited = True
        self._planned: list[Any] | None = None

    def agree(self, tensors: dict[str, Tensor], rank: int, gather: Gather) -> tuple[SavePlan, Metadata]:
        """Plan what this rank writes of ``tensors``, and what all ranks write together. Every rank calls this.

        The previous plan is used again if no rank's tensors changed, so that a save costs one small exchange.
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

    def stage(self) -> None:
        """Copy this rank's part to host memory, into the memory of the previous copies.

        From now on ``resolve_data`` returns the copies. Copies from a GPU are made on a separate stream, and this
        method does not wait for them: call ``before_change`` before the tensors change, and keep the tensors until
        then.
        """
        old = self._copies
        self._copies = {}
        sources = {item.index: self.lookup_object(item.index) for item in self._plan.items}
        on_gpu = any(source.is_cuda for source in sources.values())
        if on_gpu:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())  # which may still run the last update
        with torch.cuda.stream(self._stream) if on_gpu else contextlib.nullcontext():
            for index, source in sources.items():
                copy = old.pop(index, None)
                if copy is None or (copy.shape, copy.dtype) != (source.shape, source.dtype):
                    copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                self._copies[index] = copy.copy_(source, non_blocking=source.is_cuda)
        self._arrived = self._stream.record_event() if on_gpu and self._stream else None
        self._awaited = False

    def before_change(self) -> None:
        """Call before the tensors change. On a GPU the current stream waits for the copies; the host does not wait."""
        if self._arrived and not self._awaited:
            torch.cuda.current_stream().wait_event(self._arrived)
        self._awaited = True

    @property
    def has_copies(self) -> bool:
        """Whether ``stage`` was called, so that memory for the copies exists."""
        return bool(self._copies)

    def drop_copies(self) -> None:
        """Free the copies; ``resolve_data`` returns the tensors themselves again."""
        self._copies = {}
        self._arrived = None

    def copy_bytes(self) -> int:
        """Bytes of host memory that ``stage`` takes. Torch rounds page-locked memory up to a power of two."""
        sources = [self.lookup_object(item.index) for item in self._plan.items]
        return sum(1 << (s.nbytes - 1).bit_length() if s.is_cuda else s.nbytes for s in sources)

    def num_bytes(self) -> int:
        """Bytes that this rank writes."""
        return sum(_numel(item) * _data(item).properties.dtype.itemsize for item in self._plan.items)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The copy of a part, after waiting for its numbers; without a copy, the part itself."""
        copy = self._copies.get(index)
        if copy is not None and self._arrived and self._stream:
            with torch.cuda.device(self._stream.device):  # a thread starts on GPU 0, and would create a context there
                self._arrived.synchronize()
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


class Written(NamedTuple):
    """The file that a rank wrote. Other ranks receive it as JSON.

    Attributes:
        name, size, digest: name, bytes and hash of the file.
        places: first byte, end and hash of each part, in the order of the rank's plan.
    """

    name: str
    size: int
    digest: str
    places: Sequence[tuple[int, int, str]]


def write_tensors(
    disk: Disk, path: str, plan: SavePlan, planner: StagedPlanner, *, verify: bool, beat: Callable[[], None]
) -> Written | None:
    """Write a rank's file, hashed and durable; None if its plan is empty.

    Args:
        disk: folder of checkpoints.
        path: path of the file.
        plan: plan of this rank's writes.
        planner: planner that has the tensors.
        verify: read the file again and compare hashes.
        beat: called while bytes are written or read.

    Raises:
        OSError: writing fails.
        CheckpointError: the file was read back with other bytes.
    """
    if not plan.items:
        return None
    folder, _, name = path.partition("/")
    entry, places = write_shard(disk, path, [_part(item, planner) for item in plan.items], beat)
    if verify:
        check_written(disk, folder, name, entry, beat)
    return Written(name, entry.size, entry.digest, places)


def _part(item: WriteItem, planner: StagedPlanner) -> Part:
    """A part of a tensor. If it is not the whole tensor, its key has its offset."""
    data = _data(item)
    key = item.index.fqn
    chunk = data.chunk
    return Part(
        key=key if chunk.sizes == data.size else f"{key}@{','.join(map(str, chunk.offsets))}",
        dtype=NAMES[data.properties.dtype],
        shape=tuple(chunk.sizes),
        data=lambda: host_bytes(planner.resolve_data(item)),  # type: ignore[arg-type]  # only bytes items give BytesIO
    )


def listed(
    metadata: Metadata, plans: Sequence[SavePlan], written: Sequence[Written | None]
) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
    """The manifest's entries of the files that all ranks wrote, and of the tensors in them.

    Args:
        metadata: metadata of all tensors.
        plans: plan of each rank's writes.
        written: file that each rank wrote.
    """
    files: dict[str, FileEntry] = {}
    chunks: dict[MetadataIndex, Chunk] = {}
    for plan, file in zip(plans, written, strict=True):
        if file is None:
            continue
        files[file.name] = FileEntry(file.size, file.digest)
        for item, (begin, end, digest) in zip(plan.items, file.places, strict=True):
            part = _data(item).chunk
            chunks[item.index] = Chunk(file.name, begin, end, tuple(part.offsets), tuple(part.sizes), digest)
    tensors: dict[str, TensorEntry] = {}
    for name, tensor in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(tensor, TensorStorageMetadata), "only tensors are planned"
        parts = tuple(chunks[MetadataIndex(name, part.offsets)] for part in tensor.chunks)
        tensors[name] = TensorEntry(NAMES[tensor.properties.dtype], tuple(tensor.size), parts)
    return files, tensors

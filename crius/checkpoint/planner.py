"""Which rank writes which part of which tensor: DCP's planner, its plans exchanged as JSON instead of pickles."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from crius.checkpoint.dtypes import DTYPES, NAMES

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

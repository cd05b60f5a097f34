"""DCP's ``StorageWriter`` over Crius's format: one safetensors file a rank, the manifest and one rename at the end."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint import SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from crius.checkpoint.disk import Disk
from crius.checkpoint.files import Part, check_written, write_shard, write_small
from crius.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry
from crius.checkpoint.names import MANIFEST
from crius.checkpoint.reader import NAMES, host_bytes
from crius.checkpoint.state import encode_state
from crius.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Written:
    """A part of a tensor in the file of a rank: ``WriteResult.storage_data``.

    Attributes:
        file: its name.
        size, digest: of the whole file.
        begin, end: of the part, in bytes of the file.
        part_digest: of the part.
    """

    file: str
    size: int
    digest: str
    begin: int
    end: int
    part_digest: str


def part_key(name: str, offset: tuple[int, ...], is_whole: bool) -> str:
    """What a part of a tensor is called in a safetensors file: the tensor's name, and where in it the part starts."""
    return name if is_whole else f"{name}@{','.join(map(str, offset))}"


class ShardWriter(StorageWriter):
    """Writes one checkpoint.

    Args:
        disk: folder of the checkpoints.
        step: of the checkpoint.
        attempt: tells the files of this process's attempt from those of one that died; the same on all ranks.
        rank: of this process.
        head: the manifest, but for files and tensors; needed on the rank that finishes.
        state: what is no tensor, as JSON; likewise.
        verify: read each file again and compare hashes.
        beat: called while bytes move.
    """

    def __init__(
        self,
        disk: Disk,
        step: int,
        attempt: str,
        rank: int,
        *,
        head: Manifest | None = None,
        state: dict[str, Any] | None = None,
        verify: bool = True,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._disk, self._step, self._attempt, self._rank = disk, step, attempt, rank
        self._head, self._state, self._verify, self._beat = head, state, verify, beat
        self.folder = disk.stage(step, attempt)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one checkpoint to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder."""
        self._disk.prepare(self.folder)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, hashed and durable.

        Raises:
            OSError: the disk does not take it.
            CheckpointError: what was read again is not what was written.
        """
        results: Future[list[WriteResult]] = Future()
        results.set_result(self._write(plan, planner) if plan.items else [])
        return results

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        path = f"{self.folder}/{self._disk.file_name(f'rank-{self._rank:05d}', self._attempt)}.safetensors"
        name = path.rpartition("/")[2]
        parts = [_part(item, planner) for item in plan.items]
        entry, places = write_shard(self._disk, path, parts, self._beat)
        if self._verify:
            check_written(self._disk, self.folder, name, entry, self._beat)
        return [
            WriteResult(item.index, end - begin, Written(name, entry.size, entry.digest, begin, end, digest))
            for item, (begin, end, digest) in zip(plan.items, places, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write state and manifest, and commit. Every rank has written its file.

        Raises:
            OSError: the disk does not take it.
            CheckpointError: a rank wrote to another place than this one, or a file was not read back as it was written.
        """
        assert self._head is not None
        state = encode_state(self._state or {}, self._step)
        name = f"{self._disk.file_name('state', self._attempt)}.json"
        files = {name: write_small(self._disk, self.folder, name, state, verify=self._verify)}
        places: dict[MetadataIndex, Written] = {}
        for result in (result for of_rank in results for result in of_rank):
            places[result.index] = result.storage_data
            files[result.storage_data.file] = FileEntry(
                size=result.storage_data.size, digest=result.storage_data.digest
            )
        if missing := sorted(files.keys() - set(self._disk.files(self.folder))):
            raise CheckpointError(
                f"{self._disk.where}/{self.folder} has no {', '.join(missing[:3])}, which another rank has written: "
                "the folder of checkpoints has to be one that all ranks share."
            )
        tensors = {
            name: _entry(name, tensor, places)
            for name, tensor in sorted(metadata.state_dict_metadata.items())
            if isinstance(tensor, TensorStorageMetadata)
        }
        manifest = dataclasses.replace(self._head, files=files, tensors=tensors)
        write_small(self._disk, self.folder, MANIFEST, manifest.encode(), verify=self._verify)
        self._disk.commit(self.folder, self._step)

    def storage_meta(self) -> StorageMeta | None:
        """None: the manifest says it all."""
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """A writer is made for its place; ids are not looked at."""
        return True


def _part(item: WriteItem, planner: SavePlanner) -> Part:
    assert item.tensor_data is not None
    chunk, shape = item.tensor_data.chunk, item.tensor_data.size
    return Part(
        key=part_key(item.index.fqn, tuple(chunk.offsets), chunk.sizes == shape),
        dtype=NAMES[item.tensor_data.properties.dtype],
        shape=tuple(chunk.sizes),
        data=lambda: host_bytes(planner.resolve_data(item)),  # type: ignore[arg-type]  # only bytes items give BytesIO
    )


def _entry(name: str, tensor: TensorStorageMetadata, places: dict[MetadataIndex, Written]) -> TensorEntry:
    chunks = []
    for part in tensor.chunks:
        at = places[MetadataIndex(name, part.offsets)]
        chunks.append(
            Chunk(
                file=at.file,
                begin=at.begin,
                end=at.end,
                offset=tuple(part.offsets),
                shape=tuple(part.sizes),
                digest=at.part_digest,
            )
        )
    return TensorEntry(dtype=NAMES[tensor.properties.dtype], shape=tuple(tensor.size), chunks=tuple(chunks))

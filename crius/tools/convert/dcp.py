"""The folders of ``torch.distributed.checkpoint``: a pickled ``.metadata``, and ``.distcp`` files of archives."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from crius.checkpoint.manifest import TORCH_NAMES
from crius.checkpoint.names import check_name
from crius.checkpoint.pieces import Piece, Shape, TensorSource
from crius.interop.foreign import (
    Foreign,
    check_key,
    check_shape,
    check_tiles,
    open_inside,
    overlapping,
    size_of,
)
from crius.interop.unpickle import MAX_BYTES, Name, Record, Table, read_pickle, refusal
from crius.tools.convert.torch_file import OTHER_DTYPES, Archive

METADATA = ".metadata"

_PACKAGE = "torch.distributed.checkpoint.metadata "
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem _StorageInfo"

NAMES = frozenset(
    [
        *(f"{_PACKAGE}{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *(f"{_PACKAGE}{name}StorageMetadata" for name in ("Tensor", "Bytes", "Chunk")),
        f"{_PACKAGE}_MEM_FORMAT_ENCODING",
        _STORAGE_INFO,
        "torch Size",
        "torch.serialization _get_layout",
        "collections OrderedDict",
        "pathlib PosixPath",
        "pathlib WindowsPath",
        "pathlib._local PosixPath",
        *(f"torch {name}" for name in (*TORCH_NAMES, *OTHER_DTYPES)),
    ]
)
"""Names in the metadata of real checkpoints, as torch 2.11, 2.13 and 2.15 write it. Without dtypes there are 15."""

Place = tuple[str, int, int]  # file, first byte, bytes


class _Metadata:
    """The parts of ``.metadata`` that an import needs, checked one by one.

    Args:
        record: content of the pickle.
        folder: folder of the checkpoint.
        num_bytes: length of the pickle.
    """

    def __init__(self, record: Any, folder: Path, num_bytes: int) -> None:
        self._folder = folder
        self._where = f"{folder}/{METADATA}"
        self._budget = 16 * num_bytes + 1000  # a pickle can name one list a million times; real ones do not
        fields = self._fields(record, f"{_PACKAGE}Metadata")
        self.version = fields.get("version")
        self.places = self._places(fields.get("storage_data"))
        self._entries = self._pairs(fields.get("state_dict_metadata"))

    def _spend(self, count: int) -> None:
        """Count values that are checked."""
        self._budget -= count
        if self._budget < 0:
            raise ValueError("it repeats the same values too often")

    def _pairs(self, table: Any) -> list[tuple[Any, Any]]:
        if not isinstance(table, Table):
            raise ValueError("a table is missing")
        self._spend(len(table.pairs))
        return table.pairs

    def _fields(self, record: Any, name: str) -> dict[str, Any]:
        """The attributes of a dataclass."""
        if not isinstance(record, Record) or record.name != name or record.args:
            raise ValueError(f"a {name.split(' ')[1]} is missing")
        pairs = [] if record.state is None else self._pairs(record.state)
        return {key: value for key, value in pairs if isinstance(key, str)}

    def _shape(self, value: Any) -> Shape:
        is_size = isinstance(value, Record) and value.name == "torch Size" and len(value.args) <= 1
        shape = value
        if is_size:
            shape = value.args[0] if value.args else ()
        self._spend(1 + (len(shape) if isinstance(shape, tuple) else 0))
        return check_shape(shape, self._where)

    def _places(self, table: Any) -> dict[tuple[str, Shape | None], Place]:
        """Place of each entry, by key and, for a tensor, offset."""
        places: dict[tuple[str, Shape | None], Place] = {}
        sizes: dict[str, int] = {}
        for key, value in self._pairs(table):
            index = self._fields(key, f"{_PACKAGE}MetadataIndex")
            info = self._fields(value, _STORAGE_INFO)
            name = check_key(index.get("fqn"), self._where)
            if info.get("transform_descriptors"):
                raise ValueError("its entries went through an extension such as compression")
            path = info.get("relative_path")
            if not isinstance(path, str):
                raise ValueError("a file name is missing")
            file = check_name(path, self._where)
            begin, length = check_shape((info.get("offset"), info.get("length")), self._where)
            if file not in sizes:
                sizes[file] = size_of(self._folder, file)
            if begin + length > sizes[file]:
                raise ValueError(f"the entry of {name} reaches beyond the end of {file}")
            offset = index.get("offset")
            at = (name, None if offset is None else self._shape(offset))
            if at in places:
                raise ValueError(f"it places {name} twice")
            places[at] = (file, begin, length)
        for file in sizes:
            if overlapping((begin, begin + length) for name, begin, length in places.values() if name == file):
                raise ValueError(f"entries of {file} overlap")
        return places

    def foreign(self) -> Foreign:
        """The checkpoint."""
        tensors: dict[str, TensorSource] = {}
        values: dict[str, Callable[[], Any]] = {}
        unreadable: dict[str, str] = {}
        for key, record in self._entries:
            name = check_key(key, self._where)
            if name in tensors or name in values or name in unreadable:
                raise ValueError(f"it has the key {name} twice")
            if isinstance(record, Record) and record.name == f"{_PACKAGE}BytesStorageMetadata":
                values[name] = self._value(name)
                continue
            fields = self._fields(record, f"{_PACKAGE}TensorStorageMetadata")
            dtype = self._dtype(fields.get("properties"))
            if dtype in TORCH_NAMES:
                tensors[name] = self._tensor(name, TORCH_NAMES[dtype], fields)
            else:
                unreadable[name] = f"a Crius checkpoint cannot have {dtype}"
        version = f" {self.version}" if isinstance(self.version, str) and len(self.version) < 20 else ""
        return Foreign(f"torch DCP{version}", tensors, values, unreadable)

    def _dtype(self, properties: Any) -> str:
        """torch's name of a dtype."""
        state = properties.state if isinstance(properties, Record) else None
        if not isinstance(state, tuple) or not state or not isinstance(state[0], Name):
            raise ValueError("a tensor has no dtype")
        return state[0].name.removeprefix("torch ")

    def _tensor(self, name: str, dtype: str, fields: dict[str, Any]) -> TensorSource:
        shape = self._shape(fields.get("size"))
        chunks = fields.get("chunks")
        if not isinstance(chunks, list):
            raise ValueError(f"{name} has no parts")
        self._spend(len(chunks))
        pieces = []
        for chunk in (self._fields(chunk, f"{_PACKAGE}ChunkStorageMetadata") for chunk in chunks):
            offset = self._shape(chunk.get("offsets"))
            size = self._shape(chunk.get("sizes"))
            place = self.places.get((name, offset))
            if place is None:
                raise ValueError(f"a part of {name} has no place")
            pieces.append(Piece(offset, size, self._reader(name, place, dtype, size)))
        check_tiles([(piece.offset, piece.shape) for piece in pieces], shape, f"{name} in {self._where}")
        return TensorSource(name, dtype, shape, tuple(pieces))

    def _reader(self, name: str, place: Place, dtype: str, shape: Shape) -> Callable[[], memoryview]:
        def read(archive: Archive, where: str) -> memoryview:
            tensor = archive.tensor()
            if (tensor.dtype, tensor.shape) != (dtype, shape):
                raise refusal(where, f"it is {tensor.dtype} {list(tensor.shape)}, {METADATA} says {list(shape)}")
            return archive.read(tensor)

        return partial(self._read, name, place, read)

    def _value(self, name: str) -> Callable[[], Any]:
        return partial(self._read, name, self.places.get((name, None)), lambda archive, _: archive.value())

    def _read(self, name: str, place: Place | None, read: Callable[[Archive, str], Any]) -> Any:
        """Result of ``read`` for the archive at a place of a file."""
        if place is None:
            raise refusal(self._where, f"{name} has no place")
        file, begin, length = place
        where = f"{name} in {self._folder}/{file} at byte {begin:,}"
        with open_inside(self._folder, file) as stream:
            return read(Archive(stream, begin, length, where), where)


def read_dcp(folder: Path) -> Foreign:
    """The contents of a folder of torch's distributed checkpoint.

    Raises:
        CheckpointError: the metadata is damaged or hostile.
        OSError: the disk does not return the data.
    """
    where = f"{folder}/{METADATA}"
    with open_inside(folder, METADATA) as file:
        data = file.read(MAX_BYTES + 1)
    record = read_pickle(data, NAMES, where)
    try:
        return _Metadata(record, folder, len(data)).foreign()
    except ValueError as error:
        raise refusal(where, str(error)) from None

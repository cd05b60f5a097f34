"""Files of ``torch.save`` (a zip archive with one pickle and the numbers of its tensors), read without torch.

``torch.load(weights_only=True)`` does not execute code either, but it checks no checksum, and its list of harmless
calls includes some like ``bytearray(10**11)``.
"""

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from crius.checkpoint.manifest import TORCH_NAMES
from crius.interop.foreign import ITEMSIZE, Shape, check_shape
from crius.interop.unpickle import Name, Record, Reference, read_pickle, refusal

OTHER_DTYPES = (  # a Crius checkpoint cannot have them; only their names are known
    "uint16",
    "uint32",
    "uint64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "bits8",
    "quint8",
    "qint8",
    "qint32",
)

_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_V2, _V3, _PARAMETER = (f"torch._utils _rebuild_{what}" for what in ("tensor_v2", "tensor_v3", "parameter"))

NAMES = frozenset(
    [
        *(f"torch {name}" for name in (*TORCH_NAMES, *OTHER_DTYPES, *_STORAGES, "Size", "ComplexFloatStorage")),
        "torch.storage UntypedStorage",
        "collections OrderedDict",
        _V2,
        _V3,
        _PARAMETER,
    ]
)
"""Names that the pickle in an entry may have."""

MAX_PICKLE = 1 << 26
_ZIP = b"PK\x03\x04"
_BLOCK = 1 << 24
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
    EOFError,
    KeyError,
    IndexError,
    struct.error,
    zlib.error,
)


class _Window(io.RawIOBase):
    """A range of a file as a file, for reading.

    Args:
        file: the whole file.
        begin: first byte of the range.
        length: bytes of the range.
    """

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file = file
        self._begin = begin
        self._length = length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError("before the start of the entry")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._begin + self._at)
        count: int = self._file.readinto(view)  # type: ignore[attr-defined]  # an open file has it
        self._at += count
        return count


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the pickle describes it, checked against the archive.

    Attributes:
        dtype: name of the dtype in safetensors files.
        shape: sizes of the dims.
        strides: step in numbers along each dim.
        start: index of its first number in the storage.
        member: file of the archive with the storage.
    """

    dtype: str
    shape: Shape
    strides: Shape
    start: int
    member: str


class Archive:
    """One archive; its small members are all checked.

    Args:
        file: file with the archive in it.
        begin: start of the archive.
        length: bytes of the archive.
        where: place, for messages.

    Raises:
        CheckpointError: it is damaged, or ``torch.save`` did not write it.
    """

    def __init__(self, file: BinaryIO, begin: int, length: int, where: str) -> None:
        self._where = where
        with self._refusing():
            window = _Window(file, begin, length)
            if window.read(4) != _ZIP:
                raise ValueError("it is not a zip archive, which torch.save writes since torch 1.6")
            self._zip = zipfile.ZipFile(window)
            self._members = self._checked_members(length)
            pickle = self._read("data.pkl", MAX_PICKLE)
            for name in self._members:
                if name != "data.pkl" and not name.startswith("data/"):
                    self._read(name, 1 << 20)
            if "byteorder" in self._members and self._read("byteorder", 16) != b"little":
                raise ValueError("its numbers are big endian")
        self.content: Any = read_pickle(pickle, NAMES, where)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except _ZIP_ERRORS as error:
            said = str(error) if isinstance(error, (zipfile.BadZipFile, ValueError)) else type(error).__name__
            raise refusal(self._where, f"its archive is damaged or hostile: {said}") from None

    def _checked_members(self, length: int) -> dict[str, zipfile.ZipInfo]:
        """The members by their names in the archive's own folder."""
        found: dict[str, zipfile.ZipInfo] = {}
        for info in self._zip.infolist():
            folder, _, name = info.filename.partition("/")
            if not folder or not name or name in found or ".." in info.filename or "\\" in info.filename:
                raise ValueError(f"the member {info.filename[:100]!r} has a name that torch does not write")
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
                raise ValueError(f"the member {name[:100]!r} is compressed or encrypted")
            found[name] = info
        if "data.pkl" not in found or sum(info.file_size for info in found.values()) > length:
            raise ValueError("it lacks data.pkl, or its members are longer than the archive")
        return found

    def _read(self, name: str, limit: int) -> bytes:
        """A small member; zipfile compares its checksum."""
        if self._members[name].file_size > limit:
            raise ValueError(f"the member {name} has {self._members[name].file_size:,} bytes, more than {limit:,}")
        return self._zip.read(self._members[name])

    def tensor(self) -> StoredTensor:
        """The tensor in the archive.

        Raises:
            CheckpointError: the archive has something else, or a tensor that its storage does not fit.
        """
        with self._refusing():
            return self._tensor(self.content)

    def _tensor(self, record: Any) -> StoredTensor:
        if isinstance(record, Record) and record.name == _PARAMETER and record.args:
            record = record.args[0]
        if not isinstance(record, Record) or record.name not in (_V2, _V3) or len(record.args) < 6:
            raise ValueError("it is not a plain tensor")
        storage, start, shape, strides = record.args[:4]
        storage_type, member, numel = _storage(storage)
        if record.name == _V3:
            dtype = _dtype(record.args[6] if len(record.args) > 6 else None)
            num_bytes = numel
        else:
            dtype = _STORAGES.get(storage_type.removeprefix("torch "), "")
            num_bytes = numel * ITEMSIZE.get(dtype, 0)
        if dtype not in ITEMSIZE or member not in self._members or self._members[member].file_size != num_bytes:
            raise ValueError("its tensor has a storage that is not in the archive")
        shape = check_shape(_sizes(shape), self._where)
        strides = check_shape(_sizes(strides), self._where)
        (start,) = check_shape((start,), self._where)
        capacity = num_bytes // ITEMSIZE[dtype]
        if len(shape) != len(strides) or math.prod(shape) > capacity:
            raise ValueError(f"its tensor {list(shape)} is larger than its storage")
        last = start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if math.prod(shape) and last >= capacity:
            raise ValueError("its tensor extends beyond its storage")
        return StoredTensor(dtype, shape, strides, start, member)

    def read(self, tensor: StoredTensor) -> memoryview:
        """The bytes of ``self.tensor()`` in C order. Reads the whole storage, and so compares its checksum.

        Raises:
            CheckpointError: the checksum differs.
        """
        info = self._members[tensor.member]
        itemsize = ITEMSIZE[tensor.dtype]
        data = bytearray(info.file_size)
        with self._refusing(), self._zip.open(info) as stream:
            at = 0
            while at < len(data) and (count := stream.readinto(memoryview(data)[at : at + _BLOCK])):  # type: ignore[attr-defined]
                at += count
            if at != len(data) or stream.read(1):
                raise ValueError(f"the member {tensor.member} is cut off")
        numbers = np.frombuffer(data, dtype=f"V{itemsize}")[tensor.start :]
        strides = tuple(stride * itemsize for stride in tensor.strides)
        gathered = np.ascontiguousarray(
            np.lib.stride_tricks.as_strided(numbers, tensor.shape, strides)
        )  # may be a view
        return memoryview(gathered.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # see TensorSource.read

    def value(self) -> Any:
        """The value in the archive, if it is text, a number, a flag or None.

        Raises:
            CheckpointError: it is something else.
        """
        if self.content is None or isinstance(self.content, (str, int, float)):
            return self.content
        raise refusal(self._where, f"it has a {type(self.content).__name__} instead of a number")


def _storage(storage: Any) -> tuple[str, str, int]:
    """Type, member and numbers of a storage."""
    to = storage.to if isinstance(storage, Reference) else None
    if not isinstance(to, tuple) or len(to) != 5 or to[0] != "storage" or not isinstance(to[1], Name):
        raise ValueError("its tensor has no storage")
    if not isinstance(to[2], str) or type(to[4]) is not int:
        raise ValueError("its tensor has no storage")
    return to[1].name, f"data/{to[2]}", to[4]


def _sizes(value: Any) -> Any:
    """The sizes in a tuple or a ``torch.Size``."""
    return value.args[0] if isinstance(value, Record) and value.name == "torch Size" and value.args else value


def _dtype(value: Any) -> str:
    name = value.name.removeprefix("torch ") if isinstance(value, Name) else ""
    return TORCH_NAMES.get(name, name)

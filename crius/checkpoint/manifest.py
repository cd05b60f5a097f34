"""``manifest.json``: all contents of a checkpoint, with the hash of every file, of every part and of itself.

The first line has the manifest's own hash, computed with zeros in place of its digits, so that every changed bit
shows::

    {"digest": "xxh3-128:<32 hex digits>",
    "format": "crius-checkpoint",
    "version": 1,
    "step": 20, "run_id": "...", "versions": {}, "config": {}, "layout": "fsdp4", "num_ranks": 4, "dataset": "...",
    "tokenizer": {"tokenizer.json": [size, digest], ...},
    "files": {"rank-00000.safetensors": [size, digest], ...},
    "tensors": {"model.norm.weight": ["F32", [256], [["rank-00000.safetensors", begin, end, [0], [256], digest]]], ...}}

A run with the byte tokenizer has no ``tokenizer``, and so has a checkpoint of an older version.
"""

import contextlib
import gc
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, NoReturn

import xxhash

from crius.checkpoint.names import MANIFEST, MAX_STEP, check_name, is_state
from crius.checkpoint.tiles import MAX_SPLIT_DIMS, cover, fits, split_dims
from crius.errors import CheckpointError
from crius.strict_json import load_object

ALGORITHM = "xxh3-128"
BLOCK_BYTES = 1 << 20
"""Bytes that are hashed, read or written at a time: the block stays in the processor's cache between these steps."""

_DIGEST = re.compile(r"[0-9a-f]{32}")

Hasher = xxhash.xxh3_128
"""``.update(data)`` and ``.hexdigest()``, as in hashlib."""


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """The hash as 32 hex digits."""
    return xxhash.xxh3_128(data).hexdigest()


def is_digest(text: object) -> bool:
    """Whether ``text`` has the form of a result of ``digest_of``."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def blocks_of(file: BinaryIO) -> Iterator[memoryview]:
    """The remaining bytes of a file, in blocks; the next block overwrites the previous one."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    while count := file.readinto(buffer):  # type: ignore[attr-defined]  # every binary file has it
        yield buffer[:count]


FORMAT = "crius-checkpoint"
VERSION = 1
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 1),
}
"""Names of dtypes in safetensors files, with the bytes of an element."""

TORCH_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Dtypes of tensors that a run saves: torch's name, and the name in safetensors files."""

MAX_MANIFEST_BYTES = 1 << 30
MAX_BYTES = 1 << 60
MAX_DIMS = 16
MAX_TEXT = 1024

_dump = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_HEAD = f'{{"digest": "{ALGORITHM}:'.encode()
_ZEROS = b"0" * 32
_DIGITS = slice(len(_HEAD), len(_HEAD) + len(_ZEROS))
_KEYS = ("digest", "format", "version", "step", "run_id", "versions", "config", "layout", "num_ranks", "dataset")


def own_digest(data: bytes) -> str:
    """The hash in the first line of an encoded manifest."""
    return data[_DIGITS].decode("ascii", "replace")


class FileEntry(NamedTuple):
    """Size of a file in bytes, and its hash."""

    size: int
    digest: str


class Chunk(NamedTuple):  # large checkpoints have millions, and a dataclass takes three times as long to create
    """A part of a tensor.

    Attributes:
        file: file that has the part.
        begin, end: byte range in the file, in C order, little endian.
        offset: start of the part in the tensor, for each dim.
        shape: shape of the part.
        digest: hash of its bytes.
    """

    file: str
    begin: int
    end: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    digest: str


class TensorEntry(NamedTuple):
    """A tensor: dtype as safetensors names it, shape, and the parts that it consists of."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint and its origin.

    Attributes:
        step: number of steps done.
        run_id: id of the run that saved it.
        versions: versions of Crius, torch and other packages, by name.
        config: settings of the run; infinities are decoded as text.
        layout: name of the layout, such as ``fsdp2_tp2``.
        num_ranks: number of ranks that saved the checkpoint.
        dataset: fingerprint of the data.
        files: entries of all files except the manifest, by name.
        tensors: entries of the tensors, by name.
        tokenizer: entries of the files that all checkpoints share, by name; see ``crius.checkpoint.kept``.
        digest: hash of the encoded manifest; empty in a manifest that was not decoded, since encoding computes it.
    """

    step: int
    run_id: str
    versions: dict[str, str]
    config: dict[str, Any]
    layout: str
    num_ranks: int
    dataset: str
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    tokenizer: dict[str, FileEntry] = field(default_factory=dict)
    digest: str = ""

    @property
    def state_file(self) -> str:
        """Name of the file with the state that is not a tensor; empty if there is none."""
        return next((name for name in self.files if is_state(name)), "")

    def encode(self) -> bytes:
        """The bytes of ``manifest.json``.

        Raises:
            CheckpointError: ``decode`` would refuse them.
        """
        record = {"format": FORMAT, "version": VERSION, **{key: _plain(getattr(self, key)) for key in _KEYS[3:]}}
        lines = [
            _HEAD.decode() + _ZEROS.decode() + '"',
            *(f"{json.dumps(key)}: {_dump(value)}" for key, value in record.items()),
            *([_section("tokenizer", self.tokenizer)] if self.tokenizer else []),
            _section("files", self.files),
            _section("tensors", self.tensors),
        ]
        data = bytearray((",\n".join(lines) + "}\n").encode("ascii"))
        data[_DIGITS] = digest_of(data).encode()
        encoded = bytes(data)
        Manifest.decode(encoded, MANIFEST)
        return encoded

    @classmethod
    def decode(cls, data: bytes, where: str) -> "Manifest":
        """Decode a manifest, with every name, number and place in it checked; ``where`` is for messages.

        Raises:
            CheckpointError: the manifest is damaged, has a newer version, names anything outside of its folder, or its
                files and tensors are inconsistent.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            _refuse(where, f"has {len(data):,} bytes, but the limit is {MAX_MANIFEST_BYTES:,}")
        if not data.startswith(_HEAD):
            _refuse(where, "is damaged, or is not a manifest of Crius", "it does not start with its own hash")
        said = own_digest(data)
        if digest_of(data[: _DIGITS.start] + _ZEROS + data[_DIGITS.stop :]) != said:
            _refuse(where, "is damaged", "its hash differs from the hash in its first line")
        with _uncollected():
            return cls._decoded(data, said, where)

    @classmethod
    def _decoded(cls, data: bytes, digest: str, where: str) -> "Manifest":
        try:
            record = load_object(data)
        except ValueError as error:
            _refuse(where, f"is not JSON that Crius writes: {str(error)[:200]}")
        if record.get("format") != FORMAT or record.get("version") != VERSION:
            version = record.get("version")
            is_newer = type(version) is int and version > VERSION
            raise CheckpointError(
                f"{where} has version {_shown(version)} of the format {_shown(record.get('format'))}.",
                where=where,
                why=f"this Crius reads version {VERSION} of {FORMAT}",
                fix="load it with the newer Crius that wrote it" if is_newer else "",
            )
        return _checked(record, digest, where)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Turn off the garbage collector, which would scan millions of new parts again and again in vain."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plain(value: Any) -> Any:
    """``value`` with text in place of numbers that JSON lacks, such as an infinite limit."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _section(name: str, entries: Mapping[str, Any]) -> str:
    """One entry per line, so that two manifests can be compared by eye."""
    rows = ",\n".join(f" {json.dumps(key)}: {_dump(value)}" for key, value in entries.items())
    return f'"{name}": {{\n{rows}}}'


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 100 else text[:100] + "..."


def _refuse(where: str, what: str, why: str = "") -> NoReturn:
    raise CheckpointError(
        f"{where} {what}.", where=where, why=why, fix="resume from another step: --checkpoint.load_step N"
    )


def _checked(record: dict[str, Any], digest: str, where: str) -> Manifest:
    """The manifest from a decoded ``record``. Raises CheckpointError if it is not valid."""
    if record.keys() | {"tokenizer"} != {*_KEYS, "tokenizer", "files", "tensors"}:
        _refuse(where, f"has the keys {_shown(sorted(record))}")
    for key in ("run_id", "layout", "dataset"):
        _check_text(record[key], where, key, may_be_empty=True)
    versions = _typed(record["versions"], dict, where, "versions")
    for name, version in versions.items():
        _check_text(name, where, "versions")
        _check_text(version, where, f"the version of {name}", may_be_empty=True)
    files = _files(record, "files", where)
    tensors = {
        _check_text(name, where, "the name of a tensor"): _tensor(name, row, files, where)
        for name, row in _typed(record["tensors"], dict, where, "tensors").items()
    }
    _check_places(tensors, where)
    return Manifest(
        step=_integer(record["step"], MAX_STEP - 1, where, "step"),
        run_id=record["run_id"],
        versions=versions,
        config=_typed(record["config"], dict, where, "config"),
        layout=record["layout"],
        num_ranks=_integer(record["num_ranks"], 10**7, where, "num_ranks"),
        dataset=record["dataset"],
        files=files,
        tensors=tensors,
        tokenizer=_files(record, "tokenizer", where),
        digest=digest,
    )


def _files(record: dict[str, Any], what: str, where: str) -> dict[str, FileEntry]:
    rows = _typed(record.get(what, {}), dict, where, what)
    return {check_name(name, where): _file(name, row, where) for name, row in rows.items()}


def _file(name: str, row: Any, where: str) -> FileEntry:
    if name == MANIFEST:
        _refuse(where, "names itself among its files")
    size, digest = _row(row, 2, where, f"file {name}")
    if not is_digest(digest):
        _refuse(where, f"has {_shown(digest)} as the hash of {name}")
    return FileEntry(_integer(size, MAX_BYTES, where, f"the size of {name}"), digest)


def _tensor(name: str, row: Any, files: dict[str, FileEntry], where: str) -> TensorEntry:
    what = f"tensor {name}"
    dtype, shape, rows = _row(row, 3, where, what)
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        _refuse(where, f"has {_shown(dtype)} as the dtype of {what}", f"known are {', '.join(ITEM_BYTES)}")
    dims = _integers(shape, where, what)
    if math.prod(dims) * ITEM_BYTES[dtype] > MAX_BYTES:
        _refuse(where, f"has a shape of {what} that no disk can hold: {_shown(dims)}")
    chunks = tuple(
        _chunk(part, ITEM_BYTES[dtype], dims, files, where, what) for part in _typed(rows, list, where, what)
    )
    _check_tiling(dims, chunks, where, what)
    return TensorEntry(dtype, dims, chunks)


def _chunk(
    row: Any, item_bytes: int, dims: tuple[int, ...], files: dict[str, FileEntry], where: str, what: str
) -> Chunk:
    file, first, last, start, size, digest = _row(row, 6, where, what)
    if type(file) is not str or file not in files:
        _refuse(where, f"has a part of {what} in {_shown(file)}, which is not one of its files")
    begin, end = _integers([first, last], where, what)
    if not begin <= end <= files[file].size:
        _refuse(where, f"has {what} at bytes {begin:,} to {end:,} of {file}", f"it has {files[file].size:,} bytes")
    offset = _integers(start, where, what)
    shape = _integers(size, where, what)
    if not fits(dims, (offset, shape)):
        _refuse(where, f"has a part of {what} at {_shown(offset)} of shape {_shown(shape)}", f"it is {_shown(dims)}")
    if math.prod(shape) * item_bytes != end - begin:
        _refuse(where, f"has {end - begin:,} bytes for a part of {what} of shape {_shown(shape)}")
    if not is_digest(digest):
        _refuse(where, f"has {_shown(digest)} as the hash of a part of {what}")
    return Chunk(file, begin, end, offset, shape, digest)


def _check_tiling(dims: tuple[int, ...], chunks: tuple[Chunk, ...], where: str, what: str) -> None:
    """Check that every element is in exactly one part."""
    if len(chunks) == 1 and chunks[0].shape == dims:
        return
    boxes = [(chunk.offset, chunk.shape) for chunk in chunks]
    if len(split := split_dims(dims, boxes)) > MAX_SPLIT_DIMS:
        _refuse(where, f"splits {what} along {len(split)} dims, but the limit is {MAX_SPLIT_DIMS}")
    if not cover(dims, boxes):
        _refuse(where, f"has parts of {what} that leave a hole or overlap", f"of {_shown(dims)}")


def _check_places(tensors: dict[str, TensorEntry], where: str) -> None:
    """Check that no byte of a file belongs to two parts."""
    places = defaultdict(list)
    for name, entry in tensors.items():
        for chunk in entry.chunks:
            if chunk.end > chunk.begin:
                places[chunk.file].append((chunk.begin, chunk.end, name))
    for file, of_file in places.items():
        for (_, end, one), (begin, _, other) in itertools.pairwise(sorted(of_file)):
            if begin < end:
                _refuse(where, f"has tensors {one} and {other} in the same bytes of {file}")


def _typed(value: Any, kind: Callable[..., Any], where: str, what: str) -> Any:
    if type(value) is not kind:
        _refuse(where, f"has {_shown(value)} as {what}")
    return value


def _row(value: Any, length: int, where: str, what: str) -> Iterable[Any]:
    if type(value) is not list or len(value) != length:
        _refuse(where, f"has {_shown(value)} as {what}")
    return value


def _integer(value: Any, most: int, where: str, what: str) -> int:
    if type(value) is not int or not 0 <= value <= most:  # True is an int in Python, but not allowed here
        _refuse(where, f"has {_shown(value)} as {what}")
    return value


def _integers(value: Any, where: str, what: str) -> tuple[int, ...]:
    if type(value) is list and len(value) <= MAX_DIMS:
        if all([type(item) is int and 0 <= item <= MAX_BYTES for item in value]):  # a list: there are millions of calls
            return tuple(value)
    _refuse(where, f"has {_shown(value)} as a place of {what}")


def _check_text(value: Any, where: str, what: str, *, may_be_empty: bool = False) -> str:
    """Check text that will be printed: no control characters, which could control a terminal."""
    if not isinstance(value, str) or len(value) > MAX_TEXT or not (value.isprintable() and (value or may_be_empty)):
        _refuse(where, f"has {_shown(value)} as {what}")
    return value

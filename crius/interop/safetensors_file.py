"""Reads files and folders of safetensors (huggingface.co/docs/safetensors) of any program, also DCP's sharded ones."""

import logging
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from crius.checkpoint.manifest import digest_of
from crius.checkpoint.names import check_name
from crius.checkpoint.pieces import Piece, Shape, TensorSource, shortened
from crius.errors import CheckpointError
from crius.interop.foreign import (
    ITEMSIZE,
    Foreign,
    check_key,
    check_shape,
    check_tiles,
    open_inside,
)
from crius.interop.unpickle import refusal
from crius.strict_json import load_object

MAX_HEADER = 1 << 25
"""Most bytes of a header. The safetensors library allows 100 MB; a header of 100,000 tensors has 12 MB."""

MAX_TENSORS = 100_000
"""Most tensors of a file. Published files have fewer than 40,000; each takes about 60 us and 1 kB to check."""

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
WHOLE = f"model{SUFFIX}"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = f"adapter_model{SUFFIX}"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_SHARDING = "DCP_SHARDING_INFO"  # torch/distributed/checkpoint/_hf_utils.py


log = logging.getLogger("crius.interop")


@cache
def said(line: str) -> None:
    """Log a line, once in a process: the same weights are opened several times."""
    log.warning(line)


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        CheckpointError: the data is not an object, or has a key twice.
    """
    try:
        return load_object(data)
    except ValueError as error:
        raise refusal(where, f"it is not valid JSON: {str(error)[:200]}") from None


class SafetensorsFile:
    """One file, its header checked against its size.

    Args:
        folder: folder of the file.
        name: name of the file.

    Attributes:
        tensors: dtype, shape, first byte and end in the file, by key.
        metadata: texts that the writer added.

    Raises:
        CheckpointError: the file is damaged or hostile.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self.where = f"{folder}/{name}"
        with open_inside(folder, name) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 10 or length > min(MAX_HEADER, size - 8):
                raise refusal(
                    self.where, f"its header has {length:,} bytes; the file has {size:,}, {MAX_HEADER:,} is most"
                )
            header = json_object(file.read(length), self.where)
        if len(header) > MAX_TENSORS:
            raise refusal(self.where, f"its header has {len(header):,} keys, more than {MAX_TENSORS:,}")
        self.metadata: Any = header.pop("__metadata__", {})
        if not isinstance(self.metadata, dict):
            raise refusal(self.where, "its __metadata__ is not an object")
        self.tensors = {
            check_key(key, self.where): self._entry(key, entry, 8 + length) for key, entry in header.items()
        }
        spans = sorted((begin, end) for _, _, begin, end in self.tensors.values())
        ends = [8 + length, *(end for _, end in spans)]
        if [begin for begin, _ in spans] != ends[:-1] or ends[-1] != size:
            raise refusal(self.where, "its tensors overlap, leave gaps, or do not end where the file ends")

    def _entry(self, key: str, entry: Any, start: int) -> tuple[str, Shape, int, int]:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise refusal(self.where, f"{key} lacks dtype, shape or data_offsets, or has more than these")
        shape = check_shape(entry["shape"], self.where)
        offsets = check_shape(entry["data_offsets"], self.where)
        dtype = entry["dtype"]
        if not isinstance(dtype, str) or len(dtype) > 20 or not dtype.isprintable() or len(offsets) != 2:
            raise refusal(self.where, f"{key} has no dtype, or not two offsets")
        num_bytes = math.prod(shape) * ITEMSIZE.get(dtype, 0)
        if offsets[1] < offsets[0] or (dtype in ITEMSIZE and offsets[1] - offsets[0] != num_bytes):
            raise refusal(
                self.where, f"{key} has {offsets[1] - offsets[0]:,} bytes, but {dtype} {list(shape)} has {num_bytes:,}"
            )
        return dtype, shape, start + offsets[0], start + offsets[1]

    def read(self, key: str, first: int = 0, last: int | None = None) -> memoryview:
        """The bytes of a tensor, or of its rows from ``first`` to ``last``, without ``last``."""
        _, shape, begin, end = self.tensors[key]
        if last is not None:
            row = (end - begin) // max(shape[0], 1)
            begin, end = begin + first * row, begin + last * row
        data = np.empty(end - begin, dtype=np.uint8).data
        with open_inside(self._folder, self._name) as file:
            file.seek(begin)
            if file.readinto(data) != len(data):  # type: ignore[attr-defined]  # every binary file has it
                raise refusal(self.where, f"it became shorter while {key} was read")
        return data

    def offsets(self) -> dict[str, Shape]:
        """The offset of each tensor in the whole tensor, from DCP's sharding information; else 0 in each dim."""
        if _SHARDING not in self.metadata:
            return {key: (0,) * len(shape) for key, (_, shape, _, _) in self.tensors.items()}
        text = self.metadata[_SHARDING]
        info = json_object(text.encode() if isinstance(text, str) else b"", self.where)
        offsets = {}
        for key, (_, shape, _, _) in self.tensors.items():
            entry = info.get(key)
            offsets[key] = check_shape(entry.get("saved_offsets") if isinstance(entry, dict) else None, self.where)
            if len(offsets[key]) != len(shape):
                raise refusal(self.where, f"{key} has an offset of {len(offsets[key])} dims")
        return offsets


def read_safetensors(place: Path) -> Foreign:
    """Read the contents of a file, or of the files of a folder: those of ``model_files``, else all.

    Raises:
        CheckpointError: a file is damaged or hostile, or parts of a tensor are missing.
        OSError: reading fails.
    """
    if place.is_dir():
        return _read(place, model_files(place) or _all_files(place))
    return _read(place.parent, [place.name])


def _read(folder: Path, names: Sequence[str]) -> Foreign:
    files = [SafetensorsFile(folder, name) for name in names]
    pieces: dict[str, list[tuple[str, Piece]]] = {}
    unreadable: dict[str, str] = {}
    for file in files:
        offsets = file.offsets()
        for key, (dtype, shape, begin, _) in file.tensors.items():
            if dtype in ITEMSIZE:
                read = partial(file.read, key)
                piece = Piece(offsets[key], shape, read, read if shape else None, (file.where, begin))
                pieces.setdefault(key, []).append((dtype, piece))
            else:
                unreadable[key] = f"a Crius checkpoint cannot hold {dtype}"
    tensors = {key: _whole(key, found, f"{key} in {folder}") for key, found in pieces.items()}
    if both := tensors.keys() & unreadable.keys():
        raise refusal(str(folder), f"{min(both)} has several dtypes")
    return Foreign("safetensors", tensors, {}, unreadable)


def _whole(key: str, found: list[tuple[str, Piece]], where: str) -> TensorSource:
    dtypes = {dtype for dtype, _ in found}
    pieces = tuple(piece for _, piece in found)
    if len(dtypes) != 1 or len({len(piece.shape) for piece in pieces}) != 1:
        raise refusal(where, "its parts have several dtypes or numbers of dims")
    ends = [[start + size for start, size in zip(piece.offset, piece.shape, strict=True)] for piece in pieces]
    shape = tuple(map(max, zip(*ends, strict=True)))
    check_tiles([(piece.offset, piece.shape) for piece in pieces], shape, where)
    return TensorSource(key, dtypes.pop(), shape, pieces)


def model_files(folder: Path) -> list[str]:
    """The names of a model's files in a folder, as transformers chooses them; empty: there are none.

    They are ``model.safetensors``, else the index (``model.safetensors.index.json``) and the files that it names, else
    ``model-*-of-*.safetensors``. A line says which files are left out.

    Raises:
        CheckpointError: an index does not match its files, or ``model.safetensors`` and its index have other weights.
    """
    there = _all_files(folder)
    index = _index(folder)
    named = sorted(set(index.values()))
    names = named or [name for name in there if _SHARD.fullmatch(name)]
    if WHOLE in there:
        names = [WHOLE]
    known = [*names, ADAPTER_FILE] if (folder / ADAPTER_CONFIG).exists() else names
    left = [name for name in there if name not in known]
    if names == named:
        _check_index(folder, index)
    elif named:
        left.append(f"{INDEX}, {_why_stale(folder, named)}")
    if names and left:
        said(f"{folder}: {', '.join(shortened(names))} read; left out: {', '.join(shortened(left))}")
    return names


def _all_files(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(SUFFIX))


def _index(folder: Path) -> dict[str, str]:
    """Files by the tensors that the index says they have; empty: there is no index."""
    if not (folder / INDEX).exists():
        return {}
    with open_inside(folder, INDEX) as file:
        data = file.read(min(MAX_HEADER, os.fstat(file.fileno()).st_size))
    where = f"{folder}/{INDEX}"
    index = json_object(data, where).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise refusal(where, "it has no weight_map from keys to files")
    return {key: check_name(name, where) for key, name in index.items()}


def _check_index(folder: Path, index: Mapping[str, str]) -> None:
    held = {key: name for name in sorted(set(index.values())) for key in SafetensorsFile(folder, name).tensors}
    wrong = sorted(key for key in index.keys() | held.keys() if index.get(key) != held.get(key))
    if wrong:
        raise refusal(
            f"{folder}/{INDEX}",
            f"{wrong[0][:100]!r} and {len(wrong) - 1} more keys are not in the files that it names",
        )


def _why_stale(folder: Path, named: Sequence[str]) -> str:
    """Why the index beside ``model.safetensors`` is left out.

    Raises:
        CheckpointError: the files ``named`` there have other weights.
    """
    if absent := [name for name in named if not (folder / name).exists()]:
        return f"which names {absent[0]}, and that is absent"
    contents = [
        {(key, tensor.dtype, tensor.shape, digest_of(tensor.read())) for key, tensor in read.tensors.items()}
        for read in (_read(folder, [WHOLE]), _read(folder, named))
    ]
    if differing := contents[0] ^ contents[1]:
        raise CheckpointError(
            f"{folder} has {WHOLE} and {INDEX}, whose weights differ, such as {min(differing)[0]}.",
            why=f"one of them is stale; transformers reads {WHOLE}",
            fix=f"rm {shlex.quote(f'{folder}/{INDEX}')}, which keeps {WHOLE}",
        )
    return "which has the same weights"

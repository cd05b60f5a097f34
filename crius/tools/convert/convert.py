"""Import of a checkpoint of torch's DCP or of a safetensors library. No torch, and no code in it is executed."""

import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crius import __version__
from crius.checkpoint.disk import Disk, open_disk
from crius.checkpoint.files import Part, check_written, commit, write_shard
from crius.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry
from crius.checkpoint.names import MANIFEST, parse_step, step_name
from crius.checkpoint.pieces import TensorSource, as_array
from crius.errors import CheckpointError, ConfigError, MissingPathError
from crius.interop.foreign import Foreign
from crius.interop.safetensors_file import SUFFIX, read_safetensors
from crius.tools.convert.dcp import METADATA, read_dcp
from crius.tools.convert.foreign_names import SKIPPED, KeyRow, Rename, assign, folded, is_rotated, step_of

FILE_BYTES = 4 << 30
"""Approximate bytes per file that an import writes: with many files the ranks of a run can share their check."""


@dataclass(frozen=True)
class Imported:
    """Result of an import.

    Attributes:
        kind: kind of the other checkpoint.
        where: the written checkpoint; empty if none was written.
        step: its step.
        step_from: source of that step, as a phrase.
        num_bytes: bytes of its tensors.
        rows: fate of each key.
        notes: facts to know before training on it.
    """

    kind: str
    where: str
    step: int
    step_from: str
    num_bytes: int
    rows: list[KeyRow]
    notes: list[str]

    @property
    def unknown(self) -> list[KeyRow]:
        """Keys that have no place in a Crius checkpoint and that nobody allowed to leave out."""
        return [row for row in self.rows if not row.is_known]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": self.kind,
            "checkpoint": self.where,
            "step": self.step,
            "bytes": self.num_bytes,
            "converted": {row.source: row.target for row in self.rows if row.target},
            "left": {row.source: row.reason for row in self.rows if not row.target and row.is_known},
            "unknown": {row.source: row.reason for row in self.unknown},
            "notes": self.notes,
        }

    def lines(self) -> list[str]:
        """Lines for people: one line for the same tensor of all layers."""
        moved = folded(row.target for row in self.rows if row.target)
        left = folded(f"{_family(row)}  ({row.reason})" for row in self.rows if not row.target and row.is_known)
        unknown = folded(f"{row.source}  ({row.reason})" for row in self.unknown)
        rows = [
            *((f"{count:>6}  converted", name) for name, count in moved.items()),
            *((f"{count:>6}  left", name) for name, count in left.items()),
            *((f"{count:>6}  UNKNOWN", name) for name, count in unknown.items()),
        ]
        summary = f"{self.kind}: step {self.step} ({self.step_from})"
        if self.where:
            summary += f", {self.num_bytes / 2**20:,.1f} MiB of tensors -> {self.where}"
        return [
            f"{'keys':>6}  {'what':<9}  name",
            *(f"{what:<17}  {name}" for what, name in rows),
            *self.notes,
            summary,
        ]


def convert(
    source: str,
    target: str,
    *,
    renames: Sequence[str] = (),
    skips: Sequence[str] = (),
    step: int = -1,
    rotary_pairs: int = 0,
) -> Imported:
    """Write ``source`` as a checkpoint into the folder of checkpoints ``target``.

    One tensor at a time is in memory. Nothing is written if a key is unknown, and nothing remains if the import fails.

    Args:
        source: folder of a DCP checkpoint, or safetensors: a file or a folder of files.
        target: folder or fsspec URL of checkpoints; need not exist.
        renames: ``OLD=NEW`` names of parameters, see ``Rename``.
        skips: patterns of keys to leave out.
        step: step of the checkpoint; -1 for the step in the source.
        rotary_pairs: dims of a head, if the rotary embedding of the source turns neighbouring dims, as in torchtitan
            and Meta; 0 if it turns the halves of a head, as in Crius and Hugging Face.

    Raises:
        ConfigError: an argument does not fit the source.
        MissingPathError: there is no such source.
        CheckpointError: the source is damaged or hostile, or the target cannot be written.
        OSError: the disk does not return the data.
    """
    foreign = _read(source)
    rows = assign(foreign, [Rename.parse(text) for text in renames], skips)
    step, step_from = _step(foreign, step, source)
    tensors = {row.target: foreign.tensors[row.source] for row in rows if row.target}
    notes = _notes(foreign, tensors, rotary_pairs)
    result = Imported(foreign.kind, "", step, step_from, sum(one.num_bytes for one in tensors.values()), rows, notes)
    if result.unknown:
        return result
    if not tensors:
        raise CheckpointError(f"{source} has no tensor to convert.", fix="give fewer --skip patterns")
    parts = [
        Part(name, tensor.dtype, tensor.shape, _reader(name, tensor, rotary_pairs)) for name, tensor in tensors.items()
    ]
    state = {"imported": True, "source": f"{foreign.kind}: {source}"}
    write_checkpoint(open_disk(target), parts, step, foreign.kind, {}, state)
    where = f"{open_disk(target).where}/{step_name(step)}"
    return Imported(foreign.kind, where, step, step_from, result.num_bytes, rows, notes)


def _read(source: str) -> Foreign:
    place = Path(source)
    if not place.exists() and "://" not in source:
        raise MissingPathError(f"{source} does not exist.", where="SOURCE", fix="give a folder or a file that exists")
    if place.is_dir() and (place / METADATA).exists():
        return read_dcp(place)
    if place.suffix == SUFFIX or (place.is_dir() and any(place.glob(f"*{SUFFIX}"))):
        if (place / MANIFEST).exists():
            raise CheckpointError(
                f"{source} is a Crius checkpoint.", fix=f"train on it: --checkpoint.load_path {place.parent}"
            )
        return read_safetensors(place)
    raise CheckpointError(
        f"{source} is not a checkpoint that can be converted.",
        why=f"it is neither a folder with {METADATA} or *{SUFFIX} in it, nor a {SUFFIX} file",
        fix="give the folder of one step, and copy the files of a URL to this machine first",
    )


def _step(foreign: Foreign, step: int, source: str) -> tuple[int, str]:
    if step >= 0:
        step_name(step)
        return step, "--step"
    said = step_of(foreign)
    origin = "as in the source"
    if said is None:
        match = re.fullmatch(r"(?:global_)?step[-_]?(\d{1,15})", Path(source).absolute().name)
        said, origin = (
            (int(match[1]), "by the name of its folder") if match else (0, "the source has none; --step N gives one")
        )
    if parse_step(step_name(max(said, 0))) != said:
        raise CheckpointError(f"{source} is of step {said}, by its own record.", fix="--step N gives another")
    return said, origin


def _notes(foreign: Foreign, tensors: dict[str, TensorSource], rotary_pairs: int) -> list[str]:
    rotated = [name for name, tensor in tensors.items() if is_rotated(tensor, name)]
    notes = []
    if rotary_pairs:
        bad = [name for name in rotated if tensors[name].shape[0] % rotary_pairs]
        if rotary_pairs % 2 or rotary_pairs < 0 or not rotated or bad:
            rows = f"{bad[0]} has {tensors[bad[0]].shape[0]} rows" if bad else "it is the even number of dims of a head"
            raise ConfigError(
                f"--rotary_pairs {rotary_pairs} does not fit the checkpoint.",
                where="command line",
                why=rows if rotated else "it has no attention.wq or attention.wk",
                fix="give the dims of a head, e.g. --rotary_pairs 128, or leave it out",
            )
        notes.append(f"rows of {len(rotated)} tensors of queries and keys were reordered from pairs to halves")
    elif rotated and foreign.kind.startswith("torch DCP"):
        notes.append(
            "note: attention.wq and attention.wk are imported as they are. torchtitan and Meta turn pairs of dims in "
            "the rotary embedding, Crius turns halves: --rotary_pairs HEAD_DIM reorders the rows of their weights."
        )
    return notes


def _reader(name: str, tensor: TensorSource, rotary_pairs: int) -> Callable[[], memoryview]:
    if not (rotary_pairs and is_rotated(tensor, name)):
        return tensor.read
    return lambda: in_halves(as_array(tensor.read(), tensor.shape, tensor.dtype), rotary_pairs)


def in_halves(rows: np.ndarray[Any, Any], head_dim: int) -> memoryview:
    """The bytes of a tensor after its rows are reordered from neighbouring pairs of a head's rotary dims to its halves.

    Args:
        rows: ``(heads * head_dim, ...)``.
        head_dim: dims of a head.
    """
    return _swapped(rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]))


def in_pairs(rows: np.ndarray[Any, Any], head_dim: int) -> memoryview:
    """The inverse of ``in_halves``."""
    return _swapped(rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]))


def _swapped(heads: np.ndarray[Any, Any]) -> memoryview:
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(-1).view(np.uint8).data


def write_checkpoint(
    disk: Disk,
    parts: Sequence[Part],
    step: int,
    kind: str,
    config: dict[str, Any],
    state: dict[str, Any],
) -> None:
    """Write, verify and commit a checkpoint, one tensor at a time.

    Args:
        disk: folder of checkpoints.
        parts: tensors with their names in the checkpoint, in any order.
        step: step of the checkpoint.
        kind: kind of the source.
        config: known settings, by dotted name.
        state: values besides the step that are not tensors.

    Raises:
        CheckpointError: the step already has a checkpoint, the disk cannot be written, or a tensor is damaged.
    """
    if step in disk.committed() or step_name(step) in disk.folders():
        raise CheckpointError(
            f"{disk.where} already has a checkpoint of step {step}.",
            fix="give another folder, or another step: --step N",
        )
    attempt = f"import-{uuid.uuid4().hex[:8]}"
    folder = disk.stage(step, attempt)
    try:
        disk.prepare(folder)
        files: dict[str, FileEntry] = {}
        entries: dict[str, TensorEntry] = {}
        by_key = {part.key: part for part in parts}
        for number, keys in enumerate(shares(by_key, sorted(by_key), FILE_BYTES)):
            name = f"{disk.file_name(f'rank-{number:05d}', attempt)}{SUFFIX}"
            share = [by_key[key] for key in keys]
            files[name], places = write_shard(disk, f"{folder}/{name}", share, lambda: None)
            check_written(disk, folder, name, files[name])
            for part, (begin, end, digest) in zip(share, places, strict=True):
                chunk = Chunk(name, begin, end, (0,) * len(part.shape), part.shape, digest)
                entries[part.key] = TensorEntry(part.dtype, part.shape, (chunk,))
        manifest = Manifest(
            step=step,
            run_id=attempt,
            versions={"crius": __version__, "source": kind},
            config=config,
            layout="imported",
            num_ranks=1,
            dataset="",
            files=files,
            tensors=entries,
        )
        commit(disk, folder, attempt, manifest, state | {"train": {"step": step}})
    except BaseException:
        if folder in disk.folders():
            disk.sweep(folder)
        raise


def _family(row: KeyRow) -> str:
    """The first part of the key of a row, with a star for the rest; the whole key if the caller named it."""
    first, dot, _ = row.source.removeprefix("app.").partition(".")
    if row.reason == SKIPPED:
        return row.source
    return f"{first}.*" if dot else first


def shares(tensors: Mapping[str, Part], names: Iterable[str], most: int) -> list[list[str]]:
    """``names`` per file, in order. A file has at most ``most`` bytes, unless a single tensor has more."""
    found: list[list[str]] = [[]]
    size = 0
    for name in names:
        if size and size + tensors[name].num_bytes > most:
            found.append([])
            size = 0
        found[-1].append(name)
        size += tensors[name].num_bytes
    return found

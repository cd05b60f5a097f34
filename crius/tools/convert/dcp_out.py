"""``crius export --format dcp``: the weights as a checkpoint of torch's DCP with torchtitan's names."""

import warnings
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import WriteItem

from crius.checkpoint.files import Part
from crius.checkpoint.manifest import ALGORITHM
from crius.checkpoint.pieces import as_array
from crius.checkpoint.plain import DTYPES
from crius.errors import ConfigError
from crius.interop.weights import hash_files
from crius.tools.convert.convert import in_pairs
from crius.tools.convert.dcp import read_dcp
from crius.tools.convert.exporting import Export, ExportSource, parts_of, written
from crius.tools.convert.foreign_names import in_titan, is_rotated
from crius.tools.convert.new_folder import new_folder

_IN_PAIRS = ("llama3",)
"""Models whose rotary embedding turns neighbouring dims in torchtitan; other models turn halves, as here."""


class _OneByOne(dcp.DefaultSavePlanner):
    """Reads each tensor when it is written: the state has only shapes."""

    def __init__(self, parts: dict[str, Part]) -> None:
        super().__init__()
        self._parts = parts

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        part = self._parts[write_item.index.fqn]
        data = np.frombuffer(part.data(), dtype=np.uint8)
        data = data if data.flags.writeable else data.copy()
        return torch.from_numpy(data).view(DTYPES[part.dtype]).reshape(part.shape)


def export_dcp(source: ExportSource, target: str, dtype: str = "") -> Export:
    """Write ``source`` as the folder ``target`` of DCP, one tensor at a time in memory.

    Args:
        source, target, dtype: see ``crius.tools.convert.exporting.export_model``.

    Raises:
        CriusError: the target exists, the source is damaged, or the tensors that were read back differ from it.
    """
    model = source.weights.model
    facts = source.weights.facts
    attention = facts.attention
    is_plain = attention.qk_norm == "none" and attention.rotary_dim in (0, attention.head_dim)
    is_plain = is_plain and not any(weight.kind == "bias" for weight in attention.weights)
    if model["name"] in _IN_PAIRS and not is_plain:
        raise ConfigError(
            f"{model['name']} with biases, norms of heads or few rotary dims has no names of torchtitan.",
            where="--format dcp",
            why="torchtitan rotates neighbouring pairs, and has neither of them",
            fix="--format hf",
        )
    parts = parts_of(source, {name: in_titan(name) for name in facts.state_names}, dtype)
    if model["name"] in _IN_PAIRS:
        turned = [is_rotated(source.weights.tensors[name], name) for name in facts.state_names]
        parts = [_paired(part, model["head_dim"]) if turn else part for part, turn in zip(parts, turned, strict=True)]
    own = {part.key: part for part in parts}
    parts += [replace(own[name], key=tied) for tied, name in facts.config.ties.items()]
    by_name = {part.key: part for part in parts}
    with new_folder(target) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a single process
        state = {key: torch.empty(part.shape, dtype=DTYPES[part.dtype], device="meta") for key, part in by_name.items()}
        writer = dcp.FileSystemWriter(folder)
        dcp.save(state, storage_writer=writer, planner=_OneByOne(by_name), no_dist=True)
        names = sorted(file.name for file in folder.iterdir())
        hashes = {name: f"{ALGORITHM}:{hash_files(folder, [name])}" for name in names}
        kind = "torch DCP, torchtitan's names"
        return written(target, source, parts, read_dcp(folder).tensors, kind=kind, files=hashes)


def _paired(part: Part, head_dim: int) -> Part:
    return replace(part, data=lambda: in_pairs(as_array(part.data(), part.shape, part.dtype), head_dim))

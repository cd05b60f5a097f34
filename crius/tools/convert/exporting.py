"""``crius export``: weights of a run as a folder that transformers loads, proven by reading it back. No torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from crius import __version__
from crius.checkpoint.disk import open_disk
from crius.checkpoint.files import Part, write_shard
from crius.checkpoint.manifest import ALGORITHM, TORCH_NAMES, digest_of
from crius.checkpoint.names import step_name
from crius.checkpoint.pieces import TensorSource
from crius.checkpoint.state import read_state
from crius.checkpoint.whereabouts import find_checkpoints
from crius.errors import CheckpointError, ConfigError
from crius.host import free_host_bytes
from crius.interop.casting import FLOATS, cast
from crius.interop.context import longest_context
from crius.interop.kept import CONFIG, CONTEXT
from crius.interop.safetensors_file import INDEX, SUFFIX, read_safetensors
from crius.interop.weights import Weights, described, open_weights, settled
from crius.models.config import WORDS
from crius.models.huggingface import HuggingFace, config_of, rows_of, settings_in, with_changes
from crius.models.registry import foreign_names
from crius.plugins import REQUIREMENTS, install_line
from crius.tools.convert.comparison import Compare, compared
from crius.tools.convert.convert import shares
from crius.tools.convert.model_card import model_card
from crius.tools.convert.new_folder import new_folder
from crius.tools.convert.tokenizer_out import write_tokenizer

SHARD_BYTES = 5 * 10**9
_WRITTEN = "tensors"


@dataclass(frozen=True, kw_only=True)
class ExportSource:
    """The model to export.

    Attributes:
        weights: its weights.
        settings: settings of the run, by dotted name.
        facts: facts for people, by name.
        has_tokenizer: whether its tokenizer is exported too.
    """

    weights: Weights
    settings: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    has_tokenizer: bool = True


@dataclass(frozen=True, kw_only=True)
class Export:
    """Result of an export.

    Attributes:
        where: the folder.
        source: source of the export.
        kind: class of transformers, or the format.
        tensors: number of tensors that were written and read back equal to the source.
        files: files with tensors, and the hash of each.
        dtypes: dtypes of the tensors.
        num_bytes: bytes of the tensors.
        tokenizer: description of the tokenizer.
        logits: comparison with the logits of transformers, or why there is none.
    """

    where: str
    source: ExportSource
    kind: str
    tensors: int
    files: Mapping[str, str]
    dtypes: Sequence[str]
    num_bytes: int
    tokenizer: str = ""
    logits: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = {name: getattr(self, name) for name in ("where", "kind", "tensors", "files", "dtypes", "num_bytes")}
        source = {"source": self.source.weights.origin, "digest": self.source.weights.digest}
        return {**told, **source, "tensors_equal": self.tensors, "tokenizer": self.tokenizer, "logits": self.logits}

    def lines(self) -> list[str]:
        """For people."""
        model = self.source.weights.model["name"]
        size = f"{self.num_bytes / 2**20:,.1f} MiB of {', '.join(self.dtypes)}"
        noun = "files" if len(self.files) > 1 else "file"
        rows = {
            "source": f"{self.source.weights.origin}, {self.source.weights.digest}",
            "model": f"{model} as {self.kind}",
            "tokenizer": self.tokenizer,
            "written": f"{self.where}: {size} in {len(self.files)} {noun}",
            "read back": f"{self.tensors} of {self.tensors} tensors equal",
            "logits": self.logits,
        }
        return [f"{name:<9}  {text}" for name, text in rows.items() if text]


def open_source(path: str, step: int) -> ExportSource:
    """The source that ``path`` and ``step`` name: a run, a checkpoint, or a Hugging Face folder.

    Args:
        path: path of the source.
        step: step of the checkpoint; -1 for the newest complete one, or the one that ``path`` is.

    Raises:
        CriusError: see ``open_weights``; or there is no such step.
    """
    path = path if "://" in path else str(Path(path).expanduser())
    if step >= 0:
        found = find_checkpoints(path)
        steps = [] if found.name else found.folder.steps()
        if step not in steps:
            raise ConfigError(
                f"there is no checkpoint of step {step} in {path}.",
                where="--step",
                why=f"it is {found.name}" if found.name else f"its steps are: {', '.join(map(str, steps)) or 'none'}",
                fix=f"--step {steps[-1]}" if steps else "leave out --step",
            )
        path = f"{path.rstrip('/') if '://' in path else found.folder.disk.where}/{step_name(step)}"
    weights = open_weights(path)
    if not weights.saved:
        return ExportSource(weights=weights)
    manifest = weights.saved.manifest
    state = read_state(*weights.saved)
    init = {f"source_{key}": value for key, value in state.get("init_from", {}).items()}
    begun = state if state.get("imported") else init
    facts = {
        "step": f"{manifest.step:,}",
        "tokens": f"{state['train'].get('tokens', 0):,}",
        "ranks": f"{manifest.num_ranks} ({manifest.layout})",
        "fingerprint of the data": manifest.dataset,
        "weights from": str(begun.get("source", begun.get("source_origin", ""))),
        "hash of those": str(begun.get("source_digest", "")),
        **{f"version of {package}": version for package, version in manifest.versions.items()},
    }
    return ExportSource(weights=weights, settings=manifest.config, facts=facts)


def parts_of(source: ExportSource, names: Mapping[str, str], dtype: str) -> list[Part]:
    """The tensors as they are written, in the order of the model.

    Args:
        source: source of the tensors.
        names: Hugging Face's names by Crius's names.
        dtype: torch's name of the dtype of floating-point tensors; empty: unchanged, merged ones as their base.
    """
    wanted = TORCH_NAMES[dtype] if dtype else ""
    parts: dict[str, Part] = {}
    newest = _Newest()
    for ours, theirs in names.items():
        tensor = source.weights.tensors[ours]
        to = wanted if wanted and tensor.dtype in FLOATS else source.weights.rounds.get(ours, tensor.dtype)
        rows = rows_of(theirs, tensor.shape)
        for number, (name, shape) in enumerate(rows.items()):
            row = None if theirs in rows else number
            part = Part(name, to, shape, partial(_read, newest, tensor, row, to))
            parts[name] = _joined(parts[name], part) if name in parts else part
    return list(parts.values())


def _joined(first: Part, second: Part) -> Part:
    """Two tensors of ours that are one in Hugging Face's files: the rows of the second follow those of the first."""
    shape = (first.shape[0] + second.shape[0], *first.shape[1:])
    return Part(first.key, first.dtype, shape, lambda: memoryview(b"".join((first.data(), second.data()))))


class _Newest:
    """Reads tensors, and keeps only the tensor whose rows are read one after the other in memory."""

    def __init__(self) -> None:
        self._tensor: TensorSource | None = None
        self._data = memoryview(b"")

    def read(self, tensor: TensorSource, row: int | None) -> memoryview:
        """The bytes of a tensor, or of one of its rows."""
        if row is None or self._tensor is not tensor:
            # before the next tensor is read
            self._tensor = None
            self._data = memoryview(b"")
            data = tensor.read()
            if row is None:
                return data
            self._tensor = tensor
            self._data = data
        size = tensor.num_bytes // tensor.shape[0]
        return self._data[row * size : (row + 1) * size]


def _read(newest: _Newest, tensor: TensorSource, row: int | None, dtype: str) -> memoryview:
    try:
        data = newest.read(tensor, row)
        return cast(data, tensor.dtype, dtype) if tensor.dtype != dtype else data
    except OverflowError:
        raise CheckpointError(
            f"{tensor.key} has {tensor.dtype} numbers that are too large for {dtype}.",
            where="--dtype",
            fix="--dtype bfloat16, which has the range of float32",
        ) from None


def written(
    target: str, source: ExportSource, parts: Sequence[Part], back: Mapping[str, TensorSource], **told: Any
) -> Export:
    """The result of an export, after each tensor is compared with the source, which is read a second time.

    Args:
        target: the folder.
        source: source of the export.
        parts: tensors that were written.
        back: tensors that were read back.
        told: other attributes of the result.

    Raises:
        CheckpointError: a tensor is missing or differs.
    """
    wrong = sorted({part.key for part in parts} ^ back.keys())
    for part in (part for part in parts if part.key in back):
        found = back[part.key]
        is_like = (found.dtype, found.shape) == (part.dtype, part.shape)
        if not is_like or digest_of(part.data()) != digest_of(found.read()):
            wrong.append(part.key)
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} of {len(parts)} tensors of {target} differ from the source; the first is {wrong[0]}.",
            why="memory, disk or bus changes bits, or the source changed meanwhile; nothing was written",
            fix="export again, and check the machine: its log, its memory, its disk",
        )
    dtypes = sorted({part.dtype for part in parts})
    size = sum(part.num_bytes for part in parts)
    return Export(where=target, source=source, tensors=len(parts), dtypes=dtypes, num_bytes=size, **told)


def export_model(source: ExportSource, target: str, dtype: str = "", compare: Compare = compared) -> Export:
    """Write ``source`` as the Hugging Face folder ``target``, one tensor at a time in memory.

    Args:
        source: see ``open_source``.
        target: folder; new or empty. All of it is written, or nothing.
        dtype: see ``parts_of``.
        compare: compares its logits with those of transformers.

    Raises:
        CriusError: the target exists, Hugging Face has no such model, the source is damaged or has no tokenizer, or
            the written folder differs from it: other bits, or other logits.
    """
    facts = source.weights.facts
    family, names = foreign_names(source.weights.model["name"], facts.state_names, otherwise="--format dcp")
    parts = parts_of(source, names, dtype)
    with new_folder(target) as folder:
        about, ids = write_tokenizer(folder, source.weights, has_tokenizer=source.has_tokenizer)
        files = write_parts(folder, parts)
        largest = max(parts, key=lambda part: part.num_bytes)
        dtype_name = next(name for name, code in TORCH_NAMES.items() if code == largest.dtype)
        config = model_config(source.weights, family, ids, dtype_name)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        done = written(
            target,
            source,
            parts,
            read_safetensors(folder).tensors,
            kind=family.architecture,
            files=files,
            tokenizer=about,
            logits=_logits(folder, source.weights, facts.num_parameters, compare),
        )
        told = {"written by Crius": __version__, "parameters": f"{facts.num_parameters:,}", **source.facts}
        told |= {name: str(value) for name, value in source.weights.sizes.items()}
        (folder / "README.md").write_text(model_card(done.lines(), told, source.settings, files), encoding="utf-8")
    return done


def model_config(weights: Weights, family: HuggingFace, ids: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config.json of an export: what the source said, with the changes of training.

    Args:
        weights: weights to export.
        family: Hugging Face's names of the model.
        ids: BOS and EOS of the exported tokenizer by their keys; empty: there is none.
        dtype: torch's name of the dtype of the weights.

    Raises:
        ConfigError: the class of transformers lacks a word of the model.
    """
    said = weights.said.get(CONFIG, {})
    computed = config_of(family, weights.model)
    is_own = all(said.get(key) == computed[key] for key in ("model_type", "hidden_size", "num_hidden_layers"))
    config = {**computed, **ids, CONTEXT: 0}
    if is_own:  # auto_map names a stranger's code
        before = config_of(family, settled(settings_in(said, family, weights.model["name"])))
        config = with_changes(said, before, computed)
        config = {key: value for key, value in config.items() if key not in ("auto_map", "torch_dtype", "dtype")}
    _check_words(weights, family, config)
    if CONTEXT in config:
        config[CONTEXT] = longest_context(weights)
    config["dtype" if "dtype" in said else "torch_dtype"] = dtype
    return config


def _check_words(weights: Weights, family: HuggingFace, config: Mapping[str, Any]) -> None:
    """Check that ``config`` describes the model, as Hugging Face's class reads it.

    Raises:
        ConfigError: it has a word that the class lacks.
    """
    name = weights.model["name"]
    ours = weights.facts.config
    told = replace(described(settings_in(config, family, name)).config, rope_float32=ours.rope_float32)
    lost = [word for word in WORDS if word != "pattern" and getattr(told, word) != getattr(ours, word)]
    if not lost and told.layers() != ours.layers():
        lost = ["pattern"]
    if lost:
        raise ConfigError(
            f"{family.architecture} of transformers has no {', '.join(lost)} as this model has.",
            where="model.words",
            why="its config.json would describe another model",
            fix="--format dcp, or --model.name of a family with it: docs/models.md",
        )


def write_parts(folder: Path, parts: Sequence[Part], stem: str = "model", most: int = 0) -> dict[str, str]:
    """Write the tensors, with an index if they take several files; returns the hash of each file.

    Args:
        folder: folder to write to.
        parts: the tensors.
        stem: start of the names of the files.
        most: most bytes of a file; 0: ``SHARD_BYTES``.
    """
    by_name = {part.key: part for part in parts}
    groups = shares(by_name, by_name, most or SHARD_BYTES)
    disk = open_disk(str(folder))
    where = dict[str, str]()
    hashes = {}
    disk.prepare(_WRITTEN)
    for number, keys in enumerate(groups, start=1):
        name = f"{stem}-{number:05d}-of-{len(groups):05d}{SUFFIX}" if len(groups) > 1 else f"{stem}{SUFFIX}"
        entry, _ = write_shard(disk, f"{_WRITTEN}/{name}", [by_name[key] for key in keys], lambda: None)
        (folder / _WRITTEN / name).rename(folder / name)
        hashes[name] = f"{ALGORITHM}:{entry.digest}"
        where |= dict.fromkeys(keys, name)
    (folder / _WRITTEN).rmdir()
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(part.num_bytes for part in parts)}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return hashes


def _logits(folder: Path, weights: Weights, num_parameters: int, compare: Compare) -> str:
    """Compare logits, and ids of the tokenizer, with those of transformers.

    Raises:
        CheckpointError: transformers does not load the export, or has other logits or ids.
    """
    if weights.allows_nonfinite:
        return "not compared: the model may have numbers that are not finite (--allow_nonfinite)"
    if find_spec("transformers") is None:
        return f"not compared: transformers is not installed ({install_line(REQUIREMENTS['transformers'])})"
    needed = 5 * num_parameters  # in float32, one model after the other, with activations
    if needed > (free := free_host_bytes()):
        return f"not compared: it takes {needed / 2**30:,.1f} GiB of memory, but {free / 2**30:,.1f} are free"
    return compare({"folder": str(folder), **job_of(weights)})


def job_of(weights: Weights) -> dict[str, Any]:
    """Facts about the source that ``crius.tools.convert.logits`` needs."""
    told = {"tokenizer": weights.tokenizer, "eos_token": weights.eos_token}
    return {"model": dict(weights.model), **told}

"""``crius import``: a Hugging Face or GGUF model as a run folder. No torch, and no code in it is executed."""

import contextlib
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

from crius.checkpoint.disk import open_disk
from crius.checkpoint.files import Part
from crius.checkpoint.folder import read_manifest
from crius.checkpoint.manifest import ALGORITHM
from crius.checkpoint.names import step_name
from crius.checkpoint.pieces import TensorSource
from crius.config.data import TokenizerConfig
from crius.config.operation import CheckpointConfig
from crius.errors import CheckpointError, ConfigError
from crius.interop.adapters import Adapters
from crius.interop.casting import cast
from crius.interop.context import handed_on
from crius.interop.foreign import open_inside, read_inside
from crius.interop.hub import located
from crius.interop.kept import TOKENIZER_FOLDER, encoded
from crius.interop.numbers import check_finite
from crius.interop.weights import NONFINITE, Weights, finite_parameters, open_weights, record_of
from crius.tokens.files import (
    ADDED_TOKENS,
    FILES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    original_file,
    tokenizer_file,
)
from crius.tokens.tokenizer import build_tokenizer
from crius.tools.convert.convert import write_checkpoint
from crius.tools.convert.dcp import METADATA
from crius.tools.convert.gguf_file import SUFFIX, open_gguf
from crius.tools.convert.new_folder import check_order, new_folder

_LARGEST_FILE = 1 << 28


@dataclass(frozen=True)
class Import:
    """Result of an import.

    Attributes:
        where: the run folder.
        weights: weights of the source.
        adapters: the adapters that were written; None: all weights were.
        parts: the tensors that were written.
        manifest: hash of the checkpoint's manifest.
        tokenizer: tokenizer of the model, or why there is none.
    """

    where: str
    weights: Weights
    adapters: Adapters | None
    parts: Sequence[Part]
    manifest: str
    tokenizer: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        count = (self.adapters or self.weights.facts).num_parameters
        return {
            "run": self.where,
            "kind": self.weights.kind,
            "source": self.weights.origin,
            "source_digest": self.weights.digest,
            "model": dict(self.weights.model),
            "adapter": dict(vars(self.adapters.lora)) if self.adapters else None,
            "parameters": count,
            "tensors": len(self.parts),
            "bytes": sum(part.num_bytes for part in self.parts),
            "dtypes": sorted({part.dtype for part in self.parts}),
            "tokenizer": self.tokenizer,
            "chat_template": bool(self.weights.chat_template),
            "manifest": self.manifest,
        }

    def lines(self) -> list[str]:
        """For people."""
        facts = self.as_dict()
        sizes = ", ".join(f"{name} {value}" for name, value in self.weights.sizes.items() if name != "flavor")
        noun = f"of adapters of rank {self.adapters.lora.rank} " if self.adapters else ""
        template = "with" if facts["chat_template"] else "without"
        return [
            f"source      {facts['source']}, {facts['source_digest']}",
            f"model       {self.weights.model['name']}: {sizes}",
            f"parameters  {facts['parameters']:,} {noun}in {facts['tensors']:,} tensors of {', '.join(facts['dtypes'])}"
            f", {facts['bytes'] / 2**20:,.1f} MiB",
            f"tokenizer   {self.tokenizer}, {template} a chat template",
            f"written     {self.where}, manifest {self.manifest}",
        ]


def import_model(source: str, target: str, *, adapter: str = "", allow_nonfinite: bool = False) -> Import:
    """Write the model in ``source`` as the run folder ``target``, one tensor at a time in memory.

    Args:
        source: Hugging Face folder, folder of PEFT, name of a repository of the hub with one of them, or GGUF file.
        target: run folder; new or empty. All of it is written, or nothing.
        adapter: merge: adapters are added to their base. keep: the run folder has the adapters alone, as a LoRA run
            has. leave_out: an adapter beside a model is not read. Empty: keep for a folder of PEFT, else merge.
        allow_nonfinite: parameters may be NaN or infinite, here and wherever the run folder is read.

    Raises:
        ConfigError: the target exists, or the source does not, or Crius does not have its model.
        CheckpointError: the source is damaged or hostile, or the target cannot be written.
        EnvironmentError: a package is missing, or the hub does not return the files.
    """
    check_order("import", source, target)
    place = Path(target).expanduser()
    with new_folder(target) as folder:
        weights, files, note = open_source(source, adapter)
        parameters = finite_parameters(weights, source)
        adapters = kept_adapters(source, weights, adapter)
        (folder / TOKENIZER_FOLDER).mkdir()
        for name, content in handed_on(weights).said.items():
            (folder / TOKENIZER_FOLDER / name).write_bytes(encoded(content))
        about = write_tokenizer(folder, files, weights.model["vocab_size"], note)
        tables: dict[str, dict[str, Any]] = {"model": dict(weights.model)}
        if adapters:
            tables["lora"] = {**vars(adapters.lora), "targets": list(adapters.lora.targets)}
        if (folder / TOKENIZER_FOLDER / TOKENIZER).exists():
            tables["tokenizer"] = {"path": str(place.absolute() / TOKENIZER_FOLDER)}
        elif weights.tokenizer == "byte":
            tables["tokenizer"] = {"path": "byte"}
        if weights.eos_token and "tokenizer" in tables:
            tables["tokenizer"]["eos_token"] = weights.eos_token
        (folder / "run.toml").write_text(f"# {ascii(weights.origin)[1:-1]}\n" + tomli_w.dumps(tables))
        config = {f"{section}.{name}": value for section, table in tables.items() for name, value in table.items()}
        if allow_nonfinite or weights.allows_nonfinite:
            config[NONFINITE] = True
        tensors = adapters.tensors if adapters else weights.tensors
        parts = []
        for name, tensor in tensors.items():
            dtype = weights.rounds.get(name, tensor.dtype)
            is_checked = name in parameters and not allow_nonfinite
            check = partial(check_finite, name, source, dtype) if is_checked else None
            parts.append(Part(name, dtype, tensor.shape, partial(_read, tensor, dtype), check))
        digest = _write(folder, weights, adapters, parts, config)
    return Import(str(place), weights, adapters, parts, f"{ALGORITHM}:{digest}", about)


def _read(tensor: TensorSource, dtype: str) -> memoryview:
    try:
        return cast(tensor.read(), tensor.dtype, dtype)
    except OverflowError:
        what = f"the sum of {tensor.key} and its adapter is too large for {dtype}, the dtype of the base."
        raise CheckpointError(what, where="--adapter merge", fix="--adapter keep") from None


def kept_adapters(source: str, weights: Weights, adapter: str) -> Adapters | None:
    """The adapters that are written without their base.

    Raises:
        ConfigError: ``adapter`` does not fit the source.
    """
    if bool(weights.adapters) != (adapter in ("merge", "keep")) and adapter:
        has = "has only an adapter" if weights.adapters else "has no adapter"
        fix = "--adapter keep, or merge" if weights.adapters else "leave out --adapter"
        raise ConfigError(f"{source} {has}.", where=f"--adapter {adapter}", fix=fix)
    is_kept = adapter == "keep" or (not adapter and weights.kind == "PEFT")
    return weights.adapters if is_kept else None


def open_source(source: str, adapter: str) -> tuple[Weights, Mapping[str, Callable[[Path], object]], str]:
    """The weights of a source, with any numbers, functions that write each file of its tokenizer, and a note on the
    tokenizer.

    Raises:
        CriusError: see ``import_model``.
    """
    path = Path(source).expanduser()
    if path.suffix == SUFFIX and path.exists():
        found = open_gguf(path, "command line")
        texts = {name: (lambda to, text=text: to.write_text(text)) for name, text in found.tokenizer.items()}
        return found.weights, texts, found.note
    place = place_of(source)
    if (path / METADATA).exists():
        fix = f"crius checkpoint convert {source} DIR, and --checkpoint.load_path DIR"
        what = "is a checkpoint of torch's DCP, which does not name its model"
        raise ConfigError(f"{source} {what}.", where="command line", fix=fix)
    weights = open_weights(place, adapter=adapter, allow_nonfinite=True)
    tokenizer = Path(weights.tokenizer)
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    is_file = weights.tokenizer not in ("", "byte")
    names = [name for name in FILES if (folder / name).exists()] if is_file else []
    copies = {name: (lambda to, name=name: copy_file(folder, name, to)) for name in names}
    if not is_file:
        return weights, copies, "byte" if weights.tokenizer else f"none: {source} has no {TOKENIZER}"
    original = None if TOKENIZER in copies else original_file(folder)
    return weights, copies | _converted(folder, original), f"converted from {original.name}" if original else ""


def place_of(source: str) -> str:
    """The path of a source, which the hub may have to return first.

    Raises:
        ConfigError: there is no such source.
        EnvironmentError: a package is missing, or the hub does not return the files.
    """
    place = located(source)
    if "://" not in place and not Path(place).expanduser().exists():
        names = [str(path) for path in Path(source).parent.iterdir()] if Path(source).parent.is_dir() else []
        near = difflib.get_close_matches(os.path.normpath(source), names, n=1)
        fix = "give a Hugging Face folder, a GGUF file, or a name of the hub such as HuggingFaceTB/SmolLM2-135M"
        raise ConfigError(f"there is no {source}.", where="command line", fix=near[0] if near else fix)
    return place


def _converted(folder: Path, original: Path | None) -> dict[str, Callable[[Path], object]]:
    """Functions that write each file of a converted tokenizer."""
    if original is None:
        return {}
    for name in (original.name, TOKENIZER_CONFIG, ADDED_TOKENS):  # no links, as for copied files
        if os.path.lexists(folder / name):
            open_inside(folder, name).close()
    place = tokenizer_file(str(folder)).parent
    return {name: partial(copy_file, place, name) for name in (TOKENIZER, TOKENIZER_CONFIG)}


def copy_file(folder: Path, name: str, to: Path) -> None:
    """Copy a regular file of limited size from a folder to ``to``.

    Raises:
        CheckpointError: it is not such a file.
    """
    to.write_bytes(read_inside(folder, name, _LARGEST_FILE))


def write_tokenizer(folder: Path, files: Mapping[str, Callable[[Path], object]], num_rows: int, note: str) -> str:
    """Write a tokenizer into a run folder; an empty tokenizer folder is removed.

    Args:
        folder: the run folder.
        files: functions that write each file, from ``open_source``.
        num_rows: rows of the model's embedding.
        note: from ``open_source``.

    Returns:
        A description of the tokenizer.

    Raises:
        CriusError: it is damaged, or the model has fewer rows.
    """
    place = folder / TOKENIZER_FOLDER
    place.mkdir(exist_ok=True)
    for name, write in files.items():
        write(place / name)
    if not (place / TOKENIZER).exists():
        with contextlib.suppress(OSError):  # it has what the source said
            place.rmdir()
        return note
    built = build_tokenizer(TokenizerConfig(path=str(place)))
    if built.vocab_size > num_rows:
        raise ConfigError(
            f"the tokenizer has {built.vocab_size:,} ids, but the model has {num_rows:,} rows.",
            where=TOKENIZER,
            fix="give the tokenizer.json of this model",
        )
    return f"{built.vocab_size:,} ids" + (f" ({note})" if note else "")


def _write(
    folder: Path, weights: Weights, adapters: Adapters | None, parts: Sequence[Part], config: dict[str, Any]
) -> str:
    """Write the checkpoint; returns the hash of its manifest."""
    disk = open_disk(str(folder / CheckpointConfig.folder))
    parts = [replace(part, key=f"model.{part.key}") for part in parts]
    state = {"imported": True, "source": weights.origin, "source_kind": weights.kind, "source_digest": weights.digest}
    if weights.folder:
        state["source_folder"] = str(weights.folder.absolute())
    if adapters:
        path = adapters.base["path"]
        state["init_from"] = record_of(open_weights(path, adapter="leave_out"), path)
    write_checkpoint(disk, parts, 0, weights.kind, config, state)
    return read_manifest(disk, step_name(0)).digest

"""Opens the weights of a model: a run, a checkpoint, or a Hugging Face folder. No torch, and no code is run."""

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from crius.checkpoint.disk import Disk
from crius.checkpoint.folder import read_manifest
from crius.checkpoint.manifest import ALGORITHM, Hasher, Manifest, blocks_of
from crius.checkpoint.names import MANIFEST, step_name
from crius.checkpoint.pieces import Shape, TensorSource, misfits, stacked, stored
from crius.checkpoint.state import read_state
from crius.checkpoint.whereabouts import find_checkpoints
from crius.config.load import OF_EXPERTS, TAKEN
from crius.config.lora import saved_lora
from crius.data.chat.template import LARGEST_TEXT, find_template
from crius.data.tokenizer_files import TOKENIZER, original_file
from crius.errors import CheckpointError, ConfigError
from crius.interop.adapters import Adapters, merged, read_adapters, rounded_to
from crius.interop.foreign import Foreign, open_inside, read_inside
from crius.interop.safetensors_file import SUFFIX, json_object, read_safetensors, safetensors_names
from crius.models.config import rope_scaling_text
from crius.models.description import ModelDescription
from crius.models.huggingface import read_model_settings, rows_of
from crius.models.registry import SPECS, families, find_spec

log = logging.getLogger("crius.interop")

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_FOLDER = "tokenizer"
"""Name of the tokenizer's folder in a run folder that an import wrote."""

_MOST_BASES = 16
_DERIVED = ".rotary_emb.inv_freq"  # saved by older versions of transformers; it follows from the config


class Saved(NamedTuple):
    """A checkpoint of Crius: the folder of checkpoints, its name in there, and its manifest."""

    disk: Disk
    name: str
    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of one model. They are read later.

    Attributes:
        model: settings of ``[model]``: name, flavor and all sizes.
        tensors: tensors by our name of the parameter, such as ``layers.0.attention.wq.weight``; a tied weight once.
        tokenizer: value for ``--tokenizer.path``: ``byte``, a file or a folder; empty: there is none.
        eos_token: value for ``--tokenizer.eos_token``; empty: the tokenizer's own.
        folder: Hugging Face folder of the weights; None for other sources.
        chat_template: jinja2 text; empty: there is none.
        kind: kind of the source, for messages.
        origin: kind and place of the source, for messages.
        hash_now: function that computes ``digest``.
        saved: Crius checkpoint of the weights; None for other sources.
        adapters: LoRA adapters that are merged into ``tensors``; None: there are none.
        rounds: dtype in which an export writes a tensor that is wider here, by name.
    """

    model: Mapping[str, Any]
    tensors: Mapping[str, TensorSource]
    tokenizer: str
    chat_template: str
    kind: str
    origin: str
    hash_now: Callable[[], str]
    saved: Saved | None = None
    eos_token: str = ""
    folder: Path | None = None
    adapters: Adapters | None = None
    rounds: Mapping[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, Any]:
        """Flavor and sizes of the model."""
        return {name: value for name, value in self.model.items() if name != "name"}

    @cached_property
    def facts(self) -> ModelDescription:
        """The description of the model."""
        return described(self.model)

    @cached_property
    def digest(self) -> str:
        """``xxh3-128:HEX`` of a checkpoint's manifest. For other sources, of all their bytes, which are read for it."""
        return f"{ALGORITHM}:{self.hash_now()}"


_FUSED_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def open_weights(path: str, where: str = "command line", depth: int = 0) -> Weights:
    """Open the weights of a run folder (its newest intact checkpoint), a checkpoint, or a Hugging Face folder.

    The adapters of a LoRA run are merged into their base, which is read from its place at the start of the run.

    Args:
        path: path of the source; for checkpoints also an fsspec URL.
        where: origin of the path, for messages.
        depth: number of LoRA runs that were started from these weights.

    Raises:
        ConfigError: there is no such source, or its model is unknown to Crius.
        CheckpointError: the source is damaged or hostile, or its tensors do not match its model; names all mismatches.
        OSError: reading fails.
    """
    place = Path(path).expanduser()
    is_ours = "://" in path or (place / MANIFEST).exists() or (place / "run.toml").exists()
    if not is_ours and (place / CONFIG).exists():
        return _of_hugging_face(place, where)
    if not is_ours and place.suffix == ".gguf":
        raise ConfigError(f"{path} is GGUF.", where=where, fix=f"crius import {path} DIR, then give DIR")
    return _of_checkpoint(path if "://" in path else str(place), where, depth)


def _of_checkpoint(path: str, where: str, depth: int) -> Weights:
    found = find_checkpoints(path, where)
    disk = found.folder.disk
    name = found.name
    if not name:
        problems = {step: found.folder.problem(step) for step in found.folder.steps()}
        steps = [step for step, problem in problems.items() if not problem]
        damaged = {step: problem for step, problem in problems.items() if problem}
        reasons = "; ".join(f"step {step}: {why.rstrip('.')}" for step, why in damaged.items())
        if damaged and not steps:
            what = f"{path} has no checkpoint that can be read: {reasons}."
            fix = f"crius checkpoint verify {shlex.quote(path)} names all damage"
            raise CheckpointError(what, where=where, fix=fix)
        if damaged and max(damaged) > steps[-1]:
            log.warning("%s: step %d is used, because newer checkpoints are damaged: %s", path, steps[-1], reasons)
        if not steps:
            raise ConfigError(
                f"{path} has neither a checkpoint that can be read nor a {CONFIG} with {SUFFIX} files.",
                where=where,
                fix="give a run folder with checkpoints, a checkpoint, or a Hugging Face folder",
            )
        name = step_name(steps[-1])
    manifest = read_manifest(disk, name)
    entries = {key: entry for key, entry in manifest.tensors.items() if key.startswith("model.")}
    tensors = {key.removeprefix("model."): tensor for key, tensor in stored(disk, name, entries).items()}
    model = _saved_model(manifest, f"{disk.where}/{name}")
    place = f"{disk.where}/{name}"
    saved = Saved(disk, name, manifest)
    told = dict[str, Any]()
    try:
        lora = saved_lora(manifest.config)
    except ValueError as error:
        raise CheckpointError(f"{place} has settings that no run has: {error}.") from None
    if lora.is_on:
        recorded = read_state(*saved).get("init_from", {})
        adapters = read_adapters(lora, tensors, described(model), recorded, place)
        base = _base_of(adapters, model, place, where, depth + 1)
        tensors = merged(adapters, base.tensors)
        told = {"adapters": adapters, "rounds": rounded_to(adapters, base.tensors)}
    else:
        check_tensors(model, {key: tensor.shape for key, tensor in tensors.items()}, str, place)
    own = Path(disk.where).parent / TOKENIZER_FOLDER
    is_own = disk.is_local and (own / TOKENIZER).is_file()
    tokenizer = str(own) if is_own else str(manifest.config.get("tokenizer.path", ""))
    return Weights(
        model=model,
        tensors=tensors,
        tokenizer=tokenizer,
        chat_template=read_chat_template(Path(tokenizer)) if tokenizer not in ("", "byte") else "",
        kind="Crius checkpoint",
        origin=f"step {manifest.step} of {disk.where}",
        hash_now=lambda: manifest.digest,
        saved=saved,
        **told,
    )


def _base_of(adapters: Adapters, model: Mapping[str, Any], place: str, where: str, depth: int) -> Weights:
    """The weights that adapters were trained on, from their original place.

    Raises:
        CriusError: they are missing, or differ.
    """
    if depth > _MOST_BASES:
        raise CheckpointError(f"{place} has adapters of adapters, more than {_MOST_BASES} levels deep.", where=where)
    path = adapters.base["path"]
    digest = adapters.base["digest"]
    fix = "put it back there, or a link to it; a run that resumes also takes --checkpoint.init_from"
    try:
        base = open_weights(path, where, depth)
    except (ConfigError, OSError) as error:
        what = error.what if isinstance(error, ConfigError) else str(error)
        raise ConfigError(
            f"the base of {place} is not at {path}: {what}",
            where=where,
            why="a LoRA checkpoint has only the adapters",
            fix=fix,
        ) from None
    differs = [name for name in model if name not in ("flavor", "name") and model[name] != base.model[name]]
    if base.digest != digest or differs:
        raise ConfigError(
            f"{path} is not the base that the adapters of {place} were trained on.",
            where=where,
            why=f"its hash is {base.digest}, but the base had {digest}",
            fix=fix,
        )
    return base


def _saved_model(manifest: Manifest, where: str) -> dict[str, Any]:
    """Settings of ``[model]`` of a checkpoint, with the sizes of its flavor."""
    saved = {key.removeprefix("model."): value for key, value in manifest.config.items() if key.startswith("model.")}
    spec = find_spec(str(saved.get("name")))
    flavor = saved.get("flavor")
    if spec is None or flavor not in spec.known_flavors:
        what = f"has model {saved.get('name')}, flavor {flavor}" if saved else "is an import without settings"
        raise ConfigError(
            f"{where} {what}, and cannot be used alone.",
            where=where,
            fix="--import MODULE of that model" if saved else "resume from it: --checkpoint.load_path",
        )
    sizes = {name: saved[name] for name in (*TAKEN, *OF_EXPERTS) if saved.get(name) not in (-1, None, "")}
    return settled({"name": spec.name, "flavor": flavor, **sizes})


def settled(model: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of ``[model]`` with every size, including sizes that follow from the flavor or other sizes."""
    config = described(model).config
    names = (name for name in (*TAKEN, *OF_EXPERTS) if name != "rope_scaling" and hasattr(config, name))
    sizes = {name: getattr(config, name) for name in names}
    scaling = rope_scaling_text(config.rope_scaling)
    return {"name": model["name"], "flavor": model["flavor"], **sizes, "rope_scaling": scaling}


def described(model: Mapping[str, Any]) -> ModelDescription:
    """The description of a model from settings of ``[model]`` with all sizes."""
    return SPECS[model["name"]].describe(**{key: value for key, value in model.items() if key != "name"})


def _of_hugging_face(folder: Path, where: str) -> Weights:
    model = settled(read_model_settings(str(folder), families(), where, with_weights=True)[1])
    names = safetensors_names(folder)
    if not names:
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
        raise CheckpointError(
            f"{folder} has no {SUFFIX} files.",
            where=where,
            why=f"{pickles[0]} is a pickle, which can run code; it was not read" if pickles else "",
            fix="get the repository's safetensors, or save them: model.save_pretrained(DIR) in transformers",
        )
    return Weights(
        model=model,
        tensors=hugging_face_tensors(read_safetensors(folder), model, str(folder)),
        tokenizer=str(folder) if (folder / TOKENIZER).is_file() or original_file(folder) else "",
        chat_template=read_chat_template(folder),
        kind="Hugging Face",
        origin=f"Hugging Face folder {folder}",
        folder=folder,
        hash_now=partial(hash_files, folder, [CONFIG, *names]),
    )


def hugging_face_tensors(foreign: Foreign, model: Mapping[str, Any], where: str) -> dict[str, TensorSource]:
    """The tensors of a model by our names.

    Args:
        foreign: tensors by Hugging Face's names.
        model: settings of ``[model]``.
        where: path of the source, for messages.

    Raises:
        CheckpointError: tensors are missing, unexpected or have another shape, or a tied weight exists twice and
            differs.
    """
    family = families()[model["name"]]
    if foreign.unreadable:
        key, why = min(foreign.unreadable.items())
        raise CheckpointError(f"{key} of {where} and {len(foreign.unreadable) - 1} more cannot be used.", why=why)
    there = {key: tensor for key, tensor in foreign.tensors.items() if not key.endswith(_DERIVED)}
    first, second = (family.names.get(name, "") for name in ("tok_embeddings.weight", "output.weight"))
    if model["tied_embeddings"] and {first, second} <= there.keys():
        if there[first].read() != there[second].read():
            raise CheckpointError(
                f"{where} has {second}, which differs from {first}.",
                why=f"tie_word_embeddings in {CONFIG} says that both are one tensor",
                fix="set tie_word_embeddings to false if they are two tensors",
            )
        del there[second]
    facts = described(model)
    tensors = dict[str, TensorSource]()
    if family.splits_rows and facts.experts[0] * facts.num_experts > len(there):  # before a name is made for each
        what = f"{facts.experts[0]:,} layers of {facts.num_experts:,} experts"
        raise CheckpointError(f"{where} has {len(there):,} tensors for {what}.")
    names = check_tensors(model, {key: tensor.shape for key, tensor in there.items()}, family.translated, where)
    for name, key in names.items():
        rows = rows_of(key, facts.parameter_shapes.get(name, ()))
        tensors[name] = there[key] if key in rows else stacked(key, [there[row] for row in rows])
    return tensors


def check_tensors(
    model: Mapping[str, Any], there: Mapping[str, Shape], translated: Callable[[str], str], where: str
) -> dict[str, str]:
    """Map our names of a model's weights and buffers to the source's names; see ``crius.models.huggingface.rows_of``.

    Args:
        model: settings of ``[model]``, with all sizes.
        there: shapes by the source's names.
        translated: function from our name to the source's name.
        where: path of the source, for messages.

    Raises:
        CheckpointError: the source's tensors do not match the model; names all mismatches.
    """
    facts = described(model)
    if facts.num_layers > len(there):  # before a name is made for each
        raise CheckpointError(f"{where} has {len(there):,} tensors for {facts.num_layers:,} layers.")
    buffers = {buffer.name: buffer.shape for buffer in facts.buffers if buffer.persistent}
    wanted: dict[str, Shape] = {}
    for name, shape in (facts.parameter_shapes | buffers).items():
        wanted |= rows_of(translated(name), shape)
    if problems := misfits(there, wanted, "the source", "the model"):
        is_fused = any(name.endswith(_FUSED_EXPERTS) for name in there.keys() - wanted.keys())
        fix = "get it again from its origin"
        if is_fused:
            problems = f"a tensor has all experts of a layer, which is not supported; {problems}"
            fix = "load it with transformers and save it again, which writes each expert as a tensor"
        raise CheckpointError(
            f"the tensors of {where} do not match the model in its settings, {model['name']}.", why=problems, fix=fix
        )
    return {name: translated(name) for name in facts.state_names}


def read_chat_template(folder: Path) -> str:
    """The chat template in a tokenizer's folder, from its own file or from tokenizer_config.json; empty: there is none.

    Raises:
        CheckpointError: the file is not JSON, or too large.
    """
    folder = folder if folder.is_dir() else folder.parent

    def read(name: str) -> bytes | None:
        return read_inside(folder, name, LARGEST_TEXT) if (folder / name).exists() else None

    return find_template(read, lambda content, name: json_object(content, f"{folder}/{name}"))


def hash_files(folder: Path, names: Sequence[str]) -> str:
    """One hash of all bytes of some files of a folder, in this order."""
    hasher = Hasher()
    for name in names:
        with open_inside(folder, name) as file:
            for block in blocks_of(file):
                hasher.update(block)
    return hasher.hexdigest()

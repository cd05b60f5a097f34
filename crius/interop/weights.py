"""Opens the weights of a model: a run, a checkpoint, or a Hugging Face folder. No torch, and no code is run."""

import contextlib
import logging
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from crius.checkpoint.disk import Disk
from crius.checkpoint.folder import read_manifest
from crius.checkpoint.manifest import ALGORITHM, MAX_TEXT, Hasher, Manifest, blocks_of, digest_of
from crius.checkpoint.names import MANIFEST, step_name
from crius.checkpoint.pieces import Shape, TensorSource, misfits, rows_from, stacked, stored
from crius.checkpoint.state import read_state
from crius.checkpoint.whereabouts import find_checkpoints
from crius.config.data import TokenizerConfig
from crius.config.load import OF_EXPERTS, TAKEN
from crius.config.lora import block_linears, saved_lora
from crius.errors import CheckpointError, ConfigError, CriusError
from crius.interop.adapters import Adapters, merged, read_adapters
from crius.interop.foreign import Foreign, open_inside, read_inside
from crius.interop.kept import CONFIG, Said, origin_of, read_said
from crius.interop.numbers import check_dtypes, finite
from crius.interop.peft import differences, foreign_modules, read_peft
from crius.interop.safetensors_file import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    SUFFIX,
    json_object,
    model_files,
    read_safetensors,
    said,
)
from crius.models.config import WORDS
from crius.models.description import ModelDescription
from crius.models.huggingface import read_model_settings, rows_of
from crius.models.registry import SPECS, families, find_spec
from crius.models.rope import parse_rope_scaling, rope_scaling_text
from crius.models.words import words_text
from crius.tokens.files import TOKENIZER, original_file
from crius.tokens.template import LARGEST_TEXT, find_template
from crius.tokens.tokenizer import Tokenizer, build_tokenizer

log = logging.getLogger("crius.interop")

NONFINITE = "allow_nonfinite"
"""Entry in the settings of an imported checkpoint: its parameters may have numbers that are not finite."""

_MOST_BASES = 16
_WRAPPERS = re.compile(r"(_orig_mod\.|module\.)+")  # of torch.compile and DistributedDataParallel
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
        said: what the source of the weights said about their model; a longer context of a run is in it.
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
    said: Said = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, Any]:
        """Flavor and sizes of the model."""
        return {name: value for name, value in self.model.items() if name != "name"}

    @property
    def allows_nonfinite(self) -> bool:
        """Whether they were imported with ``--allow_nonfinite``."""
        return self.saved is not None and bool(self.saved.manifest.config.get(NONFINITE))

    @cached_property
    def facts(self) -> ModelDescription:
        """The description of the model."""
        return described(self.model)

    @cached_property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer; bytes if there is none.

        Raises:
            CriusError: its files cannot be used.
        """
        return build_tokenizer(TokenizerConfig(path=self.tokenizer or "byte", eos_token=self.eos_token))

    @cached_property
    def digest(self) -> str:
        """``xxh3-128:HEX`` of a checkpoint's manifest. For other sources, of all their bytes, which are read for it."""
        return f"{ALGORITHM}:{self.hash_now()}"


_FUSED_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def open_weights(
    path: str,
    where: str = "command line",
    depth: int = 0,
    *,
    adapter: str = "",
    allow_nonfinite: bool = False,
) -> Weights:
    """Open the weights of a run folder (its newest intact checkpoint), a checkpoint, a Hugging Face folder, or a folder
    with a LoRA adapter of PEFT.

    Adapters are merged into their base, which is read from its place at the start of the run, or from
    ``base_model_name_or_path``. Reading a parameter with numbers that are not finite raises a ``CheckpointError``.

    Args:
        path: path of the source; for checkpoints also an fsspec URL.
        where: origin of the path, for messages.
        depth: number of adapters that were trained on these weights.
        adapter: what happens to a PEFT adapter in one folder with weights: merge, keep (apart, but in ``tensors`` it is
            merged) or leave_out; empty: it is refused.
        allow_nonfinite: parameters may have any numbers and dtypes; see ``finite_parameters``.

    Raises:
        ConfigError: there is no such source, or its model is unknown to Crius.
        CheckpointError: the source is damaged or hostile, or its tensors do not match its model; names all mismatches.
        OSError: reading fails.
    """
    if depth > _MOST_BASES:
        raise CheckpointError(f"{path} has adapters of adapters, more than {_MOST_BASES} levels deep.", where=where)
    weights = _opened(path, where, depth, adapter)
    if depth or allow_nonfinite:
        return weights
    names = finite_parameters(weights, path)
    adapters = weights.adapters
    if adapters:
        adapters = replace(adapters, tensors=finite(adapters.tensors, names, path))
    return replace(weights, tensors=finite(weights.tensors, names, path), adapters=adapters)


def finite_parameters(weights: Weights, path: str) -> frozenset[str]:
    """The parameters of weights and of their adapters whose numbers must be finite.

    Args:
        weights: weights of any source.
        path: path of the source, for messages.

    Raises:
        CheckpointError: parameters of another program are not floating-point.
    """
    names = weights.facts.parameter_shapes.keys()
    if weights.saved is None:
        check_dtypes(weights.tensors, names, path)
    elif weights.allows_nonfinite:
        return frozenset()
    return frozenset({*names, *(weights.adapters.tensors if weights.adapters else ())})


def _opened(path: str, where: str, depth: int, adapter: str) -> Weights:
    place = Path(path).expanduser()
    is_ours = "://" in path or (place / MANIFEST).exists() or (place / "run.toml").exists()
    if not is_ours and (place / ADAPTER_CONFIG).exists():
        has_weights = bool(model_files(place))
        if has_weights and not adapter:
            raise ConfigError(
                f"{path} has both a model and an adapter, {ADAPTER_CONFIG}.",
                where=where,
                why="with the adapter it is another model",
                fix=f"crius import {shlex.quote(path)} DIR --adapter leave_out (or merge, or keep), and give DIR",
            )
        if not has_weights or adapter != "leave_out":
            return _of_peft(place, where, depth, str(place) if has_weights else "")
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
    place = f"{disk.where}/{name}"
    model = saved_model(manifest, place)
    saved = Saved(disk, name, manifest)
    told = dict[str, Any]()
    origin = origin_of(disk, manifest)
    try:
        lora = saved_lora(manifest.config)
    except ValueError as error:
        raise CheckpointError(f"{place} has settings that no run has: {error}.") from None
    if lora.is_on:
        recorded = read_state(*saved).get("init_from", {})
        adapters = read_adapters(lora, tensors, described(model), recorded, place)
        base = _base_of(adapters, model, place, where, depth + 1)
        tensors, rounds = merged(adapters, base.tensors)
        origin = origin if CONFIG in origin.said else origin._replace(said=base.said)
        told = {"adapters": adapters, "rounds": rounds}
    else:
        check_tensors(model, {key: tensor.shape for key, tensor in tensors.items()}, str, place)
    return Weights(
        model=model,
        tensors=tensors,
        tokenizer=origin.tokenizer,
        eos_token=str(manifest.config.get("tokenizer.eos_token", "")),
        said=origin.said,
        chat_template=read_chat_template(origin.tokenizer),
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
    path = adapters.base["path"]
    digest = adapters.base["digest"]
    fix = "put it back there, or a link to it; a run that resumes also takes --checkpoint.init_from"
    try:
        base = open_weights(path, where, depth, adapter="leave_out")
    except (ConfigError, OSError) as error:
        what = error.what if isinstance(error, ConfigError) else str(error)
        raise ConfigError(
            f"the base of {place} is not at {path}: {what}",
            where=where,
            why="a LoRA checkpoint has only the adapters",
            fix=fix,
        ) from None
    differs = [name for name in model if name not in ("flavor", "name") and is_other_size(name, model, base.model)]
    if base.digest != digest or differs:
        raise ConfigError(
            f"{path} is not the base that the adapters of {place} were trained on.",
            where=where,
            why=f"its hash is {base.digest}, but the base had {digest}",
            fix=fix,
        )
    return base


def saved_model(manifest: Manifest, where: str) -> dict[str, Any]:
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
    scaling = rope_scaling_text(config.rope_scaling, is_float32=config.rope_float32)
    flavor = SPECS[model["name"]].flavors.get(model["flavor"])
    words = words_text({name: getattr(config, name) for name in WORDS}, type(config), flavor)
    return {
        "name": model["name"],
        "flavor": model["flavor"],
        **sizes,
        "rope_scaling": scaling,
        "words": words,
    }


def is_other_size(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether a setting of ``[model]`` differs. The precision of rotary frequencies may: it fits any weights."""
    if name == "rope_scaling":
        return parse_rope_scaling(ours[name])[0] != parse_rope_scaling(theirs[name])[0]
    return bool(ours[name] != theirs[name])


def described(model: Mapping[str, Any]) -> ModelDescription:
    """The description of a model from settings of ``[model]`` with all sizes."""
    return SPECS[model["name"]].describe(**{key: value for key, value in model.items() if key != "name"})


def _of_hugging_face(folder: Path, where: str) -> Weights:
    errors: list[CriusError] = []
    try:
        model = settled(read_model_settings(str(folder), families(), where, with_weights=True)[1])
    except ConfigError as error:
        errors.append(error)
    try:
        names = model_files(folder)
        if not names:
            pickles = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
            raise ConfigError(
                f"{folder} has no model{SUFFIX}, index or model-*-of-*{SUFFIX}.",
                where=where,
                why=f"{pickles[0]} is a pickle, which can run code; it was not read" if pickles else "",
                fix="get the repository's safetensors, or save them: model.save_pretrained(DIR) in transformers",
            )
        foreign = read_safetensors(folder)
    except (CheckpointError, ConfigError) as error:
        errors.append(error)
    if errors:
        raise ConfigError.together(errors)
    return Weights(
        model=model,
        tensors=hugging_face_tensors(foreign, model, str(folder)),
        tokenizer=str(folder) if (folder / TOKENIZER).is_file() or original_file(folder) else "",
        chat_template=read_chat_template(str(folder)),
        kind="Hugging Face",
        origin=f"Hugging Face folder {folder}",
        folder=folder,
        said=read_said(folder),
        hash_now=partial(hash_files, folder, [CONFIG, *names]),
    )


def _of_peft(folder: Path, where: str, depth: int, base_path: str) -> Weights:
    """Base and adapter of a folder of PEFT.

    Args:
        folder: the folder.
        where: origin of its path, for messages.
        depth: number of adapters that were trained on these weights.
        base_path: path of the base; empty: the settings name it.

    Raises:
        CriusError: see ``open_weights``; names all settings that are not supported.
    """
    file = f"{folder}/{ADAPTER_CONFIG}"
    content = json_object(read_inside(folder, ADAPTER_CONFIG, LARGEST_TEXT), file)
    errors: list[CriusError] = [
        ConfigError(f"{file}: {what}.", where=where, fix="merge the adapter with PEFT first, model.merge_and_unload()")
        for what in differences(content)
    ]
    try:
        path = base_path or _base_path(folder, content)
        base = open_weights(path, where, depth + 1, adapter="leave_out")
        modules = foreign_modules(base.model["name"], block_linears(base.facts), where=file)
        lora, factors = read_peft(folder, content, base.facts, modules)
        told = {"kind": base.kind, "path": path, "digest": ""}
        adapters = read_adapters(lora, factors, base.facts, told, str(folder))
        tensors, rounds = merged(adapters, base.tensors)
    except CriusError as error:
        errors.append(error)
    if errors:
        raise ConfigError.together(errors)
    tokenizer = str(folder) if (folder / TOKENIZER).is_file() else base.tokenizer
    return replace(
        base,
        tensors=tensors,
        tokenizer=tokenizer,
        chat_template=read_chat_template(tokenizer),
        kind="PEFT",
        origin=f"PEFT adapter {folder} of {base.origin}",
        hash_now=lambda: digest_of(f"{hash_files(folder, [ADAPTER_CONFIG, ADAPTER_FILE])} {base.digest}".encode()),
        saved=None,
        adapters=adapters,
        rounds=rounds,
    )


def _base_path(folder: Path, content: Mapping[str, Any]) -> str:
    """Path of the base of a PEFT adapter: from this folder or beside the adapter, or in the hub's cache.

    Raises:
        CriusError: the base is not on this machine, or not named.
    """
    name = str(content.get("base_model_name_or_path") or None)
    for place in (name, f"{folder.absolute().parent}/{name}"):
        if os.path.exists(place):
            return place
    with contextlib.suppress(Exception):  # the package is missing, or its cache lacks the name
        import huggingface_hub  # noqa: PLC0415  optional package

        return huggingface_hub.snapshot_download(name, revision=content.get("revision"), local_files_only=True)
    raise ConfigError(
        f"{ascii(name)[1:-1]}, the base of the adapter {folder}, is not on this machine.",
        where=f"base_model_name_or_path in {folder}/{ADAPTER_CONFIG}",
        fix=f"hf download {shlex.quote(name)}, if it is a name of the hub; or write the path of its folder there",
    )


def record_of(weights: Weights, path: str) -> dict[str, str]:
    """Origin, kind, path and hash of weights, for the state of a run that starts from them.

    Args:
        weights: opened weights.
        path: path that they were opened from.
    """
    if weights.saved:  # the path of the checkpoint itself: its run may save further ones
        path = f"{weights.saved.disk.where}/{weights.saved.name}"
    place = path if "://" in path else str(Path(path).expanduser().absolute())
    origin = ascii(weights.origin)[1:-1][:MAX_TEXT]
    return {"origin": origin, "kind": weights.kind, "path": place, "digest": weights.digest}


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
    tensors = foreign.all_tensors(where)
    there = {key: tensor for key, tensor in tensors.items() if not key.endswith(_DERIVED)}
    if prefix := _WRAPPERS.match(os.path.commonprefix(list(there))):
        said(f"{where}: all names of tensors begin with {prefix[0]}, which is left out")
        there = {key.removeprefix(prefix[0]): tensor for key, tensor in there.items()}
    if not any(key.startswith("model.") for key in there):  # of the base model, without base_model_prefix
        there = {key if key in family.names.values() else f"model.{key}": tensor for key, tensor in there.items()}
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
    begun = dict[str, int]()  # rows that were given out, of a tensor that joins several of ours
    for name, key in names.items():
        shape = facts.parameter_shapes.get(name, ())
        rows = rows_of(key, shape)
        if key not in rows:
            tensors[name] = stacked(key, [there[row] for row in rows])
        elif there[key].shape == shape or name not in facts.parameter_shapes:
            tensors[name] = there[key]
        else:
            start = begun.get(key, 0)
            tensors[name] = rows_from(there[key], start, shape[0])
            begun[key] = start + shape[0]
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
        for key, rows in rows_of(translated(name), shape).items():
            before = wanted.get(key, (0,))[0]  # of others of ours that the source joins with this one
            wanted[key] = (before + rows[0], *rows[1:]) if before else rows
    if problems := misfits(there, wanted, "the source", "the model"):
        is_fused = any(name.endswith(_FUSED_EXPERTS) for name in there.keys() - wanted.keys())
        fix = "get it again from its origin"
        if is_fused:
            problems = f"a tensor has all experts of a layer, which is not supported; {problems}"
            fix = "load it with transformers and save it again, which writes each expert as a tensor"
        elif any("_orig_mod." in name for name in there):
            fix = "leave _orig_mod., which torch.compile adds, out of the names of its tensors"
        raise CheckpointError(
            f"the tensors of {where} do not match the model in its settings, {model['name']}.", why=problems, fix=fix
        )
    return {name: translated(name) for name in facts.state_names}


def read_chat_template(tokenizer: str) -> str:
    """The chat template of a tokenizer, in a file of its folder or in tokenizer_config.json; empty: there is none.

    Args:
        tokenizer: value for ``--tokenizer.path``.

    Raises:
        CheckpointError: the file is not JSON, or too large.
    """
    if tokenizer in ("", "byte"):
        return ""
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent

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

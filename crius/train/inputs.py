"""A run's inputs before torch is imported: its decisions, its model, its corpus. Bad data is reported at once."""

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crius.checkpoint.disk import Disk, open_disk
from crius.checkpoint.folder import CheckpointFolder, read_manifest
from crius.checkpoint.manifest import Manifest
from crius.checkpoint.names import step_name
from crius.checkpoint.state import read_state
from crius.config.changes import FIRST_BOUNDARIES, Change, changes, check_changes
from crius.config.data import TokenizerConfig
from crius.config.lora import target_names
from crius.config.pipeline import microbatch_unit, settle_stages, splits_backward
from crius.config.resolve import ITEMSIZE, BatchSizes, Resolved, auto_dtype, batch_sizes, compares_bits
from crius.config.run import RunConfig, replace_fields
from crius.config.toml_file import shown
from crius.data.corpus import Corpus, open_corpus
from crius.data.infer import completed
from crius.data.meta import META, TokenMeta
from crius.data.mixture import MOST_EPOCHS, MixedSource
from crius.errors import CheckpointError, ConfigError, CriusError, EnvironmentError, LayoutError, MissingPathError
from crius.host import Machine
from crius.interop.initial import INIT_FROM, model_of, open_base, open_initial
from crius.interop.kept import is_kept, kept_place
from crius.interop.weights import saved_model
from crius.models.adapted import Adapted
from crius.models.description import ModelDescription, ModuleFacts
from crius.models.registry import SPECS, find_spec
from crius.tokens.files import TOKENIZER
from crius.tokens.tokenizer import build_tokenizer

COMPILE = "compile.enable"

ROWS = 64
"""A vocabulary that follows the tokenizer has a multiple of this many rows."""


def describe_model(config: RunConfig) -> ModelDescription:
    """The flavor of ``config``, with the sizes that replace the flavor's and the layers that get adapters.

    Raises:
        ConfigError: see ``ModelSpec.describe``.
    """
    model = config.model
    spec = find_spec(model.name)
    if spec is None:
        raise ConfigError(f"no model is called {model.name}.", where="model.name", fix=f"use one of {', '.join(SPECS)}")
    facts = spec.describe(model.flavor, attention_mask=model.attention_mask, **model.sizes)
    names = target_names(config.lora, facts)
    return replace(facts, adapted=Adapted(config.lora.rank, names)) if names else facts


def describe_known_model(config: RunConfig) -> ModelDescription | None:
    """``describe_model``; None if there is no such model or flavor, or its sizes are not possible."""
    spec = find_spec(config.model.name)
    if spec is None or config.model.flavor not in spec.known_flavors or config.model.impossible:
        return None
    try:
        return describe_model(config)
    except ConfigError:
        return None


Decision = tuple[dict[str, Any], str]
"""Dotted fields with their decided values, and the reason; no fields if nothing was left open."""

LayOut = Callable[[RunConfig, ModelDescription], Decision]
"""Chooses the settings that ``parallelism.auto`` leaves open."""


def resolve(
    asked: RunConfig,
    machine: Machine,
    *,
    saved: Mapping[str, Any] | None = None,
    rows_are_given: bool = False,
    lay_out: LayOut | None = None,
    run_dir: Path | None = None,
) -> Resolved:
    """Decide the settings that ``asked`` leaves open: dtype, rows of the embedding, compilation, layout, stages, the
    start of a document, whether the memory decides about recomputation, and whether kernels are deterministic.

    A setting that depends on an unreadable file stays open; the code that opens the file reports why. The ranks decide
    together in ``crius.train.setup`` what only they know: the kernels of their device, and the recomputation and
    microbatch that its memory needs.

    Args:
        asked: the run.
        machine: machine that the run is trained on.
        saved: settings of the checkpoint that the run resumes from: the curve belongs to the run, not to the machine.
        rows_are_given: whether ``model.vocab_size`` stays, for any number of token ids.
        lay_out: chooses the layout under ``parallelism.auto``; without it the layout stays open.
        run_dir: folder of the run, which may keep its tokenizer; None: not known yet.
    """
    config = asked
    reasons = dict[str, str]()
    decisions: tuple[Callable[[RunConfig], Decision], ...] = (
        lambda run: _dtype(run, machine, saved),
        _sources,
        lambda run: _tokens(run, rows_are_given, run_dir),
        lambda run: _compile(run, machine),
        lambda run: _recompute(run, machine),
        lambda run: _layout(run, lay_out),
        _stages,
        lambda run: _boundaries(run, saved, run_dir),
        lambda run: _deterministic(run, machine, saved),
    )
    for decide in decisions:
        changes, why = decide(config)
        config = replace_fields(config, changes)
        reasons |= dict.fromkeys(changes, why)
    return Resolved(asked=asked, config=config, reasons=reasons, model=describe_known_model(config))


def _dtype(config: RunConfig, machine: Machine, saved: Mapping[str, Any] | None) -> Decision:
    name = "training.mixed_precision_param"
    if config.training.mixed_precision_param != "auto":
        return {}, ""
    if saved and saved.get(name) in ITEMSIZE:
        return {name: saved[name]}, "as in the checkpoint"
    dtype, why = auto_dtype(on_gpu=machine.on_gpu)
    return {name: dtype}, why


def _sources(config: RunConfig) -> Decision:
    mix = tuple(map(completed, config.data.mix))
    return {"data.mix": mix} if mix != config.data.mix else {}, "as the data looks"


def _tokens(config: RunConfig, rows_are_given: bool, run_dir: Path | None) -> Decision:
    """A token folder is read with the tokenizer that wrote it, and a model has a row for each id."""
    source = config.data.source
    path = config.tokenizer.path
    rows_are_given = rows_are_given and config.model.vocab_size != -1
    changes: dict[str, Any] = {}
    try:
        if source == "tokens" and config.data.path:
            meta = TokenMeta.from_file(Path(config.data.path[0]).expanduser() / META)
            number = meta.vocab_size
            if path == "byte" and meta.tokenizer_name != "byte":
                changes["tokenizer.path"] = meta.tokenizer_name
        else:
            number = 0 if rows_are_given else build_tokenizer(tokenizer_of(config, run_dir)).vocab_size
    except CriusError:
        return {}, ""
    facts = describe_known_model(config)
    if facts and not rows_are_given and number > facts.vocab_size:
        changes["model.vocab_size"] = -(-number // ROWS) * ROWS
    return changes, f"{number:,} token ids"


def _compile(config: RunConfig, machine: Machine) -> Decision:
    """Compilation stays off if a rule forbids it together with another setting, or if the host lacks a part of it."""
    if config.compile.enable is not None:
        return {}, ""
    obstacle = "" if machine.on_gpu else "a CPU gains little"
    if not obstacle and config.debug.detect_anomaly:
        obstacle = "debug.detect_anomaly names lines, which a compiled block lacks"
    if not obstacle and config.compile.backend == "inductor":
        obstacle = machine.cannot_compile
    with contextlib.suppress(LayoutError):  # a file that cannot be read is reported by its rule
        if not obstacle and splits_backward(config.parallelism):
            obstacle = "the pipeline schedule splits the backward of a block"
    return {COMPILE: not obstacle}, obstacle or "faster on a GPU"


def _recompute(config: RunConfig, machine: Machine) -> Decision:
    if config.activation_checkpoint.mode is not None:
        return {}, ""
    return {"activation_checkpoint.mode": "auto" if machine.on_gpu else "none"}, "a GPU" if machine.on_gpu else "a CPU"


def _layout(config: RunConfig, lay_out: LayOut | None) -> Decision:
    facts = describe_known_model(config) if config.parallelism.auto else None
    return lay_out(config, facts) if facts and lay_out else ({}, "")


def _stages(config: RunConfig) -> Decision:
    facts = describe_known_model(config)
    found = settle_stages(config.parallelism, facts.num_layers) if facts else config.parallelism
    number = found.pipeline_parallel_stages_per_rank
    changes = {"parallelism.pipeline_parallel_stages_per_rank": number} if found != config.parallelism else {}
    return changes, "the model has too few layers for two stages per rank"


def _boundaries(config: RunConfig, saved: Mapping[str, Any] | None, run_dir: Path | None) -> Decision:
    name = "data.add_bos"
    if config.data.add_bos is not None:
        return {}, ""
    add_bos = None if saved is None else (FIRST_BOUNDARIES | dict(saved)).get(name)
    if isinstance(add_bos, bool):
        return {name: add_bos}, "as in the checkpoint"
    with contextlib.suppress(CriusError):
        return {name: build_tokenizer(tokenizer_of(config, run_dir)).adds_bos}, "as the tokenizer does"
    return {}, ""


def _deterministic(config: RunConfig, machine: Machine, saved: Mapping[str, Any] | None) -> Decision:
    name = "debug.deterministic"
    needed = compares_bits(config)
    if config.debug.deterministic is not None:
        return {}, ""
    if needed and machine.on_gpu:
        return {name: True}, f"{' and '.join(needed)} on a GPU, where other kernels add in random order"
    return ({name: saved[name]}, "as in the checkpoint") if saved and saved.get(name) is not None else ({}, "")


def describe_rows(config: RunConfig, rows: int, number: int) -> str:
    """Number of ``rows`` of the embedding and its reason, for a tokenizer with ``number`` ids."""
    source = config.model.from_hf
    flavor = None if source else describe_known_model(replace(config, model=replace(config.model, vocab_size=-1)))
    why = f"as in model.vocab_size {rows}" + (f", with the sizes of {source}" if source else "")
    if flavor and rows == flavor.vocab_size:
        why = "as in the flavor"
    elif rows == -(-number // ROWS) * ROWS:
        why = f"the token ids, rounded up to a multiple of {ROWS}"
    return f"{rows:,} rows for {number:,} token ids ({why})"


def run_batch_sizes(config: RunConfig, data_parallel_ranks: int) -> BatchSizes:
    """Batch sizes of ``config``, with microbatches that suit its pipeline."""
    return batch_sizes(config.training, data_parallel_ranks, microbatch_unit(config.parallelism))


def run_modules(config: RunConfig, facts: ModelDescription) -> list[ModuleFacts]:
    """The modules that pipeline stages are made of, with costs for the sequence length of ``config``."""
    is_cut = config.parallelism.pipeline_parallel_degree > 1
    return facts.modules(config.training.seq_len, is_cut=is_cut)


def open_run_data(config: RunConfig, data_parallel_ranks: int, run_dir: Path | None = None) -> tuple[RunConfig, Corpus]:
    """The corpus of ``config``, and ``config`` with the steps that follow from ``training.epochs``.

    Args:
        config: the run.
        data_parallel_ranks: its data-parallel ranks.
        run_dir: its folder, see ``tokenizer_of``.

    Raises:
        DataError: the corpus cannot be used.
    """
    corpus = open_run_corpus(config, data_parallel_ranks, run_dir)
    batch = run_batch_sizes(config, data_parallel_ranks).total
    end = end_sample(config, corpus, batch)
    if isinstance(corpus.train, MixedSource):
        told = [f"the data of the mixture ends after {end:,} sequences, and so does the run"] if end else []
        if often := corpus.train.often_read(end or config.training.steps * batch):
            told.append(f"warning: the run reads {often}; beyond {MOST_EPOCHS} epochs repeats teach little")
        corpus = replace(corpus, description=(*corpus.description, *told))
    if not end:
        return config, corpus
    return replace_fields(config, {"training.steps": -(-end // batch)}), corpus


def end_sample(config: RunConfig, corpus: Corpus, batch: int) -> int:
    """The sample before which the run, with ``batch`` sequences per step, ends; 0 if only its steps end it."""
    if isinstance(corpus.train, MixedSource):
        return corpus.train.end_before(config.training.steps * batch)
    return max(0, config.training.epochs) * corpus.train.num_samples


def open_run_corpus(config: RunConfig, data_parallel_ranks: int, run_dir: Path | None = None) -> Corpus:
    """The corpus of ``config``; tokenised at the first time, later opened in milliseconds.

    Args:
        config, data_parallel_ranks, run_dir: see ``open_run_data``.

    Raises:
        DataError: the corpus cannot be used.
    """
    return open_corpus(
        config.data,
        tokenizer_of(config, run_dir),
        config.validation,
        seq_len=config.training.seq_len,
        global_batch_size=run_batch_sizes(config, data_parallel_ranks).total,
        vocab_size=describe_model(config).vocab_size,
        seed=config.debug.seed,
    )


def checkpoint_folder(config: RunConfig, run_dir: Path) -> str:
    """Folder or URL of the checkpoints of a run."""
    folder = config.checkpoint.folder
    return folder if "://" in folder else str(run_dir / Path(folder).expanduser())


def own_checkpoint_folder(config: RunConfig, run_dir: Path) -> Path | None:
    """The local folder of the checkpoints of a run, created and found writable; None for a URL, or without checkpoints.

    Raises:
        EnvironmentError: the folder cannot be written.
    """
    place = checkpoint_folder(config, run_dir)
    if not config.checkpoint.is_enabled or "://" in place:
        return None
    folder = Path(place)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # has no name, so a kill leaves nothing
            pass
    except OSError as error:
        raise EnvironmentError(
            f"checkpoints cannot be written to {folder}: {error.strerror}.",
            where="--checkpoint.folder",
            fix="give a writable folder: --checkpoint.folder DIR, or --checkpoint.no_enable to save nothing",
        ) from None
    return folder


def tokenizer_of(config: RunConfig, run_dir: Path | None) -> TokenizerConfig:
    """Where the tokenizer of a run is read: at ``tokenizer.path``, or in its checkpoints if nothing is left there.

    Args:
        config: the run.
        run_dir: its folder; None: not known.
    """
    own = config.tokenizer
    if run_dir is None or own.path == "byte" or Path(own.path).expanduser().exists():
        return own
    found = _resumed(config, run_dir)
    if found is None or found.manifest.config.get("tokenizer.path") != own.path:
        return own
    place = kept_place(found.disk, found.manifest.tokenizer)
    return replace(own, path=str(place)) if place else own


def saved_settings(config: RunConfig, run_dir: Path) -> Mapping[str, Any] | None:
    """Settings of the checkpoint that a run would resume from; None if there is none, or another trainer saved it."""
    found = _resumed(config, run_dir)
    return None if found is None or found.is_import else found.manifest.config


def settings_to_compare(disk: Disk, manifest: Manifest, path: str) -> Mapping[str, Any]:
    """Settings of a checkpoint, to be compared with those of a run: its tokenizer counts by content, not by place.

    Args:
        disk: folder of checkpoints.
        manifest: manifest of the checkpoint.
        path: ``tokenizer.path`` of the run.
    """
    settings = manifest.config
    name = "tokenizer.path"
    if TOKENIZER not in manifest.tokenizer or not Path(path).expanduser().exists():
        return settings
    if is_kept(path, manifest.tokenizer):
        return {**settings, name: path}
    if settings.get(name) != path:
        return settings
    return {**settings, name: str(kept_place(disk, manifest.tokenizer) or f"{path} of the checkpoint")}


def check_resume(config: RunConfig, run_dir: Path) -> None:
    """Compare the settings of a run with those of the checkpoint that it would resume from, before anything is started.

    A checkpoint that cannot be read is left to the load, which may fall back to an older one.

    Raises:
        ConfigError: the run cannot resume with these settings.
        MissingPathError: there is no checkpoint in ``checkpoint.load_path``.
    """
    found = _resumed(config, run_dir)
    if found is None:
        other = config.checkpoint.load_path
        if other and config.checkpoint.is_enabled and not CheckpointFolder(open_disk(other)).steps():
            raise nothing_to_load(other)
        if config.checkpoint.init_from:
            open_initial(config)
        elif config.lora.is_on and config.checkpoint.is_enabled:
            raise ConfigError(
                "LoRA has no weights to adapt: they would be random.",
                where="--lora.rank",
                why="a checkpoint contains the adapters only, which are useless without the weights that they adapt",
                fix=f"{INIT_FROM} with a run, a checkpoint or a Hugging Face folder; or --checkpoint.no_enable to "
                "measure a run that saves nothing",
            )
        return
    if found.is_import:
        differences = _of_import(found, config)
    else:
        saved = settings_to_compare(found.disk, found.manifest, config.tokenizer.path)
        differences = changes(saved, shown(config))
    check_changes(differences, config.checkpoint.allow_changes, found.where)
    if config.lora.is_on and found.initial:
        open_base(config, found.initial)
    if not found.is_own:
        check_steps_left(found.manifest.step, config)


def nothing_to_load(place: str) -> MissingPathError:
    """The error of a ``checkpoint.load_path`` without a checkpoint."""
    return MissingPathError(
        f"there is no checkpoint in {place}.",
        where="--checkpoint.load_path",
        fix="give a folder with step-N folders, such as runs/NAME/checkpoints",
    )


def check_steps_left(step: int, config: RunConfig) -> None:
    """Check that a run that starts from ``checkpoint.load_path`` has anything to train.

    Args:
        step: step of the checkpoint there.
        config: the run.

    Raises:
        ConfigError: the checkpoint has at least as many steps as the run.
    """
    steps = config.training.steps
    if step >= steps and config.training.epochs < 1:  # epochs count samples, and a larger batch has them in fewer steps
        raise ConfigError(
            f"training.steps {steps} leaves nothing to train: the checkpoint to start from has {step} steps.",
            where="--training.steps, --checkpoint.load_path",
            why="training.steps is the last step of the run, and the steps of the checkpoint count",
            fix=f"--training.steps {step + steps} trains {steps} steps more",
        )


@dataclass(frozen=True)
class _Resumed:
    """The checkpoint that a run would resume from.

    Attributes:
        disk: its folder of checkpoints.
        manifest: its manifest.
        is_import: whether another trainer saved it.
        is_own: whether it is in the run's own folder, not in ``checkpoint.load_path``.
        initial: its record of the weights that the run started from; empty for an import.
    """

    disk: Disk
    manifest: Manifest
    is_import: bool
    is_own: bool
    initial: Mapping[str, str]

    @property
    def where(self) -> str:
        """Its folder."""
        return f"{self.disk.where}/{step_name(self.manifest.step)}"


def _resumed(config: RunConfig, run_dir: Path) -> _Resumed | None:
    """The checkpoint that a run would resume from; None if there is none, or it cannot be read."""
    if not config.checkpoint.is_enabled:
        return None
    own = checkpoint_folder(config, run_dir)
    other = config.checkpoint.load_path
    load_step = config.checkpoint.load_step
    for place, step_to_load in ((own, -1 if other else load_step), (other, load_step)):
        if not place:
            continue
        try:
            folder = CheckpointFolder(open_disk(place))
            wanted = [step for step in folder.steps() if step_to_load in (-1, step)]
            if not wanted:
                continue
            name = step_name(wanted[-1])
            manifest = read_manifest(folder.disk, name)
            state = read_state(folder.disk, name, manifest)
        except CheckpointError:
            return None
        is_import = bool(state.get("imported"))
        initial = {} if is_import else state.get("init_from", {})
        return _Resumed(folder.disk, manifest, is_import, place == own, initial)
    return None


def _of_import(found: _Resumed, config: RunConfig) -> list[Change]:
    """What model and adapters of a run have otherwise than those of an import; one of other trainers names no model."""
    settings = found.manifest.config
    if "model.name" not in settings:
        return []
    theirs = saved_model(found.manifest, found.where)
    ours = model_of(config)
    of_adapters = [
        change
        for change in changes(settings, shown(config))
        if change.name.startswith("lora.") and change.name in settings
    ]
    return of_adapters + [
        Change(f"model.{name}", value, ours.get(name), "refuse")
        for name, value in theirs.items()
        if name != "flavor" and ours.get(name) != value
    ]

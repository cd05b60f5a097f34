"""``crius config``, ``crius data`` and ``crius doctor``."""

import contextlib
import dataclasses
import io
import json
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from crius.cli import explaining  # noqa: F401  adds its verb
from crius.cli.app import (
    COMMAND,
    SOURCES,
    ConfigFiles,
    Json,
    Layout,
    NumProcesses,
    Recipe,
    app,
    config_app,
    data_app,
    emit,
    emit_result,
    facts_of,
    fitted,
    imports,
    mix_app,
    parsed,
    place_of,
    refuse_given,
    say_inferred,
    train_verb,
)
from crius.config import rules
from crius.config.arguments import Option
from crius.config.changes import flag
from crius.config.command_line import last_of_each
from crius.config.data import DataConfig, TokenizerConfig
from crius.config.facts import Facts
from crius.config.load import OF_MODEL, recipe_names
from crius.config.rules_data import CORPUS_RULES, DATA_RULES
from crius.config.run import RunConfig, replace_fields
from crius.config.toml_file import differences, flatten
from crius.errors import ConfigError, CriusError
from crius.host import Machine, missing_for_compile, usable_cores
from crius.redact import redact_value
from crius.units import GIB

if TYPE_CHECKING:
    from crius.launch.doctor import Report


Data = Annotated[DataConfig, Option(name="data.")]
Tokenizer = Annotated[TokenizerConfig, Option(name="tokenizer.")]

SHOWN_DECIDED = ("compile.enable", "activation_checkpoint.mode", "debug.deterministic")
"""Settings whose decided value ``config show`` prints if they are not given."""


@config_app.verb
def show(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    layout: Layout = "",
    nproc: NumProcesses = 0,
    as_json: Json = False,
) -> int:
    """Print every setting of a run, its value and where it came from. Takes the flags of train."""
    resolved = facts_of(run, nproc, None, is_dry=run.parallelism.auto)
    if run.parallelism.auto:
        run = dataclasses.replace(resolved.config, data=run.data)  # a checkpoint may decide it
    decided = {name: value for name, value in flatten(resolved.config).items() if name in SHOWN_DECIDED}
    run = replace_fields(run, decided)
    values = _shown(flatten(run))
    origins = {name: SOURCES.origin(name) for name in values}
    origins |= {name: f"{origins[name]}: {why}" for name, why in resolved.reasons.items() if name in decided}
    if as_json:
        emit(json.dumps({name: {"value": value, "origin": origins[name]} for name, value in values.items()}, indent=2))
        return 0
    width = max(map(len, values))
    for name, value in values.items():
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        emit(f"{name:<{width}}  {shown or '(empty)':<20}  {origins[name]}")
    return 0


@config_app.verb
def diff(
    left: str,
    right: str,
    *,
    as_json: Json = False,
) -> int:
    """Print the settings that differ between two runs: run folders, TOML files or names of recipes."""
    changed = _shown(differences(config_of(left), config_of(right)))
    if as_json:
        emit(json.dumps({name: {"left": a, "right": b} for name, (a, b) in changed.items()}, indent=2))
        return 0
    for name, (a, b) in changed.items():
        emit(f"{name}: {a} -> {b}")
    if not changed:
        emit("no difference")
    return 0


def _shown(values: dict[str, Any]) -> dict[str, Any]:
    """Settings without secrets, by name."""
    return {name: redact_value(name, value) for name, value in values.items()}


def config_of(place: str) -> RunConfig:
    """The settings of a run folder, a TOML file or a recipe."""
    path = Path(place) / "run.toml" if Path(place).is_dir() else Path(place)
    if place not in recipe_names() and not path.exists():
        raise ConfigError(
            f"{place} is not a run folder, a TOML file or a recipe.",
            where="command line",
            fix=f"give a folder with a run.toml, a TOML file, or one of {', '.join(recipe_names())}",
        )
    source = ["--recipe", place] if place in recipe_names() else ["--config", str(path)]
    return run_of(*source)


def run_of(*flags: str) -> RunConfig:
    """The settings of a run with these flags.

    Raises:
        ConfigError: lists all that is wrong with the flags.
    """
    run: RunConfig = parsed(["config", "show", *flags]).values.get("run", RunConfig())
    return run


@data_app.verb
def prepare(
    out: Path,
    data: Data = DataConfig(),  # noqa: B008
    tokenizer: Tokenizer = TokenizerConfig(),  # noqa: B008
    *,
    num_workers: Annotated[int, "Processes that tokenise. 0: one for each core."] = 0,
) -> int:
    """Tokenise a corpus once into the folder OUT, for --data.source tokens --data.path OUT."""
    from crius.data import prepare as preparation
    from crius.data.rows import left_out

    say_inferred(RunConfig(data=data))
    _check_corpus(data, tokenizer)
    started = time.monotonic()
    meta = preparation.prepare(data, tokenizer, out, num_workers or usable_cores())
    what = "conversations" if meta.is_chat else "documents"
    emit(f"{out}: {meta.num_tokens:,} tokens of {meta.num_documents:,} {what} in {time.monotonic() - started:.1f} s")
    for line in (line for line in left_out(out).splitlines() if line.startswith("# ")):
        emit(line[2:])
    crius = "crius" if shutil.which("crius") else f"{sys.executable} -m crius"
    emit(f"train on it: {crius} train {shlex.join(_train_flags(out, data, tokenizer))}")
    return 0


def _check_corpus(data: DataConfig, tokenizer: TokenizerConfig) -> None:
    """Check a corpus by the rules of a run.

    Raises:
        ConfigError: lists all settings that exclude each other or have no effect.
    """
    refuse_given(("data.mix", "data.stage", "data.alpha"), "a mixture is read by runs; here its sources go one by one")
    run = RunConfig(data=data, tokenizer=tokenizer)
    values = flatten(run)
    defaults = flatten(RunConfig())
    facts = Facts(
        asked=run,
        config=run,
        reasons={},
        model=None,
        specs={},
        num_ranks=1,
        asked_ranks=0,
        asked_by="",
        num_gpus=0,
        num_cores=1,
        local_ranks=1,
        origin=lambda name: "default" if values[name] == defaults[name] else "command line",
    )
    if problems := [problem for rule in CORPUS_RULES for problem in rule(facts)]:
        raise ConfigError.together(problems)


def _train_flags(out: Path, data: DataConfig, tokenizer: TokenizerConfig) -> list[str]:
    """Flags that ``crius train`` needs to read the folder ``out``, and no others."""
    from crius.errors import DataError
    from crius.train.inputs import open_run_corpus, resolve

    flags = ["--data.source", "tokens", "--data.path", str(out)]
    for section, config, names in (
        ("data", data, ("format", "packing", "too_long", "add_bos", "add_eos")),
        ("tokenizer", tokenizer, ("path", "eos_token")),
    ):
        for name in names:
            value, default = (getattr(settings, name) for settings in (config, type(config)()))
            flags += flag(f"{section}.{name}", value) if value != default else []
    if data.format == "chat" and data.packing:
        flags += flag("model.attention_mask", "document")
    run = run_of(*flags)
    lengths = [run.training.seq_len >> shift for shift in range(run.training.seq_len.bit_length())]
    without_validation = [*flag("validation.interval", 0), *flag("validation.fraction", 0)]
    for seq_len, off in ((seq_len, off) for off in ([], without_validation) for seq_len in lengths):
        more = [*flags, *(flag("training.seq_len", seq_len) if seq_len != run.training.seq_len else []), *off]
        with contextlib.suppress(DataError):  # too few tokens for sequences of this length
            open_run_corpus(resolve(run_of(*more), Machine(device="cpu")).config, 1)
            return more
    return flags


@data_app.verb
def audit(run_dir: Path, *, as_json: Json = False) -> int:
    """Prove that a run, over all its restarts and numbers of ranks, trained on each sample exactly once.

    RUN_DIR is the folder of the run. Exit code 1 if a sample was repeated or skipped, or a log is incomplete.
    """
    from crius.tools.data_audit.audit import audit

    report = audit(run_dir)
    emit_result(report.as_dict(), report.lines(), as_json=as_json)
    return 1 if report.problems else 0


@data_app.verb(name="doctor")
def examine_data(
    path: Annotated[str, "File, folder or pattern."],
    /,
    data: Data = DataConfig(),  # noqa: B008
    tokenizer: Tokenizer = TokenizerConfig(),  # noqa: B008
    *,
    near: Annotated[bool, "Find near duplicates too (package rensa)."] = False,
    as_json: Json = False,
) -> int:
    """Read files once and report what a run refuses or leaves out, and what is odd about the rest.

    Source and format follow from the files, if they are not given. With --tokenizer.path also lengths and masks. Exit
    code 1 if a run would refuse the files.
    """
    from crius.tools.data_audit.doctor import examine
    from crius.tools.data_audit.rows import found_data

    given = [name for name in vars(data) if SOURCES.origin(f"data.{name}") == "command line"]
    data, files = found_data(dataclasses.replace(data, path=(path, *data.path)), given)
    config = tokenizer if SOURCES.origin("tokenizer.path") == "command line" else None
    _check_corpus(data, config or TokenizerConfig(path="none"))
    report = examine(data, files, config, is_near=near)
    emit_result(report.as_dict(), report.lines(), as_json=as_json)
    return 0 if report.is_ready else 1


@data_app.verb(name="tokenizer")
def train_tokenizer(
    out: Annotated[Path, "Folder to write, for --tokenizer.path."],
    /,
    data: Data = DataConfig(),  # noqa: B008
    *,
    vocab: Annotated[int, "Most ids, with the 256 bytes and the end of a document."] = 4096,
) -> int:
    """Train a byte-level BPE on a corpus and write it to the new folder OUT."""
    from crius.tools.data_audit.bpe import train

    say_inferred(RunConfig(data=data))
    _check_corpus(data, TokenizerConfig(path="none"))
    emit("\n".join(train(data, out, vocab)))
    return 0


@data_app.verb(name="show")
def show_data(
    place: str = "",
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    layout: Layout = "",
    nproc: NumProcesses = 0,
    sample: Annotated[tuple[int, ...], "Number of a sequence; repeat it for more."] = (),
    step: Annotated[int, "Show the sequences of this step; steps count from 1."] = 0,
    as_json: Json = False,
) -> int:
    """Print sequences as text and mark what is trained on: coloured on a terminal, else in brackets.

    PLACE is the folder of a run, a TOML file or a recipe. Without PLACE the flags of train describe the run. A run that
    logged its samples shows the sequences that a step was trained on; other runs show the sequences that it will be
    trained on. Without --sample and --step: the first two sequences.
    """
    facts, run_dir = _facts_of_data(place, run, nproc)
    from crius.data.show import lines_of, takes_colour
    from crius.tools.data_audit.show import show as samples_shown

    wanted = sample or (() if step else (0, 1))
    shown = samples_shown(facts.config, facts.data_parallel_ranks, run_dir, wanted, step)
    if as_json:
        found = [{"sample": number, "documents": [one.as_dict() for one in shown[number]]} for number in shown]
        emit(json.dumps({"step": step or None, "samples": found}))
        return 0
    for line in lines_of(shown, in_colour=takes_colour(sys.stdout)):
        sys.stdout.write(line + "\n")  # printable already, except for the colours
    return 0


def _facts_of_data(place: str, run: RunConfig, nproc: int) -> tuple[Facts, Path | None]:
    """The facts of the run that ``place`` or flags describe, and its folder if it has one.

    Raises:
        ConfigError: lists all that is wrong with the settings of its data.
    """
    run_dir = Path(place) if place and Path(place).is_dir() else None
    if place:
        given = [name for name, origin in SOURCES.origins.items() if origin == "command line" and "." in name]
        refuse_given([*given], f"{place} has all settings", "" if run_dir else f"--config {place} in place of {place}")
        run = config_of(place)
    else:
        say_inferred(run)
    with contextlib.redirect_stderr(io.StringIO()):  # it prints lines that matter only for training
        facts = dataclasses.replace(facts_of(run, nproc, None, is_dry=True), is_dry=False)
    if problems := [problem for rule in (rules.ranges, *DATA_RULES) for problem in rule(facts)]:
        raise ConfigError.together(problems)
    return facts, run_dir


@mix_app.verb(name="show")
def show_mixture(
    place: str = "",
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    layout: Layout = "",
    nproc: NumProcesses = 0,
    as_json: Json = False,
) -> int:
    """Print what a mixture reads of each source before a run: sequences, tokens, labels, epochs, and where it ends.

    PLACE is the folder of a run, a TOML file or a recipe. Without PLACE the flags of train describe the run.
    """
    facts, run_dir = _facts_of_data(place, run, nproc)
    from crius.tools.data_audit.mixture import lines_of, plan_of

    plan = plan_of(facts.config, facts.data_parallel_ranks, run_dir)
    emit_result(plan, lines_of(plan), as_json=as_json)
    return 0


@app.verb
def doctor(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    layout: Layout = "",
    nproc: NumProcesses = 0,
    as_json: Json = False,
) -> int:
    """Show what this machine has, what is missing and the exact line that installs it, and whether a run fits its
    memory.

    Takes the flags of train; the run is not started. Flags that cannot be read are refused as by any verb.
    """
    from crius.launch.doctor import examine

    report = dataclasses.replace(examine(), command=_train_command())
    if not report.missing:
        try:
            _examine_run(report, facts_of(run, nproc, None))
        except CriusError as error:
            report.missing.append(f"for this run: {error.body()}")
    emit(json.dumps(report.as_dict(), indent=2) if as_json else report.render())
    return 0 if report.ready else 1


def _train_command() -> str:
    """The command that starts the run in question."""
    words = last_of_each(COMMAND[1:], train_verb().arguments())
    return shlex.join(["crius", "train", *(word for word in words if word != "--json")])


def _examine_run(report: "Report", facts: Facts) -> None:
    """Add to ``report`` whether this machine has the memory for the run.

    Raises:
        CriusError: the run is not possible.
    """
    rules.check(facts)
    if report.gpu_bytes and facts.config.training.device != "cpu":
        _examine_kernels(report, facts.config)
    needed, there = _memory(facts, report.gpu_bytes)
    model = facts.model
    ranks = "ranks" if facts.num_ranks > 1 else "rank"
    line = f"{model.name} on {facts.num_ranks} {ranks}, {model.num_parameters:,} parameters"
    gibibytes = f"{needed / GIB:.1f} GiB planned of {there / GIB:.1f} for a rank"
    report.facts["this run"] = f"{line}: {gibibytes}"
    if needed > there:
        names = [name for name in flatten(facts.config) if name.startswith("model.")]
        values = flatten(facts.config)
        sizes = [part for name in names if _is_typed(name, values[name]) for part in flag(name, values[name])]
        plan = ["crius", "plan", *sizes, *imports()]
        report.missing.append(f"memory for {line}, {gibibytes}: {shlex.join(plan)} shows which GPUs have it")


def _examine_kernels(report: "Report", run: RunConfig) -> None:
    """Add to ``report`` which kernels compute ``run`` on the first GPU, and which optional ones are missing.

    Raises:
        ConfigError: a kernel that the run asks for by name does not run there.
    """
    import torch

    from crius.kernels.choice import missing_flash
    from crius.kernels.grouped_mm import is_for_torch
    from crius.quantize.convert import missing_matmuls
    from crius.train.setup import run_kernels

    lacking = {"float8": missing_matmuls("float8", "cuda"), "mxfp8": missing_matmuls("mxfp8", "cuda")}
    fast = [name for name, why in lacking.items() if not why]
    emulated = [f"{name} emulated ({why})" for name, why in lacking.items() if why]
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    by_torch = {name: is_for_torch("cuda", dtype) for name, dtype in dtypes.items()}
    report.facts["attention"] = run_kernels(run, torch.device("cuda", 0)).described()["attention"]
    report.facts["matmuls"] = ", ".join([*dtypes, *fast, *emulated])
    report.facts["experts"] = ", ".join(
        f"{name} by {'grouped_mm' if is_fast else 'a loop'}" for name, is_fast in by_torch.items()
    )
    if flash := missing_flash(torch.cuda.get_device_capability()):
        report.optional.append(flash)
    if why := missing_for_compile(os.environ):
        report.optional.append(f"compiled kernels: {why}")


def _is_typed(name: str, value: Any) -> bool:
    """Whether a command for the same model needs this setting."""
    origin = SOURCES.origin(name)
    if name == "model.from_hf":  # in a run.toml, which has the sizes too
        return origin == "command line"
    return origin != "default" and not origin.endswith(OF_MODEL) and value not in (-1, "", None)


def _memory(facts: Facts, gpu_bytes: int) -> tuple[float, float]:
    """Bytes planned for the fullest rank of a run, and bytes that this machine has per rank."""
    from crius.tools.plan.memory import memory
    from crius.tools.plan.workload import from_config

    machine, here = place_of(facts)
    if machine.on_gpu:
        here = dataclasses.replace(here, memory_bytes=float(gpu_bytes))
    config = fitted(facts, machine, here)[0]
    workload = from_config(config, facts.model, facts.num_ranks, device="cuda" if machine.on_gpu else "cpu")
    return memory(workload, None if machine.on_gpu else here).total, here.memory_bytes

"""``crius config``, ``crius data`` and ``crius doctor``."""

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from cyclopts import Parameter

from crius.cli.app import (
    COMMAND,
    SOURCES,
    ConfigFiles,
    Json,
    Layout,
    NumProcesses,
    Recipe,
    Run,
    app,
    config_app,
    data_app,
    emit,
    facts_of,
    imports,
)
from crius.config import rules
from crius.config.argv import normalized_argv
from crius.config.changes import flag
from crius.config.data import DataConfig, TokenizerConfig
from crius.config.facts import Facts
from crius.config.load import OF_MODEL, recipe_names
from crius.config.run import RunConfig
from crius.config.toml_file import differences, flatten
from crius.errors import ConfigError, CriusError
from crius.host import Machine
from crius.redact import redact_value
from crius.units import GIB

if TYPE_CHECKING:
    from crius.launch.doctor import Report


@config_app.command
def show(
    run: Run = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    layout: Layout = "",
    nproc: NumProcesses = 0,
    as_json: Json = False,
) -> int:
    """Print every setting of a run, its value and where it came from. Takes the flags of train."""
    if run.parallelism.auto:
        resolved = facts_of(run, nproc, None, is_dry=True).config
        run = dataclasses.replace(resolved, data=run.data)  # a checkpoint may have the last word there
    for problem in rules.not_built(run):
        raise problem
    values = _shown(flatten(run))
    if as_json:
        emit(
            json.dumps(
                {name: {"value": value, "origin": SOURCES.origin(name)} for name, value in values.items()}, indent=2
            )
        )
        return 0
    width = max(map(len, values))
    for name, value in values.items():
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        emit(f"{name:<{width}}  {shown or '(empty)':<20}  {SOURCES.origin(name)}")
    return 0


@config_app.command
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
            f"{place} is no run folder, no TOML file and no recipe.",
            where="command line",
            fix=f"give a folder with a run.toml, a TOML file, or one of {', '.join(recipe_names())}",
        )
    source = ["--recipe", place] if place in recipe_names() else ["--config", str(path)]
    return run_of(*source)


def run_of(*flags: str) -> RunConfig:
    """The settings of a run with these flags.

    Raises:
        CycloptsError: they cannot be read.
    """
    argv = ["config", "show", *normalized_argv(flags)]
    _, bound, _ = app.parse_args(argv, exit_on_error=False, print_error=False)
    run: RunConfig = bound.arguments.get("run", RunConfig())
    return run


@data_app.command
def prepare(
    out: Path,
    data: Annotated[DataConfig, Parameter(name="--data")] = DataConfig(),  # noqa: B008
    tokenizer: Annotated[TokenizerConfig, Parameter(name="--tokenizer")] = TokenizerConfig(),  # noqa: B008
    *,
    num_workers: Annotated[int, Parameter(help="Processes that tokenise. 0: one for each core.")] = 0,
) -> int:
    """Tokenise a corpus once into the folder OUT, for --data.source tokens --data.path OUT."""
    from crius.data import prepare as preparation

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    started = time.monotonic()
    meta = preparation.prepare(data, tokenizer, out, num_workers or os.cpu_count() or 1)
    emit(f"{out}: {meta.num_tokens:,} tokens of {meta.num_documents:,} documents in {time.monotonic() - started:.1f} s")
    crius = "crius" if shutil.which("crius") else f"{sys.executable} -m crius"
    emit(f"train on it: {crius} train {shlex.join(_train_flags(out, data, tokenizer))}")
    return 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End by an exception, so that what is half written and the processes that tokenise are removed."""
    raise SystemExit(128 + number)


def _train_flags(out: Path, data: DataConfig, tokenizer: TokenizerConfig) -> list[str]:
    """Flags with which ``crius train`` takes the folder ``out``: those that it needs, and no more."""
    from crius.errors import DataError
    from crius.train.inputs import open_run_corpus, resolve

    flags = ["--data.source", "tokens", "--data.path", str(out)]
    for section, config, names in (
        ("data", data, ("add_bos", "add_eos")),
        ("tokenizer", tokenizer, ("path", "eos_token")),
    ):
        for name in names:
            value, default = (getattr(settings, name) for settings in (config, type(config)()))
            flags += flag(f"{section}.{name}", value) if value != default else []
    run = run_of(*flags)
    lengths = [run.training.seq_len >> shift for shift in range(run.training.seq_len.bit_length())]
    without_validation = [*flag("validation.interval", 0), *flag("validation.fraction", 0)]
    for seq_len, off in ((seq_len, off) for off in ([], without_validation) for seq_len in lengths):
        more = [*flags, *(flag("training.seq_len", seq_len) if seq_len != run.training.seq_len else []), *off]
        with contextlib.suppress(DataError):  # too few tokens for sequences of this length
            open_run_corpus(resolve(run_of(*more), Machine(device="cpu")).config, 1)
            return more
    return flags


@data_app.command
def audit(run_dir: Path, *, as_json: Json = False) -> int:
    """Prove that a run, over all its restarts and numbers of ranks, trained on each sample exactly once.

    RUN_DIR is the folder of the run. Exit code 1 where a sample was repeated or skipped, or a log is incomplete.
    """
    from crius.tools.data_audit.audit import audit

    report = audit(run_dir)
    emit(json.dumps(report.as_dict(), indent=2) if as_json else "\n".join(report.lines()))
    return 1 if report.problems else 0


@app.command
def doctor(
    run: Run = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    layout: Layout = "",
    nproc: NumProcesses = 0,
    as_json: Json = False,
) -> int:
    """Say what this machine has, what is missing and the exact line that installs it, and whether it holds a run.

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
    """The command that starts the run that this one asks about."""
    return shlex.join(["crius", "train", *(word for word in COMMAND[1:] if word != "--json")])


def _examine_run(report: "Report", facts: Facts) -> None:
    """Add to ``report`` whether this machine holds the run.

    Raises:
        CriusError: the run is not one.
    """
    rules.check(facts)
    needed, there = _memory(facts, report.gpu_bytes)
    model, ranks = facts.model, f"{facts.num_ranks} rank{'s' * (facts.num_ranks > 1)}"
    line = f"{model.name} on {ranks}, {model.num_parameters:,} parameters"
    gibibytes = f"{needed / GIB:.1f} GiB planned of {there / GIB:.1f} for a rank"
    report.facts["this run"] = f"{line}: {gibibytes}"
    if needed > there:
        names = [name for name in flatten(facts.config) if name.startswith("model.")]
        values = flatten(facts.config)
        sizes = [part for name in names if _is_typed(name, values[name]) for part in flag(name, values[name])]
        plan = ["crius", "plan", *sizes, *imports()]
        report.missing.append(f"memory for {line}, {gibibytes}: {shlex.join(plan)} says which GPUs hold it")


def _is_typed(name: str, value: Any) -> bool:
    """Whether a command for the same model has to say this setting of it."""
    origin = SOURCES.origin(name)
    if name == "model.from_hf":  # of a run.toml, which has the sizes beside it
        return origin == "command line"
    return origin != "default" and not origin.endswith(OF_MODEL) and value not in (-1, "", None)


def _memory(facts: Facts, gpu_bytes: int) -> tuple[float, float]:
    """Bytes that the fullest rank of a run is planned to hold, and those that this machine has for each."""
    from crius.tools.plan.auto import hardware_here
    from crius.tools.plan.memory import memory
    from crius.tools.plan.workload import from_config

    if facts.num_gpus:
        return memory(from_config(facts.config, facts.model, facts.num_ranks)).total, gpu_bytes
    here = hardware_here(on_gpu=False, num_ranks=facts.num_ranks, local_ranks=facts.local_ranks, is_dry=False)
    return memory(from_config(facts.config, facts.model, facts.num_ranks, device="cpu"), here).total, here.memory_bytes

"""The command, the types of flags that verbs share, and what several verbs need. No torch here."""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from crius.cli.verbs import Call, Verb, Verbs
from crius.config.arguments import Arguments, Option
from crius.config.data import SOURCES as DATA_SOURCES
from crius.config.facts import Facts
from crius.config.load import OF_DATA, RunSources, recipe_names
from crius.config.resolve import USABLE, Resolved, leaves_open
from crius.config.rules import plain_name
from crius.config.run import ModelConfig, RunConfig, replace_fields
from crius.config.toml_file import flatten, settings_of_run
from crius.errors import ConfigError, EnvironmentError
from crius.host import Machine, gpu_sharing, missing_for_compile, usable_cores
from crius.models.huggingface import read_model_settings
from crius.models.registry import FLAVORS, IMPORTED, SPECS, families, find_spec
from crius.plugins import install_line
from crius.redact import printable, redact
from crius.untrusted import check_entries

if TYPE_CHECKING:
    from crius.models.description import ModelDescription
    from crius.tools.plan.hardware import Hardware

Recipe = Annotated[
    str,
    Option(help="A run that comes with Crius; llama3_debug where no --config is given.", known=recipe_names),
]
Layout = Annotated[
    str,
    "Degrees and options in one word, as fsdp4_tp2 or pp2_fsdp2+full: docs/verify.md.",
]
ConfigFiles = Annotated[tuple[Path, ...], "TOML file with settings; repeat it, the last one wins."]
NumProcesses = Annotated[int, "Processes to start on this machine. 0: the product of the degrees."]
Strict = Annotated[bool, "Fail if an optimisation has no effect."]
DryRun = Annotated[
    bool,
    "Train nothing: show memory, FLOPs and collectives of a rank, for any number of ranks.",
]
DryRunRank = Annotated[int, "Rank that --dry_run shows."]
DryRunImbalance = Annotated[
    float, "Tokens that the experts of that rank get, over the mean of the ranks that share them."
]
Json = Annotated[bool, Option(name="json", help="Print JSON.")]

STARTED = time.monotonic()
AUTO = "parallelism.auto"
DETERMINISTIC = "debug.deterministic"


def _read_model(path: str, name: str, where: str) -> tuple[str, dict[str, Any]]:
    asked = find_spec(name) if name else None
    if name and not (asked and asked.hf):
        what = f"{name} has no name of Hugging Face." if asked else f"no model is called {name}."
        raise ConfigError(what, where=where, fix="leave out --model.from_hf" if asked else "leave out --model.name")
    from crius.interop.hub import SETTINGS, located

    path = located(path, where, SETTINGS)
    return read_model_settings(path, {name: asked.hf} if asked and asked.hf else families(), where)


def _located(setting: str, path: str, settings: Mapping[str, str], where: str) -> str:
    """The path for a value of a setting that may be a name of the hub. A run keeps the commit that it began with."""
    from crius.hub import hub_name, snapshot_of

    asked = hub_name(path)
    if asked is None:
        return path
    from crius.interop.hub import TOKENIZER, WEIGHTS, located, located_data

    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # whatever a file lacks
        section, _, field = setting.partition(".")
        saved = settings_of_run(settings["job.run_dir"])[section][field]
        if isinstance(saved, str) and _place(saved) == _place(path):
            return path
        begun = snapshot_of(saved if isinstance(saved, str) else saved[0])
        if begun and begun.repository == asked.repository and not asked.revision:
            path = str(begun)
    if setting == "data.path":
        return located_data(path, settings.get("data.source", ""), where)
    return located(path, where, TOKENIZER if setting == "tokenizer.path" else WEIGHTS)


def _place(path: str) -> str:
    """One spelling of a path. A relative one is below the present folder; a URL stays."""
    return os.path.realpath(os.path.expanduser(path)) if path and "://" not in path else path


def _read_weights(path: str, run_dir: str, where: str) -> Mapping[str, Any]:
    """Settings that come with weights; those of the run's ``run.toml`` if the run began with the same weights."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # whatever a file lacks
        saved = settings_of_run(run_dir) if run_dir else {}
        if _place(saved["checkpoint"]["init_from"]) == _place(path):
            return {f"{part}.{name}": value for part in ("model", "tokenizer") for name, value in saved[part].items()}
    from crius.interop.weights import open_weights

    weights = open_weights(path, where)
    brought = {f"model.{name}": value for name, value in weights.model.items()}
    tokenizer = {"tokenizer.path": weights.tokenizer, "tokenizer.eos_token": weights.eos_token}
    return brought | {name: value for name, value in tokenizer.items() if value}


def _read_data(arguments: Arguments) -> Mapping[str, Any]:
    """What the data says about settings."""
    read = ("data.", "model.attention_mask")
    given = {name: argument.texts for name, argument in arguments.items() if argument.texts and name.startswith(read)}
    if given.keys().isdisjoint(("data.path", "data.format", "data.mix")):
        return {}
    from crius.data.infer import infer

    return infer(given)


SOURCES = RunSources(
    {"model.name": SPECS, "model.flavor": FLAVORS, "data.source": DATA_SOURCES},
    _read_model,
    _read_weights,
    _read_data,
    _located,
)
COMMAND: list[str] = []
"""Verb and flags of this command."""

_ABOUT = """Train large language models, from one CPU to hundreds of GPUs.

Every verb takes --import MODULE, which makes a model of your own known: docs/adding_a_model.md.
"""
app = Verbs((), _ABOUT)
config_app = app.group("config", "Show and compare the settings of runs.")
verify_app = app.group("verify", "Prove on this machine that every layout trains alike.")
bench_app = app.group("bench", "Measure on this machine which low precision pays.")
checkpoint_app = app.group("checkpoint", "List, verify and remove checkpoints.")
data_app = app.group("data", "Prepare training data.")
mix_app = data_app.group("mix", "Show what a mixture of sources reads.")


def train_verb() -> Verb:
    """The verb ``crius train``, whose flags other verbs take too."""
    from crius.cli import train  # noqa: F401  adds it

    found, _ = app.find(["train"])
    assert isinstance(found, Verb)
    return found


def help_text(verb: Verb | Verbs, words: Sequence[str]) -> str:
    """The help of a verb or a group, after which ``words`` follow on the command line."""
    from crius.cli.help import help_of

    return help_of(verb, words)


def parsed(words: Sequence[str]) -> Call:
    """The call of a verb that ``words`` stand for; ``SOURCES`` has the origins of its settings.

    Raises:
        ConfigError: lists all that is wrong.
    """
    verb, rest = app.find(words)
    if isinstance(verb, Verbs):
        raise ConfigError("no verb is given.", where="command line", fix="crius --help lists the verbs")
    return verb.call(rest, SOURCES)


def silence_stdout() -> None:
    """Discard all further output: the reader of a pipe, such as head, has ended."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def imports() -> list[str]:
    """The --import flags of this command line, for another command."""
    return [word for name in IMPORTED for word in ("--import", name)]


def script() -> str:
    """Name of the file that this program was started with."""
    return Path(sys.argv[0]).name


def started(*words: str) -> str:
    """A command that starts this program with other words, of which the first is a verb, for a shell."""
    if script() == "crius":
        is_on_path = shutil.which("crius") == os.path.abspath(sys.argv[0])
        return redact(shlex.join(["crius" if is_on_path else sys.argv[0], *words]))
    python = "python" if shutil.which("python") == sys.executable else sys.executable
    if script() == "train.py" and words[0] == "train":
        return redact(shlex.join([python, sys.argv[0], *words[1:]]))
    return redact(shlex.join([python, "-m", "crius", *words]))


def emit(text: str) -> None:
    """Print one line.

    Raises:
        BrokenPipeError: the reader has ended.
        EnvironmentError: the line cannot be written, for example to a file on a full disk.
    """
    try:
        sys.stdout.write(printable(text) + "\n")
    except BrokenPipeError:
        raise
    except OSError as error:
        silence_stdout()  # what it still holds cannot be written either
        raise EnvironmentError(f"standard output cannot be written: {error.strerror}.", where="the shell") from None


def emit_result(data: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print the result of a verb: ``data`` as JSON, or ``lines`` for people. Raises as ``emit``."""
    emit(json.dumps(data, indent=2) if as_json else "\n".join(lines))


def facts_of(
    run: RunConfig,
    nproc: int,
    placement: Any,
    is_dry: bool = False,
    saved: Mapping[str, Any] | None = None,
    run_dir: Path | None = None,
) -> Facts:
    """Facts about ``run`` on this machine, for the rules.

    Args:
        run: the requested run.
        nproc: requested number of processes; 0: the product of the degrees.
        placement: placement of this process (``crius.launch.environment.Placement``); None: no launcher started it.
        is_dry: whether nothing is started.
        saved: settings of the checkpoint that the run resumes from.
        run_dir: folder of that run.
    """
    from crius.launch.environment import sees_own_gpu, visible_gpus
    from crius.train.inputs import resolve

    num_gpus = 0 if run.training.device == "cpu" else visible_gpus(os.environ)
    if num_gpus == 1 and placement and sees_own_gpu(placement, os.environ):
        num_gpus = placement.local_world_size  # the other processes see the others
    stands_for_gpu = is_dry and run.training.device != "cpu"
    on_gpu = num_gpus > 0 or run.training.device == "cuda" or stands_for_gpu
    asked = placement.world_size if placement else nproc
    ranks = asked or num_gpus or 1
    local_ranks = placement.local_world_size if placement else ranks
    machine = Machine(
        device="cuda" if on_gpu else "cpu",
        ranks=ranks,
        local_ranks=local_ranks,
        cannot_compile=missing_for_compile(os.environ) if on_gpu and not is_dry else "",
    )
    resolved = resolve(
        _with_flavor(run),
        machine,
        saved=saved,
        rows_are_given=SOURCES.rows_are_given(),
        lay_out=functools.partial(_lay_out, machine, is_dry),
        run_dir=run_dir,
    )
    if saved is None and not SOURCES.counted and not (placement and placement.rank):  # else it was printed, or will be
        _say_decisions(resolved, on_gpu=on_gpu)
    here = asked or resolved.config.parallelism.total_ranks(num_gpus or 1)
    flag = "--nproc (command line)" if nproc else ""
    return Facts(
        **vars(resolved),
        origin=SOURCES.origin,
        specs=SPECS,
        num_ranks=here,
        asked_ranks=asked,
        asked_by=placement.launcher if placement else flag,
        num_gpus=num_gpus,
        num_cores=usable_cores(),
        local_ranks=placement.local_world_size if placement else here,
        is_dry=is_dry,
        sharing=gpu_sharing(os.environ),
    )


def say_inferred(run: RunConfig) -> None:
    """Print what was inferred from the data, in one line."""
    values = flatten(run)
    names = [name for name, origin in SOURCES.origins.items() if origin == OF_DATA]
    if names:
        told = ", ".join(f"{name} {values[name]}" for name in names)
        _note(f"auto: {told}: as the data looks; a flag overrules it")


def _note(line: str) -> None:
    if SOURCES.notes is None:
        sys.stderr.write(printable(line) + "\n")
    else:
        SOURCES.notes.append(line)


def _say_decisions(resolved: Resolved, *, on_gpu: bool) -> None:
    from crius.train.inputs import COMPILE

    say_inferred(resolved.config)
    told = [resolved.reasons[AUTO]] if AUTO in resolved.reasons else []
    if why := resolved.reasons.get(DETERMINISTIC):
        told.append(f"{DETERMINISTIC} is on: {why}")
    if on_gpu and (why := resolved.reasons.get(COMPILE)):
        told.append(f"auto: compile {'on' if resolved.config.compile.enable else 'off'}: {why}")
    for line in told:
        _note(line)


def _with_flavor(run: RunConfig) -> RunConfig:
    """``run`` with the first flavor of its model, if no flavor is requested and the model lacks the default one."""
    name = "model.flavor"
    spec = find_spec(run.model.name)
    is_open = SOURCES.origin(name) in ("default", f"recipe {SOURCES.recipe}")
    is_default = SOURCES.origin("model.name") == "default"
    if spec is None or run.model.flavor in spec.known_flavors or not is_open or is_default:
        return run
    SOURCES.origins[name] = f"the first of {run.model.name}"
    return replace_fields(run, {name: next(iter(spec.flavors))})


def _lay_out(machine: Machine, is_dry: bool, run: RunConfig, model: "ModelDescription") -> tuple[dict[str, Any], str]:
    """The layout that the planner recommends for ``parallelism.auto``, and the reason."""
    from crius.tools.plan.auto import fill, hardware_here

    hardware = hardware_here(
        on_gpu=machine.on_gpu, num_ranks=machine.ranks, local_ranks=machine.local_ranks, is_dry=is_dry
    )
    filled = fill(run, model, hardware, machine.ranks, SOURCES.origin)
    SOURCES.origins |= dict.fromkeys(filled.overrides, AUTO)
    return filled.overrides, "\n".join(filled.lines)


def place_of(facts: Facts) -> tuple[Machine, "Hardware"]:
    """The hardware of the run of ``facts``, and the memory of each rank. A GPU that this machine lacks is an H100."""
    from crius.tools.plan.auto import gpu_name, hardware_here

    ranks = facts.num_ranks
    here = facts.local_ranks
    on_gpu = facts.config.training.device != "cpu" and (facts.is_dry or facts.num_gpus > 0)
    machine = Machine(device="cuda" if on_gpu else "cpu", name=gpu_name(), ranks=ranks, local_ranks=here)
    return machine, hardware_here(on_gpu=on_gpu, num_ranks=ranks, local_ranks=here, is_dry=True)


def fitted(facts: Facts, machine: Machine, hardware: "Hardware") -> tuple[RunConfig, str]:
    """The run of ``facts`` with the settings that depend on the memory of its ranks (``place_of``), and the reasons."""
    from crius.tools.plan.fit import fit

    if not leaves_open(facts.config, on_gpu=machine.on_gpu):
        return facts.config, ""
    changes, why = fit(facts.config, facts.model, machine, USABLE * hardware.memory_bytes)
    return replace_fields(facts.config, changes), why


def _base_name(run: RunConfig) -> str:
    """The recipe, if the run trains its model; else the model, with the sizes that differ from those of its flavor."""
    names = [f"model.{field.name}" for field in dataclasses.fields(ModelConfig)]
    if SOURCES.recipe and all(SOURCES.origin(name) in ("default", f"recipe {SOURCES.recipe}") for name in names):
        return SOURCES.recipe
    source = run.model.from_hf or run.checkpoint.init_from
    defaults = ModelConfig()
    given = (name for name in vars(defaults) if SOURCES.origin(f"model.{name}") == "command line" or not source)
    changed = [
        f"{name}_{getattr(run.model, name)}"
        for name in given
        if name not in ("name", "flavor", "from_hf", "rope_scaling")
        and getattr(run.model, name) != getattr(defaults, name)
        and SOURCES.origin(f"model.{name}") != "default"
    ]
    if source:
        from crius.hub import snapshot_of

        of_hub = snapshot_of(source)
        source = of_hub.repository if of_hub else source
    place = Path(source).parent if source.endswith(".json") else Path(source)
    flavor = (plain_name(place.name) or "custom") if source else run.model.flavor
    return plain_name("_".join([run.model.name, flavor, *changed]))


def _run_name(run: RunConfig, placement: Any) -> str:
    """A name for a run without a name. All ranks of a launcher get the same name."""
    base = _base_name(run)
    if placement is None:
        name = f"{base}-{time.strftime('%Y%m%d-%H%M%S')}"
        candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return next(candidate for candidate in candidates if not (Path("runs") / candidate).exists())
    if placement.launcher == "slurm":
        return f"{base}-slurm-{os.environ.get('SLURM_JOB_ID', '0')}.{os.environ.get('SLURM_STEP_ID', '0')}"
    if os.environ.get("TORCHELASTIC_RUN_ID", "none") != "none":
        return f"{base}-{os.environ['TORCHELASTIC_RUN_ID']}"
    if placement.world_size == placement.local_world_size:
        return f"{base}-torchrun-{os.getppid()}"  # the agent is the parent of all ranks
    raise ConfigError(
        "a run on several hosts needs a name.",
        where="torchrun without --rdzv_id",
        why="all ranks write to one run folder and cannot agree on a name by themselves",
        fix="--job.name NAME, or torchrun --rdzv_id NAME",
    )


def run_dir(run: RunConfig, placement: Any) -> Path:
    """The run folder. It is made, and a test file is written to it."""
    folder = Path(run.job.run_dir or Path("runs") / (run.job.name or _run_name(run, placement)))
    try:
        for name in check_entries(folder, (run.checkpoint.folder, "data"), ("wandb",)):
            if placement is None or placement.rank == 0:
                sys.stderr.write(f"{folder / name} is a link to {printable(os.readlink(folder / name))}\n")
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder / "logs"):  # has no name, so a kill leaves nothing
            pass
    except OSError as error:
        raise EnvironmentError(
            f"the run folder {folder} cannot be written: {error.strerror}.",
            where="--job.run_dir" if run.job.run_dir else "--job.name",
            fix="give another folder, e.g. --job.run_dir runs/mine",
        ) from None
    return folder


def refuse_given(names: Iterable[str], why: str, instead: str = "") -> None:
    """Raise ConfigError if the command line has a setting that the verb sets itself or does not use.

    Args:
        names: dotted names of the settings.
        why: reason why they have no effect.
        instead: flag to give in their place; empty if there is no such flag.
    """
    given = ", ".join(f"--{name}" for name in names if SOURCES.origin(name) == "command line")
    if given:
        fix = f"leave out {given}" + (f", and give {instead}" if instead else "")
        has = "have" if ", " in given else "has"
        raise ConfigError(f"{given} {has} no effect: {why}.", where="command line", fix=fix)


def check_save_ops(run: RunConfig) -> None:
    """Raise ConfigError if activation checkpointing should keep an op that this torch lacks."""
    if run.activation_checkpoint.mode == "selective":
        from crius.parallel.activation_checkpoint import resolve_save_ops

        resolve_save_ops(run.activation_checkpoint.save_ops)


def need_torch() -> None:
    """Raise EnvironmentError if torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentError(
            "torch is not installed.", fix=f"{install_line('torch>=2.11')}; crius doctor checks the rest"
        )

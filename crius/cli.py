"""The ``crius`` command: verbs and what they call. Imports that are slow or need torch happen inside the verbs."""

import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from crius import __version__
from crius.config import rules
from crius.config.data import DataConfig
from crius.config.export import differences, flatten
from crius.config.load import RunSources, explain, normalized_argv, recipe_names
from crius.config.run import RunConfig
from crius.config.tokenizer import TokenizerConfig
from crius.errors import ConfigError, CriusError, EnvironmentError
from crius.help import print_panel
from crius.install import install_line
from crius.models.registry import SPECS

Run = Annotated[RunConfig, Parameter(name="*")]
Recipe = Annotated[str, Parameter(help="A run that comes with Crius; llama3_debug where no --config is given.")]
ConfigFiles = Annotated[tuple[Path, ...], Parameter(help="TOML file with settings; repeat it, the last one wins.")]
NumProcesses = Annotated[int, Parameter(help="Processes to start here. 0: what the degrees multiply to.")]
Json = Annotated[bool, Parameter(negative=(), help="Print JSON.")]

STARTED = time.monotonic()
SOURCES = RunSources()
_SHARED: dict[str, Any] = {
    "default_parameter": Parameter(name_transform=lambda name: name, negative_bool="no_", negative_iterable=()),
    "config": [SOURCES],
    "help_formatter": print_panel,
    "result_action": "return_value",
}
app = App(
    name="crius", help="Train large language models, from one CPU to hundreds of GPUs.", version=__version__, **_SHARED
)
config_app = App(name="config", help="Show and compare the settings of runs.")
data_app = App(name="data", help="Prepare training data.")
app.command(config_app)
app.command(data_app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 failed, 2 usage or config, 130 Ctrl-C."""
    arguments = normalized_argv(sys.argv[1:] if argv is None else argv)
    SOURCES.origins.clear()
    try:
        command, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
        return command(*bound.args, **bound.kwargs) or 0
    except CycloptsError as error:
        print(explain(error), file=sys.stderr)
        return 2
    except CriusError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _emit(text: str) -> None:
    sys.stdout.write(text + "\n")


def _facts(run: RunConfig, nproc: int, placement: Any) -> rules.Facts:
    from crius.launch.environment import visible_gpus

    num_gpus = 0 if run.training.device == "cpu" else visible_gpus(os.environ)
    asked = placement.world_size if placement else nproc
    parallelism = run.parallelism
    here = asked or parallelism.total_ranks(num_gpus or 1)
    return rules.Facts(
        config=run,
        origin=SOURCES.origin,
        specs=SPECS,
        num_ranks=here,
        asked_ranks=asked,
        asked_by=placement.launcher if placement else "--nproc (command line)" if nproc else "",
        num_gpus=num_gpus,
        local_ranks=placement.local_world_size if placement else here,
    )


def _run_name(placement: Any) -> str:
    """A name for a run that has none; all ranks of a launcher find the same one."""
    recipe = SOURCES.recipe or "run"
    if placement is None:
        name = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
        candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return next(candidate for candidate in candidates if not (Path("runs") / candidate).exists())
    if placement.launcher == "slurm":
        return f"{recipe}-slurm-{os.environ.get('SLURM_JOB_ID', '0')}.{os.environ.get('SLURM_STEP_ID', '0')}"
    if os.environ.get("TORCHELASTIC_RUN_ID", "none") != "none":
        return f"{recipe}-{os.environ['TORCHELASTIC_RUN_ID']}"
    if placement.world_size == placement.local_world_size:
        return f"{recipe}-torchrun-{os.getppid()}"  # the agent is the parent of all ranks
    raise ConfigError(
        "a run on several hosts needs a name.",
        where="torchrun without --rdzv_id",
        why="all ranks write to one run folder and cannot agree on a name by themselves",
        fix="--job.name NAME, or torchrun --rdzv_id NAME",
    )


def _run_dir(run: RunConfig, placement: Any) -> Path:
    folder = Path(run.job.run_dir or Path("runs") / (run.job.name or _run_name(placement)))
    probe = folder / "logs" / f".writable-{os.uname().nodename}-{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise EnvironmentError(
            f"the run folder {folder} cannot be written: {error.strerror}.",
            where="--job.run_dir" if run.job.run_dir else "--job.name",
            fix="give another folder, e.g. --job.run_dir runs/mine",
        ) from None
    return folder


@app.command
def train(run: Run = RunConfig(), *, recipe: Recipe = "", config: ConfigFiles = (), nproc: NumProcesses = 0) -> int:  # noqa: B008
    """Train a model.

    Without any flag: a small Llama 3 on the source of Python's standard library, on this machine's CPU or GPUs.
    Settings come from defaults, then the recipe, then --config files, then flags. More processes than one are
    started here when the parallel degrees ask for them; under torchrun or Slurm this process joins theirs.
    """
    from crius.launch.environment import joined_placement, single_placement

    if nproc < 0:
        raise ConfigError(f"--nproc {nproc} is negative.", fix="give the number of processes, e.g. --nproc 4")
    placement = joined_placement(os.environ)
    if placement and nproc and nproc != placement.world_size:
        raise ConfigError(
            f"--nproc {nproc}, but {placement.launcher} started {placement.world_size} ranks.",
            where="command line",
            fix="leave out --nproc",
        )
    facts = _facts(run, nproc, placement)
    rules.check(facts)
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentError(
            "torch is not installed.", fix=f"{install_line('torch>=2.11')}; crius doctor says what else"
        )
    run_dir = _run_dir(run, placement)
    if placement is None and run.data.source != "huggingface":
        # bad data is one message here, before there are workers to say it N times; a stream's threads cannot be forked
        from crius.train.inputs import open_run_corpus

        open_run_corpus(run, facts.data_parallel_ranks)

    from crius.launch.local import run_single, run_workers
    from crius.launch.worker import leave
    from crius.train import job

    target = functools.partial(job.run, run, run_dir, STARTED)
    if placement is None and facts.num_ranks > 1:
        code = run_workers(target, facts.num_ranks, run_dir)
    else:
        code = run_single(target, placement or single_placement(), run_dir)
        if code and placement:
            leave(code)  # a normal exit would wait for peers that may be gone
    if code == 0 and (placement is None or placement.rank == 0):
        _say_next(run, run_dir)
    return code


def _say_next(run: RunConfig, run_dir: Path) -> None:
    _emit(f"run folder: {run_dir} (metrics.jsonl, summary.json, run.toml, logs/)")
    if run.model.flavor == "debug":
        crius = "crius" if shutil.which("crius") else f"{sys.executable} -m crius"
        again = f"--config {run_dir / 'run.toml'} --training.steps {2 * run.training.steps}"
        _emit("try next:")
        _emit(f"  the same curve on four workers   {crius} train --parallelism.data_parallel_shard_degree 4")
        _emit(f"  this run again, twice as long    {crius} train {again}")
        _emit(f"  every setting and its origin     {crius} config show")


@config_app.command
def show(
    run: Run = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    nproc: NumProcesses = 0,
    as_json: Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON.")] = False,
) -> int:
    """Print every setting of a run, its value and where it came from. Takes the flags of train."""
    values = flatten(run)
    if as_json:
        _emit(
            json.dumps(
                {name: {"value": value, "origin": SOURCES.origin(name)} for name, value in values.items()}, indent=2
            )
        )
        return 0
    width = max(map(len, values))
    for name, value in values.items():
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        _emit(f"{name:<{width}}  {shown or '(empty)':<20}  {SOURCES.origin(name)}")
    return 0


@config_app.command
def diff(
    left: str,
    right: str,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON.")] = False,
) -> int:
    """Print the settings that differ between two runs: run folders, TOML files or names of recipes."""
    changed = differences(_config_of(left), _config_of(right))
    if as_json:
        _emit(json.dumps({name: {"left": a, "right": b} for name, (a, b) in changed.items()}, indent=2))
        return 0
    for name, (a, b) in changed.items():
        _emit(f"{name}: {a} -> {b}")
    if not changed:
        _emit("no difference")
    return 0


def _config_of(place: str) -> RunConfig:
    """The settings of a run folder, a TOML file or a recipe."""
    path = Path(place) / "run.toml" if Path(place).is_dir() else Path(place)
    if place not in recipe_names() and not path.exists():
        raise ConfigError(
            f"{place} is no run folder, no TOML file and no recipe.",
            where="command line",
            fix=f"give a folder with a run.toml, a TOML file, or one of {', '.join(recipe_names())}",
        )
    source = ["--recipe", place] if place in recipe_names() else ["--config", str(path)]
    _, bound, _ = app.parse_args(["config", "show", *source], exit_on_error=False, print_error=False)
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

    started = time.monotonic()
    meta = preparation.prepare(data, tokenizer, out, num_workers or os.cpu_count() or 1)
    _emit(
        f"{out}: {meta.num_tokens:,} tokens of {meta.num_documents:,} documents in {time.monotonic() - started:.1f} s"
    )
    _emit(f"train on it: crius train --data.source tokens --data.path {out}")
    return 0


@app.command
def doctor(*, as_json: Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON.")] = False) -> int:
    """Say what this machine has, what is missing and the exact line that installs it."""
    from crius.launch.doctor import examine

    report = examine()
    _emit(json.dumps(dataclasses.asdict(report), indent=2) if as_json else report.render())
    return 0 if report.ready else 1

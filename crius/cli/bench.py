"""``crius bench``."""

import dataclasses
import shlex
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from crius.cli.app import (
    SOURCES,
    ConfigFiles,
    Json,
    NumProcesses,
    Recipe,
    Run,
    app,
    bench_app,
    check_save_ops,
    facts_of,
    need_torch,
    refuse_given,
    run_dir,
)
from crius.config import rules
from crius.config.argv import normalized_argv
from crius.config.facts import Facts
from crius.config.run import RunConfig
from crius.config.toml_file import command_line_flags, flatten, to_toml
from crius.config.training import SET_BY_FORMAT
from crius.errors import ConfigError

Repeat = Annotated[int, Parameter(help="Rounds; each round times everything that is compared.")]


@bench_app.command
def optimizer(
    run: Run = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    repeat: Repeat = 7,
    variants: Annotated[
        str, Parameter(help="Out of for-loop, foreach, fused, bfloat16, 8bit and muon, joined by commas. Empty: all.")
    ] = "",
    as_json: Json = False,
) -> int:
    """Time optimizer steps at the shapes of a model, with their peak memory: in one process, in turns.

    Takes the flags of train. Nothing is trained: weights and gradients are random.
    """
    facts = _checked(run)
    from crius.tools.bench.optimizer import optimizer

    refuse_given(_degrees(run), "an optimizer steps over whole parameters here")
    return optimizer(run, facts.model, repeat=repeat, variants=variants, as_json=as_json)


@bench_app.command
def quantize(
    run: Run = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    gpu: Annotated[str, Parameter(help="GPU to use: here is the first of this machine.")] = "here",
    tokens: Annotated[int, Parameter(help="Tokens that a layer multiplies: those of a rank's microbatch.")] = 8192,
    repeat: Repeat = 7,
    formats: Annotated[
        str,
        Parameter(
            help="Out of float8_tensorwise, float8_rowwise, float8_rowwise_with_gw_hp and mxfp8, joined by commas. "
            "Empty: all that the device has matmuls for."
        ),
    ] = "",
    modes: Annotated[str, Parameter(help="eager, compiled, or both joined by a comma. Empty: both.")] = "",
    emulated: Annotated[
        bool,
        Parameter(negative=(), help="Time the emulation if there are no such matmuls; it is not the format's speed."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Time each linear shape of a model in bfloat16 and in each low precision, and report which formats are slower.

    Takes the flags of train; only the model and parallelism.tensor_parallel_degree count. Nothing is trained.
    """
    facts = _checked(run)
    from crius.tools.bench.quantize import quantize

    others = [name for name in _degrees(run) if "tensor" not in name]
    refuse_given(others, "they change the shape of no linear layer")
    refuse_given(SET_BY_FORMAT, "all formats are timed, or those of --formats")
    return quantize(
        run,
        facts.model,
        gpu=gpu,
        tokens=tokens,
        repeat=repeat,
        formats=formats,
        modes=modes,
        emulated=emulated,
        as_json=as_json,
    )


@bench_app.command
def checkpoint(
    *,
    folder: Annotated[Path, Parameter(help="Folder to write to, on the disk to measure.")] = Path("runs"),
    gib: Annotated[float, Parameter(help="Size of the saved state, in GiB.")] = 0.5,
    repeat: Repeat = 5,
    as_json: Json = False,
) -> int:
    """Time checkpoints: saving and loading with and without hashes, sync and async, and by torch's DCP; in turns."""
    need_torch()
    from crius.tools.bench.checkpoint import checkpoint

    return checkpoint(folder, gib=gib, repeat=repeat, as_json=as_json)


@bench_app.command
def data(
    run: Run = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    batches: Annotated[int, Parameter(help="Batches per sample. 0: as many as have 4 million tokens.")] = 0,
    repeat: Repeat = 7,
    as_json: Json = False,
) -> int:
    """Time the loader: tokens per second and core from the corpus to batches, and from text to tokens.

    Takes the flags of train; only the data, the tokenizer and the sizes of the batch count. Nothing is trained.
    """
    _checked(run)
    from crius.tools.bench.data import data

    refuse_given(_degrees(run), "one rank reads the whole batch here")
    return data(run, batches=batches, repeat=repeat, as_json=as_json)


@bench_app.command
def startup(
    run: Run = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    repeat: Repeat = 5,
    as_json: Json = False,
) -> int:
    """Time the start: help, errors and the first step of a training, each in processes of its own, in turns.

    Takes the flags of train. Each training runs one step; with --compile.enable once with a cold and once with a warm
    cache.
    """
    facts = _checked(run)
    from crius.tools.bench.startup import startup

    refuse_given(("job.run_dir", "job.name"), "each training has a folder of its own, which is removed")
    return startup(facts.config, repeat=repeat, as_json=as_json)


@bench_app.command
def train(
    run: Run = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    nproc: NumProcesses = 0,
    vs: Annotated[
        tuple[str, ...],
        Parameter(help='Flags of a variant, on top of the others, as --vs "--compile.enable"; repeat it for more.'),
    ] = (),
    warmup: Annotated[int, Parameter(help="Steps before the first round.")] = 5,
    rounds: Annotated[int, Parameter(help="Turns of each variant.")] = 10,
    steps_per_round: Annotated[int, Parameter(help="Steps of a turn.")] = 5,
    overhead: Annotated[
        bool, Parameter(negative=(), help="Also run a plain PyTorch loop, and report the overhead of Crius.")
    ] = False,
    as_json: Json = False,
    out: Annotated[Path | None, Parameter(help="File to write the JSON to.")] = None,
) -> int:
    """Time training steps: the real train job and variants of it take turns, in processes of their own.

    Takes the flags of train. Validation, checkpoints, profiler and watchdog are off; the losses are those of the run.
    """
    facts = _timed(run, nproc)
    from crius.tools.bench.train import Schedule, Variant, prepared, train

    schedule = Schedule(warmup=warmup, rounds=rounds, steps=steps_per_round)
    if overhead:
        from crius.tools.bench.train_job import check_bare

        check_bare(prepared(facts.config, schedule), facts.num_ranks)
    variants = [Variant("base", facts.config, facts.num_ranks)]
    with tempfile.TemporaryDirectory(prefix="crius-bench-") as folder:
        for flags in vs:
            # decided again: document starts by the variant's tokenizer, whether it compiles and whether it is exact
            anew = {name: getattr(facts.asked, name) for name in ("data", "compile", "debug")}
            base = dataclasses.replace(facts.config, **anew)
            other = _variant(base, flags, Path(folder))
            variants.append(Variant(flags, other.config, other.num_ranks))
    return train(variants, schedule, overhead=overhead, as_json=as_json, out=out)


@bench_app.command(show=False)
def contestant(
    run: Run = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    nproc: NumProcesses = 0,
    warmup: int = 5,
    bare: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Train in turns, as the process that started this one asks on stdin: see crius.tools.bench.contestant."""
    facts = facts_of(run, nproc, None)
    rules.check(facts)
    need_torch()
    folder = run_dir(facts.config, None)
    if bare:
        from crius.tools.bench.train_job import bare_loop

        return bare_loop(facts.config, folder, warmup)
    from crius.tools.bench.train_job import train_job

    return train_job(facts.config, folder, facts.num_ranks, warmup)


def _timed(run: RunConfig, nproc: int) -> Facts:
    """Facts about a run to be timed: its rules are checked, and its corpus is ready."""
    refuse_given(("job.run_dir", "job.name"), "a timed run leaves no folder")
    refuse_given(("training.steps",), "the timed steps are the only ones", "--rounds and --steps_per_round")
    facts = facts_of(run, nproc, None)
    rules.check(facts)
    need_torch()
    check_save_ops(facts.config)
    if facts.config.data.source != "huggingface":
        from crius.train.inputs import open_run_corpus

        open_run_corpus(facts.config, facts.data_parallel_ranks)
    return facts


def _variant(base: RunConfig, flags: str, folder: Path) -> Facts:
    """The run of ``base`` with ``flags`` on top.

    Raises:
        ConfigError: the flags are not flags of a run.
    """
    fix = 'flags of train, as --vs "--compile.enable"'
    try:
        given = shlex.split(flags)
    except ValueError as error:
        raise ConfigError(f"--vs {flags!r} cannot be read: {error}.", where="--vs", fix=fix) from None
    file = folder / "base.toml"
    file.write_text(to_toml(base), encoding="utf-8")
    SOURCES.origins.clear()
    arguments = normalized_argv(["bench", "contestant", "--config", str(file), *command_line_flags(base), *given])
    command, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    if not given or command is not contestant or {"bare", "warmup"} & set(bound.arguments):
        raise ConfigError(f"--vs {flags!r} has no flag of a run.", where="--vs", fix=fix)
    return _timed(bound.arguments.get("run", RunConfig()), bound.arguments.get("nproc", 0))


def _degrees(run: RunConfig) -> list[str]:
    """The settings that are degrees of parallelism."""
    return [name for name in flatten(run) if name.endswith("_degree")]


def _checked(run: RunConfig) -> Facts:
    """Facts about a run whose rules are checked for any number of ranks, because none of it is started."""
    facts = dataclasses.replace(facts_of(run, 0, None), is_dry=True)
    rules.check(facts)
    need_torch()
    return facts

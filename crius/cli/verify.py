"""``crius verify``."""

from pathlib import Path
from typing import Annotated

from crius.cli.app import (
    ConfigFiles,
    Json,
    NumProcesses,
    Recipe,
    check_save_ops,
    facts_of,
    need_torch,
    refuse_given,
    run_dir,
    verify_app,
)
from crius.config.run import RunConfig
from crius.config.toml_file import flatten
from crius.config.training import SET_BY_FORMAT
from crius.errors import ConfigError
from crius.tools.verify.options import Chaotic, Formats, OnLayouts, Resumed, Trained


@verify_app.verb
def parity(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    options: Trained = Trained(),  # noqa: B008
    as_json: Json = False,
) -> int:
    """Train layouts and one device on the same batches, and compare loss, gradient norm and weights.

    Takes the flags of train. Exit code 1 if a layout differs by more than the tolerance.
    """
    from crius.tools.verify.compare import parity

    folder = _verify_folder(run)
    return parity(facts_of(run, 0, None), folder, options, as_json=as_json)


@verify_app.verb
def init(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    options: OnLayouts = OnLayouts(),  # noqa: B008
    as_json: Json = False,
) -> int:
    """Start the weights on layouts and print a hash of each; all must be equal. Takes the flags of train."""
    from crius.tools.verify.init import init

    folder = _verify_folder(run)
    return init(facts_of(run, 0, None), folder, options, as_json=as_json)


@verify_app.verb(name="compile")
def compile_(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    options: Trained = Trained(),  # noqa: B008
    as_json: Json = False,
) -> int:
    """Train layouts eager and compiled, and compare loss, gradient norm and weights. Takes the flags of train."""
    from crius.tools.verify.compare import compile

    folder = _verify_folder(run)
    return compile(facts_of(run, 0, None), folder, options, as_json=as_json)


@verify_app.verb
def resume(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    nproc: NumProcesses = 0,
    options: Resumed = Resumed(),  # noqa: B008
    as_json: Json = False,
) -> int:
    """Kill a run at given steps, let it resume from its checkpoints, and compare it with a run that is not killed.

    Takes the flags of train, with all degrees. Exit code 1 if a loss, a gradient norm, weights, optimizer state or a
    sample differs by a bit, or if a kill did not happen.
    """
    from crius.tools.verify.resume import resume
    from crius.tools.verify.starts import SET_BY_VERB

    refuse_given(SET_BY_VERB, "this verb sets them", "--steps 20 --kill_at 7,13")
    folder = _folder_of_starts(run, nproc, options.layouts)
    return resume(facts_of(run, nproc, None), folder, options, as_json=as_json)


@verify_app.verb
def chaos(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    nproc: NumProcesses = 0,
    options: Chaotic = Chaotic(),  # noqa: B008
    as_json: Json = False,
) -> int:
    """Kill random ranks at random moments, in start-up and saves too, and compare with a run that is not killed.

    Takes the flags of train, with all degrees. Exit code 1 if a loss, a gradient norm, weights, optimizer state or a
    sample differs by a bit, if a kill did not happen, or if a process is left.
    """
    from crius.tools.verify.chaos import chaos
    from crius.tools.verify.starts import DATA_PARALLEL, SET_BY_VERB

    refuse_given(SET_BY_VERB, "this verb sets them", "--steps 40 --kills 25")
    if options.world_sizes:
        refuse_given(DATA_PARALLEL, "--world_sizes sets them")
        if nproc:
            raise ConfigError(
                "--nproc and --world_sizes exclude each other.", where="command line", fix="leave out --nproc"
            )
    folder = _folder_of_starts(run, nproc, options.layouts)
    return chaos(facts_of(run, nproc, None), folder, options, as_json=as_json)


@verify_app.verb
def crash(
    *,
    writers: Annotated[str, "Writers joined by commas, such as train,fsdp2. Empty: all."] = "",
    seed: Annotated[int, "Seed of the states that are resumed to the end."] = 1,
) -> int:
    """Try each state that a crash can leave of a run folder: the next start must recover it.

    Exit code 1 if a state is not recovered.
    """
    from crius.cli import main
    from crius.tools.verify.crash import crash

    need_torch()
    return crash(main, writers=writers, seed=seed)


@verify_app.verb
def precision(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    options: Formats = Formats(),  # noqa: B008
    as_json: Json = False,
) -> int:
    """Train one run in bfloat16 and in each low precision, and compare the loss curves: table, JSON and picture.

    Takes the flags of train; training.mixed_precision_param applies to the reference and to all formats. Exit code 1 if
    a curve ends further away than the tolerance, or a format converted no linear layer.
    """
    from crius.tools.verify.precision import precision

    refuse_given(SET_BY_FORMAT, "a format sets them", "--formats float8_rowwise")
    folder = _verify_folder(run, "--layout, such as fsdp2")
    return precision(facts_of(run, 0, None), folder, options, as_json=as_json)


def _verify_folder(run: RunConfig, instead: str = "--layouts, such as fsdp2_tp2 or pp2_accum2") -> Path:
    """The folder of the logs; refuses flags that a layout sets.

    Raises:
        ConfigError: lists them.
    """
    set_by_layout = [*(name for name in flatten(run) if name.endswith("_degree")), "training.local_batch_size"]
    refuse_given(set_by_layout, "a layout sets all degrees and the microbatches", instead)
    return _folder(run)


def _folder_of_starts(run: RunConfig, nproc: int, layouts: str) -> Path:
    """The folder of the logs; if there are ``layouts``, refuses flags that they set.

    Raises:
        ConfigError: lists them.
    """
    if not layouts:
        return _folder(run)
    if nproc:
        raise ConfigError("--nproc and --layouts exclude each other.", where="command line", fix="leave out --nproc")
    return _verify_folder(run, "--layouts")


def _folder(run: RunConfig) -> Path:
    """The folder of the logs, after a check that torch is installed and has the ops that the run keeps results of."""
    need_torch()
    check_save_ops(run)
    return run_dir(run, None)

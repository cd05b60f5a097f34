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
from crius.config.layout import parse_layout
from crius.config.run import RunConfig
from crius.config.toml_file import flatten
from crius.config.training import SET_BY_FORMAT
from crius.errors import ConfigError

Layouts = Annotated[str, "Layouts joined by commas, such as fsdp2_tp2,pp4+gpipe. Empty: a table of them."]
MostRanks = Annotated[int, "Most ranks of a layout, if --layouts is not given."]
Timeout = Annotated[int, "Seconds that one layout may take."]


@verify_app.verb
def parity(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    layouts: Layouts = "",
    nproc: MostRanks = 8,
    steps: Annotated[int, "Steps to train; the first three are compared."] = 3,
    timeout: Timeout = 300,
    as_json: Json = False,
) -> int:
    """Train layouts and one device on the same batches, and compare loss, gradient norm and weights.

    Takes the flags of train. Exit code 1 if a layout differs by more than the tolerance.
    """
    _check_layouts(layouts)
    from crius.tools.verify.compare import parity

    folder = _verify_folder(run)
    return parity(
        facts_of(run, 0, None), folder, layouts=layouts, nproc=nproc, steps=steps, timeout=timeout, as_json=as_json
    )


@verify_app.verb
def init(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    layouts: Layouts = "",
    nproc: MostRanks = 8,
    timeout: Timeout = 300,
    as_json: Json = False,
) -> int:
    """Start the weights on layouts and print a hash of each; all must be equal. Takes the flags of train."""
    _check_layouts(layouts)
    from crius.tools.verify.init import init

    return init(
        facts_of(run, 0, None), _verify_folder(run), layouts=layouts, nproc=nproc, timeout=timeout, as_json=as_json
    )


@verify_app.verb(name="compile")
def compile_(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    layouts: Layouts = "",
    nproc: MostRanks = 8,
    steps: Annotated[int, "Steps to train; the first three are compared."] = 3,
    timeout: Timeout = 300,
    as_json: Json = False,
) -> int:
    """Train layouts eager and compiled, and compare loss, gradient norm and weights. Takes the flags of train."""
    _check_layouts(layouts)
    from crius.tools.verify.compare import compile

    folder = _verify_folder(run)
    return compile(
        facts_of(run, 0, None), folder, layouts=layouts, nproc=nproc, steps=steps, timeout=timeout, as_json=as_json
    )


@verify_app.verb
def resume(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    nproc: NumProcesses = 0,
    steps: Annotated[int, "Steps to train."] = 20,
    kill_at: Annotated[str, "Steps at which a rank is killed, joined by commas."] = "7,13",
    layouts: Annotated[
        str,
        (
            "Layouts joined by commas, such as fsdp2_ep2,tp2,1, which the starts get in turn; losses may then "
            "differ by a tolerance. Empty: always the layout of the run."
        ),
    ] = "",
    timeout: Annotated[int, "Seconds that each of the two runs may take."] = 600,
    as_json: Json = False,
) -> int:
    """Kill a run at given steps, let it resume from its checkpoints, and compare it with a run that is not killed.

    Takes the flags of train, with all degrees. Exit code 1 if a loss, a gradient norm, weights, optimizer state or a
    sample differs by a bit, or if a kill did not happen.
    """
    _check_layouts(layouts)
    from crius.tools.verify.resume import resume
    from crius.tools.verify.starts import SET_BY_VERB

    refuse_given(SET_BY_VERB, "this verb sets them", "--steps 20 --kill_at 7,13")
    return resume(
        facts_of(run, nproc, None),
        _folder_of_starts(run, nproc, layouts),
        steps=steps,
        kill_at=kill_at,
        layouts=layouts,
        timeout=timeout,
        as_json=as_json,
    )


@verify_app.verb
def chaos(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    nproc: NumProcesses = 0,
    kills: Annotated[int, "Number of kills."] = 25,
    seed: Annotated[int, "Seed of the ranks, steps, phases and moments."] = 1,
    steps: Annotated[int, "Steps to train."] = 40,
    world_sizes: Annotated[
        str,
        (
            "Numbers of ranks joined by commas; each start gets one at random, as replicas and shards. "
            "With --training.reproducible. Empty: always those of the run."
        ),
    ] = "",
    layouts: Annotated[
        str,
        (
            "Layouts joined by commas, such as fsdp2_ep2,tp2; each start gets one at random, and losses may "
            "then differ by a tolerance. Empty: always the layout of the run."
        ),
    ] = "",
    timeout: Annotated[int, "Seconds that each of the two runs may take."] = 1800,
    as_json: Json = False,
) -> int:
    """Kill random ranks at random moments, in start-up and saves too, and compare with a run that is not killed.

    Takes the flags of train, with all degrees. Exit code 1 if a loss, a gradient norm, weights, optimizer state or a
    sample differs by a bit, if a kill did not happen, or if a process is left.
    """
    _check_layouts(layouts)
    from crius.tools.verify.chaos import chaos
    from crius.tools.verify.starts import DATA_PARALLEL, SET_BY_VERB

    refuse_given(SET_BY_VERB, "this verb sets them", "--steps 40 --kills 25")
    if world_sizes:
        refuse_given(DATA_PARALLEL, "--world_sizes sets them")
        if nproc:
            raise ConfigError(
                "--nproc and --world_sizes exclude each other.", where="command line", fix="leave out --nproc"
            )
    return chaos(
        facts_of(run, nproc, None),
        _folder_of_starts(run, nproc, layouts),
        kills=kills,
        seed=seed,
        steps=steps,
        world_sizes=world_sizes,
        layouts=layouts,
        timeout=timeout,
        as_json=as_json,
    )


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
    formats: Annotated[
        str,
        (
            "Formats joined by commas: float8_tensorwise, float8_rowwise, float8_rowwise_with_gw_hp, mxfp8, and "
            "float32 or bfloat16. Empty: the low precisions."
        ),
    ] = "",
    steps: Annotated[int, "Steps to train."] = 200,
    layout: Annotated[str, "Layout that trains, such as fsdp2; 1 is one device."] = "1",
    tolerance: Annotated[float, "Largest difference of the final loss, as a share of it."] = 0.02,
    plot: Annotated[str, "PNG file of the curves. Empty: precision.png in the run folder."] = "",
    timeout: Annotated[int, "Seconds that one format may take."] = 1800,
    as_json: Json = False,
) -> int:
    """Train one run in bfloat16 and in each low precision, and compare the loss curves: table, JSON and picture.

    Takes the flags of train; training.mixed_precision_param applies to the reference and to all formats. Exit code 1 if
    a curve ends further away than the tolerance, or a format converted no linear layer.
    """
    _check_layouts(layout)
    from crius.tools.verify.precision import precision

    refuse_given(SET_BY_FORMAT, "a format sets them", "--formats float8_rowwise")
    return precision(
        facts_of(run, 0, None),
        _verify_folder(run, "--layout, such as fsdp2"),
        formats=formats,
        steps=steps,
        layout=layout,
        tolerance=tolerance,
        plot=plot,
        timeout=timeout,
        as_json=as_json,
    )


def _check_layouts(layouts: str) -> None:
    """Refuse what is not a layout before torch is imported.

    Raises:
        ConfigError: names it.
    """
    for layout in layouts.split(",") if layouts else ():
        parse_layout(layout)


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

"""``crius bench``."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from crius.cli.app import ConfigFiles, Json, Recipe, Run, bench_app, facts_of, need_torch, refuse_given
from crius.config import rules
from crius.config.export import flatten
from crius.config.facts import Facts
from crius.config.quantize import SET_BY_FORMAT
from crius.config.run import RunConfig

Repeat = Annotated[int, Parameter(help="Rounds; each goes through all that is compared.")]


@bench_app.command
def optimizer(
    run: Run = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    repeat: Repeat = 7,
    variants: Annotated[
        str, Parameter(help="Of for-loop, foreach, fused, bfloat16, 8bit and muon, joined by commas. Empty: all.")
    ] = "",
    as_json: Json = False,
) -> int:
    """Time optimizer steps at the shapes of a model, with their peak memory: in one process, in turns.

    Takes the flags of train. Nothing is trained: weights and gradients are random.
    """
    facts = _checked(run)
    from crius.bench.optimizer import optimizer

    degrees = [name for name in flatten(run) if name.endswith("_degree")]
    refuse_given(degrees, "an optimizer steps over whole parameters here")
    return optimizer(run, facts.model, repeat=repeat, variants=variants, as_json=as_json)


@bench_app.command
def quantize(
    run: Run = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    gpu: Annotated[str, Parameter(help="Which GPU: here, the first of this machine.")] = "here",
    tokens: Annotated[int, Parameter(help="Tokens that a layer multiplies: of one microbatch of a rank.")] = 8192,
    repeat: Repeat = 7,
    formats: Annotated[
        str,
        Parameter(
            help="Of float8_tensorwise, float8_rowwise, float8_rowwise_with_gw_hp and mxfp8, joined by commas. Empty: "
            "what the device has matmuls for."
        ),
    ] = "",
    modes: Annotated[str, Parameter(help="Of eager and compiled, joined by commas. Empty: both.")] = "",
    emulated: Annotated[
        bool, Parameter(negative=(), help="Time the emulation where there are no such matmuls: no speed of the format.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Time each linear shape of a model in bfloat16 and in each low precision, and say which lose.

    Takes the flags of train, of which the model and parallelism.tensor_parallel_degree count. Nothing is trained.
    """
    facts = _checked(run)
    from crius.bench.quantize import quantize

    others = [name for name in flatten(run) if name.endswith("_degree") and "tensor" not in name]
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
    folder: Annotated[Path, Parameter(help="Folder to write to, on the disk that is to be measured.")] = Path("runs"),
    gib: Annotated[float, Parameter(help="Size of what is saved, in GiB.")] = 0.5,
    repeat: Repeat = 5,
    as_json: Json = False,
) -> int:
    """Time checkpoints: saved and loaded with and without hashes, sync and async, and by torch's DCP; in turns."""
    need_torch()
    from crius.bench.checkpoint import checkpoint

    return checkpoint(folder, gib=gib, repeat=repeat, as_json=as_json)


def _checked(run: RunConfig) -> Facts:
    """What is known of a run that its rules let pass on any number of ranks, for nothing of it is started."""
    facts = facts_of(run, 0, None, is_dry=True)
    rules.check(facts)
    need_torch()
    return facts

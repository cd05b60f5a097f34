"""``crius bench``."""

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated

from crius.cli.app import COMMAND, ConfigFiles, Json, Recipe, bench_app, facts_of, need_torch, refuse_given
from crius.config import rules
from crius.config.run import RunConfig
from crius.config.toml_file import flatten
from crius.config.training import SET_BY_FORMAT
from crius.errors import ConfigError
from crius.tools.bench.options import Timed

MOVED = {
    "checkpoint": "checkpoint",
    "contestant": "train_job",
    "data": "data",
    "optimizer": "optimizer",
    "startup": "startup",
    "train": "train",
}
"""Verbs that measure Crius itself, and their modules in ``benchmarks``, a folder of a checkout."""


@bench_app.verb
def quantize(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    options: Timed = Timed(),  # noqa: B008
    as_json: Json = False,
) -> int:
    """Time each linear shape of a model in bfloat16 and in each low precision, and report which formats are slower.

    Takes the flags of train; only the model and parallelism.tensor_parallel_degree count. Nothing is trained.
    """
    facts = dataclasses.replace(facts_of(run, 0, None), is_dry=True)  # no rank is started: any number will do
    rules.check(facts)
    need_torch()
    from crius.tools.bench.quantize import quantize

    others = [name for name in flatten(run) if name.endswith("_degree") and "tensor" not in name]
    refuse_given(others, "they change the shape of no linear layer")
    refuse_given(SET_BY_FORMAT, "all formats are timed, or those of --formats")
    return quantize(run, facts.model, options, as_json=as_json)


@bench_app.verb
def calibrate(
    *, out: Annotated[Path | None, "The file. Not given: the one that plans read."] = None, as_json: Json = False
) -> int:
    """Measure this machine in less than a minute, and write a hardware file for plans."""
    need_torch()
    from crius.tools.bench.calibrate import calibrate

    return calibrate(out, as_json=as_json)


def _answer(verb: str) -> None:
    """Add the old ``verb``, which says what replaces it."""

    @bench_app.verb(name=verb, is_listed=False, takes_all=True)
    def moved(*words: str) -> int:
        raise ConfigError(
            f"crius bench {verb} has moved.",
            where="command line",
            why="what measures Crius itself is in its checkout, not in the package; run there:",
            fix=shlex.join(["python", "-m", f"benchmarks.{MOVED[verb]}", *COMMAND[2:]]),
        )


for verb in MOVED:
    _answer(verb)

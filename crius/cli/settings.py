"""``crius config``, ``crius data`` and ``crius doctor``."""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from crius.cli.app import (
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
)
from crius.config import rules
from crius.config.data import DataConfig
from crius.config.export import differences, flatten
from crius.config.load import recipe_names
from crius.config.run import RunConfig
from crius.config.tokenizer import TokenizerConfig
from crius.errors import ConfigError
from crius.redact import redact_value


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
        run = facts_of(run, nproc, None, is_dry=True).config
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
    emit(f"{out}: {meta.num_tokens:,} tokens of {meta.num_documents:,} documents in {time.monotonic() - started:.1f} s")
    emit(f"train on it: crius train --data.source tokens --data.path {out}")
    return 0


@data_app.command
def audit(run_dir: Path, *, as_json: Json = False) -> int:
    """Prove that a run, over all its restarts and numbers of ranks, trained on each sample exactly once.

    RUN_DIR is the folder of the run. Exit code 1 where a sample was repeated or skipped, or a log is incomplete.
    """
    from crius.data.audit import audit

    report = audit(run_dir)
    emit(json.dumps(report.as_dict(), indent=2) if as_json else "\n".join(report.lines()))
    return 1 if report.problems else 0


@app.command
def doctor(*, as_json: Json = False) -> int:
    """Say what this machine has, what is missing and the exact line that installs it."""
    from crius.launch.doctor import examine

    report = examine()
    emit(json.dumps(dataclasses.asdict(report), indent=2) if as_json else report.render())
    return 0 if report.ready else 1

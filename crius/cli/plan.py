"""``crius plan``: which layout, how much memory, how fast."""

import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from crius.cli.app import (
    SOURCES,
    STARTED,
    ConfigFiles,
    Json,
    Layout,
    Recipe,
    app,
    check_save_ops,
    emit_result,
    facts_of,
    imports,
    need_torch,
    refuse_given,
)
from crius.cli.settings import config_of, run_of
from crius.config import rules
from crius.config.load import DEFAULT_RECIPE, recipe_settings
from crius.config.names import PLAN_SHORT
from crius.config.run import RunConfig, replace_fields
from crius.config.toml_file import flatten
from crius.errors import ConfigError, CriusError
from crius.host import Machine
from crius.models.registry import SPECS
from crius.tools.plan.options import Asked

if TYPE_CHECKING:
    from crius.models.description import ModelDescription
    from crius.tools.plan.hardware import Hardware
    from crius.tools.plan.legal import Case
    from crius.tools.plan.plan import Alternative, Plan
    from crius.tools.plan.validate import CheckReport

DEFAULT_SEQ_LEN = 8192
"""Sequence length of a plan without one: the context that Llama 3 was trained with (arXiv:2407.21783)."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"training.mixed_precision_param": "float32"},
    "bfloat16": {"training.mixed_precision_param": "bfloat16"},
    "float8": {"training.mixed_precision_param": "bfloat16", "quantize.dense.float8.enable": True},
}
"""Settings that ``--precision`` stands for."""

PLANNED = (
    "model.",
    "training.mixed",
    "training.dtype",
    "optimizer.state_dtype",
    "optimizer.implementation",
    "training.device",
    "training.enable_cpu_offload",
    "quantize.dense.float8.enable",
)
"""Prefixes of settings that a plan depends on and its search does not choose."""

UNPLANNED = tuple(
    f"parallelism.pipeline_parallel_{name}"
    for name in ("schedule_csv", "first_stage_less_layers", "last_stage_less_layers", "module_names_per_stage")
)
"""Settings of train that a plan ignores."""

SPLIT = "a plan splits the layers by their cost"


@app.verb(
    moved={
        "--check": ("plan", "check"),
        "--validate": ("plan", "validate"),
        "--compare": ("plan", "compare"),
        "--calibrate": ("bench", "calibrate"),
    }
)
def plan(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    layout: Layout = "",
    asked: Asked = Asked(),  # noqa: B008
    as_json: Json = False,
) -> int:
    """Find the layout that trains a model fastest on some GPUs, without using any: memory, speed and the flags to give.

    Takes the flags of train: given settings stay, open settings are searched. --model, --flavor, --seq_len,
    --global_batch_size and --local_batch_size are short for their dotted names. Exit code 1 if nothing fits.
    """
    data, lines, code = _told(_planned(_case(run, asked)), asked, config)
    emit_result(data, lines, as_json=as_json)
    return code


@app.verb(name="plan check")
def check(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    layout: Layout = "",
    asked: Asked = Asked(),  # noqa: B008
    as_json: Json = False,
) -> int:
    """Compare a plan with the dry run of the real code. Takes the flags of plan; exit code 1 if they differ."""
    case = _case(run, asked)
    if case.facts is None:
        raise ConfigError(
            f"a check needs a model that Crius trains, but {case.shape.name} is not trainable yet.",
            where="command line",
            fix=f"crius plan, which only plans it, or one of {', '.join(SPECS)}",
        )
    plan = _planned(case)
    data, lines, code = _told(plan, asked, config)
    if plan.winner:
        report = _checked(case, plan)
        data |= {"check": report.as_dict()}
        lines += ["", *report.lines()]
        code = int(not report.agrees)
    emit_result(data, lines, as_json=as_json)
    return code


@app.verb(name="plan validate")
def validate(file: Annotated[Path, "CSV file of measurements."], *, as_json: Json = False) -> int:
    """Compare the planner with measured runs, one per row."""
    from crius.tools.plan.validate import validate_file

    report = validate_file(file, _run_of_row)
    emit_result(report.as_json(), report.table(), as_json=as_json)
    return 0 if report.judged else 1


@app.verb(name="plan compare")
def compare(
    run_folder: Annotated[Path, "Run folder."],
    *,
    gpu: Annotated[str, "A known GPU, or a TOML file. Empty: the run's."] = "",
    as_json: Json = False,
) -> int:
    """Compare the measurements of a run with its plan."""
    from crius.tools.plan.compare import compare_run
    from crius.tools.plan.hardware import hardware
    from crius.train.inputs import describe_model

    run = config_of(str(run_folder))
    compared = compare_run(run_folder, run, describe_model(run), hardware(gpu) if gpu else None)
    emit_result(compared.as_dict(), compared.lines(), as_json=as_json)
    return 0


def _case(run: RunConfig, asked: Asked) -> "Case":
    """The case to plan: settings of flags, recipe and files are fixed, open settings are searched."""
    from crius.tools.plan.hardware import hardware, shared
    from crius.tools.plan.legal import Case
    from crius.tools.plan.shapes import shape_named
    from crius.train.inputs import resolve

    refuse_given(UNPLANNED, SPLIT)
    found = hardware(asked.gpu)
    num_gpus = _count(asked.gpus, asked.nodes, found)
    on_gpu = found.generation != "cpu"
    run = replace_fields(run, {"parallelism.auto": False})  # a plan does that anyway
    run = _with_full_name(run)
    pinned = set(SOURCES.origins) & set(flatten(RunConfig())) - {"parallelism.auto"}
    changes: dict[str, Any] = dict(PRECISIONS.get(asked.precision, {})) | ({} if on_gpu else {"training.device": "cpu"})
    if "training.seq_len" not in pinned:
        changes["training.seq_len"] = DEFAULT_SEQ_LEN
    run = replace_fields(run, changes)
    machine = Machine(device="cuda" if on_gpu else "cpu", ranks=num_gpus)
    resolved = resolve(run, machine, rows_are_given=SOURCES.rows_are_given())
    run = dataclasses.replace(resolved.config, parallelism=run.parallelism)  # the stages are searched
    facts = facts_of(run, 0, None, is_dry=True)
    problems = [*_open_flavor(run, pinned), *(_missing_precision(run, found, asked.precision) if on_gpu else ())]
    problems += rules.sizes(facts)
    if not problems and facts.model is None and run.model.name in SPECS:
        problems += rules.known_model(facts)
    if problems:
        raise ConfigError.together(problems)
    return Case(
        config=run,
        shape=facts.model or shape_named(run.model.name, run.model.flavor if "model.flavor" in pinned else ""),
        hardware=shared(found, num_gpus),
        num_gpus=num_gpus,
        pinned=frozenset(pinned | set(changes)),
    )


def _with_full_name(run: RunConfig) -> RunConfig:
    """``run`` with a name and a flavor, if its model was named in one word that Crius splits into these."""
    from crius.tools.plan.shapes import trained_as

    if run.model.name in SPECS:
        return run
    origins = SOURCES.origins
    found = trained_as(run.model.name, run.model.flavor if "model.flavor" in origins else "")
    if found is None:
        return run
    origins["model.flavor"] = origins["model.name"]
    return replace_fields(run, dict(zip(("model.name", "model.flavor"), found, strict=True)))


def _open_flavor(run: RunConfig, pinned: set[str]) -> Iterator[CriusError]:
    """Error if the size of the model is open: the default is a model for tests, which nobody buys a GPU for."""
    if run.model.name in SPECS and "model.flavor" not in pinned:
        flavors = list(SPECS[run.model.name].flavors)
        yield ConfigError(
            f"the size of {run.model.name} is not given.",
            where="--flavor",
            why="memory and speed depend on it, and the default of crius train, debug, is for tests",
            fix=f"--flavor with one of {', '.join(flavors)}, e.g. --flavor {flavors[len(flavors) // 2]}",
        )


def _missing_precision(run: RunConfig, found: "Hardware", precision: str) -> Iterator[CriusError]:
    """Error if the GPU lacks the matmuls that are asked for: crius train emulates them, at an unknown speed."""
    missing = {"float8": not found.float8_flops, "mxfp8": not found.has_mxfp8}
    for kind, is_missing in missing.items():
        name = f"quantize.dense.{kind}.enable"
        if is_missing and getattr(run.quantize.dense, kind).enable:
            is_short = precision == kind
            yield ConfigError(
                f"{found.name} has no {kind} matmuls.",
                where=f"--precision {kind}" if is_short else f"--{name} ({SOURCES.origin(name)})",
                why="" if is_short else "crius train emulates them there, which gains nothing and cannot be planned",
                fix=f"{'--precision bfloat16' if is_short else f'leave out --{name}'}, or another --gpu",
            )


def _count(gpus: int | None, nodes: int | None, found: "Hardware") -> int:
    """Number of GPUs that were asked for.

    Raises:
        ConfigError: a number is below 1, or two numbers differ.
    """
    for name, count in (("gpus", gpus), ("nodes", nodes)):
        if count is not None and count < 1:
            raise ConfigError(f"--{name} {count}: a count is at least 1.", where="command line", fix=f"e.g. --{name} 8")
    if gpus and nodes and gpus != nodes * found.gpus_per_node:
        raise ConfigError(
            f"--nodes {nodes} of {found.gpus_per_node} GPUs are not --gpus {gpus}.",
            where="command line",
            fix="give one",
        )
    return gpus or (nodes or 0) * found.gpus_per_node or 8


def _planned(case: "Case") -> "Plan":
    """The plan of ``case``, after its checks."""
    from crius.tools.plan.plan import check_case, make_plan

    check_case(case, SOURCES.origin)
    plan = make_plan(case)
    # settings of a recipe or a file; on the command line they are refused
    left_out = [f"--{name} ({SOURCES.origin(name)}) is not planned: {SPLIT}" for name in UNPLANNED if case.given(name)]
    return dataclasses.replace(plan, outside=[*plan.outside, *left_out])


def _told(plan: "Plan", asked: Asked, files: tuple[Path, ...]) -> tuple[dict[str, Any], list[str], int]:
    """``plan`` as data and as lines, and the exit code. If nothing fits, with the commands of plans that fit."""
    from crius.tools.plan.hardware import card_taken
    from crius.tools.plan.plan import alternatives, remedies_of
    from crius.tools.plan.render import impossible_data, impossible_lines, plan_data, plan_lines

    card = card_taken(asked.gpu)
    if plan.winner:
        settings = _settings(plan.case, plan.settings, files)
        start = " ".join(["crius train", *imports(), *_sources(files)])
        return plan_data(plan, settings), plan_lines(plan, card, start, settings, is_explained=asked.explain), 0
    remedies = remedies_of(plan)
    fitting = [(one.what, _plan_command(one, asked, files)) for one in alternatives(plan, remedies)]
    data = impossible_data(plan, remedies) | {"commands_that_fit": [text for _, text in fitting]}
    return data, impossible_lines(plan, card, remedies, fitting, is_explained=asked.explain), 1


def _plan_command(one: "Alternative", asked: Asked, files: tuple[Path, ...]) -> str:
    """The given command, changed to what ``one`` asks for."""
    from crius.tools.plan.render import flags

    given = {name for name, origin in SOURCES.origins.items() if origin == "command line"} - one.left_out
    values = flatten(one.case.config)
    short = {name: short for short, name in PLAN_SHORT.items()}
    typed = {short.get(name, name): values[name] for name in values if name in given | set(one.changes)}
    machine = {"gpus": one.case.num_gpus, "gpu": one.gpu or asked.gpu}
    also = {"precision": asked.precision} if asked.precision else {}
    return " ".join(["crius plan", *_sources(files), *flags({**typed, **machine, **also})])


def _sources(files: tuple[Path, ...]) -> list[str]:
    """The recipe and the files of the command line, as typed."""
    configs = [f"--config {shlex.quote(str(file))}" for file in files]
    return [f"--recipe {SOURCES.recipe}", *configs] if SOURCES.recipe else configs


def _settings(case: "Case", settings: dict[str, Any], files: tuple[Path, ...]) -> dict[str, Any]:
    """Settings in the command of a plan besides its recipe and files; without these ``crius train`` uses its own."""
    is_bare = not SOURCES.recipe and not files
    base = flatten(RunConfig()) | (recipe_settings(DEFAULT_RECIPE) if is_bare else {})
    planned = flatten(replace_fields(case.config, settings))
    rests_on = {name: value for name, value in planned.items() if name.startswith(PLANNED) and value != base[name]}
    elsewhere = {name for name, origin in SOURCES.origins.items() if origin != "command line"}
    ordered = sorted(settings | rests_on, key=list(planned).index)
    untold = elsewhere if case.facts else elsewhere | {"model.name", "model.flavor"}  # not a model that a run knows
    needed = (
        {"checkpoint.init_from": "FOLDER"} if case.config.lora.is_on and not case.config.checkpoint.init_from else {}
    )
    return {name: planned[name] for name in ordered if name not in untold} | needed


def _checked(case: "Case", plan: "Plan") -> "CheckReport":
    """The winner in closed form and through the dry run of the real code."""
    assert case.facts is not None
    need_torch()
    run = replace_fields(case.config, plan.settings)
    check_save_ops(run)
    from crius.tools.dry_run.run import dry_run
    from crius.tools.plan.validate import compare_dry_run

    return compare_dry_run(run, case.facts, case.num_gpus, dry_run(run, case.num_gpus, 0, STARTED).as_dict())


def _run_of_row(settings: Mapping[str, str]) -> tuple[RunConfig, "ModelDescription"]:
    """A run with these settings and the defaults of all others, as it would be on a GPU, and its model."""
    from crius.train.inputs import resolve

    try:
        run = run_of("--config", os.devnull, *(f"--{name}={value}" for name, value in settings.items()))
    except ConfigError as error:
        raise ConfigError(error.what) from None
    resolved = resolve(run, Machine(device="cpu" if run.training.device == "cpu" else "cuda"), rows_are_given=True)
    if resolved.model is None:
        raise ConfigError(f"there is no model {run.model.name}/{run.model.flavor} of these sizes.")
    return resolved.config, resolved.model

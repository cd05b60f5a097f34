"""Rules about the pipeline: stages, microbatches, schedule files, and the settings that a split backward excludes."""

from crius.config.facts import Facts, Violations
from crius.config.pipeline import (
    V_SCHEDULES,
    is_layer,
    legal_microbatches,
    microbatch_unit,
    microbatches_allowed,
    num_stages,
    split_stages,
    splits_backward,
    stages_per_rank,
)
from crius.config.resolve import batch_sizes
from crius.config.rules_layout import listed
from crius.config.schedule import PREFIX, read_schedule
from crius.errors import LayoutError
from crius.plugins import install_line, installed_torch

_SPLITTING_TORCH = (2, 13)
"""The first torch whose split backward supports autograd functions written in Python."""


def _is_sound(facts: Facts) -> bool:
    """Whether there is a pipeline with a valid number of stages; if not, another rule reports why."""
    parallelism = facts.config.parallelism
    if parallelism.pipeline_parallel_degree <= 1:
        return False
    return not list(schedule_file_runs(facts)) and not list(stages_per_rank_suit(facts))


def pipeline_flags_have_effect(facts: Facts) -> Violations:
    """Settings of a pipeline are not given without a pipeline, nor given twice."""
    parallelism = facts.config.parallelism
    less = ["first_stage_less_layers", "last_stage_less_layers"]
    found: dict[str, list[str]] = {}
    if parallelism.pipeline_parallel_degree == 1:
        of_pipelines = ["schedule", "schedule_csv", "stages_per_rank", *less, "module_names_per_stage"]
        found["pipeline_parallel_degree 1"] = of_pipelines
    elif parallelism.pipeline_parallel_schedule_csv:
        found["a schedule file, which sets both"] = ["schedule", "stages_per_rank"]
    if parallelism.pipeline_parallel_module_names_per_stage and parallelism.pipeline_parallel_degree > 1:
        found["explicit modules of each stage"] = less
    for reason, fields in found.items():
        vain = facts.changed(f"--{PREFIX}{field}" for field in fields)
        yield from facts.no_effect(vain, f" with {reason}", "leave out --NAME")


def schedule_file_runs(facts: Facts) -> Violations:
    """A schedule file can be read, is for these ranks, and runs to its end."""
    parallelism = facts.config.parallelism
    if parallelism.pipeline_parallel_degree > 1 and parallelism.pipeline_parallel_schedule_csv:
        try:
            read_schedule(parallelism)
        except LayoutError as error:
            yield error


def stages_per_rank_suit(facts: Facts) -> Violations:
    """The schedule can run the given number of stages per rank."""
    parallelism = facts.config.parallelism
    given = parallelism.pipeline_parallel_stages_per_rank
    schedule = parallelism.pipeline_parallel_schedule
    if parallelism.pipeline_parallel_degree <= 1 or parallelism.pipeline_parallel_schedule_csv or given == -1:
        return
    ranges = {"gpipe": (1, 1), "1f1b": (1, 1), "interleave_1f1b": (1, given), **dict.fromkeys(V_SCHEDULES, (2, 2))}
    least, most = ranges.get(schedule, (2, given))
    if not least <= given <= most:
        name = f"{PREFIX}stages_per_rank"
        right = f"exactly {least}" if least == most else f"at least {least}"
        other = f", or --{PREFIX}schedule interleave_1f1b" if most == 1 and given > 1 else ""
        yield facts.layout_error(
            f"{name} {given} does not suit {schedule}, which needs {right} on each rank.",
            name,
            fix=f"--{name} -1 (here: {least})" + other,
        )


def modules_split(facts: Facts) -> Violations:
    """Every stage has a layer, and explicit lists hold every module once."""
    parallelism = facts.config.parallelism
    model = facts.model
    if model is None or not _is_sound(facts):
        return
    modules = model.modules(1)
    layers = sum(is_layer(module.name) for module in modules)
    stages = num_stages(parallelism)
    if stages <= layers:
        try:
            split_stages(modules, stages, parallelism)
        except LayoutError as error:
            yield error
        return
    degree = parallelism.pipeline_parallel_degree
    each = stages_per_rank(parallelism)
    name = f"{PREFIX}degree"
    legal = range(2, layers // each + 1)
    halves = [n for n in legal if degree % n == 0]  # the ranks still divide
    if legal and not parallelism.pipeline_parallel_schedule_csv:
        fix = f"--{name} {max(halves or legal)}"
    else:
        fix = f"--model.num_layers {stages}, or a schedule with fewer stages"
    yield facts.layout_error(
        f"{degree} pipeline ranks with {each} stages each make {stages} stages, more than the {layers} layers of "
        f"{facts.model_name}; legal degrees: {listed([1, *legal])}.",
        name,
        why="every stage has at least one layer",
        fix=fix,
    )


def microbatches_suit(facts: Facts) -> Violations:
    """The schedule can run the number of microbatches that follows from the batch sizes."""
    parallelism = facts.config.parallelism
    training = facts.config.training
    ranks = facts.data_parallel_ranks
    sizes = (training.local_batch_size, training.global_batch_size)
    if not _is_sound(facts) or ranks < 1 or any(size < 1 and size != -1 for size in sizes):
        return
    unit = microbatch_unit(parallelism)
    try:
        batch = batch_sizes(training, ranks, unit)
    except ValueError:
        return  # batch_divides reports it
    count = batch.accumulation
    share = batch.total // ranks
    if microbatches_allowed(parallelism, count):
        return
    legal = legal_microbatches(parallelism, share)
    given = facts.given("training.global_batch_size", "training.local_batch_size")
    of_each = f"the {share} sequences of a data-parallel rank"
    if legal:
        shown = f"legal for {of_each}: {listed(legal)}"
        fix = f"--training.local_batch_size {share // min(legal, key=lambda n: abs(n - count))}"
    else:
        shown = f"no legal count divides {of_each}"
        total = -(-batch.total // (ranks * unit)) * ranks * unit
        fix = f"--training.global_batch_size {total} --training.local_batch_size -1"
    schedule = parallelism.pipeline_parallel_schedule_csv or parallelism.pipeline_parallel_schedule
    yield facts.layout_error(
        f"{count} microbatches per step do not suit {schedule} on {parallelism.pipeline_parallel_degree} pipeline ranks"
        f"; {shown}.",
        *(given or [f"{PREFIX}degree"]),
        why=f"every multiple of {unit} fills the pipeline",
        fix=fix,
    )


def split_backward_goes_with(facts: Facts) -> Violations:
    """A schedule with a split backward needs torch 2.13, eager blocks, and weights that stay gathered."""
    config = facts.config
    parallelism = config.parallelism
    if not _is_sound(facts) or not splits_backward(parallelism):
        return
    if parallelism.pipeline_parallel_schedule_csv:
        asked = "schedule_csv"
        other = "a file with full backwards (B) only"
    else:
        asked = "schedule"
        other = f"--{PREFIX}schedule interleave_1f1b"
    schedule = f"{PREFIX}{asked} {getattr(parallelism, f'pipeline_parallel_{asked}')}"
    if (version := installed_torch()) and version[0] < _SPLITTING_TORCH:
        yield facts.layout_error(
            f"{schedule} needs torch 2.13 or newer; torch {version[1]} is installed.",
            f"{PREFIX}{asked}",
            why="older versions cannot compute gradients of weights apart through autograd functions in Python",
            fix=f"{other}, or {install_line('--upgrade', 'torch>=2.13')}",
        )
    if parallelism.reshard_after_forward_mode == "always":
        yield facts.layout_error(
            f"parallelism.reshard_after_forward_mode always loses gradients under {schedule}.",
            "parallelism.reshard_after_forward_mode",
            why="gradients of weights are computed after another microbatch's forward has freed the gathered weights",
            fix=f"--parallelism.reshard_after_forward_mode never, or {other}",
        )
    if config.activation_checkpoint.mode not in ("none", "auto"):
        yield facts.layout_error(
            f"activation_checkpoint.mode {config.activation_checkpoint.mode} does not go with {schedule}.",
            "activation_checkpoint.mode",
            why="the backward visits a block once for each group of weights: full recomputes it each time, selective "
            "fails",
            fix=f"--activation_checkpoint.mode none, or {other}",
        )
    if config.compile.enable:
        yield facts.layout_error(
            f"compile.enable does not go with {schedule}.",
            "compile.enable",
            why="a compiled block has one backward for inputs and weights, and it would run twice",
            fix=f"--compile.no_enable, or {other}",
        )


PIPELINE_RULES = (
    pipeline_flags_have_effect,
    schedule_file_runs,
    stages_per_rank_suit,
    modules_split,
    microbatches_suit,
    split_backward_goes_with,
)

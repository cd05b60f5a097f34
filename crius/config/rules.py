"""Rules between sections: one named function each, all violations reported together before anything starts.

A rule yields errors; it never raises. Nothing here imports torch. Facts about models, ranks and devices are handed in.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from crius.config.batch import batch_sizes
from crius.config.export import flatten
from crius.config.load import did_you_mean
from crius.config.run import RunConfig
from crius.errors import ConfigError, CriusError, LayoutError
from crius.install import install_line


class _Spec(Protocol):
    @property
    def flavors(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules need to know beside the config.

    Attributes:
        config: the run.
        origin: where the value of a dotted field came from, as a phrase.
        specs: the models by name.
        num_ranks: processes the run will have.
        asked_ranks: processes that ``--nproc``, torchrun or Slurm fixed; 0 when the degrees decide.
        asked_by: who fixed them, as a phrase.
        num_gpus: GPUs that torch can use on this machine.
        local_ranks: processes on this machine.
    """

    config: RunConfig
    origin: Callable[[str], str]
    specs: Mapping[str, _Spec]
    num_ranks: int
    asked_ranks: int
    asked_by: str
    num_gpus: int
    local_ranks: int

    @property
    def data_parallel_ranks(self) -> int:
        """Ranks that read different sequences."""
        parallelism = self.config.parallelism
        return parallelism.data_parallel_replicate_degree * parallelism.shard_degree(self.num_ranks)

    def flag(self, name: str) -> str:
        """``--name (origin)``, for the ``from`` line of an error."""
        return f"--{name} ({self.origin(name)})"


Violations = Iterator[CriusError]
Rule = Callable[[Facts], Violations]


def known_model(facts: Facts) -> Violations:
    """The model and its flavor exist, and overrides of its sizes make sense."""
    model = facts.config.model
    spec = facts.specs.get(model.name)
    if spec is None:
        what = f"no model is called {model.name}{did_you_mean(model.name, facts.specs) or '.'}"
        yield ConfigError(what, where=facts.flag("model.name"), fix=f"use one of {', '.join(facts.specs)}")
    elif model.flavor not in spec.flavors:
        what = f"{model.name} has no flavor {model.flavor}{did_you_mean(model.flavor, spec.flavors) or '.'}"
        yield ConfigError(what, where=facts.flag("model.flavor"), fix=f"use one of {', '.join(spec.flavors)}")
    for name in ("vocab_size", "num_layers"):
        value = getattr(model, name)
        if value != -1 and value < 1:
            yield ConfigError(
                f"model.{name} {value} is not positive.",
                where=facts.flag(f"model.{name}"),
                fix=f"give a positive number, or -1 for the flavor's, e.g. --model.{name} -1",
            )


# Field, whether a value is right, what is right, a value that works. Cheap ranges, one row each.
_RANGES: list[tuple[str, Callable[[Any], bool], str, str]] = [
    *[
        (name, lambda value: value >= 1, "at least 1", default)
        for name, default in (
            ("training.steps", "100"),
            ("training.seq_len", "256"),
            ("metrics.log_interval", "1"),
            ("validation.num_samples", "128"),
            ("data.virtual_shards", "8"),
            ("comm.timeout_seconds", "300"),
            ("profiler.start_step", "5"),
            ("profiler.num_steps", "2"),
            ("parallelism.data_parallel_replicate_degree", "1"),
            ("parallelism.tensor_parallel_degree", "1"),
            ("parallelism.context_parallel_degree", "1"),
            ("parallelism.pipeline_parallel_degree", "1"),
            ("parallelism.expert_parallel_degree", "1"),
        )
    ],
    *[
        (name, lambda value: value == -1 or value >= 1, "-1 or at least 1", "-1")
        for name in (
            "training.local_batch_size",
            "training.global_batch_size",
            "parallelism.data_parallel_shard_degree",
        )
    ],
    *[
        (name, lambda value: value >= 0, "0 or more", "0")
        for name in (
            "training.max_norm",
            "training.gc_interval",
            "lr_scheduler.warmup_steps",
            "validation.interval",
            "metrics.peak_tflops",
            "data.prefetch",
            "optimizer.weight_decay",
            "debug.seed",
            "checkpoint.interval",
        )
    ],
    ("optimizer.lr", lambda value: value > 0, "above 0", "3e-4"),
    ("optimizer.eps", lambda value: value > 0, "above 0", "1e-8"),
    ("optimizer.beta1", lambda value: 0 <= value < 1, "in [0, 1)", "0.9"),
    ("optimizer.beta2", lambda value: 0 <= value < 1, "in [0, 1)", "0.95"),
    ("lr_scheduler.decay_ratio", lambda value: value is None or 0 <= value <= 1, "in [0, 1]", "0.1"),
    ("lr_scheduler.min_lr_factor", lambda value: 0 <= value <= 1, "in [0, 1]", "0.1"),
    ("checkpoint.load_step", lambda value: value >= -1, "-1 or more", "-1"),
    ("validation.fraction", lambda value: 0 <= value < 1, "in [0, 1)", "0.02"),
]


def ranges(facts: Facts) -> Violations:
    """Every number is in the range where it means something."""
    values = flatten(facts.config)
    for name, is_right, right, example in _RANGES:
        value = values[name]
        if isinstance(value, float) and not math.isfinite(value):
            right, is_right = "a finite number", lambda _: False
        if not is_right(value):
            yield ConfigError(
                f"{name} {value} must be {right}.", where=facts.flag(name), fix=f"e.g. --{name} {example}"
            )


def degrees_match_ranks(facts: Facts) -> Violations:
    """The degrees multiply to the number of ranks, where something else fixed it."""
    parallelism, ranks = facts.config.parallelism, facts.asked_ranks
    total = parallelism.total_ranks(ranks)
    if not ranks or total == ranks or total < 1:
        return
    names = (
        "data_parallel_replicate",
        "data_parallel_shard",
        "tensor_parallel",
        "context_parallel",
        "pipeline_parallel",
    )
    degrees = " x ".join(f"{name} {getattr(parallelism, f'{name}_degree')}" for name in names)
    unit = parallelism.ranks_beside_shards()
    if parallelism.data_parallel_shard_degree == -1:
        yield LayoutError(
            f"{ranks} ranks are no multiple of {unit}, the product of {degrees}.",
            where=facts.asked_by,
            why="data_parallel_shard_degree -1 takes the ranks left over",
            fix=f"start {-(-ranks // unit) * unit} ranks, or lower a degree",
        )
    else:
        yield LayoutError(
            f"the degrees multiply to {total} ranks, but there are {ranks}: {degrees}.",
            where=facts.asked_by,
            why="the degrees multiply to the number of processes",
            fix=f"start {total} ranks" + ", or --parallelism.data_parallel_shard_degree -1" * (ranks % unit == 0),
        )


def ranks_fit_gpus(facts: Facts) -> Violations:
    """No more ranks on a machine than it has GPUs, unless the run is on CPUs."""
    device = facts.config.training.device
    if device == "cuda" and facts.num_gpus == 0:
        yield LayoutError(
            "no GPU that torch can use was found.",
            where=facts.flag("training.device"),
            fix="--training.device cpu; crius doctor says what is missing",
        )
    elif device != "cpu" and 0 < facts.num_gpus < facts.local_ranks:
        yield LayoutError(
            f"{facts.local_ranks} ranks on this machine, but {facts.num_gpus} visible GPUs.",
            where=facts.asked_by or "the degrees of [parallelism]",
            why="each rank needs a GPU of its own",
            fix=f"use at most {facts.num_gpus} ranks here, or --training.device cpu",
        )


def batch_divides(facts: Facts) -> Violations:
    """The global batch splits into whole microbatches."""
    training = facts.config.training
    sizes = (training.local_batch_size, training.global_batch_size)
    if any(size < 1 and size != -1 for size in sizes) or facts.data_parallel_ranks < 1:
        return  # ranges reports it
    try:
        batch_sizes(training, facts.data_parallel_ranks)
    except ValueError as error:
        names = ("training.global_batch_size", "training.local_batch_size")
        given = [name for name in names if facts.origin(name) != "default"]
        sentence, _, remedy = str(error).partition("; ")
        yield ConfigError(
            f"{sentence}.",
            where=", ".join(facts.flag(name) for name in given),
            why="every rank takes whole microbatches, and no batch may be smaller than the ranks",
            fix=f"--training.global_batch_size {remedy.rpartition(' ')[2]} ({remedy})",
        )


def reshard_degree_divides(facts: Facts) -> Violations:
    """An integer ``reshard_after_forward_mode`` is a proper divisor of the shard degree."""
    mode = facts.config.parallelism.reshard_after_forward_mode
    name = "parallelism.reshard_after_forward_mode"
    if isinstance(mode, str):
        return
    shards = facts.config.parallelism.shard_degree(facts.num_ranks)
    legal = [n for n in range(2, shards) if shards % n == 0]
    if mode not in legal:
        yield LayoutError(
            f"{name} {mode} is no proper divisor of the shard degree {shards}.",
            where=facts.flag(name),
            why="weights are resharded to groups of that many ranks; 1 is never, the shard degree itself is always",
            fix=f"use {', '.join(map(str, legal)) or 'always or never'}",
        )


def data_path_given(facts: Facts) -> Violations:
    """Sources that read files say which; the standard library needs none."""
    data = facts.config.data
    if data.source == "stdlib" and data.path:
        yield ConfigError(
            f"data.path {', '.join(data.path)} has no effect with data.source stdlib.",
            where=facts.flag("data.path"),
            fix="--data.source text or jsonl",
        )
    elif data.source != "stdlib" and not data.path:
        yield ConfigError(
            f"data.source {data.source} needs data.path.",
            where=facts.flag("data.source"),
            fix=f"e.g. --data.source {data.source} --data.path PATH",
        )
    elif data.source in ("tokens", "huggingface") and len(data.path) > 1:
        yield ConfigError(
            f"data.source {data.source} takes one data.path, not {len(data.path)}.",
            where=facts.flag("data.path"),
            fix=f"--data.path {data.path[0]}",
        )


def data_flags_have_effect(facts: Facts) -> Violations:
    """What was given on the command line for one kind of source is not given to another."""
    source = facts.config.data.source
    owners = {
        "text_field": ("jsonl", "huggingface"),
        "name": ("huggingface",),
        "split": ("huggingface",),
        "virtual_shards": ("huggingface",),
        "shuffle": ("stdlib", "text", "jsonl", "tokens"),
    }
    for name, sources in owners.items():
        if facts.origin(f"data.{name}") == "command line" and source not in sources:
            yield ConfigError(
                f"data.{name} has no effect with data.source {source}.",
                where=facts.flag(f"data.{name}"),
                fix=f"leave it out, or --data.source {sources[0]}",
            )


def virtual_shards_split(facts: Facts) -> Violations:
    """Each rank reads whole virtual shards of a stream."""
    data, ranks = facts.config.data, facts.data_parallel_ranks
    if data.source == "huggingface" and data.virtual_shards >= 1 and ranks >= 1 and data.virtual_shards % ranks:
        yield ConfigError(
            f"data.virtual_shards {data.virtual_shards} is no multiple of the {ranks} data-parallel ranks.",
            where=facts.flag("data.virtual_shards"),
            why="each rank reads whole shards of a stream, so that none tokenises what another needs",
            fix=f"--data.virtual_shards {-(-data.virtual_shards // ranks) * ranks}",
        )


def profiler_window(facts: Facts) -> Violations:
    """A trace that is asked for lies inside the run."""
    profiler, steps = facts.config.profiler, facts.config.training.steps
    last = profiler.start_step + profiler.num_steps - 1
    if profiler.enable and last > steps >= 1:
        yield ConfigError(
            f"the profiler traces steps {profiler.start_step} to {last}, but the run has {steps}.",
            where=facts.flag("profiler.start_step"),
            why="the trace is written when its last step is done",
            fix=f"--profiler.start_step 1 --profiler.num_steps {min(profiler.num_steps, steps)}, or more steps",
        )


def extras_installed(facts: Facts) -> Violations:
    """Optional packages that the run asks for are there."""
    config = facts.config
    needs_datasets = config.data.source == "huggingface"
    wanted = [
        (config.metrics.enable_tensorboard, "metrics.enable_tensorboard", "tensorboard"),
        (needs_datasets, "data.source", "datasets"),
        (config.tokenizer.path != "byte", "tokenizer.path", "tokenizers"),
    ]
    for asked, name, package in wanted:
        if asked and importlib.util.find_spec(package) is None:
            yield ConfigError(
                f"--{name} needs the package {package}, which is not installed.",
                where=facts.flag(name),
                fix=install_line(package),
            )


def built_already(facts: Facts) -> Violations:
    """What parses but is not built yet is refused, never ignored."""
    config = facts.config
    p = config.parallelism
    refused = [
        (p.tensor_parallel_degree > 1, "parallelism.tensor_parallel_degree", "tensor parallelism"),
        (p.context_parallel_degree > 1, "parallelism.context_parallel_degree", "context parallelism"),
        (p.pipeline_parallel_degree > 1, "parallelism.pipeline_parallel_degree", "pipeline parallelism"),
        (p.expert_parallel_degree > 1, "parallelism.expert_parallel_degree", "expert parallelism"),
        (p.enable_async_tensor_parallel, "parallelism.enable_async_tensor_parallel", "async tensor parallelism"),
        (config.compile.enable, "compile.enable", "torch.compile"),
        (config.quantize.dense.float8.enable, "quantize.dense.float8.enable", "float8"),
        (config.quantize.dense.mxfp8.enable, "quantize.dense.mxfp8.enable", "MXFP8"),
        (config.activation_checkpoint.mode != "none", "activation_checkpoint.mode", "activation checkpointing"),
        (config.checkpoint.enable, "checkpoint.enable", "checkpointing"),
        (config.checkpoint.interval > 0, "checkpoint.interval", "checkpointing"),
        (config.checkpoint.load_step >= 0, "checkpoint.load_step", "checkpointing"),
        (config.checkpoint.folder != "checkpoints", "checkpoint.folder", "checkpointing"),
    ]
    schedule = "parallelism.pipeline_parallel_schedule"
    if facts.origin(schedule) != "default":
        refused.append((p.pipeline_parallel_schedule != "1f1b", schedule, "pipeline parallelism"))
    values = flatten(config)
    found = [(name, feature) for asked, name, feature in refused if asked]
    if found:
        named = ", ".join(f"{feature} (--{name} {values[name]})" for name, feature in found)
        yield ConfigError(f"not built yet: {named}.", fix=f"leave out {', '.join(f'--{name}' for name, _ in found)}")


RULES: tuple[Rule, ...] = (
    known_model,
    ranges,
    degrees_match_ranks,
    ranks_fit_gpus,
    batch_divides,
    reshard_degree_divides,
    data_path_given,
    data_flags_have_effect,
    virtual_shards_split,
    profiler_window,
    extras_installed,
    built_already,
)


def check(facts: Facts) -> None:
    """Run every rule.

    Raises:
        ConfigError: all violations in one error; a single one keeps its own class.
    """
    problems = [problem for rule in RULES for problem in rule(facts)]
    if problems:
        raise ConfigError.together(problems)

"""Rules between sections: one named function per rule. All violations are reported together before anything starts.

A rule yields errors and never raises. Nothing here imports torch. Facts about models, ranks and devices are arguments.
"""

import importlib.util
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from crius import plugins
from crius.config.facts import Facts, Rule, Violations
from crius.config.load import did_you_mean
from crius.config.rules_data import DATA_RULES
from crius.config.rules_debugging import DEBUGGING_RULES
from crius.config.rules_experts import EXPERT_RULES
from crius.config.rules_layout import LAYOUT_RULES, divisors, listed
from crius.config.rules_lora import LORA_RULES
from crius.config.rules_moe import MOE_RULES
from crius.config.rules_pipeline import PIPELINE_RULES
from crius.config.rules_quantize import QUANTIZE_RULES
from crius.config.rules_training import (
    CHECKPOINT_RULES,
    KERNEL_RULES,
    OPTIMIZER_RULES,
    REPRODUCIBLE_RULES,
    STABILITY_RULES,
)
from crius.config.toml_file import flatten, imports_of
from crius.errors import ConfigError
from crius.plugins import REQUIREMENTS, install_line


def known_model(facts: Facts) -> Violations:
    """The model and its flavor exist, and the sizes that replace the flavor's are valid."""
    model = facts.config.model
    spec = facts.specs.get(model.name)
    if spec is None:
        known = [*facts.specs, *plugins.installed(plugins.MODELS)]
        named = imports_of(facts.origin("model.name"))
        asks = f"the file asks to run the Python code of a module; if you trust it, add {named}"
        yield facts.error(
            f"no model is called {model.name}{did_you_mean(model.name, known) or '.'}",
            "model.name",
            fix=asks if named else f"use one of {', '.join(known)}",
        )
    elif model.flavor not in spec.known_flavors:
        yield facts.error(
            f"{model.name} has no flavor {model.flavor}{did_you_mean(model.flavor, spec.known_flavors) or '.'}",
            "model.flavor",
            fix=f"use one of {', '.join(spec.known_flavors)}",
        )
    else:
        try:
            spec.describe(model.flavor, **model.sizes)
        except ConfigError as error:
            yield facts.error(error.what, error.where, why=error.why, fix=error.fix)
    for name in model.impossible:
        yield facts.error(
            f"model.{name} {getattr(model, name)} is not positive.",
            f"model.{name}",
            fix=f"give a positive number, or -1 for the flavor's, e.g. --model.{name} -1",
        )


def heads_divide(facts: Facts) -> Violations:
    """Key/value heads divide the query heads, and the width of a head is even: a position turns pairs of numbers."""
    model = facts.model
    if model is None or min(model.num_heads, model.num_kv_heads, model.dim) < 1:
        return  # known_model reports it
    heads = model.num_heads
    widths = {layer.attention.rope.dim for _, layer in model.layers if layer.attention.rope}
    width = next((width for width in widths if width % 2 or width < 2), 0)
    if heads % model.num_kv_heads:
        legal = list(divisors(heads))
        yield facts.error(
            f"model.num_kv_heads {model.num_kv_heads} does not divide the {heads} query heads of "
            f"{facts.model_name}; legal: {listed(legal)}.",
            "model.num_kv_heads",
            fix=f"--model.num_kv_heads {max(n for n in legal if n <= model.num_kv_heads)}",
        )
    given = facts.given("model.dim", "model.num_heads", "model.head_dim")
    if facts.config.model.head_dim == -1 and model.config.head_dim == model.dim // heads and model.dim % heads:
        legal = [n for n in divisors(model.dim) if model.dim // n % 2 == 0]
        near = min(legal, key=lambda n: abs(n - heads), default=0)
        yield facts.error(
            f"model.dim {model.dim} is not a multiple of the {heads} query heads of {facts.model_name}.",
            *(given or ["model.dim"]),
            why="the width of a head is dim / num_heads unless model.head_dim gives it",
            fix=(f"--model.num_heads {near}, or " if near else "") + "give the width of a head as model.head_dim",
        )
    elif width:
        yield facts.error(
            f"positions of {facts.model_name} rotate {width} numbers of a head, an odd number.",
            *(given or ["model.head_dim"]),
            why="a position turns a head's numbers in pairs",
            fix=f"--model.head_dim {width + 1}",
        )


_LONGEST_NAME = 200
_LONGEST_PLAIN = 60


@dataclass(frozen=True)
class Between:
    """Numbers that lie in the same range.

    Attributes:
        right: the range in words.
        is_right: test of a value.
        examples: settings, and of each a value that works.
    """

    right: str
    is_right: Callable[[Any], bool]
    examples: Mapping[str, str]


RANGES = (
    Between(
        "at least 1",
        lambda value: value >= 1,
        {
            "training.steps": "100",
            "training.seq_len": "256",
            "metrics.log_interval": "1",
            "validation.num_samples": "128",
            "data.virtual_shards": "8",
            "comm.timeout_seconds": "300",
            "profiler.start_step": "5",
            "profiler.num_steps": "2",
            "stability.max_consecutive": "5",
            "training.virtual_shards": "8",
            "checkpoint.max_failures": "3",
            "launch.max_failures_at_step": "2",
            "stability.snapshot_interval": "50",
            "optimizer.muon_ns_steps": "5",
            "parallelism.data_parallel_replicate_degree": "1",
            "parallelism.tensor_parallel_degree": "1",
            "parallelism.context_parallel_degree": "1",
            "parallelism.pipeline_parallel_degree": "1",
            "parallelism.expert_parallel_degree": "1",
        },
    ),
    Between(
        "-1 or at least 1",
        lambda value: value == -1 or value >= 1,
        {
            "training.local_batch_size": "-1",
            "training.global_batch_size": "-1",
            "training.epochs": "-1",
            "kernels.loss_chunk_tokens": "-1",
            "parallelism.data_parallel_shard_degree": "-1",
        },
    ),
    Between(
        "0 or more",
        lambda value: value >= 0,
        {
            "training.max_norm": "0",
            "training.gc_interval": "0",
            "lr_scheduler.warmup_steps": "0",
            "validation.interval": "0",
            "samples.every": "0",
            "metrics.peak_tflops": "0",
            "data.prefetch": "0",
            "optimizer.weight_decay": "0",
            "debug.seed": "0",
            "compile.max_recompiles": "0",
            "checkpoint.interval": "0",
            "checkpoint.interval_minutes": "0",
            "checkpoint.keep_every": "0",
            "launch.max_restarts": "0",
            "launch.grace_seconds": "0",
            "watchdog.limit_seconds": "0",
            "sdc.recompute_interval": "0",
            "sdc.replica_interval": "0",
            "profiler.interval": "0",
            "moe.aux_loss_coefficient": "0",
            "moe.z_loss_coefficient": "0",
            "moe.bias_update_rate": "0",
        },
    ),
    Between(
        "above 0",
        lambda value: value > 0,
        {
            "optimizer.lr": "3e-4",
            "optimizer.eps": "1e-8",
            "stability.spike_zscore": "6",
            "watchdog.startup_seconds": "600",
        },
    ),
    Between("at least 10", lambda value: value >= 10, {"stability.window": "100"}),
    Between("at least 2", lambda value: value >= 2, {"checkpoint.keep_last": "3"}),
    Between(
        "in [0, 1)",
        lambda value: 0 <= value < 1,
        {
            "optimizer.muon_momentum": "0.95",
            "optimizer.beta1": "0.9",
            "optimizer.beta2": "0.95",
            "validation.fraction": "0.02",
        },
    ),
    Between(
        "in [0, 1]",
        lambda value: value is None or 0 <= value <= 1,
        {
            "lr_scheduler.decay_ratio": "0.1",
            "lr_scheduler.min_lr_factor": "0.1",
            "activation_checkpoint.memory_budget": "0.5",
        },
    ),
    Between(
        "-1 or more",
        lambda value: value >= -1,
        {
            "parallelism.pipeline_parallel_first_stage_less_layers": "-1",
            "parallelism.pipeline_parallel_last_stage_less_layers": "-1",
            "checkpoint.load_step": "-1",
        },
    ),
)


def ranges(facts: Facts) -> Violations:
    """Every number is in its valid range."""
    values = flatten(facts.config)
    for row in RANGES:
        for name, example in row.examples.items():
            value = values[name]
            is_finite = not isinstance(value, float) or math.isfinite(value)
            if not is_finite or not row.is_right(value):
                right = row.right if is_finite else "a finite number"
                yield facts.error(f"{name} {value} must be {right}.", name, fix=f"e.g. --{name} {example}")


_LARGEST_STEP = 2**36
"""Most tokens of a step."""


def sizes(facts: Facts) -> Violations:
    """No number is so large that torch's tensor sizes overflow."""
    training = facts.config.training
    values = flatten(facts.config)
    largest = {
        "training.steps": 2**63 - 1,
        "training.epochs": 2**63 - 1,
        "debug.seed": 2**63 - 1,
        "model.vocab_size": 2**24,
        "model.num_layers": 100_000,
        "model.dim": 2**20,
        "model.num_heads": 2**20,
        "model.head_dim": 2**20,
        "model.ffn_dim": 2**20,
        "model.expert_ffn_dim": 2**20,
        "model.num_experts": 2**16,
    }
    limits = {name: largest.get(name, 2**31 - 1) for name, value in values.items() if isinstance(value, int)}
    too_large = {name: limit for name, limit in limits.items() if values[name] > limit}
    for name, limit in too_large.items():
        yield facts.error(f"{name} {values[name]} is above {limit:,}.", name, fix=f"--{name} {limit}")
    sequences = max(training.global_batch_size, training.local_batch_size, 1)
    if not too_large and training.seq_len * sequences > _LARGEST_STEP:
        yield facts.error(
            f"a step of {sequences:,} sequences of {training.seq_len:,} tokens has more than {_LARGEST_STEP:,} tokens.",
            "training.seq_len",
            fix=f"--training.seq_len {max(1, _LARGEST_STEP // sequences)}",
        )


def plain_name(text: str) -> str:
    """``text`` as the name of a folder: only words, dots, + and -, and not too long."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.")[:_LONGEST_PLAIN]


def job_name_is_plain(facts: Facts) -> Violations:
    """The name of a run is the name of a folder in ``runs/``, not a path elsewhere."""
    name = facts.config.job.name
    is_path = "/" in name or name.startswith(".") or not name.isprintable() or len(name.encode()) > _LONGEST_NAME
    if name and is_path:
        yield facts.error(
            f"job.name {name if name.isprintable() else ascii(name)} is not a plain name.",
            "job.name",
            why=f"the run folder is runs/NAME: no slash, no leading dot, at most {_LONGEST_NAME} bytes",
            fix=f"--job.name {plain_name(name) or 'mine'}, or --job.run_dir DIR for a folder elsewhere",
        )


def sinks_installed(facts: Facts) -> Violations:
    """Each named sink belongs to an installed package and can be created."""
    for name in facts.config.metrics.sinks:
        try:
            if callable(plugins.load(plugins.SINKS, name)):
                continue
        except ConfigError as error:
            yield error
            continue
        known = plugins.installed(plugins.SINKS)
        if name in known:
            yield facts.error(f"sink {name} cannot be called.", "metrics.sinks", fix="leave it out")
        else:
            yield facts.error(
                f"no sink is called {name}{did_you_mean(name, known) or '.'}",
                "metrics.sinks",
                why=f"installed packages have {', '.join(known) or 'none'} as entry points in {plugins.SINKS}",
                fix="leave it out, or install its package",
            )


def extras_installed(facts: Facts) -> Violations:
    """Optional packages that the run asks for are installed."""
    config = facts.config
    dense = config.quantize.dense
    needs_datasets = config.data.source == "huggingface"
    wanted = [
        (config.metrics.enable_tensorboard, "metrics.enable_tensorboard", "tensorboard"),
        (config.metrics.enable_wandb, "metrics.enable_wandb", "wandb"),
        (needs_datasets, "data.source", "datasets"),
        (config.data.source == "parquet", "data.source", "pyarrow"),
        (config.data.format == "chat", "data.format", "jinja2"),
        (config.tokenizer.path != "byte", "tokenizer.path", "tokenizers"),
        (dense.float8.enable, "quantize.dense.float8.enable", "torchao"),
        (dense.mxfp8.enable, "quantize.dense.mxfp8.enable", "torchao"),
        (config.optimizer.state_dtype == "8bit", "optimizer.state_dtype", "torchao"),
    ]
    for asked, name, package in wanted:
        if asked and importlib.util.find_spec(package) is None:
            yield facts.error(
                f"--{name} needs the package {package}, which is not installed.",
                name,
                fix=install_line(REQUIREMENTS[package]),
            )


RULES: tuple[Rule, ...] = (
    known_model,
    heads_divide,
    ranges,
    sizes,
    job_name_is_plain,
    *LAYOUT_RULES,
    *PIPELINE_RULES,
    *QUANTIZE_RULES,
    *LORA_RULES,
    *MOE_RULES,
    *EXPERT_RULES,
    *KERNEL_RULES,
    *OPTIMIZER_RULES,
    *STABILITY_RULES,
    *CHECKPOINT_RULES,
    *REPRODUCIBLE_RULES,
    *DATA_RULES,
    sinks_installed,
    *DEBUGGING_RULES,
    extras_installed,
)


def check(facts: Facts) -> None:
    """Run every rule.

    Raises:
        ConfigError: all violations in one error; a single violation keeps its own class.
    """
    # the other rules count layers, shapes and ranks, so these must hold first
    problems = list(sizes(facts)) or [problem for rule in RULES for problem in rule(facts)]
    if problems:
        raise ConfigError.together(problems)

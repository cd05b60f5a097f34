"""The model on one rank, and the runner that trains it."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from crius.config.low_precision import (
    TOO_SMALL,
    LinearChoice,
    converts_output,
    is_enabled,
    kind,
    linear_choices,
    summary,
    table,
)
from crius.config.pipeline import describe_microbatches, describe_stages, num_stages, placement, split_stages
from crius.config.resolve import BatchSizes, LossChunks, loss_chunks
from crius.config.run import RunConfig
from crius.config.training import DenseQuantizeConfig, OptimizerConfig
from crius.kernels.linear_cross_entropy import Chunks, score_block, softcapped_score
from crius.models import registry
from crius.models.decoder import check_decoder
from crius.models.description import ModelDescription
from crius.models.layers import loss_of
from crius.models.moe import MixtureOfExperts
from crius.parallel.apply import Applied, materialize, parallelize
from crius.parallel.compile import compile_loss
from crius.parallel.fsdp import GradientSync
from crius.parallel.gradients import Gradients
from crius.parallel.init import draw_weight, init_rules
from crius.parallel.mesh import Mesh
from crius.parallel.pipeline import Pipeline
from crius.parallel.reproducible import ReproducibleGradients
from crius.parallel.runtime import World
from crius.parallel.stages import order_of, prune, simulate, stage_costs, stage_indices, stage_table
from crius.quantize.convert import Converted, convert, missing_matmuls, precompute_scales
from crius.quantize.frozen import fill, quantize_base, quantized_linears
from crius.train.inputs import run_batch_sizes, run_modules
from crius.train.step import Accumulation, Pipelined, Runner

log = logging.getLogger("crius.train")


@dataclass(frozen=True)
class Job:
    """A run as seen by one of its ranks, from which the rank's part of the model is built.

    Attributes:
        config: the run; its rules have been checked.
        facts: description of its model.
        mesh: the ranks, by axes.
        ranks: all ranks.
        is_loaded: whether the weights come from a checkpoint instead of being drawn.
    """

    config: RunConfig
    facts: ModelDescription
    mesh: Mesh
    ranks: World
    is_loaded: bool = field(default=False, kw_only=True)

    @cached_property
    def sizes(self) -> BatchSizes:
        """Sizes of the batch."""
        return run_batch_sizes(self.config, self.mesh.layout.batch)

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        """Device type of the run."""
        return "cuda" if self.ranks.device.type == "cuda" else "cpu"

    @property
    def num_tokens(self) -> int:
        """Tokens of a sequence on one rank of its context-parallel group."""
        return self.config.training.seq_len // self.mesh.layout.cp

    @property
    def copied(self) -> list[str]:
        """The trained weights that two stages of a pipeline each have a copy of."""
        is_trained = self.mesh.layout.pp > 1 and self.facts.adapted is None
        return list(self.facts.config.ties.values()) if is_trained else []


@dataclass(frozen=True)
class LowPrecision:
    """Which linear layers run in low precision, and how.

    Attributes:
        dense: the section of the settings.
        choices: choices for all linear layers of the whole model.
        emulated: reason why matmuls are emulated; empty if the device has such matmuls.
    """

    dense: DenseQuantizeConfig
    choices: list[LinearChoice]
    emulated: str

    def convert(self, part: nn.Module, shard_degree: int) -> Converted:
        """Convert the chosen layers of a part of the model; FSDP will split its weights over ``shard_degree`` ranks."""
        emulate = bool(self.emulated)
        return convert(part, self.choices, self.dense, emulate=emulate, shard_degree=shard_degree)

    @property
    def how(self) -> str:
        """Recipe and emulation, in a few words."""
        recipe = self.dense.float8.recipe if kind(self.dense) == "float8" else "blocks of 32"
        parts = [recipe, f"emulated: {self.emulated}" if self.emulated else "", self.advice]
        return "; ".join(filter(None, parts))

    @property
    def advice(self) -> str:
        """Advice if the filter of small layers leaves nothing to convert; empty if some layer is converted."""
        is_filtered = any(choice.reason == TOO_SMALL for choice in self.choices)
        is_empty = not any(choice.is_converted for choice in self.choices)
        return "--quantize.dense.auto_filter off converts small layers too" if is_filtered and is_empty else ""

    def lines(self) -> list[str]:
        """The precision of each linear layer, as a table. The counts are logged by the effect."""
        *rows, total = table(self.choices)
        rows.append(total.removeprefix(f"{summary(self.choices)}; "))
        if self.dense.pad_inner_dim and all(choice.padded == choice.local for choice in self.choices):
            rows.append("pad_inner_dim: no layer needs padding; tokens that do not fill whole blocks are padded")
        return [f"{kind(self.dense)}: {line}" for line in rows]


def keep_scales(job: Job, parts: Sequence[nn.Module]) -> None:
    """Call after each update: computes the scales of weights that are gathered in float8, if that is asked for."""
    float8 = job.config.quantize.dense.float8
    if float8.enable and float8.precompute_scale:
        precompute_scales(parts, job.mesh.fsdp.get_group("fsdp"))


def low_precision(config: RunConfig, facts: ModelDescription, device_type: str) -> LowPrecision | None:
    """Low precision of a run on this process's device; None if no low precision is on."""
    dense = config.quantize.dense
    if not is_enabled(dense):
        return None
    missing = missing_matmuls(kind(dense), device_type)
    asked = getattr(dense, kind(dense)).emulate
    return planned(config, facts, accelerated=not missing, emulated="as asked" if asked else missing)


def planned(config: RunConfig, facts: ModelDescription, *, accelerated: bool, emulated: str) -> LowPrecision:
    """Low precision of a run whose device is known.

    Args:
        config: the run, with a low precision on.
        facts: sizes of the model.
        accelerated: whether the device has such matmuls.
        emulated: reason why they are emulated; empty if they are not.
    """
    choices = linear_choices(config, facts, facts.plan, accelerated=accelerated)
    return LowPrecision(config.quantize.dense, choices, emulated)


def describe_loss(chunks: LossChunks, num_tokens: int, vocabulary: int, itemsize: int) -> str:
    """Log line about the loss of a microbatch of ``num_tokens``, with logits of ``itemsize`` bytes over a
    ``vocabulary``.
    """
    name = "linear_cross_entropy"
    logits = num_tokens * vocabulary
    if chunks.tokens is None:
        return f"{name}: off ({chunks.reason}): {_mib(logits * itemsize)} of logits per microbatch"
    tokens = min(num_tokens, chunks.tokens)
    eager = logits * 3 * 4  # backward: log-softmax, its gradient, the gradient of the logits
    here = tokens * vocabulary * itemsize + min(tokens, chunks.block_tokens) * vocabulary * 4
    return (
        f"{name}: chunked ({chunks.reason}): at most {tokens:,} of {num_tokens:,} tokens at a time, "
        f"{_mib(here)} of logits instead of {_mib(eager)}"
    )


def set_up_loss(part: nn.Module, chunks: LossChunks, config: RunConfig) -> None:
    """Make a part of the model compute its loss in ``chunks``, compiled if asked for."""
    loss = loss_of(part)
    score = softcapped_score(loss.softcap) if loss.softcap else score_block
    loss.chunks = None if chunks.tokens is None else Chunks(chunks.tokens, chunks.block_tokens, score)
    if config.compile.enable and config.compile.loss:
        loss.token_losses = compile_loss(loss.token_losses, config.compile)
        loss.chunks = loss.chunks and replace(loss.chunks, score=compile_loss(loss.chunks.score, config.compile))


def set_up_balance(part: nn.Module, config: RunConfig, sequences: int) -> None:
    """Make the experts of a part of the model balance as ``[moe]`` says, over global batches of ``sequences``."""
    moe = config.moe
    for module in part.modules():
        if isinstance(module, MixtureOfExperts):
            module.router.aux_scale = moe.aux_loss_coefficient / sequences if moe.aux_loss == "sequence" else 0.0
            module.router.z_scale = moe.z_loss_coefficient / (sequences * config.training.seq_len)
            module.bias_rate = moe.bias_update_rate


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


@dataclass(frozen=True)
class Built:
    """The model on this rank.

    Attributes:
        parts: its stages, laid out on the mesh; one without pipeline parallelism.
        stages: indices of these stages in the pipeline, ascending.
        modules: modules of every stage of the pipeline, in order.
        names: trained parameters of the whole model, in order.
        applied: report of the passes, per part.
        precision: linear layers of the model in low precision; None if low precision is off.
        converted: report of their conversion, per part.
    """

    parts: list[nn.Module]
    stages: list[int]
    modules: list[tuple[str, ...]]
    names: list[str]
    applied: list[Applied]
    precision: LowPrecision | None
    converted: list[Converted]


def build_parts(job: Job) -> Built:
    """This rank's stages of the model, laid out on the mesh, still on the meta device."""
    config = job.config
    facts = job.facts
    mesh = job.mesh
    all_stages = split_stages(run_modules(config, facts), num_stages(config.parallelism), config.parallelism)
    indices = stage_indices(config.parallelism, mesh.pp.get_local_rank() if mesh.pp else 0)
    model = on_meta(config, facts)
    check_decoder(model, facts)
    names = [weight.name for weight in facts.trained]
    precision = low_precision(config, facts, mesh.fsdp.device_type)
    built = [build_part(job, all_stages[index], precision) for index in indices]
    parts, applied, converted = map(list, zip(*built, strict=True))
    return Built(parts, indices, all_stages, names, applied, precision, converted)


def on_meta(config: RunConfig, facts: ModelDescription) -> nn.Module:
    """The whole model, with shapes and without numbers. Frozen weights have the dtype that they are multiplied in."""
    training = config.training
    dtype = getattr(torch, training.mixed_precision_param if config.lora.is_on else training.dtype)
    with torch.device("meta"):
        model = registry.build(facts)
    for parameter in model.parameters():  # not model.to: a buffer keeps its dtype
        parameter.data = parameter.data.to(dtype)
    return model


def build_part(
    job: Job, modules: Sequence[str], precision: LowPrecision | None
) -> tuple[nn.Module, Applied, Converted]:
    """The stage with only ``modules``, in ``precision``, laid out on the mesh, still on the meta device."""
    part = on_meta(job.config, job.facts)
    prune(part, modules)
    converted = precision.convert(part, job.mesh.layout.fsdp) if precision else Converted(0)
    quantize_base(part, job.facts, job.config.lora)
    set_up_loss(part, run_loss(job, precision), job.config)
    set_up_balance(part, job.config, job.sizes.total)
    applied = parallelize(part, job.facts, job.mesh, job.config)
    return part, applied, converted


def run_loss(job: Job, precision: LowPrecision | None) -> LossChunks:
    """Chunks that the run computes its loss in, the same on every rank."""
    in_low_precision = precision is not None and converts_output(precision.choices, job.facts.plan)
    tp = job.mesh.layout.tp
    vocab_size = job.facts.vocab_size
    return loss_chunks(job.config, vocab_size, job.device_type, num_ranks=tp, in_low_precision=in_low_precision)


def build_model(job: Job) -> Built:
    """This rank's stages of the model. Their shards are drawn from ``debug.seed``, or NaN if they will be loaded."""
    built = build_parts(job)
    begin = time.monotonic()
    rules = init_rules(job.facts)
    for part in built.parts:
        materialize(part, rules, job.ranks, job.config, draws=not job.is_loaded)
        if not (job.is_loaded or job.config.checkpoint.init_from):
            for name, linear in quantized_linears(part):
                shape = (linear.out_features, linear.in_features)
                weight = f"{name}.weight"
                fill(name, linear, draw_weight(weight, shape, rules, job.config.debug.seed))
    how = "not drawn, as a checkpoint will be loaded" if job.is_loaded else f"drawn from seed {job.config.debug.seed}"
    log.info("init: weights %s, %.1f s", how, time.monotonic() - begin)
    return built


def run_optimizer(job: Job) -> OptimizerConfig:
    """``[optimizer]``; under ``training.reproducible`` with kernels that round a number the same at any place in a
    tensor.

    On a CPU torch's fused AdamW rounds the last numbers of a tensor, which do not fill a vector, in a different way.
    The split of a weight decides which numbers these are. On a GPU each number goes through the same function
    (``adam_math`` of fused_adam_utils.cuh), whether it was loaded in a vector or by itself.
    """
    training = job.config.training
    optimizer = job.config.optimizer
    is_on_host = job.device_type == "cpu" or training.enable_cpu_offload
    if not (training.reproducible and is_on_host) or optimizer.implementation != "fused":
        return optimizer
    log.info("reproducible: adamw foreach instead of fused, whose last bits depend on the split of the weights")
    return replace(optimizer, implementation="foreach")


def build_gradients(job: Job, parameters: Sequence[tuple[str, nn.Parameter]]) -> Gradients:
    """The gradients of ``parameters`` (this rank's, by name), with the way they are summed over the ranks."""
    trained = [parameter for _, parameter in parameters]
    ranks = job.ranks
    if job.config.training.reproducible:
        return ReproducibleGradients(trained, job.mesh, ranks)
    twice = [parameter for name, parameter in parameters if name in job.copied]
    return Gradients(trained, ranks.size // job.mesh.layout.pp, ranks.device, twice)


def build_runner(job: Job, built: Built) -> Runner:
    """The runner of the parts over a batch: an accumulation loop, or a pipeline."""
    mesh = job.mesh
    sizes = job.sizes
    parallelism = job.config.parallelism
    training = job.config.training
    itemsize = getattr(torch, training.mixed_precision_param).itemsize
    vocabulary = -(-job.facts.vocab_size // mesh.layout.tp)
    chunks = run_loss(job, built.precision)
    log.info("%s", describe_loss(chunks, sizes.local * job.num_tokens, vocabulary, itemsize))
    if mesh.pp is None:
        sync = GradientSync(built.parts[0], parallelism, training, mesh)
        if training.reproducible:
            shards = f"{training.virtual_shards} virtual shards of {sizes.local} sequences"
            how = f"{sizes.accumulation} per rank, summed as a tree: {sync.describe(mesh.layout, sizes.accumulation)}"
            log.info("reproducible: %s, %s", shards, how)
        elif sizes.accumulation > 1:
            log.info("gradient_sync %s: %s", training.gradient_sync, sync.describe(mesh.layout, sizes.accumulation))
        return Accumulation(built.parts[0], sync, sizes.local)
    modules = run_modules(job.config, job.facts)
    timeline = simulate(order_of(parallelism, sizes.accumulation), stage_costs(modules, built.modules))
    asked = training.local_batch_size != -1
    log.info("pipeline: %s", describe_microbatches(parallelism, sizes.accumulation, sizes.local, asked))
    if about_stages := describe_stages(parallelism):
        log.info("pipeline: %s", about_stages)
    for line in stage_table(modules, built.modules, placement(parallelism), timeline):
        log.info("pipeline: %s", line)
    for name in job.copied:
        log.info("pipeline: %s is tied: the first and the last stage each have a copy and sum its gradients", name)
    log.info("gradient_sync deferred: the schedule synchronises once per step, after the last microbatch")
    dtype = getattr(torch, training.mixed_precision_param)
    where = (mesh.pp, job.ranks.device, job.facts.dim, dtype)
    pipeline = Pipeline(built.parts, built.stages, parallelism, sizes.accumulation, *where)
    return Pipelined(pipeline)

"""``parallelize``: the passes over a model, in their order."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from crius.config.run import RunConfig
from crius.models.description import ModelDescription
from crius.models.plan import ShardingPlan
from crius.parallel.activation_checkpoint import CheckpointedBlocks, apply_activation_checkpoint
from crius.parallel.allocate import allocate
from crius.parallel.compile import compile_blocks
from crius.parallel.context import apply_context_parallel
from crius.parallel.expert import apply_expert_parallel, experts_of
from crius.parallel.fsdp import describe_units, end_backward_at_adapters, needs_fsdp, plan_units, shard
from crius.parallel.init import Init, init_parameters
from crius.parallel.lora import apply_lora
from crius.parallel.mesh import Mesh
from crius.parallel.runtime import World
from crius.parallel.tensor import apply_tensor_parallel

log = logging.getLogger("crius.parallel")


@dataclass(frozen=True)
class Applied:
    """Result of the passes over one stage of the model.

    Attributes:
        checkpointed: blocks that recompute activations.
        compiled: number of compiled blocks.
    """

    checkpointed: CheckpointedBlocks
    compiled: int


def parallelize(model: nn.Module, facts: ModelDescription, mesh: Mesh, config: RunConfig) -> Applied:
    """Lay out a meta-device model, or one pipeline stage of it, on ``mesh``, in place.

    Raises:
        PlanError: the plan and the model do not match.
    """
    plan = facts.plan
    if mesh.tp:
        _say(apply_tensor_parallel(model, plan, facts.num_kv_heads, mesh.tp))
    if facts.num_experts:
        _say(apply_expert_parallel(model, plan, mesh))
    if mesh.cp:
        _say(apply_context_parallel(model, mesh.cp, config.parallelism.context_parallel_method))
    if facts.adapted:
        _say(apply_lora(model, facts, config.lora, getattr(torch, config.training.dtype)))
    checkpointed = apply_activation_checkpoint(model, plan, config.activation_checkpoint, bool(config.compile.enable))
    compiled = compile_blocks(model, plan, config.compile) if config.compile.enable else 0
    _say(_shard(model, plan, mesh, config))
    return Applied(checkpointed, compiled)


def _shard(model: nn.Module, plan: ShardingPlan, mesh: Mesh, config: RunConfig) -> Iterator[str]:
    layout = mesh.layout
    training = config.training
    if not needs_fsdp(layout, config):
        dtype = training.mixed_precision_param if config.lora.is_on else f"their {training.dtype}"
        yield f"fsdp: off: one rank holds all weights, computes in {dtype}, and does not communicate"
        return
    units = plan_units(plan, model, config.parallelism)
    experts = experts_of(model, plan)
    shard(model, units, mesh, training, experts, casts=not config.lora.is_on)
    if config.lora.is_on:
        end_backward_at_adapters(model, units, plan.embeddings[0])
    offloaded = ", offloaded to host memory" if training.enable_cpu_offload else ""
    yield (
        f"fsdp: {len(units)} units, weights split over {layout.fsdp} ranks, {layout.dp_replicate} replicas, "
        f"param {training.mixed_precision_param}, reduce {training.mixed_precision_reduce}{offloaded}"
    )
    if experts and mesh.experts:
        yield f"fsdp: weights of experts are split over {layout.efsdp} ranks that have the same experts"
    yield from describe_units(units, layout, config.parallelism, training)


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        log.info("%s", line)


def materialize(
    model: nn.Module, rules: list[tuple[str, Init]], world: World, config: RunConfig, *, draws: bool
) -> None:
    """Allocate this rank's shards and initialise them from ``debug.seed``, equally under every layout.

    Args:
        model: the model, laid out on the meta device.
        rules: initialisation rules of the whole model.
        world: all ranks.
        config: config of the run.
        draws: see ``init_parameters``.
    """
    allocate(model, "cpu" if config.training.enable_cpu_offload else world.device, buffers=world.device)
    init_parameters(model, rules, config.debug.seed, draws=draws)

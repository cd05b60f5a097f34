"""``parallelize``: the passes over a model, in an order to read aloud."""

import logging

from torch import nn

from crius.config.parallelism import ParallelismConfig
from crius.config.training import TrainingConfig
from crius.models.init import Init
from crius.models.plan import ShardingPlan
from crius.parallel.fsdp import describe_units, plan_units, shard
from crius.parallel.init import init_parameters
from crius.parallel.mesh import Mesh
from crius.parallel.runtime import World

log = logging.getLogger("crius.parallel")


def parallelize(
    model: nn.Module, plan: ShardingPlan, mesh: Mesh, parallelism: ParallelismConfig, training: TrainingConfig
) -> None:
    """Lay a meta-device model out on ``mesh``, in place.

    Raises:
        PlanError: the plan and the model do not match.
    """
    units = plan_units(plan, model, parallelism)
    shard(model, units, mesh, training)
    dims = mesh.dims
    log.info(
        "fsdp: %d units, weights split over %d ranks, %d replicas, param %s, reduce %s%s",
        len(units),
        dims.dp_shard,
        dims.dp_replicate,
        training.mixed_precision_param,
        training.mixed_precision_reduce,
        ", offloaded to host memory" if training.enable_cpu_offload else "",
    )
    for line in describe_units(units, dims, parallelism, training):
        log.info("%s", line)


def materialize(
    model: nn.Module, rules: list[tuple[str, Init]], world: World, training: TrainingConfig, seed: int
) -> None:
    """Allocate this rank's shards and start them from ``seed``, alike under every layout."""
    model.to_empty(device="cpu" if training.enable_cpu_offload else world.device)
    init_parameters(model, rules, seed)

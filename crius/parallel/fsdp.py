"""FSDP2 for every data-parallel layout: shards, replicas of shards (HSDP), plain replicas (DDP) and one process.

DDP is a mesh of replicas with one shard each, one process a mesh of one: ``fully_shard`` serves all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from crius.config.parallelism import ParallelismConfig
from crius.config.training import TrainingConfig
from crius.models.plan import ShardingPlan
from crius.parallel.mesh import Mesh


@dataclass(frozen=True)
class FsdpUnit:
    """Modules that are gathered together, and what happens to their weights after the forward.

    Attributes:
        modules: names of the modules.
        reshard_after_forward: freed (True), kept (False), or resharded to so many ranks.
        reason: why, in a few words.
    """

    modules: tuple[str, ...]
    reshard_after_forward: bool | int
    reason: str


def plan_units(plan: ShardingPlan, model: nn.Module, parallelism: ParallelismConfig) -> list[FsdpUnit]:
    """The FSDP units of ``model`` with the reshard decision of each."""
    names = [name for name, _ in model.named_modules() if name]
    plan.check_coverage(names, [name for name, _ in model.named_parameters()])
    groups = plan.expand_units(names)
    first_names = [name for name, _ in model.named_children()]
    last = max(groups, key=lambda group: max(first_names.index(name.split(".")[0]) for name in group))
    mode = parallelism.reshard_after_forward_mode
    return [FsdpUnit(group, *_reshard(mode, group == last)) for group in groups]


def _reshard(mode: str | int, is_last: bool) -> tuple[bool | int, str]:
    if isinstance(mode, int):
        return mode, f"asked for groups of {mode} ranks"
    if mode != "default":
        return mode == "always", f"asked for {mode}"
    if is_last:
        return False, "its backward comes next"
    return True, "frees its weights until the backward"


def shard(model: nn.Module, units: list[FsdpUnit], mesh: Mesh, training: TrainingConfig) -> None:
    """Shard ``model`` in place. Gradients are summed over ranks, never averaged: the loss is already normalised."""
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,  # the only float inputs of a block are its activations and the rotary cos and sin
    )
    on_gpu = mesh.fsdp.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=on_gpu) if training.enable_cpu_offload else OffloadPolicy()
    for unit in units:
        modules = [model.get_submodule(name) for name in unit.modules]
        fully_shard(
            modules,
            mesh=mesh.fsdp,
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=precision,
            offload_policy=offload,
        )
    fully_shard(model, mesh=mesh.fsdp, mp_policy=precision, offload_policy=offload)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # Gloo cannot pre-multiply; a plain sum is NCCL's fast path too


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules of ``model`` that FSDP manages, the root among them."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


class GradientSync:
    """When the gradients of a step's microbatches are synchronised, and how long gathered weights stay.

    Attributes:
        reason: what was chosen and why, for the log.
    """

    def __init__(self, model: nn.Module, parallelism: ParallelismConfig, training: TrainingConfig) -> None:
        assert isinstance(model, FSDPModule)
        self._model = model
        self._mode = training.gradient_sync
        self._keep_weights = parallelism.reshard_after_forward_mode == "never"
        self.reason = {
            "immediate": "reduce-scatter and all-reduce in every microbatch (asked)",
            "deferred": "all in the last microbatch, unsharded gradients until then (asked)",
            "auto": "reduce-scatter in every microbatch, all-reduce over replicas in the last (auto: least memory "
            "without repeated all-reduce)",
        }[self._mode]

    def start_microbatch(self, is_last: bool) -> None:
        """Call before the forward of each microbatch."""
        self._model.set_is_last_backward(is_last)
        if self._mode == "deferred":
            self._model.set_requires_gradient_sync(is_last)
        elif self._mode == "auto":
            self._model.set_requires_all_reduce(is_last)
        if self._keep_weights:
            self._model.set_reshard_after_backward(is_last)

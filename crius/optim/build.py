"""The optimizer of a run, with its parameter groups."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from crius.config.training import OptimizerConfig
from crius.models.plan import ShardingPlan
from crius.optim.adamw import MOMENTS, AdamW, CompactAdamW
from crius.optim.base import Joint, Optimizer
from crius.optim.groups import ParameterGroup, parameter_groups
from crius.optim.muon import Muon
from crius.optim.storage import Storage, nbytes
from crius.shards import local_tensor

log = logging.getLogger("crius.optim")

IMPLEMENTATIONS = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "for-loop": {"fused": False, "foreach": False},
}


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], plan: ShardingPlan, config: OptimizerConfig, *, seed: int
) -> Optimizer:
    """The optimizer over this rank's shards; prints its groups and its memory.

    Args:
        parameters: by their names in the whole model, already laid out.
        plan: says which are embeddings, and which matrices are inside repeated blocks.
        config: the section.
        seed: of stochastic rounding.
    """
    groups = parameter_groups(parameters, plan, config)
    named = {parameter: name for group in groups for parameter, name in group.members.items()}
    storage = Storage(named, config.state_dtype, config.stochastic_rounding, seed)
    by_muon = [group for group in groups if group.optimizer == "muon"]
    by_adamw = [group for group in groups if group.optimizer == "adamw"]
    names = (["muon"] if by_muon else []) + ([f"adamw {config.implementation}"] if by_adamw else [])
    described = "; ".join(group.describe() for group in groups)
    log.info("optimizer: %s, %d groups: %s", " and ".join(names), len(groups), described)
    log.info("optimizer: %s", _memory(groups, storage, config))
    parts: list[Optimizer] = []
    if by_adamw:
        parts.append(_adamw(by_adamw, storage, config))
    if by_muon:
        parts.append(_muon(by_muon, storage, config))
    on_gpu = all(local_tensor(parameter).device.type == "cuda" for parameter in named)
    for part in parts:
        part.takes_found_inf = on_gpu and (config.implementation == "fused" or isinstance(part, Muon))
    return parts[0] if len(parts) == 1 else Joint(parts)


def _adamw(groups: list[ParameterGroup], storage: Storage, config: OptimizerConfig) -> Optimizer:
    betas, how = (config.beta1, config.beta2), IMPLEMENTATIONS[config.implementation]
    weights = (parameter for group in groups for parameter in group.members)
    if config.state_dtype == "float32" and all(weight.dtype == torch.float32 for weight in weights):
        return AdamW(_torch_groups(groups, config), lr=config.lr, betas=betas, eps=config.eps, **how)
    return CompactAdamW(_torch_groups(groups, config), storage, betas=betas, eps=config.eps, **how)


def _muon(groups: list[ParameterGroup], storage: Storage, config: OptimizerConfig) -> Optimizer:
    return Muon(
        _torch_groups(groups, config),
        storage,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        ns_steps=config.muon_ns_steps,
        adjust_lr=config.muon_adjust_lr,
    )


def _torch_groups(groups: list[ParameterGroup], config: OptimizerConfig) -> list[dict[str, Any]]:
    return [
        {
            "params": list(group.members),
            "name": group.name,
            "lr": config.lr * group.lr_factor,
            "lr_factor": group.lr_factor,
            "weight_decay": group.weight_decay,
        }
        for group in groups
    ]


def _memory(groups: list[ParameterGroup], storage: Storage, config: OptimizerConfig) -> str:
    """What this rank holds between two steps; gradients have the dtype of the weights."""
    states = sum(
        storage.state_bytes(parameter, 1 if group.optimizer == "muon" else len(MOMENTS))
        for group in groups
        for parameter in group.members
    )
    weights = nbytes(parameter for group in groups for parameter in group.members)
    dtypes = {parameter.dtype for group in groups for parameter in group.members}
    is_rounded = torch.bfloat16 in dtypes or config.state_dtype == "bfloat16"
    how = ", bfloat16 rounded " + ("stochastically" if config.stochastic_rounding else "to nearest")
    return (
        f"states {states / 2**30:.3f} GiB per rank ({config.state_dtype}), weights {weights / 2**30:.3f}, "
        f"gradients {weights / 2**30:.3f}{how if is_rounded else ''}"
    )

"""The optimizer with its parameter groups."""

import logging
from collections.abc import Iterable

import torch
from torch import nn

from crius.config.optimizer import OptimizerConfig
from crius.models.plan import ShardingPlan, match

log = logging.getLogger("crius.optim")

IMPLEMENTATIONS = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "for-loop": {"fused": False, "foreach": False},
}


def decay_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], plan: ShardingPlan, config: OptimizerConfig
) -> dict[str, list[nn.Parameter]]:
    """Parameters by group: ``decayed``, ``1d`` and ``embeddings``; a group without parameters is left out."""
    groups: dict[str, list[nn.Parameter]] = {"decayed": [], "embeddings": [], "1d": []}
    for name, parameter in parameters:
        if any(match(f"{pattern}.weight", name) for pattern in plan.embeddings) and not config.decay_embeddings:
            groups["embeddings"].append(parameter)
        elif parameter.dim() < 2 and not config.decay_1d:
            groups["1d"].append(parameter)
        else:
            groups["decayed"].append(parameter)
    return {name: members for name, members in groups.items() if members}


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], plan: ShardingPlan, config: OptimizerConfig
) -> torch.optim.AdamW:
    """AdamW over this rank's shards, by name, in the implementation that was asked for; prints its groups."""
    groups = decay_groups(parameters, plan, config)
    decay = {name: config.weight_decay if name == "decayed" else 0.0 for name in groups}
    log.info(
        "optimizer: adamw %s, %d groups: %s",
        config.implementation,
        len(groups),
        "; ".join(
            f"{name} {len(members)} tensors, {sum(p.numel() for p in members):,} parameters, weight decay {decay[name]}"
            for name, members in groups.items()
        ),
    )
    return torch.optim.AdamW(
        [{"params": members, "weight_decay": decay[name], "name": name} for name, members in groups.items()],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        **IMPLEMENTATIONS[config.implementation],
    )

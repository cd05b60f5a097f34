"""Builds the optimizer of a run: parameter groups, each with its optimizer, learning rate and weight decay."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from crius.config.param_groups import Kind, group_of, parse_group
from crius.config.training import LRSchedulerConfig, OptimizerConfig
from crius.models.plan import ShardingPlan, match
from crius.optim.adamw import MOMENTS, AdamW, CompactAdamW
from crius.optim.muon import Muon
from crius.optim.state import Joint, Optimizer
from crius.optim.storage import Storage, nbytes
from crius.shards import local_tensor
from crius.units import counted

log = logging.getLogger("crius.optim")

IMPLEMENTATIONS = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "for-loop": {"fused": False, "foreach": False},
}


@dataclass
class ParameterGroup:
    """Parameters with the same settings.

    Attributes:
        name: ``decayed``, ``router``, ``embeddings``, ``1d`` or ``muon``, preceded by the pattern of
            ``optimizer.param_groups`` if there is one.
        optimizer: optimizer that updates the parameters.
        lr_factor: factor on the learning rate of the step.
        weight_decay: decoupled weight decay.
        members: the parameters with their names. A pipeline rank may have both copies of a tied weight, with one name.
    """

    name: str
    optimizer: Kind
    lr_factor: float
    weight_decay: float
    members: dict[nn.Parameter, str] = field(default_factory=dict)

    def describe(self) -> str:
        """Name, counts and settings."""
        numel = sum(parameter.numel() for parameter in self.members)
        counts = f"{self.name} {counted(len(self.members), 'tensor')}, {numel:,} parameters"
        factor = f", lr x {self.lr_factor}" if self.lr_factor != 1 else ""
        return f"{counts}, weight decay {self.weight_decay}{factor}"


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], plan: ShardingPlan, config: OptimizerConfig
) -> list[ParameterGroup]:
    """Put every parameter into one group. Groups without a pattern come first.

    Raises:
        ValueError: an entry of ``config.param_groups`` is malformed; config rules report it before anything starts.
    """
    specs = [parse_group(text) for text in config.param_groups]
    order = {"decayed": 0, "muon": 1, "router": 2, "embeddings": 3, "1d": 4}
    groups: dict[tuple[int, int], ParameterGroup] = {}
    for name, parameter in parameters:
        spec = group_of(specs, name)
        base = decay_class(name, parameter, plan, config)
        optimizer: Kind = "muon" if config.name == "muon" and is_inner_matrix(name, parameter, plan) else "adamw"
        decay = config.weight_decay if base in ("decayed", "router") else 0.0
        factor = 1.0
        if spec:
            optimizer = spec.optimizer or optimizer
            factor = spec.lr_factor
            decay = decay if spec.weight_decay is None else spec.weight_decay
        label = "muon" if optimizer == "muon" and base == "decayed" else base
        place = (1 + specs.index(spec) if spec else 0, order[label] + len(order) * (optimizer == "muon"))
        full_name = f"{spec.pattern}/{label}" if spec else label
        group = groups.setdefault(place, ParameterGroup(full_name, optimizer, factor, decay))
        group.members[parameter] = name
    return [groups[place] for place in sorted(groups)]


def decay_class(name: str, parameter: nn.Parameter, plan: ShardingPlan, config: OptimizerConfig) -> str:
    """``embeddings`` or ``1d``, which by default have no weight decay, or ``decayed`` or ``router``, which have it."""
    if any(match(f"{pattern}.weight", name) for pattern in plan.embeddings) and not config.decay_embeddings:
        return "embeddings"
    if parameter.dim() < 2 and not config.decay_1d:
        return "1d"
    return "router" if plan.routers and match(f"{plan.routers}.weight", name) else "decayed"


def is_inner_matrix(name: str, parameter: nn.Parameter, plan: ShardingPlan) -> bool:
    """Whether Muon may update the parameter: a matrix in a repeated block, but not an embedding, output or router."""
    parts = name.split(".")
    modules = [".".join(parts[:end]) for end in range(1, len(parts))]
    is_inside = any(match(plan.block, module) for module in modules)
    excluded = (*plan.embeddings, *plan.sensitive, *filter(None, (plan.routers,)))
    is_excluded = any(match(pattern, module) for pattern in excluded for module in modules)
    return parameter.dim() == 2 and is_inside and not is_excluded


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], plan: ShardingPlan, config: OptimizerConfig, *, seed: int
) -> Optimizer:
    """The optimizer over this rank's shards. Logs its groups and its memory.

    Args:
        parameters: parameters with their names in the whole model, already laid out.
        plan: sharding plan, which names embeddings and repeated blocks.
        config: the section.
        seed: seed of stochastic rounding.
    """
    groups = parameter_groups(parameters, plan, config)
    named = {parameter: name for group in groups for parameter, name in group.members.items()}
    storage = Storage(named, config.state_dtype, config.stochastic_rounding, seed)
    by_muon = [group for group in groups if group.optimizer == "muon"]
    by_adamw = [group for group in groups if group.optimizer == "adamw"]
    names = (["muon"] if by_muon else []) + ([f"adamw {config.implementation}"] if by_adamw else [])
    described = "; ".join(group.describe() for group in groups)
    log.info("optimizer: %s, %s: %s", " and ".join(names), counted(len(groups), "group"), described)
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
    betas = (config.beta1, config.beta2)
    how = IMPLEMENTATIONS[config.implementation]
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


def state_bytes(groups: list[ParameterGroup], storage: Storage) -> int:
    """Bytes of the states of all parameters on this rank."""
    return sum(
        storage.state_bytes(parameter, 1 if group.optimizer == "muon" else len(MOMENTS))
        for group in groups
        for parameter in group.members
    )


def _memory(groups: list[ParameterGroup], storage: Storage, config: OptimizerConfig) -> str:
    """Memory of this rank between two steps, for the log. Gradients have the dtype of the weights."""
    states = state_bytes(groups, storage)
    weights = nbytes(parameter for group in groups for parameter in group.members)
    dtypes = {parameter.dtype for group in groups for parameter in group.members}
    is_rounded = torch.bfloat16 in dtypes or config.state_dtype == "bfloat16"
    how = ", bfloat16 rounded " + ("stochastically" if config.stochastic_rounding else "to nearest")
    return (
        f"states {states / 2**30:.3f} GiB per rank ({config.state_dtype}), weights {weights / 2**30:.3f}, "
        f"gradients {weights / 2**30:.3f}{how if is_rounded else ''}"
    )


class WarmupStableDecay:
    """Factor on the peak learning rate at each step: warmup-stable-decay as torchtitan defines it.

    Linear warmup over ``w`` steps, then 1, then a decay over ``d`` steps. ``d`` is ``decay_ratio`` of the run, or
    everything after the warmup. The first step of the decay still has factor 1, and its end is one step after the run,
    so that no step trains at ``min_lr_factor`` 0: 10 steps with ``w`` 2 give 1/2, 1, 1, 7/8, 6/8, ..., 1/8.

    Args:
        config: the section.
        steps: steps of the run, at least 1.
    """

    def __init__(self, config: LRSchedulerConfig, steps: int) -> None:
        self._config = config
        self._warmup = min(config.warmup_steps, steps)
        if config.warmup_steps > steps:
            log.info("lr_scheduler: warmup_steps %d clamped to the %d steps of the run", config.warmup_steps, steps)
        left = steps - self._warmup
        ratio = config.decay_ratio
        self._decay = left if ratio is None else min(left, round(steps * ratio))
        if ratio is not None and round(steps * ratio) > left:
            log.info("lr_scheduler: decay of %d steps clamped to the %d after warmup", round(steps * ratio), left)
        self._decay_start = steps - self._decay  # the first step of the decay, which is still at the peak

    def factor(self, step: int) -> float:
        """Factor at ``step``, counted from 0."""
        if step < self._warmup:
            return (step + 1) / self._warmup
        if step <= self._decay_start:
            return 1.0
        progress = (step - self._decay_start) / self._decay
        shape = {
            "linear": 1 - progress,
            "sqrt": 1 - math.sqrt(progress),
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        }[self._config.decay_type]
        return self._config.min_lr_factor + (1 - self._config.min_lr_factor) * shape

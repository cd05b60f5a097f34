"""Which parameter is updated by which optimizer, at which rate, with which decay."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from crius.config.param_groups import Kind, group_of, parse_group
from crius.config.training import OptimizerConfig
from crius.models.plan import ShardingPlan, match


@dataclass
class ParameterGroup:
    """Parameters with the same settings.

    Attributes:
        name: ``decayed``, ``embeddings``, ``1d`` or ``muon``, behind the pattern of ``optimizer.param_groups``, if any.
        optimizer: that updates them.
        lr_factor: of the learning rate of the step.
        weight_decay: decoupled.
        members: the parameters with their names; of a tied weight a pipeline rank may have two with one name.
    """

    name: str
    optimizer: Kind
    lr_factor: float
    weight_decay: float
    members: dict[nn.Parameter, str] = field(default_factory=dict)

    def describe(self) -> str:
        """Name, counts and settings."""
        numel = sum(parameter.numel() for parameter in self.members)
        counts = f"{self.name} {len(self.members)} tensors, {numel:,} parameters"
        factor = f", lr x {self.lr_factor}" if self.lr_factor != 1 else ""
        return f"{counts}, weight decay {self.weight_decay}{factor}"


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], plan: ShardingPlan, config: OptimizerConfig
) -> list[ParameterGroup]:
    """All parameters, each in one group; the groups without a pattern first.

    Raises:
        ValueError: an entry of ``config.param_groups`` is not of its form; rules say so before anything starts.
    """
    specs = [parse_group(text) for text in config.param_groups]
    order = {"decayed": 0, "muon": 1, "embeddings": 2, "1d": 3}
    groups: dict[tuple[int, int], ParameterGroup] = {}
    for name, parameter in parameters:
        spec = group_of(specs, name)
        base = decay_class(name, parameter, plan, config)
        optimizer: Kind = "muon" if config.name == "muon" and is_inner_matrix(name, parameter, plan) else "adamw"
        decay, factor = config.weight_decay if base == "decayed" else 0.0, 1.0
        if spec:
            optimizer, factor = spec.optimizer or optimizer, spec.lr_factor
            decay = decay if spec.weight_decay is None else spec.weight_decay
        label = "muon" if optimizer == "muon" and base == "decayed" else base
        place = (1 + specs.index(spec) if spec else 0, order[label] + len(order) * (optimizer == "muon"))
        full_name = f"{spec.pattern}/{label}" if spec else label
        group = groups.setdefault(place, ParameterGroup(full_name, optimizer, factor, decay))
        group.members[parameter] = name
    return [groups[place] for place in sorted(groups)]


def decay_class(name: str, parameter: nn.Parameter, plan: ShardingPlan, config: OptimizerConfig) -> str:
    """``embeddings`` and ``1d``, which by default do not decay, or ``decayed``."""
    if any(match(f"{pattern}.weight", name) for pattern in plan.embeddings) and not config.decay_embeddings:
        return "embeddings"
    return "1d" if parameter.dim() < 2 and not config.decay_1d else "decayed"


def is_inner_matrix(name: str, parameter: nn.Parameter, plan: ShardingPlan) -> bool:
    """Whether Muon is for this parameter: a matrix of a repeated block, neither embedding nor output layer."""
    parts = name.split(".")
    modules = [".".join(parts[:end]) for end in range(1, len(parts))]
    is_inside = any(match(plan.block, module) for module in modules)
    is_excluded = any(match(pattern, module) for pattern in (*plan.embeddings, *plan.sensitive) for module in modules)
    return parameter.dim() == 2 and is_inside and not is_excluded

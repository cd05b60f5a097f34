"""``ShardingPlan``: how a model is laid out on a mesh, as a table of strings."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from crius.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """Rows ``module pattern -> style``; a ``*`` in a pattern stands for one path component.

    Attributes:
        block: the repeated module, the unit of FSDP, activation checkpointing, compile and pipeline cuts.
        fsdp_units: modules that are gathered together, in forward order; ``a+b`` is one unit of several modules.
        embeddings: modules whose weights are looked up, not multiplied; weight decay leaves them alone by default.
        sensitive: linear layers that stay in high precision unless a config says otherwise, such as the output layer.
        tensor_parallel: module pattern to the name of a style in ``crius.parallel.tensor``.
        heads: fields of the model's config that tensor parallelism splits: query heads first, then key/value heads.
    """

    block: str
    fsdp_units: tuple[str, ...]
    embeddings: tuple[str, ...]
    sensitive: tuple[str, ...] = ()
    tensor_parallel: Mapping[str, str] = field(default_factory=dict)
    heads: tuple[str, ...] = ()

    def expand_units(self, module_names: Iterable[str]) -> list[tuple[str, ...]]:
        """The FSDP units of a model, in order, each as the names of its modules.

        Raises:
            PlanError: a pattern that matches no module.
        """
        names = list(module_names)
        units: list[tuple[str, ...]] = []
        for unit in self.fsdp_units:
            parts = [_matches(pattern, names) for pattern in unit.split("+")]
            if len(parts) == 1:
                units.extend((name,) for name in parts[0])
            else:
                units.append(tuple(name for part in parts for name in part))
        return units

    def check_coverage(self, module_names: Iterable[str], parameter_names: Iterable[str]) -> None:
        """Check both ways: every pattern matches a module, every parameter is in one FSDP unit and one tensor row.

        Raises:
            PlanError: names the pattern or the parameter.
        """
        names = list(module_names)
        for pattern in (self.block, *self.embeddings, *self.sensitive, *self.tensor_parallel):
            _matches(pattern, names)
        units = self.expand_units(names)
        for parameter in parameter_names:
            owners = [unit for unit in units if any(parameter.startswith(f"{name}.") for name in unit)]
            if len(owners) != 1:
                found = "no FSDP unit" if not owners else f"{len(owners)} FSDP units"
                raise PlanError(f"parameter {parameter} is in {found} of the sharding plan.", fix="add or narrow a row")
            module = parameter.rpartition(".")[0]
            if self.tensor_parallel and not any(match(row, module) for row in self.tensor_parallel):
                raise PlanError(f"no tensor-parallel row of the sharding plan covers {parameter}.", fix="add a row")


def match(pattern: str, name: str) -> bool:
    """Whether ``name`` fits ``pattern``; ``*`` is one path component."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def _matches(pattern: str, names: list[str]) -> list[str]:
    found = [name for name in names if match(pattern, name)]
    if not found:
        raise PlanError(f"the sharding plan's row {pattern!r} matches no module of the model.", fix="mend the pattern")
    return found

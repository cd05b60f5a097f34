"""``Facts``: input of the rules between sections: a resolved run, its models and its machine."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from crius.config.resolve import Resolved
from crius.errors import ConfigError, CriusError


@dataclass(frozen=True, kw_only=True)
class Facts(Resolved):
    """A resolved run, and the other facts that the rules need.

    Attributes:
        origin: gives the source of the value of a dotted field, as a phrase.
        specs: models by name (``crius.models.spec.ModelSpec``).
        num_ranks: processes that the run will have.
        asked_ranks: processes that ``--nproc``, torchrun or Slurm fixed; 0 if the degrees decide.
        asked_by: phrase that says who fixed them.
        num_gpus: GPUs that torch can use on this machine.
        num_cores: CPU cores of this machine.
        local_ranks: processes on this machine.
        is_dry: whether nothing is started, and one process stands for any number of ranks.
        sharing: library by which ranks on one GPU communicate; empty: each rank needs a GPU of its own.
    """

    origin: Callable[[str], str]
    specs: Mapping[str, Any]
    num_ranks: int
    asked_ranks: int
    asked_by: str
    num_gpus: int
    num_cores: int
    local_ranks: int
    is_dry: bool = False
    sharing: str = ""

    @property
    def plan(self) -> Any:
        """The model's sharding plan (``crius.models.plan.ShardingPlan``); None if there is no such model."""
        return self.model.plan if self.model else None

    @property
    def heads(self) -> tuple[str, ...]:
        """Fields of the model's config that tensor parallelism splits: query heads first, then key/value heads."""
        return self.plan.heads if self.plan else ()

    @property
    def data_parallel_ranks(self) -> int:
        """Ranks that read different sequences."""
        parallelism = self.config.parallelism
        return parallelism.data_parallel_replicate_degree * parallelism.shard_degree(self.num_ranks)

    @property
    def has_experts(self) -> bool:
        """Whether the layers of the model have experts."""
        return self.model is not None and self.model.num_experts > 0

    @property
    def model_name(self) -> str:
        """Architecture and flavor."""
        return f"{self.config.model.name}/{self.config.model.flavor}"

    def flag(self, name: str) -> str:
        """``--name (origin)``, for the ``from`` line of an error."""
        return f"--{name} ({self.origin(name)})"


Violations = Iterator[CriusError]
Rule = Callable[[Facts], Violations]


def without_effect(facts: Facts, rows: Iterable[tuple[str, str, str]], why: str = "") -> Violations:
    """Errors about settings on the command line that have no effect in this run.

    Args:
        facts: of the run.
        rows: for each such setting its name, with or without dashes, the end of the sentence, and what to type instead.
        why: reason for all rows.
    """
    for shown, reason, fix in rows:
        name = shown.removeprefix("--")
        if facts.origin(name) == "command line":
            yield ConfigError(f"{shown} has no effect{reason}.", where=facts.flag(name), why=why, fix=fix)

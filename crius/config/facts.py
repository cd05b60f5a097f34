"""``Facts``: input of the rules between sections: a resolved run, its models and its machine."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from crius.config.resolve import Resolved
from crius.config.run import RunConfig
from crius.config.toml_file import flatten
from crius.errors import ConfigError, CriusError, LayoutError


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

    def shown(self, name: str) -> str:
        """A setting as an error writes it: with its value, unless it is on."""
        value = flatten(self.config)[name]
        return name if value is True else f"{name} {value}"

    def given(self, *names: str) -> list[str]:
        """Those of ``names`` that the run does not leave at their defaults."""
        return [name for name in names if self.origin(name) != "default"]

    def changed(self, names: Iterable[str]) -> list[str]:
        """Those of ``names``, with or without dashes, whose values are not the default ones."""
        values = flatten(self.config)
        defaults = flatten(RunConfig())
        fields = {name: name.removeprefix("--") for name in names}
        return [name for name, field in fields.items() if values[field] != defaults[field]]

    def error(self, what: str, *names: str, why: str = "", fix: str = "") -> ConfigError:
        """An error that comes from the settings ``names``."""
        return ConfigError(what, where=", ".join(map(self.flag, names)), why=why, fix=fix)

    def layout_error(self, what: str, *names: str, why: str = "", fix: str = "") -> LayoutError:
        """An error of the layout that comes from the settings ``names``."""
        return LayoutError(what, where=", ".join(map(self.flag, names)), why=why, fix=fix)

    def no_effect(self, names: Iterable[str], reason: str, fix: str, why: str = "") -> "Violations":
        """Errors about settings on the command line that have no effect in this run.

        Args:
            names: settings as the error writes them, with or without dashes.
            reason: end of the sentence.
            fix: what to type instead; ``NAME`` stands for the setting.
            why: reason, if the sentence does not say it.
        """
        for shown in names:
            name = shown.removeprefix("--")
            if self.origin(name) == "command line":
                fixed = fix.replace("NAME", name)
                yield self.error(f"{shown} has no effect{reason}.", name, why=why, fix=fixed)


Violations = Iterator[CriusError]
Rule = Callable[[Facts], Violations]

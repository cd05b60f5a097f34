"""``ParallelDims``: the degrees of the mesh axes and their arithmetic. No torch, no process group."""

import math
from dataclasses import dataclass, fields

from crius.config.parallelism import ParallelismConfig
from crius.errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Degree of each axis of the mesh, outermost first; every degree is at least 1."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def build(cls, config: ParallelismConfig, num_ranks: int) -> "ParallelDims":
        """The degrees of ``config`` on ``num_ranks`` ranks.

        Raises:
            LayoutError: the degrees do not multiply to ``num_ranks``.
        """
        dims = cls(
            pp=config.pipeline_parallel_degree,
            dp_replicate=config.data_parallel_replicate_degree,
            dp_shard=config.shard_degree(num_ranks),
            cp=config.context_parallel_degree,
            tp=config.tensor_parallel_degree,
        )
        if dims.num_ranks != num_ranks:
            raise LayoutError(
                f"the degrees multiply to {dims.num_ranks} ranks, but there are {num_ranks}: {dims}.",
                fix=f"start {dims.num_ranks} ranks",
            )
        return dims

    @property
    def degrees(self) -> dict[str, int]:
        """Axis name to degree, outermost first."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def num_ranks(self) -> int:
        """Product of all degrees."""
        return math.prod(self.degrees.values())

    @property
    def fsdp(self) -> int:
        """Ranks that weights are split over by FSDP: those of a sequence too."""
        return self.dp_shard * self.cp

    @property
    def batch(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def layout(self) -> str:
        """The layout as it is spelled everywhere, such as ``pp2_hsdp2x2_tp2``; ``1`` for one device."""
        data = f"hsdp{self.dp_replicate}x{self.dp_shard}"
        if 1 in (self.dp_replicate, self.dp_shard):
            data = f"ddp{self.dp_replicate}" if self.dp_replicate > 1 else f"fsdp{self.dp_shard}"
        terms = [("pp", self.pp), (data, self.batch), ("cp", self.cp), ("tp", self.tp)]
        named = [name if name == data else f"{name}{degree}" for name, degree in terms if degree > 1]
        return "_".join(named) or "1"

    def __str__(self) -> str:
        return " x ".join(f"{axis} {degree}" for axis, degree in self.degrees.items())

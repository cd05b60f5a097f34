"""What a run leaves to the machine, decided once, before the model is built, and the same on every rank."""

import logging
import platform
from collections import Counter
from typing import Protocol

import torch

from crius.config.dtype import auto_dtype
from crius.config.layout import replace_fields
from crius.config.run import RunConfig
from crius.errors import ConfigError
from crius.host_memory import free_host_bytes
from crius.models.description import ModelDescription
from crius.parallel.runtime import World
from crius.train.inputs import with_dtype

log = logging.getLogger("crius.train")


class Recomputation(Protocol):
    """The mode that ``activation_checkpoint.mode auto`` is."""

    def __call__(
        self, config: RunConfig, facts: ModelDescription, num_ranks: int, budget: float, *, on_gpu: bool
    ) -> str:
        """Decide, and say what and why.

        Args:
            config: the run.
            facts: of its model.
            num_ranks: of the run.
            budget: bytes of a rank that may be planned with.
            on_gpu: where it computes.
        """


USABLE = 0.9
"""Share of a device's memory that is planned with; the rest is for what the plan does not see, and for its error."""


def decide(config: RunConfig, facts: ModelDescription, ranks: World, recomputation: Recomputation | None) -> RunConfig:
    """``config`` with every ``auto`` that depends on the machine decided; says what and why.

    Args:
        config: the run; its rules have been checked.
        facts: of its model.
        ranks: all ranks, which decide alike.
        recomputation: decides what is recomputed; without it nothing is.

    Raises:
        ConfigError: ``auto`` means another dtype on another rank.
    """
    on_gpu = ranks.device.type == "cuda"
    config = with_dtype(config, on_gpu=on_gpu)
    _check_one_dtype(config, ranks)
    dtype, why = auto_dtype(on_gpu=on_gpu)
    stored, param = config.training.dtype, config.training.mixed_precision_param
    log.info("precision: %s weights, computed in %s; auto is %s here, on %s", stored, param, dtype, why)
    if config.activation_checkpoint.mode != "auto":
        return config
    budget = USABLE * _memory(ranks)
    mode = recomputation(config, facts, ranks.size, budget, on_gpu=on_gpu) if recomputation else "none"
    return replace_fields(config, {"activation_checkpoint.mode": mode})


def _check_one_dtype(config: RunConfig, ranks: World) -> None:
    """Refuse ranks that would hang: one computes in another dtype than the others, on another CPU for example."""
    name = "training.mixed_precision_param"
    found: list[str] = ranks.gather_json(config.training.mixed_precision_param)
    if len(set(found)) == 1:
        return
    first = ", ".join(f"{dtype} on {found.count(dtype)}, first rank {found.index(dtype)}" for dtype in sorted({*found}))
    raise ConfigError(
        f"{name} differs between ranks: {first}.",
        where=f"--{name}",
        why="auto is decided on each machine, by what its device multiplies",
        fix=f"the same on all of them, e.g. --{name} {found[0]}",
    )


def _memory(ranks: World) -> float:
    """Bytes that a rank can have, the least over all ranks: of its GPU, or its share of what its host has free."""
    if ranks.device.type == "cuda":
        own = float(torch.cuda.get_device_properties(ranks.device).total_memory)
        return min(ranks.gather_json(own))
    free = ranks.gather_json([platform.node(), free_host_bytes()])
    neighbours = Counter(host for host, _ in free)
    return min(nbytes / neighbours[host] for host, nbytes in free)

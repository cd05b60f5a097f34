"""What a run leaves to the machine, decided once, before the model is built, and the same on every rank."""

import logging
import platform
from collections import Counter
from dataclasses import replace

import torch

from crius.config.dtype import auto_dtype
from crius.config.pipeline import splits_backward
from crius.config.run import RunConfig
from crius.errors import ConfigError
from crius.host_memory import free_host_bytes
from crius.models.description import ModelDescription
from crius.parallel.dims import ParallelDims
from crius.parallel.runtime import World
from crius.planner.estimate import Estimate
from crius.planner.from_config import from_config
from crius.planner.memory import memory
from crius.planner.workload import Checkpointing
from crius.train.inputs import with_dtype

log = logging.getLogger("crius.train")

MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""From the least recomputation to the most: on 8b it adds 0, 10 and 24 % to the FLOPs."""

USABLE = 0.9
"""Share of a device's memory that is planned with; the rest is for what the plan does not see, and for its error."""


def decide(config: RunConfig, facts: ModelDescription, dims: ParallelDims, ranks: World) -> RunConfig:
    """``config`` with every ``auto`` that depends on the machine decided; says what and why.

    Args:
        config: the run; its rules have been checked.
        facts: of its model.
        dims: its layout.
        ranks: all ranks, which decide alike.

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
    found = estimates(config, facts, dims, ranks.device)
    mode = choose_mode(found, budget)
    gib = budget / 2**30
    for name, one in found.items():
        mark = "chosen" if name == mode else "fits" if one.total <= budget else "does not fit"
        log.info("activation_checkpoint auto: %s: %s of %.2f a rank, %s", name, _shown(one), gib, mark)
    if found[mode].total > budget and ranks.rank == 0:
        log.warning(
            "activation_checkpoint auto: %s is estimated at %.2f of %.2f GiB a rank and may not fit: lower "
            "--training.local_batch_size, or split the model over more ranks",
            mode,
            found[mode].total / 2**30,
            gib,
        )
    return replace(config, activation_checkpoint=replace(config.activation_checkpoint, mode=mode))


def estimates(
    config: RunConfig, facts: ModelDescription, dims: ParallelDims, device: torch.device
) -> dict[Checkpointing, Estimate]:
    """Of the modes that the run can take, from the least recomputation to the most.

    Of a GPU with what its allocator reserves, of a CPU the tensors alone: the process is there already.
    """
    on_gpu = device.type == "cuda"
    workload = from_config(config, facts, dims.num_ranks, device="cuda" if on_gpu else "cpu")
    modes = MODES[:1] if splits_backward(config.parallelism) else MODES
    return {
        mode: memory(
            replace(workload, activation_checkpoint=mode, selective_layers=None),
            counting="reserved" if on_gpu else "tensors",
        )
        for mode in modes
    }


def choose_mode(found: dict[Checkpointing, Estimate], budget: float) -> Checkpointing:
    """The first that fits into ``budget`` bytes, else the last."""
    fitting = [mode for mode, one in found.items() if one.total <= budget]
    return fitting[0] if fitting else list(found)[-1]


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


def _shown(estimate: Estimate) -> str:
    """The total, the parts that matter, and the moment."""
    large = {name: nbytes for name, nbytes in estimate.parts.items() if nbytes >= estimate.total / 100}
    shown = " + ".join(f"{name} {nbytes / 2**30:.2f}" for name, nbytes in large.items())
    return f"{estimate.total / 2**30:.2f} GiB ({shown}; {estimate.note})"


def _memory(ranks: World) -> float:
    """Bytes that a rank can have, the least over all ranks: of its GPU, or its share of what its host has free."""
    if ranks.device.type == "cuda":
        own = float(torch.cuda.get_device_properties(ranks.device).total_memory)
        return min(ranks.gather_json(own))
    free = ranks.gather_json([platform.node(), free_host_bytes()])
    neighbours = Counter(host for host, _ in free)
    return min(nbytes / neighbours[host] for host, nbytes in free)

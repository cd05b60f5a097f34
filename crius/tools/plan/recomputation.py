"""``activation_checkpoint.mode auto``: the least recomputation with which a run fits."""

import logging
from dataclasses import replace

from crius.config.pipeline import splits_backward
from crius.config.run import RunConfig
from crius.models.description import ModelDescription
from crius.tools.plan.memory import memory
from crius.tools.plan.workload import MODES, Checkpointing, Estimate, from_config
from crius.units import GIB

log = logging.getLogger("crius.train")


def recomputation(
    config: RunConfig, facts: ModelDescription, num_ranks: int, budget: float, *, on_gpu: bool
) -> Checkpointing:
    """See ``crius.train.setup.Recomputation``. Logs as rank 0 does; the other ranks have files of their own."""
    found = estimates(config, facts, num_ranks, on_gpu=on_gpu)
    mode = choose_mode(found, budget)
    for name, one in found.items():
        mark = "chosen" if name == mode else "fits" if one.total <= budget else "does not fit"
        log.info("activation_checkpoint auto: %s: %s of %.2f a rank, %s", name, _shown(one), budget / GIB, mark)
    if found[mode].total > budget:
        log.warning(
            "activation_checkpoint auto: %s is estimated at %.2f of %.2f GiB a rank and may not fit: lower "
            "--training.local_batch_size, or split the model over more ranks",
            mode,
            found[mode].total / GIB,
            budget / GIB,
        )
    return mode


def estimates(
    config: RunConfig, facts: ModelDescription, num_ranks: int, *, on_gpu: bool
) -> dict[Checkpointing, Estimate]:
    """Of the modes that the run can take, from the least recomputation to the most.

    Of a GPU with what its allocator reserves, of a CPU the tensors alone: the process is there already.
    """
    workload = from_config(config, facts, num_ranks, device="cuda" if on_gpu else "cpu")
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


def _shown(estimate: Estimate) -> str:
    """The total, the parts that matter, and the moment."""
    large = {name: nbytes for name, nbytes in estimate.parts.items() if nbytes >= estimate.total / 100}
    shown = " + ".join(f"{name} {nbytes / GIB:.2f}" for name, nbytes in large.items())
    return f"{estimate.total / GIB:.2f} GiB ({shown}; {estimate.note})"

"""Recomputation and microbatch of a run that leaves them to the memory of its ranks: the fastest choice that fits."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from crius.config.layout import Layout
from crius.config.pipeline import microbatch_unit, splits_backward
from crius.config.resolve import open_microbatches
from crius.config.run import RunConfig, replace_fields
from crius.host import Machine
from crius.models.description import ModelDescription
from crius.tools.plan.compare import summed
from crius.tools.plan.hardware import KNOWN, of_machine
from crius.tools.plan.memory import memory
from crius.tools.plan.time import step_time
from crius.tools.plan.workload import MODES, Estimate, from_config
from crius.units import GIB

log = logging.getLogger("crius.train")

MODE = "activation_checkpoint.mode"
MICROBATCH = "training.local_batch_size"


@dataclass(frozen=True)
class FitCandidate:
    """One way to train a run.

    Attributes:
        mode: mode of activation checkpointing.
        microbatch: sequences per microbatch.
        memory: on a GPU with the memory that its allocator reserves; on a CPU only the tensors, as the process already
            exists.
        seconds: seconds of a step.
    """

    mode: str
    microbatch: int
    memory: Estimate
    seconds: float

    def __str__(self) -> str:
        """Names and total."""
        return f"{self.mode} with {self.microbatch} per microbatch: {self.memory.total / GIB:.2f} GiB"


def fit(config: RunConfig, facts: ModelDescription, machine: Machine, budget: float) -> tuple[dict[str, Any], str]:
    """See ``crius.train.setup.Fit``. Warns if nothing fits."""
    found = candidates(config, facts, machine)
    chosen = choose(found, budget)
    faster = [str(one) for one in found[: found.index(chosen)]]
    which = "the fastest that fits" + (f" ({faster[-1]} would not)" if faster else "")
    if chosen.memory.total <= budget and len(found) == 1:
        return {MODE: chosen.mode}, ""
    if chosen.memory.total > budget:
        which = f"the least of {len(found)}" if len(found) > 1 else "which is more"
        smaller = "lower --training.local_batch_size, or " if chosen.microbatch > 1 else ""
        log.warning("the run may not fit: %ssplit the model over more ranks", smaller)
    parts = f"{summed(chosen.memory.parts, GIB)}; {chosen.memory.note}"
    why = f"auto: activation_checkpoint {chosen} of {budget / GIB:.2f} per rank, {which}: {parts}"
    is_default = chosen.microbatch == max(one.microbatch for one in found)
    return {MODE: chosen.mode} | ({} if is_default else {MICROBATCH: chosen.microbatch}), why


def candidates(config: RunConfig, facts: ModelDescription, machine: Machine) -> list[FitCandidate]:
    """Possible choices for ``config``, the fastest first. On a CPU the microbatch is as given, or as by default.

    If no known GPU has all precisions, times are those of an H100: they are only compared with each other.
    """
    known = of_machine(machine.name) if machine.on_gpu else None
    hardware = known if known and known.float8_flops else KNOWN["h100-80g"]

    def found() -> Iterator[FitCandidate]:
        sizes = open_microbatches(config.training, batch, microbatch_unit(config.parallelism))
        for mode in _modes(config):
            for size in sizes if machine.on_gpu else sizes[:1]:
                one = replace_fields(config, {MODE: mode, MICROBATCH: size})
                work = from_config(one, facts, machine.ranks, device="cuda" if machine.on_gpu else "cpu")
                counted = memory(work, counting="reserved" if machine.on_gpu else "tensors")
                yield FitCandidate(mode, size, counted, step_time(work, hardware).total)

    batch = Layout.of(config.parallelism, machine.ranks).batch
    return sorted(found(), key=lambda one: one.seconds)


def _modes(config: RunConfig) -> tuple[str, ...]:
    """Modes from the least recomputation to the most."""
    mode = config.activation_checkpoint.mode or "none"
    if mode != "auto":
        return (mode,)
    return MODES[:1] if splits_backward(config.parallelism) else MODES


def choose(found: list[FitCandidate], budget: float) -> FitCandidate:
    """The first choice that fits into ``budget`` bytes, else the smallest."""
    fitting = (one for one in found if one.memory.total <= budget)
    return next(fitting, min(found, key=lambda one: one.memory.total))

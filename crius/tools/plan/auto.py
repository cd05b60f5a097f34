"""``parallelism.auto``: chooses the layout of a run before anything starts. Torch-free."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crius.config.layout import DEGREES
from crius.config.resolve import AUTO_GLOBAL_BATCH_SIZE
from crius.config.run import RunConfig, replace_fields
from crius.config.toml_file import flatten
from crius.errors import ConfigError
from crius.host import cpu_with_cores, free_host_bytes
from crius.models.description import ModelDescription
from crius.tools.plan.hardware import KNOWN, Hardware, of_machine, shared
from crius.tools.plan.legal import Case
from crius.tools.plan.plan import recommend
from crius.tools.plan.variants import overrides
from crius.units import GIB
from crius.untrusted import text_named

FLAG = "parallelism.auto"

FILLED = (
    *DEGREES.values(),
    *("activation_checkpoint.mode", "training.local_batch_size", "training.gradient_sync"),
    "parallelism.reshard_after_forward_mode",
    "parallelism.pipeline_parallel_schedule",
    "parallelism.pipeline_parallel_stages_per_rank",
)
"""Fields that it fills if they were not given; a given degree is refused. None of them changes the loss curve."""

_GPUS = Path("/proc/driver/nvidia/gpus")
_DRY_RUN_GPU = "h100-80g"


@dataclass(frozen=True)
class Filled:
    """The layout of a run.

    Attributes:
        overrides: fields that were filled, and ``parallelism.auto`` off, so that the run's TOML means this layout
            everywhere.
        lines: the choices and their reasons.
    """

    overrides: dict[str, Any]
    lines: list[str]


def fill(
    config: RunConfig,
    facts: ModelDescription,
    hardware: Hardware,
    num_ranks: int,
    origin: Callable[[str], str],
) -> Filled:
    """The fastest layout of ``config`` that fits on ``num_ranks`` ranks of ``hardware``.

    Args:
        config: the run, with its dtypes decided.
        facts: description of its model.
        hardware: hardware of each rank.
        num_ranks: available ranks.
        origin: gives the origin of a dotted field's value.

    Raises:
        ConfigError: degrees were given as well.
        LayoutError: nothing fits.
    """
    given = [name for name in DEGREES.values() if origin(name) != "default"]
    if given:
        named = ", ".join(f"--{name} ({origin(name)})" for name in given)
        raise ConfigError(
            f"{FLAG} chooses all degrees, but some were given: {named}.",
            where=f"--{FLAG} ({origin(FLAG)})",
            fix=f"leave out {', '.join(f'--{name}' for name in given)}, or leave out --{FLAG}",
        )
    if config.training.global_batch_size == -1:  # as on this many ranks without a flag: it decides the curve
        unit = num_ranks * max(1, config.training.local_batch_size)
        total = -(-AUTO_GLOBAL_BATCH_SIZE // unit) * unit
        config = replace_fields(config, {"training.global_batch_size": total})
    filled = {name for name in FILLED if origin(name) == "default"}
    case = Case(
        config=config,
        shape=facts,
        hardware=hardware,
        num_gpus=num_ranks,
        pinned=frozenset(flatten(config)) - filled,
    )
    winner, reasons = recommend(case)
    work = winner.workload
    chosen = {name: value for name, value in overrides(case, work).items() if name in filled}
    chosen["training.global_batch_size"] = config.training.global_batch_size
    head = (
        f"{work.layout} on {num_ranks} x {hardware.name}, {work.num_microbatches} microbatches of {work.microbatch}, "
        f"activation checkpoint {work.activation_checkpoint}: {winner.memory.total / GIB:.2f} GiB and "
        f"{winner.tokens_per_second:,.0f} tokens/s per rank planned"
    )
    return Filled(overrides={**chosen, FLAG: False}, lines=[f"auto: {line}" for line in (head, *reasons)])


def hardware_here(*, on_gpu: bool, num_ranks: int, local_ranks: int, is_dry: bool) -> Hardware:
    """Hardware of each rank of a run on this machine.

    Args:
        on_gpu: whether the run, or the run that it stands for, is on GPUs.
        num_ranks: ranks of the run.
        local_ranks: ranks on this machine.
        is_dry: whether nothing is started; then missing GPUs count as H100s.

    Raises:
        ConfigError: the GPU is not known.
    """
    if not on_gpu:
        cpu = of_machine(cpu_with_cores()) or replace(KNOWN["cpu"], memory_bytes=float(free_host_bytes()))
        return shared(cpu, local_ranks)
    name = gpu_name()
    found = of_machine(name) if name else None
    if found is None and is_dry:
        return KNOWN[_DRY_RUN_GPU]
    if found is None:
        raise ConfigError(
            f"{FLAG} does not know the GPU {name or 'of this machine'}.",
            where=f"--{FLAG}",
            why="the choice depends on the memory and the speed of the GPUs",
            fix="crius bench calibrate measures it once; or give the degrees: crius plan --help",
        )
    return replace(found, gpus_per_node=local_ranks) if local_ranks < num_ranks else found


def gpu_name(root: Path = _GPUS) -> str:
    """The driver's name of this machine's first GPU, without torch; empty if the driver does not report it."""
    for file in sorted(root.glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", text_named(file), re.MULTILINE)
        if model:
            return model[1].strip()
    return ""

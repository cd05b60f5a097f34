"""``crius bench optimizer``: step time and peak memory of each optimizer at the shapes of a model."""

import gc
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from crius.config.run import RunConfig, replace_fields
from crius.errors import ConfigError
from crius.host import free_host_bytes
from crius.models.description import ModelDescription
from crius.models.plan import ShardingPlan
from crius.optim.build import build_optimizer
from crius.optim.storage import nbytes
from crius.parallel.runtime import pick_device
from crius.plugins import REQUIREMENTS, install_line
from crius.table import aligned
from crius.tools.bench.machine import Machine, PeakMemory, seconds_of
from crius.tools.bench.result import Samples, show
from crius.train.inputs import describe_model
from crius.units import GIB

BASELINE = "for-loop"

_ADAMW = {"optimizer.name": "adamw", "optimizer.state_dtype": "float32"}
VARIANTS: dict[str, dict[str, Any]] = {
    "for-loop": {**_ADAMW, "optimizer.implementation": "for-loop"},
    "foreach": {**_ADAMW, "optimizer.implementation": "foreach"},
    "fused": {**_ADAMW, "optimizer.implementation": "fused"},
    "bfloat16": {"optimizer.name": "adamw", "optimizer.state_dtype": "bfloat16"},
    "8bit": {"optimizer.name": "adamw", "optimizer.state_dtype": "8bit"},
    "muon": {"optimizer.name": "muon", "optimizer.state_dtype": "float32"},
}
"""Settings of each row: AdamW in three implementations, AdamW with smaller states, and Muon."""

TIMED_STEPS = 3
"""Timed steps of one round, after one that is not timed, which creates the states and compiles."""

STATE_BYTES = 8
"""Bytes per parameter of two float32 moments, the most that any of ``VARIANTS`` keeps."""


@dataclass
class OptimizerRow:
    """Results of one optimizer.

    Attributes:
        name: as in ``VARIANTS``.
        samples: times of its steps.
        state_bytes: bytes of its states.
        peak_bytes: peak beyond weights and gradients in the last round; None if it cannot be known.
        refusal: why it was not run; empty if it was.
    """

    name: str
    samples: Samples = field(default_factory=Samples)
    state_bytes: int = 0
    peak_bytes: int | None = None
    refusal: str = ""


def optimizer(
    config: RunConfig, facts: ModelDescription, *, repeat: int = 7, variants: str = "", as_json: bool = False
) -> int:
    """Time the steps of each optimizer in turns on the same weights and gradients, and print a table.

    Only one optimizer exists at a time, so that its peak memory is its own. Rounds go through all optimizers, so that a
    machine with a drifting speed favours none.

    Args:
        config: gives the learning rate, the implementation of the small states and the dtype of the weights.
        facts: the model; its parameters are drawn at random.
        repeat: rounds.
        variants: names of ``VARIANTS`` joined by commas; empty: all.
        as_json: print JSON instead of a table.

    Returns:
        0; 1 if an optimizer that ``variants`` names cannot run here.

    Raises:
        ConfigError: a variant is unknown, there is no round, or the memory is too small.
    """
    names = _chosen(variants)
    if repeat < 1:
        raise ConfigError(f"--repeat {repeat} is not positive.", where="command line", fix="--repeat 7")
    device = pick_device(config.training.device, 0)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()
    check_memory(config, facts, free, device)
    parameters = make_parameters(facts, getattr(torch, config.training.dtype), device)
    plan = facts.plan
    rows = [OptimizerRow(name) for name in names]
    for _ in range(repeat):
        for row in rows:
            if not row.refusal:
                _round(row, replace_fields(config, VARIANTS[row.name]), parameters, plan, device)
    _print(config, facts, rows, Machine.of(device), as_json)
    return 1 if variants and any(row.refusal for row in rows) else 0


def _chosen(variants: str) -> list[str]:
    names = variants.split(",") if variants else list(VARIANTS)
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        known = ", ".join(VARIANTS)
        raise ConfigError(
            f"--variants has unknown names: {', '.join(unknown)}.", where="command line", fix=f"use some of {known}"
        )
    return list(dict.fromkeys(names))


def check_memory(config: RunConfig, facts: ModelDescription, free: int, device: torch.device) -> None:
    """Raise ConfigError if weights, gradients and the largest optimizer do not fit into ``free`` bytes."""
    needed = needed_bytes(facts, config.training.dtype)
    if needed <= free:
        return
    fitting = [
        layers
        for layers in range(1, facts.num_layers)
        if needed_bytes(describe_model(replace_fields(config, {"model.num_layers": layers})), config.training.dtype)
        <= free
    ]
    raise ConfigError(
        f"{config.model.name}/{config.model.flavor} needs {needed / GIB:.1f} GiB here, but {free / GIB:.1f} are free.",
        where=str(device),
        why=f"{facts.num_parameters:,} parameters: weights, gradients, two moments and temporaries",
        fix=f"--model.num_layers {fitting[-1]}, of the same shapes" if fitting else "use a smaller --model.flavor",
    )


def needed_bytes(facts: ModelDescription, dtype: str) -> int:
    """Most bytes that a step takes: weights, gradients, states and temporaries.

    With foreach the temporaries are as large as a moment; in the loop, as large as two moments of the largest
    parameter.
    """
    count = facts.num_parameters
    largest = max(math.prod(shape) for shape in facts.parameter_shapes.values())
    temporary = max(STATE_BYTES // 2 * count, STATE_BYTES * largest)
    return (2 * getattr(torch, dtype).itemsize + STATE_BYTES) * count + temporary


def make_parameters(
    facts: ModelDescription, dtype: torch.dtype, device: torch.device
) -> list[tuple[str, nn.Parameter]]:
    """A parameter for every name of the model, in its shape, with a gradient; both random and small."""
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for name, shape in facts.parameter_shapes.items():
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator))
        parameter.grad = torch.empty_like(parameter).normal_(0, 1e-3, generator=generator)
        made.append((name, parameter))
    return made


def _round(
    row: OptimizerRow,
    config: RunConfig,
    parameters: list[tuple[str, nn.Parameter]],
    plan: ShardingPlan,
    device: torch.device,
) -> None:
    """Build the optimizer of ``row``, time its steps, and free it; if it is missing here, the row says so."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # no optimizer gets blocks that were split for another
    peak = PeakMemory(device)
    try:
        built = build_optimizer(parameters, plan, config.optimizer, seed=config.debug.seed)
        built.step()
    except ModuleNotFoundError as error:
        package = error.name or ""
        row.refusal = f"{package} is not installed; {install_line(REQUIREMENTS.get(package, package))}"
        return
    row.samples.seconds += [seconds_of(built.step, device) for _ in range(TIMED_STEPS)]
    row.peak_bytes = peak.read()
    row.state_bytes = state_bytes(built)


def state_bytes(built: torch.optim.Optimizer) -> int:
    """Bytes of all tensors that ``built`` keeps for its parameters."""
    return nbytes(value for state in built.state.values() for value in state.values() if isinstance(value, Tensor))


def _print(
    config: RunConfig, facts: ModelDescription, rows: list[OptimizerRow], machine: Machine, as_json: bool
) -> None:
    is_gpu = machine.device == "cuda"
    model = f"{config.model.name}/{config.model.flavor}"
    peak_source = "torch.cuda.max_memory_allocated" if is_gpu else "resident set of the process (VmHWM)"
    base = next((row.samples.median for row in rows if row.name == BASELINE and not row.refusal), None)
    record = {
        "verb": "bench optimizer",
        "machine": machine.as_dict(),
        "model": model,
        "num_layers": facts.num_layers,
        "parameters": facts.num_parameters,
        "dtype": config.training.dtype,
        "peak_source": peak_source,
        "rows": [_json_row(row, base) for row in rows],
    }
    header = ["optimizer", "ms/step", "spread", f"of {BASELINE}", "states GiB", "peak GiB", ""]
    lines = [
        str(machine),
        f"{model}, {facts.num_layers} layers: {facts.num_parameters:,} parameters in {config.training.dtype}",
        *aligned([header, *(_cells(row, base) for row in rows)], left=(0, len(header) - 1)),
        "",
        "ms/step: median over all rounds, taken in turns; spread: from the lower to the upper quartile",
        f"peak: beyond weights and gradients, {peak_source}",
    ]
    show(as_json, record, lines)


def _cells(row: OptimizerRow, base: float | None) -> list[str]:
    if row.refusal:
        return [row.name, *["-"] * 5, f"not run: {row.refusal}"]
    peak = "-" if row.peak_bytes is None else f"{row.peak_bytes / GIB:.4f}"
    ratio = "-" if base is None else f"{row.samples.median / base:.3f}"
    times = [f"{1e3 * row.samples.median:.3f}", f"{row.samples.spread:.1%}", ratio]
    return [row.name, *times, f"{row.state_bytes / GIB:.4f}", peak, ""]


def _json_row(row: OptimizerRow, base: float | None) -> Mapping[str, Any]:
    if row.refusal:
        return {"optimizer": row.name, "refusal": row.refusal}
    return {
        "optimizer": row.name,
        **row.samples.as_dict(),
        "ratio": None if base is None else row.samples.median / base,
        "state_bytes": row.state_bytes,
        "peak_bytes": row.peak_bytes,
    }

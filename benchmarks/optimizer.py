"""Step time, states and peak memory of each optimizer at the shapes of a model; nothing is trained.

    python -m benchmarks.optimizer [--variants NAMES] [--repeat N] [flags of crius train]

Weights and gradients are random. Only one optimizer exists at a time, so that its peak is its own: the memory of a step
beyond weights and gradients, from torch's allocator on a GPU, else from the resident set of this process, whose peak
Linux resets on request; it includes all that the process does, so a few MiB mean nothing.
"""

import ctypes
import gc
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.command import end_with, facts_from, parse, parser_of, positive
from benchmarks.contestant import resident_bytes
from benchmarks.rows import Row, measure, report
from crius.cli.app import refuse_given
from crius.config.run import RunConfig, replace_fields
from crius.config.toml_file import flatten
from crius.errors import ConfigError, EnvironmentError
from crius.host import free_host_bytes
from crius.models.description import ModelDescription
from crius.optim.build import build_optimizer
from crius.optim.storage import nbytes
from crius.parallel.runtime import pick_device
from crius.plugins import REQUIREMENTS, install_line
from crius.tools.bench.machine import BenchMachine, wait_for
from crius.units import GIB

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


class PeakMemory:
    """Memory that is taken on a device after this object was created."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # no optimizer gets blocks that were split for another
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
        if trim:
            trim(0)  # memory from the free heap would not grow the resident set
        try:
            # proc_pid_clear_refs(5): the peak becomes the present resident set
            Path("/proc/self/clear_refs").write_text("5")
            self._before = resident_bytes("VmRSS")
        except OSError:
            pass

    def read(self) -> int | None:
        """Peak bytes so far; None if they cannot be known."""
        if self._before is None:
            return None
        on_gpu = self._device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self._device) if on_gpu else resident_bytes("VmHWM")
        return max(0, peak - self._before)


class Steps:
    """The steps of one optimizer over ``parameters``, which it changes."""

    def __init__(self, config: RunConfig, facts: ModelDescription, parameters: list[tuple[str, nn.Parameter]]) -> None:
        self._config = config
        self._plan = facts.plan
        self._parameters = parameters
        self._device = parameters[0][1].device
        self._built: torch.optim.Optimizer | None = None

    def prepare(self) -> None:
        """Build the optimizer, and make one step."""
        self._peak = PeakMemory(self._device)
        seed = self._config.debug.seed
        self._built = build_optimizer(self._parameters, self._plan, self._config.optimizer, seed=seed)
        self._built.step()
        wait_for(self._device)

    def work(self) -> int:
        """The timed steps; returns their number."""
        assert self._built
        for _ in range(TIMED_STEPS):
            self._built.step()
        wait_for(self._device)
        return TIMED_STEPS

    def parts(self) -> dict[str, float]:
        """Sizes in GiB, the peak if it is known; frees the optimizer."""
        assert self._built
        states = [value for state in self._built.state.values() for value in state.values()]
        found = {"states GiB": nbytes(value for value in states if isinstance(value, Tensor)) / GIB}
        peak = self._peak.read()
        if peak is not None:
            found["peak GiB"] = peak / GIB
        self._built = None
        return found


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


def rows_of(
    config: RunConfig, facts: ModelDescription, parameters: list[tuple[str, nn.Parameter]], names: Sequence[str]
) -> list[Row]:
    """A row for each of ``VARIANTS`` whose packages are here, or for each of ``names``.

    Raises:
        EnvironmentError: a package of one of ``names`` is missing.
    """
    rows = []
    for name in names or VARIANTS:
        steps = Steps(replace_fields(config, VARIANTS[name]), facts, parameters)
        try:
            steps.prepare()
        except ModuleNotFoundError as error:
            package = error.name or ""
            fix = install_line(REQUIREMENTS.get(package, package))
            missing = EnvironmentError(f"{name} needs {package}, which is not installed.", fix=fix)
            if names:
                raise missing from None
            print(missing, file=sys.stderr)
            continue
        steps.parts()  # frees it
        rows.append(Row(name, steps.work, steps.prepare, steps.parts))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--variants", default="", help=f"of {', '.join(VARIANTS)}, joined by commas; empty: all")
    parser.add_argument("--repeat", type=positive, default=7, help="rounds")
    options, flags = parse(parser, argv)
    names = options.variants.split(",") if options.variants else []
    if unknown := set(names) - set(VARIANTS):
        parser.error(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    found = facts_from(flags, is_dry=True)
    config = found.config
    facts = found.model
    degrees = [name for name in flatten(config) if name.endswith("_degree")]
    refuse_given(degrees, "an optimizer steps over whole parameters here")
    device = pick_device(config.training.device, 0)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()
    needed = needed_bytes(facts, config.training.dtype)
    if needed > free:
        raise ConfigError(
            f"the optimizer of this model needs {needed / GIB:.1f} GiB here, but {free / GIB:.1f} are free.",
            where=str(device),
            why=f"{facts.num_parameters:,} parameters: weights, gradients, two moments and temporaries",
            fix=f"--model.num_layers with fewer than {facts.num_layers}, of the same shapes",
        )
    parameters = make_parameters(facts, getattr(torch, config.training.dtype), device)
    rows = rows_of(config, facts, parameters, names)
    measure(rows, options.repeat)
    about = f"{config.model.name}/{config.model.flavor}, {facts.num_layers} layers: {facts.num_parameters:,} parameters"
    report(options, "optimizer", rows, BenchMachine.of(device), "steps", f"{about} in {config.training.dtype}")
    return 0


if __name__ == "__main__":
    end_with(main)

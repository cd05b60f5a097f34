"""A trace of some steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from crius.config.profiler import ProfilerConfig


@contextmanager
def profiler(config: ProfilerConfig, run_dir: Path, rank: int) -> Iterator[Callable[[], None]]:
    """Call what this yields after each step; steps ``start_step`` and on are written to ``traces/rank-N.json``."""
    if not config.enable:
        yield lambda: None
        return
    folder = run_dir / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    before = config.start_step - 1  # the profiler warms up on the step before, where there is one
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])],
        schedule=schedule(wait=max(0, before - 1), warmup=min(1, before), active=config.num_steps, repeat=1),
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(folder / f"rank-{rank}.json")),
    ) as active:
        yield active.step

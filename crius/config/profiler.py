"""``[profiler]``."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """A trace of some steps by torch.profiler."""

    enable: bool = False
    """Write a Chrome trace of each rank to traces/ in the run folder."""

    start_step: int = 5
    """First step of the trace."""

    num_steps: int = 2
    """Steps in the trace."""

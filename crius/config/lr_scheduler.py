"""``[lr_scheduler]``: warmup, stable, decay."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig:
    """Warmup-stable-decay with torchtitan's definition, so that curves compare."""

    warmup_steps: int = 200
    """Steps of linear warmup; the first step trains at lr / warmup_steps. Clamped to the length of the run."""

    decay_ratio: float | None = None
    """Share of all steps that decay. Not given: everything after the warmup decays."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""

    min_lr_factor: float = 0.0
    """The decay ends at lr x this. The last step still trains: the curve would reach it one step later."""

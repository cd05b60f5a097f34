"""``[debug]``: seed and determinism."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Reproducibility."""

    seed: int = 42
    """Seed of the weights and of the order of the data."""

    deterministic: bool = False
    """Use deterministic kernels only; slower on a GPU."""

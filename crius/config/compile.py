"""``[compile]``."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """torch.compile of each block."""

    enable: bool = False
    """Compile the blocks of the model."""

"""``[checkpoint]``."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming a run."""

    enable: bool = False
    """Save checkpoints. An interval alone enables them."""

    interval: int = 0
    """Steps between checkpoints. 0: none."""

    folder: str = "checkpoints"
    """Folder of the checkpoints inside the run folder."""

    load_step: int = -1
    """Step to resume from. -1: the newest."""

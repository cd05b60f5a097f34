"""``[activation_checkpoint]``."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointConfig:
    """Recompute activations in the backward instead of keeping them."""

    mode: Literal["none", "full", "selective"] = "none"
    """none keeps all activations."""

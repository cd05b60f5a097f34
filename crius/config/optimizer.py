"""``[optimizer]``."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    name: Literal["adamw"] = "adamw"
    """Optimizer."""

    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """fused: one kernel for many parameters, the fastest. foreach: few launches. for-loop: one parameter at a time."""

    lr: float = 3e-4
    """Peak learning rate."""

    beta1: float = 0.9
    """Decay of the running mean of gradients."""

    beta2: float = 0.95
    """Decay of the running mean of squared gradients."""

    eps: float = 1e-8
    """Added to the denominator."""

    weight_decay: float = 0.1
    """Decoupled weight decay of the parameters in the decayed group."""

    decay_1d: bool = False
    """Decay one-dimensional parameters (norm weights, biases) too."""

    decay_embeddings: bool = False
    """Decay embeddings too. A tied output layer counts as an embedding."""

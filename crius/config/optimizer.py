"""``[optimizer]``."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), or Muon for matrices beside it."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: matrices of the layers by Muon (kellerjordan.github.io/posts/muon), all else by AdamW."""

    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """fused: one kernel for many parameters, the fastest. foreach: few launches. for-loop: one parameter at a time."""

    state_dtype: Literal["float32", "bfloat16", "8bit"] = "float32"
    """How AdamW keeps its two moments and Muon its one. bfloat16: half the memory, rounded stochastically. 8bit: a
    quarter, in blocks of 256 with a scale each (arXiv:2110.02861, needs torchao). Parameters with fewer than 4096
    numbers keep float32 then."""

    stochastic_rounding: bool = True
    """Round stochastically where values are stored in bfloat16, so that small updates are not lost. Has an effect with
    training.dtype bfloat16 or state_dtype bfloat16. The same on any layout."""

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

    param_groups: tuple[str, ...] = ()
    """Settings of single parameters: "PATTERN: key=value ...", with the keys lr_factor, weight_decay and optimizer
    (adamw or muon), as "attention.wq: lr_factor=0.5 weight_decay=0". The first that fits a parameter counts alone."""

    muon_momentum: float = 0.95
    """Decay of Muon's running mean of gradients."""

    muon_nesterov: bool = True
    """Nesterov momentum in Muon."""

    muon_ns_steps: int = 5
    """Newton-Schulz iterations that make a matrix of Muon orthogonal."""

    muon_adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """match_rms_adamw: an update as large as AdamW's, so that lr and weight_decay serve both (arXiv:2502.16982).
    original: Keller Jordan's factor, for learning rates about 0.02."""

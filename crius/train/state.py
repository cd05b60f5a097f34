"""``TrainState``: what a run is between two steps."""

from dataclasses import dataclass

import torch
from torch import nn

from crius.optim.lr_scheduler import WarmupStableDecay


@dataclass
class TrainState:
    """Everything that training changes; what a checkpoint has to hold.

    Attributes:
        parts: the stages of the model that this rank holds; one, the whole model, without pipeline parallelism.
        step: optimizer steps done.
        tokens: tokens trained on, over all ranks.
    """

    parts: list[nn.Module]
    optimizer: torch.optim.Optimizer
    schedule: WarmupStableDecay
    step: int = 0
    tokens: int = 0

"""``TrainState``: what a run is between two steps."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from crius.optim.base import Optimizer
from crius.optim.lr_scheduler import WarmupStableDecay

COUNTERS = ("step", "tokens", "updates", "skipped_steps", "rolled_back_steps")


@dataclass
class TrainState:
    """Everything that training changes; what a checkpoint has to hold.

    Attributes:
        parts: the stages of the model that this rank holds; one, the whole model, without pipeline parallelism.
        step: steps done, one batch each, whether its update was applied or not.
        tokens: tokens of those batches, over all ranks.
        updates: updates in the weights, which the schedule goes by; fewer than ``step`` where some were left out.
        skipped_steps: steps whose update was left out.
        rolled_back_steps: steps whose update was lost when the weights of a snapshot came back.
    """

    parts: list[nn.Module]
    optimizer: Optimizer
    schedule: WarmupStableDecay
    step: int = 0
    tokens: int = 0
    updates: int = 0
    skipped_steps: int = 0
    rolled_back_steps: int = 0

    def counters(self) -> dict[str, int]:
        """All that is counted, by name."""
        return {name: getattr(self, name) for name in COUNTERS}

    def restore(self, counters: Mapping[str, int]) -> None:
        """Take back what ``counters`` gave; what it lacks stays 0, and one update a step is assumed."""
        for name in COUNTERS:
            setattr(self, name, counters.get(name, counters.get("step", 0) if name == "updates" else 0))

    def set_lr(self, peak: float) -> float:
        """Give each parameter group its learning rate for the next update.

        Args:
            peak: learning rate that the schedule's factor is of.

        Returns:
            The learning rate of a group whose own factor, ``lr_factor``, is 1.
        """
        lr = peak * self.schedule.factor(self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        return lr

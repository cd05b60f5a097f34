"""``[stability]``: what happens at a step whose loss or gradient is not finite, or jumps."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class StabilityConfig:
    """Policies for steps that would harm the weights. Each such step writes ``incidents/step-N.json``."""

    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """A loss or gradient that is not finite. stop: end the run before the update, exit code 1. skip: leave out the
    update, go on with the next batch. rollback: go back to the weights of the last snapshot, go on with the next batch.
    On a GPU skip and rollback wait for the device in each step; stop does not."""

    spike: Literal["stop", "skip", "warn", "off"] = "warn"
    """A loss or gradient norm far above those of the steps before. stop and skip as above, before the update, and with
    the same wait on a GPU; warn: say so and make the update, without a wait; off: do not look."""

    spike_zscore: float = 6.0
    """A spike is so many standard deviations above the running mean. The deviation is taken for at least 2 % of the
    mean loss and 20 % of the mean gradient norm."""

    window: int = 100
    """Steps that the standard deviation is taken over, at least 10; the running mean is over the last fifth of them, at
    least 5. So many steps are only observed in the beginning. Spikes stay out of both."""

    max_consecutive: int = 5
    """Stop at so many steps in a row to be skipped, or so many returns to the same snapshot. Under spike warn, so many
    spikes in a row are a new level instead, and the window starts anew."""

    snapshot_interval: int = 50
    """Updates between snapshots of this rank's weights and optimizer state in host memory, for rollback."""

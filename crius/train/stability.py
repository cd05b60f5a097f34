"""Spikes: a loss or gradient norm far above those of the steps before."""

import itertools
import math
import statistics
from collections import deque
from dataclasses import dataclass

# The least standard deviation, as a share of the mean. A window of nearly equal values would make a spike of every
# ripple; these make a spike, at z 6, of at least 12 % more loss or 2.2 times the gradient norm (docs/stability.md).
FLOORS = {"loss": 0.02, "grad_norm": 0.2}
LEAST_SEEN = 5  # a standard deviation of fewer values says nothing


@dataclass(frozen=True)
class Score:
    """A value against the window of the steps before.

    Attributes:
        value: of this step.
        mean: running mean, of the last fifth of the window.
        std: standard deviation that a step has around it, or the floor where that is larger.
    """

    value: float
    mean: float
    std: float

    @property
    def z(self) -> float:
        """Standard deviations above the mean; negative below it."""
        if self.std == 0:
            return math.inf if self.value > self.mean else 0.0
        return (self.value - self.mean) / self.std


class SpikeMonitor:
    """Running z-scores of loss and gradient norm, upwards only, over the values that were accepted.

    The early steps are what it is for, where the loss falls by half in the time of a window. So the mean is that of the
    last fifth of the window, and the deviation comes from the differences of successive steps, in which the fall hardly
    shows (von Neumann 1941, doi:10.1214/aoms/1177731677): that of all values around their mean would be as large as
    the fall, and hide a loss that trebles.

    Args:
        zscore: a spike is so many standard deviations above the mean.
        window: values to keep; a fifth of them, and at least 5, are only observed, and are what the mean is over.
    """

    def __init__(self, zscore: float, window: int) -> None:
        self._zscore = zscore
        self._seen: dict[str, deque[float]] = {name: deque(maxlen=window) for name in FLOORS}
        self._least = max(LEAST_SEEN, -(-window // 5))

    def score(self, loss: float, grad_norm: float) -> dict[str, Score]:
        """Loss and gradient norm of a step by name; empty while too few steps were seen. Both have to be finite."""
        if len(self._seen["loss"]) < self._least:
            return {}
        return {
            name: _score(value, list(self._seen[name]), self._least, FLOORS[name])
            for name, value in (("loss", loss), ("grad_norm", grad_norm))
        }

    def spikes(self, scores: dict[str, Score]) -> list[str]:
        """Which of ``scores`` are spikes."""
        return [name for name, score in scores.items() if score.z >= self._zscore]

    def accept(self, loss: float, grad_norm: float) -> None:
        """Take the values of a step into the window."""
        self._seen["loss"].append(loss)
        self._seen["grad_norm"].append(grad_norm)

    def restart(self) -> None:
        """Forget the window: the values have a new level."""
        for seen in self._seen.values():
            seen.clear()

    def state(self) -> dict[str, list[float]]:
        """The window by name, oldest value first."""
        return {name: list(seen) for name, seen in self._seen.items()}

    def load(self, state: dict[str, list[float]]) -> None:
        """Take back what ``state`` gave; the window starts anew where it is of other values than these."""
        for name, seen in self._seen.items():
            seen.clear()
            seen.extend(state[name] if state.keys() == self._seen.keys() else ())


def _score(value: float, seen: list[float], num_last: int, floor: float) -> Score:
    mean = statistics.fmean(seen[-num_last:])
    variance = statistics.fmean((late - early) ** 2 for early, late in itertools.pairwise(seen)) / 2
    std = math.sqrt(variance * (1 + 1 / num_last))  # of a value, and of the mean that it is compared with
    return Score(value, mean, max(std, floor * abs(mean)))

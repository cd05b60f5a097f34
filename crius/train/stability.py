"""Steps with values that are not finite or spike: how they are found, and the incident file about them."""

import itertools
import json
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crius.parallel.runtime import World
from crius.redact import redact
from crius.run_file import write_run_file
from crius.train.step import StepResult

log = logging.getLogger("crius.train")


# Lowest standard deviation, as a share of the mean. In a window of nearly equal values every ripple would be a spike.
# With these floors a spike at z 6 has at least 12 % more loss or 2.2 times the gradient norm (docs/stability.md).
FLOORS = {"loss": 0.02, "grad_norm": 0.2}
LEAST_SEEN = 5  # a standard deviation of fewer values has no meaning


@dataclass(frozen=True)
class SpikeScore:
    """A value compared with the window of the steps before.

    Attributes:
        value: value of this step.
        mean: running mean over the last fifth of the window.
        std: standard deviation of a step around the mean, or the floor if that is larger.
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
    """Running z-scores of loss and gradient norm, upwards only, over the accepted values.

    The monitor matters most in the early steps, where the loss falls by half within a window. So the mean is taken over
    the last fifth of the window, and the deviation over the differences of successive steps, in which the fall hardly
    shows (von Neumann 1941, doi:10.1214/aoms/1177731677). The deviation of all values around their mean would be as
    large as the fall, and would hide a loss that trebles.

    Args:
        zscore: standard deviations above the mean from which on a value is a spike.
        window: number of values to keep. The mean is taken over the last fifth of them, at least 5; the same number of
            first values is only observed.
    """

    def __init__(self, zscore: float, window: int) -> None:
        self._zscore = zscore
        self._seen: dict[str, deque[float]] = {name: deque(maxlen=window) for name in FLOORS}
        self._least = max(LEAST_SEEN, -(-window // 5))

    def score(self, loss: float, grad_norm: float) -> dict[str, SpikeScore]:
        """Scores of loss and gradient norm, which must be finite, by name; empty while too few steps were seen."""
        if len(self._seen["loss"]) < self._least:
            return {}
        return {
            name: _score(value, list(self._seen[name]), self._least, FLOORS[name])
            for name, value in (("loss", loss), ("grad_norm", grad_norm))
        }

    def spikes(self, scores: dict[str, SpikeScore]) -> list[str]:
        """Names of the ``scores`` that are spikes."""
        return [name for name, score in scores.items() if score.z >= self._zscore]

    def accept(self, loss: float, grad_norm: float) -> None:
        """Add the values of a step to the window."""
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
        """Restore what ``state`` returned; a state of other values than loss and gradient norm restarts the window."""
        for name, seen in self._seen.items():
            seen.clear()
            seen.extend(state[name] if state.keys() == self._seen.keys() else ())


def _score(value: float, seen: list[float], num_last: int, floor: float) -> SpikeScore:
    mean = statistics.fmean(seen[-num_last:])
    variance = statistics.fmean((late - early) ** 2 for early, late in itertools.pairwise(seen)) / 2
    std = math.sqrt(variance * (1 + 1 / num_last))  # of a value and of the mean together
    return SpikeScore(value, mean, max(std, floor * abs(mean)))


_NUM_RANKS = 4  # in a message


@dataclass(frozen=True)
class Culprit:
    """Place where a value that is not finite was found.

    Attributes:
        ranks: ranks with such a loss, else ranks whose own backward pass had such a gradient; empty if only the sum
            over ranks shows it.
        gradient: first parameter, in the order of the backward pass, with such a gradient.
        weights: parameters that themselves have such values.
        samples: sequences that may have caused it.
    """

    ranks: list[int]
    gradient: str | None
    weights: list[str]
    samples: list[int]

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:_NUM_RANKS])) + (", ..." if len(self.ranks) > _NUM_RANKS else "")
        noun = "rank" if len(self.ranks) == 1 else "ranks"
        where = f"on {noun} {shown}" if self.ranks else "in the sum over ranks"
        if self.weights:
            return f"found {where}; already in the weights of {', '.join(self.weights)}"
        return f"found {where}" + (f", first in the gradient of {self.gradient}" if self.gradient else "")


class IncidentReporter:
    """Writes one file per incident. Every rank must call it: norms and samples are gathered from all ranks.

    Args:
        names: names of the parameters of the whole model, in order.
        own_names: names of this rank's parameters; it may have two copies of one.
        squared_weight_norms: this rank's share of the squared norm of each of its parameters.
        world: all ranks.
        folder: folder of the files; created with the first file.
    """

    def __init__(
        self,
        names: Sequence[str],
        own_names: Sequence[str],
        squared_weight_norms: Callable[[], Tensor],
        world: World,
        folder: Path,
    ) -> None:
        self._names = list(names)
        places = {name: place for place, name in enumerate(names)}
        self._places = [places[name] for name in own_names]
        self._squared_weight_norms = squared_weight_norms
        self._world = world
        self._folder = folder

    def path(self, step: int) -> Path:
        """The file of an incident at ``step``."""
        return self._folder / f"step-{step}.json"

    def nonfinite(self, result: StepResult, facts: Mapping[str, Any]) -> Culprit:
        """Report a loss or gradient that is not finite, with the place where it was found.

        Args:
            result: result of the step.
            facts: first entries of the file.
        """
        losses = _not_finite(self._world.gather(result.local_losses))  # (ranks, microbatches)
        squared_grads, squared_weights = self._squared_norms(result)
        # (ranks, parameters)
        bad_grads = _not_finite(squared_grads)
        bad_weights = _not_finite(squared_weights)
        guilty = losses.any(dim=1) if losses.any() else self._bad_backward(result, bad_grads)
        ranks = guilty.nonzero().flatten().tolist()
        # backward runs from the output to the embedding, so the first bad gradient is the last by name
        grads = self._named(bad_grads)[::-1]
        ids = self._sample_ids(result)
        if losses.any():
            samples = ids[ranks[0]].reshape(losses.shape[1], -1)[losses[ranks[0]]]
        else:
            samples = ids[ranks] if ranks else ids  # any sample of the step may have caused it
        culprit = Culprit(ranks, grads[0] if grads else None, self._named(bad_weights), _sorted(samples))
        found = {
            "rank": ranks[0] if ranks else None,
            "found_in": "loss" if losses.any() else "gradient",
            "ranks_with_bad_loss": ranks if losses.any() else [],
            "ranks_with_bad_gradient": [] if losses.any() else ranks,
            "first_bad_parameter": culprit.gradient,
            "bad_parameters": grads,
            "bad_weights": culprit.weights,
            "sample_ids": culprit.samples,
        }
        self._write(result, {**facts, **found}, squared_grads, squared_weights)
        return culprit

    def spike(self, result: StepResult, scores: Mapping[str, SpikeScore], facts: Mapping[str, Any]) -> None:
        """Report a loss or gradient norm that jumped.

        Args:
            result: result of the step.
            scores: scores of its loss and gradient norm.
            facts: first entries of the file.
        """
        squared_grads, squared_weights = self._squared_norms(result)
        found = {
            "scores": [
                {"name": name, "value": score.value, "mean": score.mean, "std": score.std, "z": score.z}
                for name, score in scores.items()
            ],
            "sample_ids": _sorted(self._sample_ids(result)),
        }
        self._write(result, {**facts, **found}, squared_grads, squared_weights)

    def _bad_backward(self, result: StepResult, bad_grads: Tensor) -> Tensor:
        """Ranks whose own backward pass had a gradient that is not finite, bool ``(ranks,)``.

        Args:
            result: result of the step.
            bad_grads: where the summed gradients are not finite, bool ``(ranks, parameters)``.
        """
        if result.local_peak is not None:
            guilty = _not_finite(self._world.gather(result.local_peak.to(torch.float64)))
            if guilty.any():
                return guilty
        bad = bad_grads.any(dim=0).nonzero()
        holders = bad_grads[:, int(bad.max())] if len(bad) else bad_grads.new_zeros(len(bad_grads))
        return holders & (holders.sum() == 1)  # several ranks have it from their sum

    def _squared_norms(self, result: StepResult) -> tuple[Tensor, Tensor]:
        """Each rank's share of the squared norms of gradients and of weights, both ``(ranks, all parameters)``."""
        return self._gathered(result.squared_norms), self._gathered(self._squared_weight_norms())

    def _gathered(self, values: Tensor) -> Tensor:
        """Values of each rank's parameters, placed among all parameters of the model, 0 elsewhere."""
        spread = values.new_zeros(len(self._names))
        spread.index_add_(0, torch.tensor(self._places, device=values.device), values)
        return self._world.gather(spread)

    def _sample_ids(self, result: StepResult) -> Tensor:
        return self._world.gather(torch.tensor(result.sample_ids, device=self._world.device))

    def _named(self, bad: Tensor) -> list[str]:
        return [name for name, is_bad in zip(self._names, bad.any(dim=0).tolist(), strict=True) if is_bad]

    def _write(self, result: StepResult, facts: Mapping[str, Any], grads: Tensor, weights: Tensor) -> None:
        if self._world.rank != 0:
            return
        squares = zip(grads.sum(dim=0).tolist(), weights.sum(dim=0).tolist(), strict=True)
        parameters = dict(zip(self._names, squares, strict=True))
        layers: dict[str, tuple[float, float]] = {}
        for name, (grad, weight) in parameters.items():
            so_far = layers.get(layer_of(name), (0.0, 0.0))
            layers[layer_of(name)] = (so_far[0] + grad, so_far[1] + weight)
        report = {**facts, "layers": _norms(layers), "parameters": _norms(parameters)}
        write_run_file(self.path(result.step), redact(to_json(report)), log.warning, is_private=True)


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number, or without its last part."""
    parts = name.split(".")
    index = next((index for index, part in enumerate(parts) if part.isdecimal()), max(0, len(parts) - 2))
    return ".".join(parts[: index + 1])


def to_json(report: Mapping[str, Any]) -> str:
    """JSON with one line per key, and one line per entry of a list of objects. A float that is not finite is text."""
    return "{\n" + ",\n".join(f'  "{key}": {_value(value)}' for key, value in report.items()) + "\n}\n"


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"    {json.dumps(_finite(entry))}" for entry in value) + "\n  ]"
    return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _norms(squares: Mapping[str, tuple[float, float]]) -> list[dict[str, Any]]:
    """Norms by name: gradients that are not finite first, then the largest."""
    rows = [
        {"name": name, "grad_norm": math.sqrt(grad), "weight_norm": math.sqrt(weight)}
        for name, (grad, weight) in squares.items()
    ]
    return sorted(rows, key=lambda row: -row["grad_norm"] if math.isfinite(row["grad_norm"]) else -math.inf)


def _not_finite(values: Tensor) -> Tensor:
    return (~torch.isfinite(values)).cpu()


def _sorted(samples: Tensor) -> list[int]:
    """Sorted sample ids without padding, each once: ranks of a tensor-parallel or pipeline group share samples."""
    return sorted({number for number in samples.flatten().tolist() if number >= 0})

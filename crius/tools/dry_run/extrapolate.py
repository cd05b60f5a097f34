"""Values of a model with many equal blocks from two models with few: all values of a step are linear in the number of
blocks.

They are also linear in the number of accumulated microbatches. Peaks are taken apart by block and microbatch, counted
from either end (``recorder.places``), because only the peaks at each place are linear, not the largest of them.
"""

from collections.abc import Callable, Sequence

from crius.config.pipeline import is_layer
from crius.config.run import RunConfig
from crius.models.description import ModelDescription
from crius.tools.dry_run.memory import Values

FEW = (3, 4)
"""Numbers of blocks that are measured: with 3 blocks, the first two and the last two have all neighbours that they have
with more."""

Measure = Callable[[Sequence[str], int], Values]
"""Measurement of the modules to keep and the microbatches to accumulate."""


def along(few: Values, more: Values, count: int) -> Values:
    """Values for ``count`` blocks or microbatches from ``few`` and ``more``, the values for ``FEW`` of them."""
    steps = count - FEW[0]
    return {
        key: few.get(key, 0) + steps * (more.get(key, 0) - few.get(key, 0))
        for key in {**few, **more}
        if "between" not in key
    }


def first_blocks(names: Sequence[str], count: int) -> list[str]:
    """``names`` with only the first ``count`` of the repeated blocks."""
    layers = [name for name in names if is_layer(name)]
    return [name for name in names if name not in layers[count:]]


def blocks_are_alike(config: RunConfig, model: ModelDescription) -> bool:
    """Whether every block does the same work: recomputation treats all alike, and none or all have experts."""
    checkpoint = config.activation_checkpoint
    takes_some = checkpoint.mode == "selective" and isinstance(checkpoint.selective_option, int)
    return not takes_some and len(model.layers) == 1


class Extrapolation:
    """Measures small models and extrapolates to larger ones; records which.

    Args:
        measure: the measurement; its results are kept.
        config: the run.
        model: model of the run.
        full: measure everything.

    Attributes:
        blocks: numbers of blocks that were extrapolated to.
        microbatches: numbers of microbatches that were extrapolated to.
    """

    def __init__(self, measure: Measure, config: RunConfig, model: ModelDescription, *, full: bool = False) -> None:
        self._measure = measure
        self._full = full
        self._alike = blocks_are_alike(config, model)
        self._has_trees = config.training.reproducible  # their counts of microbatches are powers of two
        self._known: dict[tuple[tuple[str, ...], int, int], Values] = {}
        self.blocks: set[int] = set()
        self.microbatches: set[int] = set()

    def of(self, names: Sequence[str], num_microbatches: int) -> Values:
        """The measurement of ``names`` and ``num_microbatches``."""
        if self._full or self._has_trees or num_microbatches <= FEW[-1]:
            return self._of_blocks(names, num_microbatches)
        self.microbatches.add(num_microbatches)
        return along(self._of_blocks(names, FEW[0]), self._of_blocks(names, FEW[1]), num_microbatches)

    def _of_blocks(self, names: Sequence[str], num_microbatches: int) -> Values:
        count = sum(map(is_layer, names))
        if self._full or not self._alike or count <= FEW[-1]:
            return self._of_exactly(names, num_microbatches)
        self.blocks.add(count)
        few, more = (self._of_exactly(first_blocks(names, size), num_microbatches) for size in FEW)
        return along(few, more, count)

    def _of_exactly(self, names: Sequence[str], num_microbatches: int) -> Values:
        layers = [name for name in names if is_layer(name)]
        others = tuple(name for name in names if name not in layers)
        key = (others if self._alike else tuple(names), len(layers), num_microbatches)
        if key not in self._known:
            if not any(known[0] == key[0] for known in self._known):
                self._measure(
                    first_blocks(names, 1), 1
                )  # DTensor runs operators that it does not know on whole tensors
            self._known[key] = self._measure(names, num_microbatches)
        return self._known[key]

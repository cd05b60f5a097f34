"""``Buffer``: a tensor of a layer that no gradient trains. Torch-free."""

from math import prod
from typing import NamedTuple


class Buffer(NamedTuple):
    """One tensor that no gradient trains: state that a layer's ``after_update`` changes, or a counter of a step.

    Every rank that has the layer has all of it, and it keeps its dtype whatever the weights are trained in.

    Attributes:
        name: its dotted name, within what lists it.
        shape: of it.
        dtype: as torch names it; of a counter ``int64``, whose sums are the same in any order.
        value: what each of its numbers is at the start.
        persistent: it is state, in every checkpoint; else a counter, which starts each step at 0.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    value: float = 0.0
    persistent: bool = True

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return prod(self.shape)

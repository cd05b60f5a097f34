"""``Adapted``: which linear layers of a model have low-rank adapters. Torch-free."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Adapted(NamedTuple):
    """Linear layers that have low-rank adapters, which are trained in place of all weights.

    Attributes:
        rank: of the adapters.
        linears: names of the layers, in the model's order.
    """

    rank: int
    linears: tuple[str, ...]

    def parts(self, shapes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, tuple[int, int], str]]:
        """Name, shape and layer, such as ``layers.3``, of each factor: ``lora_A`` ``(rank, in)``, ``lora_B``
        ``(out, rank)``.

        Args:
            shapes: ``(out_features, in_features)`` of the linear layers by name.
        """
        for name in self.linears:
            out_features, in_features = shapes[name]
            unit = ".".join(name.split(".")[:2])
            yield f"{name}.lora_A", (self.rank, in_features), unit
            yield f"{name}.lora_B", (out_features, self.rank), unit

"""``Adapted``: the linear layers of a model that have low-rank adapters. Torch-free."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Adapted(NamedTuple):
    """Linear layers that have low-rank adapters. Training updates the adapters and freezes all weights.

    Attributes:
        rank: rank of the adapters.
        linears: names of the adapted layers, in the model's order.
    """

    rank: int
    linears: tuple[str, ...]

    def parts(self, shapes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, tuple[int, int], str]]:
        """Name, shape and pipeline module (such as ``layers.3``) of each factor.

        The factors of a layer are ``lora_A`` ``(rank, in)`` and ``lora_B`` ``(out, rank)``.

        Args:
            shapes: ``(out_features, in_features)`` of the linear layers by name.
        """
        for name in self.linears:
            out_features, in_features = shapes[name]
            unit = ".".join(name.split(".")[:2])
            yield f"{name}.lora_A", (self.rank, in_features), unit
            yield f"{name}.lora_B", (out_features, self.rank), unit

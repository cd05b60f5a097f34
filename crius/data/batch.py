"""One rank's share of an optimizer step: tokens, labels, positions.

B batch, T tokens
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from crius.kernels.linear_cross_entropy import IGNORE_INDEX as IGNORE_INDEX


@dataclass(frozen=True)
class Batch:
    """Sequences and what to predict from them, all int64 and ``(batch, tokens)``.

    ``labels_BT[b, t]`` is the token after ``tokens_BT[b, t]``, or ``IGNORE_INDEX``. ``positions_BT`` counts from 0 at
    the start of each document and of each sequence. ``sample_ids[b]`` names row b in its source; -1 is padding.
    """

    tokens_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    sample_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.sample_ids)

    def microbatches(self, size: int) -> Iterator["Batch"]:
        """Consecutive slices of ``size`` rows, views of this batch.

        Raises:
            ValueError: ``size`` does not divide the number of rows.
        """
        if size < 1 or len(self) % size:
            raise ValueError(f"microbatches of {size} rows do not divide a batch of {len(self)} rows")
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield Batch(self.tokens_BT[rows], self.labels_BT[rows], self.positions_BT[rows], self.sample_ids[rows])

    def grouped(self, num_groups: int) -> "Batch":
        """The rows with ``sample_id % num_groups`` 0 first, then 1, and so on; within a group as they were."""
        rows = sorted(range(len(self)), key=lambda row: self.sample_ids[row] % num_groups)
        ordered = self.map(lambda tensor: torch.stack([tensor[row] for row in rows]))
        return replace(ordered, sample_ids=tuple(self.sample_ids[row] for row in rows))

    def to(self, device: torch.device | str) -> "Batch":
        """A copy on ``device``; it overlaps with the host where the batch is pinned. This batch if it is there."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """A copy in page-locked host memory. Needs CUDA."""
        return self.map(Tensor.pin_memory)

    def counted(self) -> "Batch":
        """Positions that count from the start of each sequence, whatever documents it holds."""
        positions = torch.arange(self.tokens_BT.shape[1], device=self.tokens_BT.device).expand_as(self.tokens_BT)
        return Batch(self.tokens_BT, self.labels_BT, positions, self.sample_ids)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """``function`` of each tensor, such as a slice of its tokens."""
        return Batch(function(self.tokens_BT), function(self.labels_BT), function(self.positions_BT), self.sample_ids)

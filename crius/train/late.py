"""Numbers that leave the device while it goes on."""

import time

import torch
from torch import Tensor


class Late:
    """Numbers on their way to the host. The device may go on before they are read.

    Args:
        values: float64, any shape; a copy is made, in page-locked memory where they are on a GPU.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if values.is_cuda else None
        if self._arrived:
            self._arrived.record()

    def has_arrived(self) -> bool:
        """Whether reading would not wait."""
        return self._arrived is None or self._arrived.query()

    def arrives_within(self, seconds: float) -> bool:
        """Wait for the numbers, but not longer; whether they are there."""
        end = time.monotonic() + seconds
        while not self.has_arrived():
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True

    def read(self) -> list[float]:
        """The numbers; waits for the device as far as it has not computed them yet, and for nothing queued later."""
        if self._arrived:
            self._arrived.synchronize()
        values: list[float] = self._values.tolist()
        return values

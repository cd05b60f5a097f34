"""The linear layer of every precision."""

from torch import Tensor, nn

from crius.kernels.linear import linear


class Linear(nn.Linear):
    """``nn.Linear`` without a bias. ``crius.quantize`` puts subclasses in its place that multiply in low precision.

    Tensor parallelism calls ``multiply`` with this rank's part of the input and of the weight, so that scales are of
    what the rank multiplies.
    """

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x`` ``(..., in)`` times ``weight`` ``(out, in)`` transposed: ``(..., out)``, in the dtype of ``x``.

        In high precision by the kernel that the process chose.
        """
        return linear(x, weight)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in)`` to ``(..., out)``."""
        return self.multiply(x, self.weight)

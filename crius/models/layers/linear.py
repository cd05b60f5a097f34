"""Linear layers that multiply in another way than ``F.linear``."""

from torch import Tensor, nn

from crius.kernels.linear import linear


class Linear(nn.Linear):
    """``nn.Linear`` without a bias, by the kernel that the process chose."""

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in)`` to ``(..., out)``."""
        return linear(x, self.weight)


class LowPrecisionLinear(nn.Linear):
    """A linear layer without a bias whose product is a method of plain tensors.

    ``crius.quantize`` puts subclasses in the place of a model's linears. Tensor parallelism calls ``multiply`` with
    this rank's part of the input and of the weight, so that scales are of what the rank multiplies.
    """

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x`` ``(..., in)`` times ``weight`` ``(out, in)`` transposed: ``(..., out)``, in the dtype of ``x``."""
        raise NotImplementedError

    @property
    def rounds_whole_input(self) -> bool:
        """Whether the input is rounded with one scale, so that it can be gathered as it is multiplied."""
        return False

    def gather_rounded(self, x: Tensor, group_name: str, num_ranks: int) -> Tensor:
        """The sequence of all ranks, rounded for ``multiply`` before it is gathered: fewer bytes, the same numbers.

        Args:
            x: this rank's part of the sequence, ``(B, T / ranks, in)``.
            group_name: the process group of the ranks.
            num_ranks: how many they are.
        """
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in)`` to ``(..., out)``."""
        return self.multiply(x, self.weight)

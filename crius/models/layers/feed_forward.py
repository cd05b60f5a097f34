"""SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202)."""

from torch import Tensor, nn

from crius.kernels.swiglu import swiglu
from crius.models.layers.linear import Linear


class FeedForward(nn.Module):
    """``w2(silu(w1 x) * w3 x)``, model dim D to hidden dim F and back."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, ffn_dim, bias=False)
        self.w2 = Linear(ffn_dim, dim, bias=False)
        self.w3 = Linear(dim, ffn_dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, D)`` to ``(B, T, D)``."""
        y: Tensor = self.w2(swiglu(self.w1(x_BTD), self.w3(x_BTD)))
        return y

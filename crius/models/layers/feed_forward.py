"""SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202)."""

from torch import Tensor, nn
from torch.nn import functional as F


class FeedForward(nn.Module):
    """``w2(silu(w1 x) * w3 x)``, model dim D to hidden dim F and back."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, D)`` to ``(B, T, D)``."""
        y: Tensor = self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))
        return y

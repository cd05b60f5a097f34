"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245).

B batch, T tokens, D model dim, N query heads, K key/value heads, H head dim
"""

from torch import Tensor, nn

from crius.kernels.attention import Mask, causal_attention, document_mask, masked_attention
from crius.kernels.rotary import rotary
from crius.models.layers.linear import Linear


class DocumentMask(nn.Module):
    """Where a token may attend. A module of its own, so that another can take its place."""

    def forward(self, positions_BT: Tensor) -> Mask:
        """Mask of the tokens at ``positions_BT``: bool ``(B, 1, T, T)``, queries before keys, or its blocks."""
        return document_mask(positions_BT)


class CausalAttention(nn.Module):
    """Scaled dot-product attention over earlier tokens. A module of its own, so that another can take its place."""

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Mask | None) -> Tensor:
        """``(B, T, N, H)``; ``mask`` is bool ``(B, 1, T, T)`` or its blocks, or None for plain causal attention."""
        q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        y = causal_attention(q, k, v) if mask is None else masked_attention(q, k, v, mask)
        return y.transpose(1, 2)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; query heads share key/value heads in groups."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = Linear(dim, num_heads * head_dim, bias=False)
        self.wk = Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wv = Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wo = Linear(num_heads * head_dim, dim, bias=False)
        self.inner = CausalAttention()

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None) -> Tensor:
        """Attend; ``mask`` as ``CausalAttention`` takes it. Returns ``(B, T, D)``."""
        q_BTNH, k_BTKH, v_BTKH = self.project(x_BTD)
        q_BTNH, k_BTKH = rotary(q_BTNH, *rope), rotary(k_BTKH, *rope)
        y: Tensor = self.wo(self.inner(q_BTNH, k_BTKH, v_BTKH, mask).flatten(2))
        return y

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values before positions turn them: ``(B, T, N, H)`` and twice ``(B, T, K, H)``."""
        # -1 heads: the local count, so this line serves one device and a tensor-parallel shard alike
        q_BTNH, k_BTKH, v_BTKH = (w(x_BTD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        return q_BTNH, k_BTKH, v_BTKH

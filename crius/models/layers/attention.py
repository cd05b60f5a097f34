"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245).

B batch, T tokens, D model dim, N query heads, K key/value heads, H head dim
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crius.models.layers.rope import apply_rope


def document_mask(positions_BT: Tensor) -> Tensor:
    """True where a token may attend: earlier tokens of its own document. bool ``(B, 1, T, T)``.

    A document starts wherever a position is 0.
    """
    documents = (positions_BT == 0).cumsum(dim=-1)
    same = documents[:, :, None] == documents[:, None, :]
    return (same & torch.ones_like(same).tril())[:, None]


class Attention(nn.Module):
    """Causal self-attention with rotary positions; query heads share key/value heads in groups."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(num_heads * head_dim, dim, bias=False)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Attend; ``mask`` is bool ``(B, 1, T, T)``, or None for plain causal attention. Returns ``(B, T, D)``."""
        # -1 heads: the local count, so this line serves one device and a tensor-parallel shard alike
        q_BTNH, k_BTKH, v_BTKH = (w(x_BTD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q_BTNH, k_BTKH = apply_rope(q_BTNH, *rope), apply_rope(k_BTKH, *rope)
        y_BNTH = F.scaled_dot_product_attention(
            q_BTNH.transpose(1, 2),
            k_BTKH.transpose(1, 2),
            v_BTKH.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        y: Tensor = self.wo(y_BNTH.transpose(1, 2).flatten(2))
        return y

"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245).

B batch, T tokens, D model dim, N query heads, K key/value heads, H head dim
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from crius.models.layers.rope import apply_rope


class DocumentMask(nn.Module):
    """True where a token may attend: earlier tokens of its own document. A document starts where a position is 0."""

    def forward(self, positions_BT: Tensor) -> Tensor:
        """Mask of the tokens at ``positions_BT``: bool ``(B, 1, T, T)``, queries before keys."""
        documents = (positions_BT == 0).cumsum(dim=-1)
        same = documents[:, :, None] == documents[:, None, :]
        return (same & torch.ones_like(same).tril())[:, None]


# without cuDNN's, whose gradient of masked attention is NaN at some lengths on Hopper (pytorch/pytorch#196678); these
# give zeros for a row that sees nothing
_MASKED_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def masked_attention(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask: Tensor) -> Tensor:
    """Attention where ``mask``, bool ``(B, 1, queries, keys)``, is True: ``(B, N, T, H)``; K divides N."""
    if q_BNTH.is_cuda:  # no other fused kernel takes both a mask and shared key/value heads
        k_BKTH, v_BKTH = (x.repeat_interleave(q_BNTH.shape[1] // x.shape[1], dim=1) for x in (k_BKTH, v_BKTH))
    with sdpa_kernel(_MASKED_KERNELS):
        return F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, attn_mask=mask, enable_gqa=True)


class CausalAttention(nn.Module):
    """Scaled dot-product attention over earlier tokens. A module of its own, so that another can take its place."""

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Tensor | None) -> Tensor:
        """``(B, T, N, H)``; ``mask`` is bool ``(B, 1, T, T)``, or None for plain causal attention."""
        q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        if mask is not None:
            return masked_attention(q, k, v, mask).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; query heads share key/value heads in groups."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(num_heads * head_dim, dim, bias=False)
        self.inner = CausalAttention()

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Attend; ``mask`` is bool ``(B, 1, T, T)``, or None for plain causal attention. Returns ``(B, T, D)``."""
        # -1 heads: the local count, so this line serves one device and a tensor-parallel shard alike
        q_BTNH, k_BTKH, v_BTKH = (w(x_BTD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q_BTNH, k_BTKH = apply_rope(q_BTNH, *rope), apply_rope(k_BTKH, *rope)
        y: Tensor = self.wo(self.inner(q_BTNH, k_BTKH, v_BTKH, mask).flatten(2))
        return y

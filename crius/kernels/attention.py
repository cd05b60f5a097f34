"""Scaled dot-product attention by the backends that this process chose.

B batch, T tokens, N query heads, K key/value heads, H head dim
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from crius.kernels import choice
from crius.kernels.cpu import blocked_attention

Mask = Tensor | BlockMask
"""What a query may see: bool ``(B, 1, queries, keys)``, or the blocks of it for flex."""

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# without cuDNN's, whose gradient of masked attention is NaN at some lengths on Hopper (pytorch/pytorch#196678); these
# give zeros for a row that sees nothing
_MASKED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def causal_attention(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor) -> Tensor:
    """Attention over earlier tokens and the own one: ``(B, N, T, H)``; K divides N."""
    order = choice.current().attention
    if "blocked" in order and blocked_attention.when(q_BNTH, k_BKTH, v_BKTH):
        return blocked_attention.blocked_attention(q_BNTH, k_BKTH, v_BKTH)
    backends = [_BACKENDS[name] for name in order if name in _BACKENDS]
    if not backends:
        return F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=True)
    if backends == [SDPBackend.EFFICIENT_ATTENTION]:  # which takes no shared key/value heads
        k_BKTH, v_BKTH = _repeated(q_BNTH, k_BKTH, v_BKTH)
    with sdpa_kernel(backends, set_priority=True):
        return F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=True)


def masked_attention(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask: Mask) -> Tensor:
    """Attention where ``mask`` is True: ``(B, N, T, H)``; K divides N."""
    if isinstance(mask, BlockMask):
        attend = _compiled(flex_attention, q_BNTH.device.type)
        y: Tensor = attend(q_BNTH, k_BKTH, v_BKTH, block_mask=mask, enable_gqa=True)
        return y
    if q_BNTH.is_cuda:  # no other fused kernel takes both a mask and shared key/value heads
        k_BKTH, v_BKTH = _repeated(q_BNTH, k_BKTH, v_BKTH)
    chosen = [_BACKENDS[name] for name in choice.current().attention if name in _BACKENDS]
    with sdpa_kernel([backend for backend in _MASKED if backend in chosen] or list(_MASKED)):
        return F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, attn_mask=mask, enable_gqa=True)


def cached_attention(q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of the newest tokens to all that are kept, themselves included: ``(B, T, N, H)``.

    Args:
        q_BTNH: queries of the last T of S tokens.
        k_BSKH: keys; K divides N.
        v_BSKH: values.
        mask: bool, ``(B or 1, 1, T, S)``. None: one token sees all S, and T = S tokens see the earlier ones.
    """
    k_BKSH, v_BKSH = k_BSKH.transpose(1, 2), v_BSKH.transpose(1, 2)
    if q_BTNH.shape[1] == 1:  # the query heads of a key/value head are rows of one matmul, and no key is copied
        q_BKGH = q_BTNH[:, 0].unflatten(1, (k_BSKH.shape[2], -1))
        return F.scaled_dot_product_attention(q_BKGH, k_BKSH, v_BKSH, attn_mask=mask).flatten(1, 2)[:, None]
    q_BNTH = q_BTNH.transpose(1, 2)
    y = causal_attention(q_BNTH, k_BKSH, v_BKSH) if mask is None else masked_attention(q_BNTH, k_BKSH, v_BKSH, mask)
    return y.transpose(1, 2)


def _repeated(q_BNTH: Tensor, *shared: Tensor) -> list[Tensor]:
    """Key/value heads, one for each query head."""
    return [x.repeat_interleave(q_BNTH.shape[1] // x.shape[1], dim=1) for x in shared]


def document_mask(positions_BT: Tensor) -> Mask:
    """Where a token may attend: earlier tokens of its own document. A document starts where a position is 0.

    Returns:
        Bool ``(B, 1, T, T)``, queries before keys; for flex the blocks of 128 of it that are not empty.
    """
    documents_BT = (positions_BT == 0).cumsum(dim=-1)
    if choice.current().attention != ("flex",):
        same = documents_BT[:, :, None] == documents_BT[:, None, :]
        return (same & torch.ones_like(same).tril())[:, None]

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (documents_BT[b, q] == documents_BT[b, k])

    batch, tokens = positions_BT.shape
    make = _compiled(create_block_mask, positions_BT.device.type)
    blocks: BlockMask = make(sees, batch, None, tokens, tokens, device=positions_BT.device)
    return blocks


@functools.cache
def _compiled(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Uncompiled, flex and its mask make a matrix of all pairs of tokens, which is for tests on a CPU only."""
    return torch.compile(function, dynamic=False) if device_type == "cuda" else function

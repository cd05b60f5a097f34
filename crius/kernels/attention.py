"""Scaled dot-product attention, computed by the backends that this process chose.

B batch, T tokens, N query heads, K key/value heads, H head dim
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from crius.kernels import choice
from crius.kernels.cpu import blocked_attention
from crius.plugins import release


class Documents(NamedTuple):
    """Documents of a batch whose rows are joined into one sequence.

    Attributes:
        ends: ends of the documents, counted from the start of the batch, int32 with a leading 0. A repeated number is
            an empty document.
        window: newest tokens that a token attends to, itself included; 0: all of its document.
    """

    ends: Tensor
    window: int = 0


Mask = Tensor | BlockMask | Documents
"""Keys that a query may see: bool ``(B, 1, queries, keys)``, flex's blocks of such a mask, or ends of documents."""

masks_made: Counter[str] = Counter()
"""Number of document masks that this process made, by the kernel that takes them."""

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# without cuDNN's backend, whose gradient of masked attention is NaN at some lengths on Hopper (pytorch/pytorch#196678);
# these backends give zeros for a row that sees no key
_MASKED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def causal_attention(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, scale: float | None = None) -> Tensor:
    """Attention of each token to itself and to earlier tokens: ``(B, N, T, H)``; K divides N.

    Args:
        q_BNTH: queries.
        k_BKTH: keys.
        v_BKTH: values.
        scale: factor of the scores; None: ``H ** -0.5``.
    """
    order = choice.current().attention
    if "blocked" in order and scale is None and blocked_attention.when(q_BNTH, k_BKTH, v_BKTH):
        return blocked_attention.blocked_attention(q_BNTH, k_BKTH, v_BKTH)
    backends = [_BACKENDS[name] for name in order if name in _BACKENDS]
    is_wide_on_gpu = q_BNTH.is_cuda and q_BNTH.itemsize > 2 and backends != [SDPBackend.MATH]
    if is_wide_on_gpu or backends == [SDPBackend.EFFICIENT_ATTENTION]:  # the only kernel; it takes no shared heads
        k_BKTH, v_BKTH = _repeated(q_BNTH, k_BKTH, v_BKTH)
    if not backends:
        return F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, is_causal=True, scale=scale, enable_gqa=True)
    with sdpa_kernel(backends, set_priority=True):
        return F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, is_causal=True, scale=scale, enable_gqa=True)


def masked_attention(
    q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask: Mask, scale: float | None = None, softcap: float = 0.0
) -> Tensor:
    """Attention where ``mask`` is True: ``(B, N, T, H)``; K divides N.

    Args:
        q_BNTH: queries.
        k_BKTH: keys.
        v_BKTH: values.
        mask: keys that a query may see; with ``softcap`` not ``Documents``.
        scale: as in ``causal_attention``.
        softcap: bound of the scores; 0: none.
    """
    if isinstance(mask, BlockMask):
        attend = _compiled(flex_attention, q_BNTH.device.type)
        bound = _score_mod(softcap) if softcap else None
        y: Tensor = attend(q_BNTH, k_BKTH, v_BKTH, bound, block_mask=mask, scale=scale, enable_gqa=True)
        return y
    if softcap:
        assert isinstance(mask, Tensor)
        return _softcapped_attention(q_BNTH, k_BKTH, v_BKTH, mask, scale, softcap)
    if isinstance(mask, Documents):
        return _attention_by_document(q_BNTH, k_BKTH, v_BKTH, mask, scale)
    if q_BNTH.is_cuda:  # no other fused kernel takes both a mask and shared key/value heads
        k_BKTH, v_BKTH = _repeated(q_BNTH, k_BKTH, v_BKTH)
    chosen = [_BACKENDS[name] for name in choice.current().attention if name in _BACKENDS]
    with sdpa_kernel([backend for backend in _MASKED if backend in chosen] or list(_MASKED)):
        return F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, attn_mask=mask, scale=scale, enable_gqa=True)


def softcapped(x: Tensor, softcap: float) -> Tensor:
    """``softcap * tanh(x / softcap)`` (Gemma 2, arXiv:2408.00118, section 2); with 0 ``x`` itself."""
    return softcap * torch.tanh(x / softcap) if softcap else x


@functools.cache  # a new function would be compiled again
def _score_mod(softcap: float) -> Callable[..., Tensor]:
    def bounded(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcapped(score, softcap)

    return bounded


def _softcapped_attention(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None, scale: float | None, softcap: float
) -> Tensor:
    """The plain formula, for a CPU and for tokens that are read one by one. The softmax is in float32 at least."""
    k_BNSH, v_BNSH = _repeated(q_BNTH, k_BKSH, v_BKSH)
    scale = q_BNTH.shape[-1] ** -0.5 if scale is None else scale
    scores_BNTS = softcapped(q_BNTH @ k_BNSH.transpose(-1, -2) * scale, softcap)
    if mask is not None:
        scores_BNTS = scores_BNTS.masked_fill(~mask, -torch.inf)
    wide = torch.promote_types(q_BNTH.dtype, torch.float32)
    return scores_BNTS.softmax(-1, dtype=wide).to(q_BNTH.dtype) @ v_BNSH


# torch 2.11 lacks the argument and compares no numbers of heads; its FlashAttention takes shared heads all the same
_SHARES_HEADS: dict[str, Any] = {"enable_gqa": True} if release(torch.__version__) >= (2, 12) else {}


def _attention_by_document(
    q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, documents: Documents, scale: float | None
) -> Tensor:
    """Attention within each document, as a sequence of its own. The longest may have T tokens: its real length is only
    known on the device.
    """
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  for GPUs; it imports torch's compiler

    batch, _, tokens, _ = q_BNTH.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNTH, k_BKTH, v_BKTH))
    ends = documents.ends
    earlier = documents.window - 1  # -1: all
    attend = varlen_attn(q, k, v, ends, ends, tokens, tokens, scale=scale, window_size=(earlier, 0), **_SHARES_HEADS)
    y = cast(Tensor, attend)
    return y.unflatten(0, (batch, tokens)).transpose(1, 2)


def cached_attention(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of the newest tokens to all cached tokens and to themselves: ``(B, T, N, H)``.

    Args:
        q_BTNH: queries of the last T of S tokens.
        k_BSKH: keys; K divides N.
        v_BSKH: values.
        mask: bool, ``(B or 1, 1, T, S)``. None: with T = 1 the token sees all S keys; with T = S attention is causal.
        scale: as in ``causal_attention``.
        softcap: as in ``masked_attention``.
    """
    k_BKSH = k_BSKH.transpose(1, 2)
    v_BKSH = v_BSKH.transpose(1, 2)
    if softcap:
        count = q_BTNH.shape[1]
        if mask is None and count > 1:
            mask = torch.ones(count, count, dtype=torch.bool, device=q_BTNH.device).tril()
        return _softcapped_attention(q_BTNH.transpose(1, 2), k_BKSH, v_BKSH, mask, scale, softcap).transpose(1, 2)
    if q_BTNH.shape[1] == 1:  # the query heads of a key/value head are rows of one matmul, and no key is copied
        q_BKGH = q_BTNH[:, 0].unflatten(1, (k_BSKH.shape[2], -1))
        y_BKGH = F.scaled_dot_product_attention(q_BKGH, k_BKSH, v_BKSH, attn_mask=mask, scale=scale)
        return y_BKGH.flatten(1, 2)[:, None]
    q_BNTH = q_BTNH.transpose(1, 2)
    if mask is None:
        y = causal_attention(q_BNTH, k_BKSH, v_BKSH, scale)
    else:
        y = masked_attention(q_BNTH, k_BKSH, v_BKSH, mask, scale)
    return y.transpose(1, 2)


def _repeated(q_BNTH: Tensor, *shared: Tensor) -> list[Tensor]:
    """Key/value heads, repeated so that each query head has its own."""
    ratios = [q_BNTH.shape[1] // x.shape[1] for x in shared]
    return [x if ratio == 1 else x.repeat_interleave(ratio, dim=1) for x, ratio in zip(shared, ratios, strict=True)]


def document_mask(positions_BT: Tensor, ends_BM: Tensor | None = None, window: int = 0) -> Mask:
    """Make the mask by which a token sees only earlier tokens of its own document. Position 0 starts a document.

    Args:
        positions_BT: position of each token.
        ends_BM: ends of the documents of each row, as in ``crius.data.loader.Batch``; None if the batch has no ends.
        window: newest tokens that a token attends to, itself included; 0: all of its document.

    Returns:
        With ``ends_BM``, the ends of all documents. Else bool ``(B, 1, T, T)``, queries before keys, or for flex its
        non-empty blocks of 128.
    """
    if ends_BM is not None:
        masks_made["varlen"] += 1
        batch = ends_BM.shape[0]
        tokens = positions_BT.shape[1]
        starts = torch.arange(0, batch * tokens, tokens, dtype=ends_BM.dtype, device=ends_BM.device)
        ends = F.pad((ends_BM + starts[:, None]).flatten(), (1, 0))
        torch._dynamo.maybe_mark_dynamic(ends, 0)  # one compiled graph for any number of documents
        return Documents(ends, window)
    documents_BT = (positions_BT == 0).cumsum(dim=-1)
    takes_flex = "flex" in choice.current().attention
    masks_made["flex" if takes_flex else "sdpa"] += 1
    if not takes_flex:
        same = documents_BT[:, :, None] == documents_BT[:, None, :]
        earlier = torch.ones_like(same).tril()
        return (same & (earlier.triu(1 - window) if window else earlier))[:, None]
    batch, tokens = positions_BT.shape
    reach = window or tokens

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q < k + reach) & (documents_BT[b, q] == documents_BT[b, k])

    make = _compiled(create_block_mask, positions_BT.device.type)
    blocks: BlockMask = make(sees, batch, None, tokens, tokens, device=positions_BT.device)
    return blocks


def ends_of_rows(batch: int, tokens: int, device: torch.device) -> Tensor | None:
    """Ends of documents that are whole rows, for windows without a document mask; None where no kernel takes ends."""
    if "varlen" not in choice.current().attention:
        return None
    return torch.full((batch, 1), tokens, dtype=torch.int32, device=device)


@functools.cache
def _compiled(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Compiled on a GPU. Uncompiled, flex makes a matrix of all pairs of tokens, which only tests on a CPU do."""
    return torch.compile(function, dynamic=False) if device_type == "cuda" else function

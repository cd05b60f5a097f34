"""Causal attention of short sequences on a CPU: batched matmuls over blocks of queries. It keeps the probabilities.

PyTorch's flash kernel computes the probabilities again in its backward. Here the backward reads them, which takes four
matmuls instead of five and no exponentials. The query heads that share a key/value head are rows of one matmul. A block
of queries meets only the keys up to its own last key, so little more than half of all pairs are computed. The last
block is the largest. Its probabilities are not kept: the backward starts with this block and computes them again.

B batch, T tokens, N query heads, K key/value heads, G = N / K, H head dim, V head dim of the values,
L blocks of S tokens, T = L S
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from crius.host import ATTENTION_BLOCK as BLOCK
from crius.kernels import choice

_library = torch.library.Library("crius", "FRAGMENT")
_library.define("attend(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    "attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor p) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def blocked_attention(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTV: Tensor) -> Tensor:
    """Attention of each token to itself and to earlier tokens: ``(B, N, T, V)``. Call only where ``when`` is True."""
    y: Tensor = _Blocked.apply(q_BNTH, k_BKTH, v_BKTV)
    return y


def when(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTV: Tensor) -> bool:
    """Whether it takes the tensors: plain float32 on a CPU, as many queries as keys, a multiple of ``BLOCK``."""
    is_square = q_BNTH.shape[2] == k_BKTH.shape[2] and q_BNTH.shape[2] % BLOCK == 0
    return is_square and q_BNTH.numel() > 0 and choice.are_plain((torch.float32,), q_BNTH, k_BKTH, v_BKTV)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTV: Tensor) -> Tensor:
        kv_heads = k_BKTH.shape[1]
        q = _blocks(q_BNTH, kv_heads)
        k = _rows(k_BKTH)
        v = _rows(v_BKTV)
        y, p = torch.ops.crius.attend.default(q, k, v)
        ctx.save_for_backward(q, k, v, p)
        ctx.kv_heads = kv_heads
        return _from_blocks(y, q_BNTH.shape[0], kv_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNTV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch = grad_BNTV.shape[0]
        kv_heads = ctx.kv_heads
        dq, dk, dv = torch.ops.crius.attend_backward.default(_blocks(grad_BNTV, kv_heads), *ctx.saved_tensors)
        return _from_blocks(dq, batch, kv_heads), *(x.unflatten(0, (batch, kv_heads)) for x in (dk, dv))


def _blocks(x_BNTH: Tensor, kv_heads: int) -> Tensor:
    """``(L, B K, S G, H)``: the rows of a block are contiguous, with the query heads of a key/value head together."""
    x = x_BNTH.unflatten(2, (-1, BLOCK)).unflatten(1, (kv_heads, -1))  # B K G L S H
    return x.permute(3, 0, 1, 4, 2, 5).contiguous().flatten(3, 4).flatten(1, 2)


def _from_blocks(x: Tensor, batch: int, kv_heads: int) -> Tensor:
    """``(B, N, T, H)``, in memory ``(B, T, N, H)``, the layout of the matmuls before and after attention."""
    x = x.unflatten(2, (BLOCK, -1)).unflatten(1, (batch, kv_heads))  # L B K S G H
    return x.permute(1, 0, 3, 2, 4, 5).contiguous().flatten(3, 4).flatten(1, 2).transpose(1, 2)


def _rows(x_BKTH: Tensor) -> Tensor:
    """``(B K, T, H)``, contiguous."""
    return x_BKTH.contiguous().flatten(0, 1)


def _parts(p: Tensor, last: Tensor, q: Tensor) -> Iterator[tuple[int, Tensor]]:
    """For each block, the number of keys that it sees and its probabilities ``(B K, S G, keys)``.

    The probabilities are views into the memory ``p``; those of the last block are a view of ``last``.
    """
    blocks, batch, rows, _ = q.shape
    start = 0
    for keys in range(BLOCK, blocks * BLOCK, BLOCK):
        stop = start + batch * rows * keys
        yield keys, p[start:stop].view(batch, rows, keys)
        start = stop
    yield blocks * BLOCK, last.view(batch, rows, blocks * BLOCK)


def _num_kept(q: Tensor) -> int:
    """Number of kept probabilities: all blocks but the last, each with one column per key up to its own last key."""
    blocks, batch, rows, _ = q.shape
    return batch * rows * BLOCK * (blocks * (blocks - 1) // 2)


def _of_last_block(q: Tensor) -> Tensor:
    """Memory for the scores of the last block, which has the most of all blocks."""
    blocks, batch, rows, _ = q.shape
    return q.new_empty(batch * rows * blocks * BLOCK)


def _later(q: Tensor) -> Tensor:
    """``(S G, S)``, added to the scores of a block and its own keys: -inf for keys after the query."""
    return q.new_full((BLOCK, BLOCK), -torch.inf).triu_(1).repeat_interleave(q.shape[2] // BLOCK, 0)


def _probabilities(out: Tensor, q: Tensor, k: Tensor, later: Tensor) -> None:
    """Probabilities of a block ``(B K, S G, keys)`` from ``q`` ``(B K, S G, H)`` and ``k`` ``(B K, keys, H)``."""
    torch.baddbmm(out, q, k.mT, beta=0, alpha=1 / math.sqrt(q.shape[2]), out=out)
    out[..., -BLOCK:] += later
    torch.softmax(out, -1, out=out)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output in the layout of ``_blocks``, and the kept probabilities."""
    y = q.new_empty(*q.shape[:3], v.shape[2])
    p = q.new_empty(_num_kept(q))
    later = _later(q)
    for block, (keys, part) in enumerate(_parts(p, _of_last_block(q), q)):
        _probabilities(part, q[block], k[:, :keys], later)
        torch.bmm(part, v[:, :keys], out=y[block])
    return y, p


def _attend_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``q``, ``k`` and ``v``; ``grad`` is in the layout of ``_blocks``."""
    dq = torch.empty_like(q)
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    scale = 1 / math.sqrt(q.shape[3])
    last = _of_last_block(q)
    buffer = _of_last_block(q)
    _probabilities(last.view(*q.shape[1:3], -1), q[-1], k, _later(q))
    for block, (keys, part) in reversed(list(enumerate(_parts(p, last, q)))):
        ds = buffer[: part.numel()].view(part.shape)
        torch.bmm(grad[block], v[:, :keys].mT, out=ds)
        torch.ops.aten._softmax_backward_data.out(ds, part, -1, ds.dtype, grad_input=ds)
        torch.baddbmm(dq[block], ds, k[:, :keys], beta=0, alpha=scale, out=dq[block])
        for total, rows_of, other in ((dv, part, grad[block]), (dk, ds, q[block])):
            if keys == total.shape[1]:  # the last block sees all keys and comes first
                torch.bmm(rows_of.mT, other, out=total)
            else:
                total[:, :keys] += torch.bmm(rows_of.mT, other)
    return dq, dk.mul_(scale), dv


_library.impl("attend", _attend, "CPU")
_library.impl("attend_backward", _attend_backward, "CPU")


@torch.library.register_fake("crius::attend", lib=_library)
def _shapes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:-1], v.shape[2]), q.new_empty(_num_kept(q))


@torch.library.register_fake("crius::attend_backward", lib=_library)
def _backward_shapes(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@register_flop_formula(torch.ops.crius.attend)
def flops(q: torch.Size, k: torch.Size, v: torch.Size, *args: object, **kwargs: object) -> int:
    """FLOPs of all pairs, also those with later keys, since PyTorch counts causal attention so."""
    blocks, batch, rows, width = q
    return 2 * batch * blocks * rows * k[1] * (width + v[2])


@register_flop_formula(torch.ops.crius.attend_backward)
def backward_flops(grad: torch.Size, q: torch.Size, k: torch.Size, v: torch.Size, *args: object, **kw: object) -> int:
    """FLOPs of the gradients: two matmuls for each matmul of the forward."""
    return 2 * flops(q, k, v)

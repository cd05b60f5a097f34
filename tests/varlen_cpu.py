"""``torch.nn.attention.varlen`` on a CPU, for which torch has no kernel: by the definition, and slowly."""

from itertools import pairwise

import torch
from torch.nn import functional as F
from torch.nn.attention import varlen


def register():
    """Give torch's operators, forward and backward, to the CPU in this process."""
    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)


def seen(ends):
    """What ``ends`` say of the rows as one sequence: bool ``(B * T, B * T)``."""
    owner = torch.bucketize(torch.arange(int(ends[-1])), ends[1:], right=True)
    return (owner[:, None] == owner) & torch.ones(len(owner), len(owner)).bool().tril()


def plain_attention(q, k, v, ends, scale):
    """Each document alone, in the order of the batch: the definition of ``varlen_attn`` with a causal window."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    parts = []
    for start, stop in pairwise(ends.tolist()):
        rows = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
        parts.append(F.scaled_dot_product_attention(*rows, is_causal=True, scale=scale)[0].transpose(0, 1))
    return torch.cat(parts)


def forward(q, k, v, ends, ends_k, max_q, max_k, is_causal=False, scale=None, window=None, *_):
    assert is_causal and torch.equal(ends, ends_k) and ends.dtype == torch.int32 and ends[-1] == len(q)
    assert max_q == max_k >= int(ends.diff().max())
    lse = torch.zeros(q.shape[1], len(q))
    return plain_attention(q, k, v, ends, scale), lse, torch.zeros(2, dtype=torch.uint64)


def backward(grad, q, k, v, out, lse, ends, ends_k, max_q, max_k, is_causal, rng, scale=None, window=None):
    """By hand, for the operator is called below autograd: the gradient of a softmax, one matrix for all documents."""
    scale, ratio = scale or q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    q, k, v, grad = (x.transpose(0, 1) for x in (q, k, v, grad))
    k, v = (x.repeat_interleave(ratio, dim=0) for x in (k, v))
    scores = (scale * q @ k.mT).masked_fill(~seen(ends), -torch.inf)
    shares, towards = scores.softmax(-1), grad @ v.mT
    slope = scale * shares * (towards - (towards * shares).sum(-1, keepdim=True))
    own = [slope.mT @ q, shares.mT @ grad]
    summed = [x.unflatten(0, (-1, ratio)).sum(1) for x in own]
    return tuple(x.transpose(0, 1).contiguous() for x in (slope @ k, *summed))

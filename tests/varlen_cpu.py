"""``torch.nn.attention.varlen`` on a CPU, for which torch has no kernel: by the definition, and slowly."""

import torch
from torch.nn import functional as F
from torch.nn.attention import varlen


def register():
    """Give torch's operators, forward and backward, to the CPU in this process."""
    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)


def seen(ends, window=0):
    """What ``ends`` and a window say of the rows as one sequence: bool ``(B * T, B * T)``."""
    owner = torch.bucketize(torch.arange(int(ends[-1])), ends[1:], right=True)
    earlier = torch.ones(len(owner), len(owner)).bool().tril()
    return (owner[:, None] == owner) & (earlier.triu(1 - window) if window else earlier)


def forward(q, k, v, ends, ends_k, max_q, max_k, is_causal=False, scale=None, window=None, *_):
    assert torch.equal(ends, ends_k) and ends.dtype == torch.int32 and ends[-1] == len(q)
    assert max_q == max_k >= int(ends.diff().max())
    assert is_causal == (window[0] == -1) and window[1] == 0
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen(ends, window[0] + 1), scale=scale)
    return y.transpose(0, 1).contiguous(), torch.zeros(q.shape[:2]), torch.zeros(2, dtype=torch.uint64)


def backward(grad, q, k, v, out, lse, ends, ends_k, max_q, max_k, is_causal, rng, scale=None, window=None):
    """By hand, for the operator is called below autograd: the gradient of a softmax, one matrix for all documents."""
    scale, ratio = scale or q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    q, k, v, grad = (x.transpose(0, 1) for x in (q, k, v, grad))
    k, v = (x.repeat_interleave(ratio, dim=0) for x in (k, v))
    scores = (scale * q @ k.mT).masked_fill(~seen(ends, window[0] + 1), -torch.inf)
    shares, towards = scores.softmax(-1), grad @ v.mT
    slope = scale * shares * (towards - (towards * shares).sum(-1, keepdim=True))
    own = [slope.mT @ q, shares.mT @ grad]
    summed = [x.unflatten(0, (-1, ratio)).sum(1) for x in own]
    return tuple(x.transpose(0, 1).contiguous() for x in (slope @ k, *summed))

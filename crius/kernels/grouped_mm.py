"""Stub until the operator lands."""

import torch


def grouped_linear(x, weight, ends):
    out = []
    s = 0
    for w, e in zip(weight.unbind(0), ends.tolist()):
        out.append(x[s:e] @ w.T)
        s = e
    return torch.cat(out)


def spread(x, order, place, k):
    return x[order // k]


def combine(rows, order, place):
    return rows[place]

"""Mixture of experts: a router, experts as stacked weights, dropless dispatch, and balancing of their load.

Shazeer et al. 2017 (arXiv:1701.06538); the sigmoid form with groups and a bias: DeepSeek-V3 (arXiv:2412.19437). Each
token visits the K experts that its scores choose, however many others do: none is dropped, nothing is padded. Loads
are counted in integers, and balance losses are taken by sequence, so that neither depends on how the batch is split.

B batch, T tokens of this rank's part of a sequence, N = B * T, D model dim, F hidden dim, E experts, K visited experts,
M rows that this rank's experts compute
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crius.kernels.cpu.pointwise import swiglu
from crius.kernels.grouped_mm import grouped_linear, permute
from crius.models.config import RoutedConfig
from crius.models.layers import FeedForward

LOSS_UNIT = 2.0**-32
"""Unit of the balance loss in the last number of a load. The loss is fixed-point, so its sum has no order."""

_MOST_LOSS = 2.0**20
"""Largest balance loss of one layer and microbatch that is counted. NaN counts as 0; the loss itself is NaN then."""


class SequenceCounts(nn.Module):
    """Counts how often all tokens of a sequence chose each expert.

    A separate module, so that a layout can replace it: ranks that share a sequence sum their counts.

    Attributes:
        ranks: number of ranks that share a sequence.
    """

    ranks = 1

    def forward(self, counts_BE: Tensor) -> Tensor:
        """int64 counts of whole sequences, from the counts of this rank's part of each."""
        return counts_BE


class _WithLoss(torch.autograd.Function):
    """Returns its first argument. The backward of the first argument also starts the backward of ``loss``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        ctx.device = loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=ctx.dtype, device=ctx.device)


class Router(nn.Module):
    """Chooses the experts of each token and their weights. It computes in float32 if the model uses a lower precision.

    Attributes:
        aux_scale: factor of the balance loss of one sequence (DeepSeek-V3, equations 17 to 20): its coefficient over
            the sequences of the global batch; 0: no such loss.
        z_scale: factor of the squared log-partition of one token (ST-MoE, arXiv:2202.08906): its coefficient over the
            tokens of the global batch; 0: no such loss.
    """

    bias: Tensor

    def __init__(self, config: RoutedConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim))
        if config.router_bias:
            self.register_buffer("bias", torch.zeros(config.num_experts))
        self.sequence_counts = SequenceCounts()
        self.top_k = config.top_k
        self.score = config.score
        self.norm_topk = config.norm_topk
        self.route_scale = config.route_scale
        self.num_groups = config.num_groups
        self.top_groups = config.top_groups
        self.aux_scale = self.z_scale = 0.0

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See ``route``."""
        return self.route(x_BTD, self.weight)

    def route(self, x_BTD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The experts of each token, int64 ``(N, K)``, their weights, float32 ``(N, K)``, and the layer's counts.

        The counts, int64 ``(E + 1,)``, are the tokens that chose each expert, then the losses in ``LOSS_UNIT``.
        """
        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        logits_NE = F.linear(x_BTD.flatten(0, 1).to(dtype), weight_ED.to(dtype))
        scores_NE = logits_NE.softmax(-1) if self.score == "softmax" else logits_NE.sigmoid()
        ids_NK = torch.topk(self._choice(scores_NE.detach()), self.top_k, dim=-1, sorted=False).indices
        weights_NK = scores_NE.gather(1, ids_NK)
        if self.norm_topk:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)  # sigmoids can all be 0
        if self.route_scale != 1.0:
            weights_NK = weights_NK * self.route_scale
        counts_BE = logits_NE.new_zeros(x_BTD.shape[0], logits_NE.shape[1], dtype=torch.int64)
        chosen = ids_NK.view(x_BTD.shape[0], -1)
        counts_BE.scatter_add_(1, chosen, torch.ones_like(chosen))
        lost = counts_BE.new_zeros(1)
        if self.training and (self.aux_scale or self.z_scale):
            loss = self._losses(logits_NE, scores_NE, counts_BE)
            weights_NK = _WithLoss.apply(weights_NK, loss)
            counted = loss.detach().nan_to_num(0.0, _MOST_LOSS).clamp(max=_MOST_LOSS)
            lost = (counted / LOSS_UNIT).round().to(torch.int64)[None]
        return ids_NK, weights_NK, torch.cat((counts_BE.sum(0), lost))

    def _choice(self, scores_NE: Tensor) -> Tensor:
        """The scores for the choice of experts."""
        choice_NE = scores_NE + self.bias if hasattr(self, "bias") else scores_NE
        if self.num_groups == 1:
            return choice_NE
        groups_NGE = choice_NE.unflatten(1, (self.num_groups, -1))
        best_NG = groups_NGE.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1, sorted=False).indices
        is_out_NG = torch.ones_like(groups_NGE[..., 0], dtype=torch.bool).scatter(1, best_NG, False)
        return groups_NGE.masked_fill(is_out_NG[..., None], -torch.inf).flatten(1)

    def _losses(self, logits_NE: Tensor, scores_NE: Tensor, counts_BE: Tensor) -> Tensor:
        """This rank's share of the balance loss and of the z-loss, a float64 scalar."""
        loss = logits_NE.new_zeros((), dtype=torch.float64)
        if self.aux_scale:
            # f: how often an expert was chosen, over an even load; P: its mean share of the scores
            tokens = scores_NE.shape[0] // counts_BE.shape[0] * self.sequence_counts.ranks
            share_BE = self.sequence_counts(counts_BE).double() * (counts_BE.shape[1] / (self.top_k * tokens))
            part_NE = scores_NE if self.score == "softmax" else scores_NE / scores_NE.sum(-1, keepdim=True)
            mean_BE = part_NE.view(counts_BE.shape[0], -1, counts_BE.shape[1]).sum(1).double() / tokens
            loss = loss + self.aux_scale * (share_BE * mean_BE).sum()
        if self.z_scale:
            loss = loss + self.z_scale * logits_NE.logsumexp(-1).square().sum(dtype=torch.float64)
        return loss


class Experts(nn.Module):
    """SwiGLU feed-forwards, ``w2(silu(w1 x) * w3 x)`` each, their weights stacked."""

    def __init__(self, num_experts: int, dim: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, width, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, width))
        self.w3 = nn.Parameter(torch.empty(num_experts, width, dim))

    def forward(self, x_MD: Tensor, ends_E: Tensor) -> Tensor:
        """See ``compute``."""
        return self.compute(x_MD, ends_E, self.w1, self.w2, self.w3)

    def compute(self, x_MD: Tensor, ends_E: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        """Apply the experts to rows ``x`` in order of experts: ``(M, D)``. Rows of expert e end before ``ends[e]``.

        ``ends`` is int32. Expert parallelism calls this with the experts that this rank has.
        """
        hidden_MF = swiglu(grouped_linear(x_MD, w1, ends_E), grouped_linear(x_MD, w3, ends_E))
        return grouped_linear(hidden_MF, w2, ends_E)


def inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def by_expert(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The stable order of the choices by expert, and the place of each choice in this order."""
    order = ids.flatten().argsort(stable=True)
    return order, inverse(order)


class Dispatch(nn.Module):
    """Brings tokens to their experts and back. It is a separate module, so that another module can replace it."""

    def forward(
        self, x_ND: Tensor, ids_NK: Tensor, counts_E: Tensor, experts: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Output of each chosen expert for each token, ``(N, K, D)``.

        Args:
            x_ND: tokens.
            ids_NK: experts of the tokens.
            counts_E: number of tokens that chose each expert, int64.
            experts: experts, which take rows ordered by expert. The rows of expert e end before row ``ends[e]``.
        """
        order, place = by_expert(ids_NK)
        rows = experts(permute(x_ND, order, place, ids_NK.shape[1]), counts_E.cumsum(0).to(torch.int32))
        return permute(rows, place, order).view(*ids_NK.shape, -1)


class MixtureOfExperts(nn.Module):
    """A feed-forward with experts. Each token visits some of the routed experts and all shared experts.

    Attributes:
        bias_rate: change of the router's bias per update; experts with too few tokens get a larger bias.
        load: sum of the counts of ``Router.route`` over the forward passes of a step.
    """

    load: Tensor

    def __init__(self, config: RoutedConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.dispatch = Dispatch()
        self.experts = Experts(config.num_experts, config.dim, config.expert_ffn_dim)
        self.shared = FeedForward(config.dim, config.shared_ffn_dim) if config.shared_ffn_dim else None
        self.register_buffer("load", torch.zeros(config.num_experts + 1, dtype=torch.int64), persistent=False)
        self.bias_rate = 0.0

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Output, ``(B, T, D)``, and the counts of the router, ``(E + 1,)``."""
        ids_NK, weights_NK, load = self.router(x_BTD)
        found_NKD = self.dispatch(x_BTD.flatten(0, 1), ids_NK, load[:-1], self.experts)
        y_ND = (found_NKD * weights_NK[..., None]).sum(1).to(x_BTD.dtype)  # in float32, in the order of choice
        y_BTD = y_ND.view(x_BTD.shape)
        return (y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)), load

    def after_update(self) -> None:
        """Move the router's bias by the loads of the step: integers, summed over all ranks (arXiv:2408.15664)."""
        if hasattr(self.router, "bias") and self.bias_rate:
            counts = self.load[:-1]
            self.router.bias += self.bias_rate * (counts.sum() - counts * counts.numel()).sign()

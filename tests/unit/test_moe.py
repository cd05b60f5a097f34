"""The router, the balance of experts and what a layer counts, against the formulas written out."""

from dataclasses import replace

import pytest
import torch
from sigmoid_moe import SMALL
from torch.nn import functional as F

from crius.models.moe import LOSS_UNIT, MixtureOfExperts, Router

B, T = 3, 8


def layer(seed=0, kind=MixtureOfExperts, **sizes):
    """A layer with experts, its weights drawn, and hidden states that want gradients."""
    generator = torch.Generator().manual_seed(seed)
    module = kind(replace(SMALL, **sizes))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return module, torch.randn(B, T, SMALL.dim, generator=generator).requires_grad_()


def written_out(moe, x_BTD):
    """What each token gets, token by token and expert by expert, and the experts that it chose."""
    config, router = SMALL, moe.router
    rows, chosen = [], []
    for x in x_BTD.flatten(0, 1):
        logits = router.weight @ x
        scores = logits.softmax(0) if router.score == "softmax" else logits.sigmoid()
        choice = scores.detach() + (router.bias if hasattr(router, "bias") else 0)
        if router.num_groups > 1:
            groups = choice.view(router.num_groups, -1)
            best = groups.topk(2).values.sum(1).topk(router.top_groups).indices.tolist()
            size = groups.shape[1]
            choice = torch.tensor([c if i // size in best else -9e9 for i, c in enumerate(choice.tolist())])
        ids = choice.topk(config.top_k).indices
        weights = scores[ids] / (scores[ids].sum() if router.norm_topk else 1.0) * router.route_scale
        experts = moe.experts
        y = sum(
            w * (experts.w2[i] @ (F.silu(experts.w1[i] @ x) * (experts.w3[i] @ x)))
            for i, w in zip(ids, weights, strict=False)
        )
        rows.append(y + (moe.shared(x[None, None])[0, 0] if moe.shared is not None else 0))
        chosen.append(sorted(ids.tolist()))
    return torch.stack(rows).view_as(x_BTD), chosen


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"score": "softmax", "router_bias": False, "num_groups": 1, "route_scale": 1.0, "shared_ffn_dim": 0},
        {"norm_topk": False, "num_groups": 1},
    ],
    ids=["sigmoid", "softmax", "not normed"],
)
def test_each_token_gets_the_weighted_sum_of_its_experts(sizes):
    moe, x = layer(**sizes)
    if hasattr(moe.router, "bias"):
        moe.router.bias.copy_(torch.linspace(-0.5, 0.5, SMALL.num_experts))
    got, load = moe(x)
    want, chosen = written_out(moe, x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert load[:-1].tolist() == [sum(e in of_one for of_one in chosen) for e in range(SMALL.num_experts)]
    for one, other in zip(
        *(torch.autograd.grad(y.square().sum(), [x, *moe.parameters()]) for y in (got, want)), strict=False
    ):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_the_bias_chooses_and_does_not_weigh():
    router, x = layer(kind=Router, num_groups=1)
    ids, weights, _ = router(x)
    router.bias[5] = 10.0
    moved, reweighed, _ = router(x)
    assert (moved == 5).any(1).all() and not (ids == 5).any(1).all()
    scores = torch.sigmoid(F.linear(x.flatten(0, 1), router.weight)).gather(1, moved)
    torch.testing.assert_close(reweighed, 2.5 * scores / scores.sum(1, keepdim=True))


def test_the_bias_moves_by_whole_counts():
    moe, _ = layer()
    moe.bias_rate = 0.01
    moe.load[:-1] = torch.tensor([5, 1, 3, 3, 3, 3, 3, 3])
    moe.after_update()
    assert moe.router.bias.tolist() == pytest.approx([-0.01, 0.01, *[0.0] * 6])
    assert not moe.router.bias.requires_grad


def test_a_backward_keeps_nothing_of_the_choice_of_experts_or_of_the_counted_loss():
    router, x = layer(kind=Router)
    router.aux_scale = router.z_scale = 0.5
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        ids, _, _ = router(x)
    assert [tensor for tensor in kept if tensor.ndim == 0] == []
    assert [tensor.shape for tensor in kept if tensor.dtype == torch.int64] == [ids.shape]  # of the chosen scores


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balance_losses_come_as_gradients_and_are_counted(score):
    router, x = layer(kind=Router, score=score, num_groups=1, router_bias=False)
    ids, weights, load = router(x)
    assert load[-1] == 0
    alone = torch.autograd.grad(weights.sum(), x)[0]
    router.aux_scale, router.z_scale = 0.5, 0.25
    ids, weights, load = router(x)
    got = torch.autograd.grad(weights.sum(), x)[0] - alone
    logits = F.linear(x, router.weight)
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    shares = (scores / scores.sum(-1, keepdim=True)).mean(1)  # P of each sequence
    often = F.one_hot(ids.view(B, T * SMALL.top_k), SMALL.num_experts).sum(1) * SMALL.num_experts / SMALL.top_k / T  # f
    want = 0.5 * (often * shares).sum() + 0.25 * logits.logsumexp(-1).square().sum()
    torch.testing.assert_close(got, torch.autograd.grad(want, x)[0], rtol=1e-4, atol=1e-5)
    assert load[-1].item() * LOSS_UNIT == pytest.approx(want.item(), rel=1e-6)
    assert int(load[:-1].sum()) == B * T * SMALL.top_k


def test_a_balanced_sequence_has_the_least_balance_loss():
    router, x = layer(kind=Router, router_bias=False, num_groups=1, score="softmax")
    router.aux_scale = 1.0
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, :8] = 4.0 * torch.eye(8)
        x.zero_()
        x[..., :8] = torch.eye(8)  # token t of each sequence prefers expert t
    balanced = router(x)[2][-1].item() * LOSS_UNIT / B
    with torch.no_grad():
        x[..., :8] = torch.eye(8)[0]
    worst = router(x)[2][-1].item() * LOSS_UNIT / B
    assert balanced < 1.05 < 3 < worst


@pytest.mark.parametrize(("scale", "counted"), [(float("nan"), 0.0), (1e30, 2.0**20)])
def test_a_balance_loss_that_is_no_number_or_huge_is_counted_as_one_that_fits(scale, counted):
    router, x = layer(kind=Router)
    router.aux_scale = scale
    assert router(x)[2][-1].item() == counted * 2**32


def test_validation_brings_no_losses():
    router, x = layer(kind=Router)
    router.aux_scale = 1.0
    assert router.eval()(x)[2][-1] == 0

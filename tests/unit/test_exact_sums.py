"""The parts of ``training.reproducible`` that one process can show: no cut of a tensor changes a bit."""

import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from crius.config.layout import Layout
from crius.parallel import reproducible
from crius.parallel.reproducible import (
    HashedReduceScatter,
    PlainReduceScatter,
    ReproducibleGradients,
    TreeAccumulation,
    describe_trees,
    hash_bits,
    slice_scales,
    sliced_squares,
    tree_sum,
)

# of shards; most leave numbers over that fill no vector of the CPU
CUTS = (1, 7, 33, 257, 3501)


def numbers(count, seed=0):
    """Of very different sizes, float32."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=draw) * 10.0 ** torch.randint(-12, 12, (count,), generator=draw)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8])
def test_a_tree_adds_neighbours_first(count):
    def added(low, high):
        if high - low == 1:
            return parts[low]
        half = low + 2 ** ((high - low - 1).bit_length() - 1)  # the left branch is whole
        return added(low, half) + added(half, high)

    parts = numbers(count * 50).view(count, 50)
    assert torch.equal(tree_sum(parts), added(0, count))


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_microbatches_are_added_as_the_tree_that_ranks_make(count):
    parts, tree = numbers(count * 50).view(count, 50), TreeAccumulation(None)
    for _ in range(2):  # a second step starts anew
        for index in range(count):
            total = parts[index].clone()
            tree.is_last = index == count - 1
            tree(total)
        assert torch.equal(total, tree_sum(parts))


@pytest.mark.parametrize("cut", CUTS)
def test_no_cut_changes_a_squared_norm_which_is_right_to_1e_15(cut):
    values = numbers(7000)
    [scale] = slice_scales(values.abs().amax().double()[None])
    whole = sliced_squares(values, scale)
    pieces = [sliced_squares(piece, scale) for piece in values.split(cut)]
    assert torch.equal(torch.stack(pieces).sum(dim=0), whole)
    assert torch.equal(torch.stack(pieces[::-1]).sum(dim=0), whole)
    exact = sum(Fraction(value) ** 2 for value in values.tolist())
    assert abs(Fraction(whole.sum().item()) / exact - 1) < 1e-15


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_the_exact_norm_of_what_it_counts(rank, monkeypatch):
    monkeypatch.setattr(reproducible.dist, "all_reduce", lambda *_, **__: None)
    own = ReproducibleGradients.__new__(ReproducibleGradients)
    own._device = torch.device("cpu")
    own._world = SimpleNamespace(rank=rank, sum=lambda slices: slices)
    own._is_counted = torch.tensor([1.0, 1.0, 0.0, 0.0])[:, None]
    first, *others = own._squared([numbers(700), torch.zeros(0), numbers(50), numbers(9)]).tolist()
    exact = 0 if rank else sum(Fraction(value) ** 2 for value in numbers(700).tolist())
    assert abs(Fraction(first) - exact) <= 1e-15 * exact and others == [0, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_no_finite_norm(bad):
    values = torch.tensor([1.0, bad, -2.0])
    [scale] = slice_scales(values.abs().amax().double()[None])
    assert not sliced_squares(values, scale).sum().isfinite()


def test_a_gradient_of_zeros_and_one_without_numbers_have_norm_zero():
    [scale] = slice_scales(torch.zeros(1, dtype=torch.float64))
    assert sliced_squares(torch.zeros(3), scale).sum() == 0
    assert sliced_squares(torch.zeros(0), scale).sum() == 0


def adamw(cut, **how):
    """Weights and moments after three steps on shards of ``cut`` numbers."""
    parts = [nn.Parameter(part.clone()) for part in numbers(7000).split(cut)]
    optimizer = torch.optim.AdamW(parts, lr=1e-3, weight_decay=0.1, **how)
    for step in range(3):
        for part, gradient in zip(parts, numbers(7000, seed=step + 1).split(cut), strict=True):
            part.grad = gradient.clone()
        torch._foreach_mul_([part.grad for part in parts], torch.tensor(0.37))
        optimizer.step()
    held = [[part.detach() for part in parts]]
    held += [[optimizer.state[part][name] for part in parts] for name in ("exp_avg", "exp_avg_sq")]
    return torch.cat([torch.cat(pieces) for pieces in held])


@pytest.mark.parametrize("cut", CUTS)
def test_foreach_adamw_rounds_a_number_alike_wherever_it_is_in_a_shard(cut):
    """The fused one does not, which is why a reproducible run leaves it."""
    assert torch.equal(adamw(cut, foreach=True), adamw(7000, foreach=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hash_sees_any_flipped_bit_and_any_swap(dtype):
    values = numbers(100_000).to(dtype)
    before = hash_bits(values)
    ints = values.view({4: torch.int32, 2: torch.int16}[values.element_size()])
    for index in (0, 1, 65_536, 99_999):
        for bit in (0, 9, 14):
            ints[index] ^= 1 << bit
            assert not torch.equal(hash_bits(values), before)
            ints[index] ^= 1 << bit
    assert torch.equal(hash_bits(values), before)
    for first, second in ((0, 1), (7, 65_543), (0, 65_536), (3, 99_999)):
        swapped = values.clone()
        swapped[[first, second]] = values[[second, first]]
        assert not torch.equal(hash_bits(swapped), before)


@pytest.mark.parametrize(("count", "kept"), [(1, "no more memory"), (2, "1 more"), (8, "3 more sharded gradients are")])
def test_each_doubling_of_the_microbatches_keeps_one_gradient_more(count, kept):
    assert kept in describe_trees(Layout(dp_shard=2), count)


def test_a_ranks_own_gradient_is_hashed_when_the_buffer_of_the_sum_is_made():
    reduced = HashedReduceScatter(PlainReduceScatter())

    def backward(value):
        own = reduced.allocate((6,), dtype=torch.float32, device=torch.device("cpu")).fill_(value)
        reduced.allocate((3,), dtype=torch.float32, device=torch.device("cpu"))
        return hash_bits(own)

    backward(1.0)
    assert reduced.hashes == []
    reduced.is_on = True
    wanted = [backward(2.0), backward(3.0)]
    assert torch.equal(torch.stack(reduced.hashes), torch.stack(wanted))

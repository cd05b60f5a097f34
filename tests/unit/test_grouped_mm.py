"""``crius::grouped_mm`` and the moves of rows, against loops over the groups."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from crius.kernels.grouped_mm import grouped_linear, permute, spread

SIZES = (0, 5, 1, 0, 3, 2, 0)


def case(sizes=SIZES, dtype=torch.float64, inner=8, outer=4):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), inner, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(len(sizes), outer, inner, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return x, weight, torch.tensor(sizes).cumsum(0).to(torch.int32)


def looped(x, weight, sizes):
    return torch.cat([rows @ matrix.T for rows, matrix in zip(x.split(list(sizes)), weight, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sizes", [SIZES, (4, 4), (0, 0, 6), (0, 0)], ids=str)
def test_each_row_meets_the_matrix_of_its_group(sizes, dtype):
    x, weight, ends = case(sizes, dtype)
    got = grouped_linear(x, weight, ends)
    want = looped(x, weight, sizes)
    assert got.dtype == dtype and got.shape == want.shape
    bound = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}[dtype]
    assert torch.allclose(got, want, rtol=bound, atol=10 * bound)
    towards = torch.linspace(-1, 1, want.numel(), dtype=dtype).view_as(want)
    for one, other in zip(
        torch.autograd.grad(got, [x, weight], towards), torch.autograd.grad(want, [x, weight], towards), strict=True
    ):
        assert torch.allclose(one, other, rtol=bound, atol=10 * bound)


def test_gradients_are_those_of_finite_differences():
    x, weight, ends = case()
    assert torch.autograd.gradcheck(lambda x, weight: grouped_linear(x, weight, ends), (x, weight))


def test_a_gradient_without_memory_of_its_own_will_do():
    x, weight, ends = case(dtype=torch.float32)
    grouped_linear(x, weight, ends).sum().backward()
    assert x.grad is not None and weight.grad[0].eq(0).all() and weight.grad[1].ne(0).any()


def test_rows_behind_the_last_group_are_refused():
    x, weight, ends = case()
    with pytest.raises(ValueError, match="which does not ascend to the number of rows, 10"):
        grouped_linear(x[:10], weight, ends)


def test_what_shares_a_group_does_not_show():
    """More rows, other groups: the bits of a row stay, from four rows on (MKL multiplies fewer in another way)."""
    x, weight, _ = case((8, 8), torch.float32, 64, 64)
    both = grouped_linear(x, weight, torch.tensor([8, 16], dtype=torch.int32))
    alone = grouped_linear(x[:4], weight[:1], torch.tensor([4], dtype=torch.int32))
    assert torch.equal(both[:4], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_are_known_without_numbers(dtype):
    x, weight, ends = (tensor.to("meta") for tensor in case(dtype=dtype))
    y = grouped_linear(x, weight, ends)
    assert y.shape == (11, 4) and y.dtype == dtype
    grads = torch.autograd.grad(y.sum(), [x, weight])
    assert [grad.shape for grad in grads] == [x.shape, weight.shape]


def test_flops_are_counted_forward_and_backward():
    x, weight, ends = case()
    with FlopCounterMode(display=False) as counter:
        grouped_linear(x, weight, ends).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 11 * 8 * 4


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_one_graph_serves_other_groups_and_recomputation(backend):
    def block(x, weight, order, place, ends):
        y = grouped_linear(spread(x, order, place, 2), weight, ends)
        return permute(y, place, order).view(-1, 2, y.shape[1]).sum(1)

    def recomputed(*args):
        return checkpoint(block, *args, use_reentrant=False)

    torch._dynamo.reset()
    compiled = torch.compile(recomputed, backend=backend, fullgraph=True)
    for sizes in ((0, 5, 3), (8, 0, 0), (2, 2, 4)):
        _, weight, ends = case(sizes)
        x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
        order = torch.randperm(8)
        place = order.argsort()
        args = (x, weight, order, place, ends)
        got, want = compiled(*args), block(*args)
        assert torch.equal(got, want)
        for one, other in zip(
            torch.autograd.grad(got.square().sum(), [x, weight]),
            torch.autograd.grad(want.square().sum(), [x, weight]),
            strict=True,
        ):
            assert torch.allclose(one, other)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_rows_are_spread_and_their_gradients_summed():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    place = order.argsort()
    rows = spread(x, order, place, 2)
    assert torch.equal(rows, x.repeat_interleave(2, 0)[order])
    assert torch.equal(permute(rows, place, order), x.repeat_interleave(2, 0))
    assert torch.autograd.gradcheck(lambda x: permute(spread(x, order, place, 2), place, order), (x,))

"""Squared norms by rows: those of float64 sums, to rounding, and the same on every split of the rows."""

import pytest
import torch

from crius.kernels.choice import Choice, applied
from crius.kernels.cpu.pointwise import MAX_ROW, squared_norms, squared_norms_reference, sums_rows

SHAPES = [(7,), (5, 33), (3, 4, 9), (0, 8), (8, 0), (1, 1), ()]


@pytest.fixture(autouse=True)
def fused():
    with applied(Choice(pointwise="fused")):
        yield


def test_they_are_the_sums_in_float64_to_rounding():
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in SHAPES] + [torch.randn(40, 30).t(), torch.randn(6, 20)[:, ::2]]
    found = squared_norms(tensors)
    assert found.dtype == torch.float64
    exact = torch.stack([x.double().square().sum() for x in tensors])
    torch.testing.assert_close(found, exact, rtol=3e-7, atol=0)


def test_errors_of_many_rows_cancel():
    torch.manual_seed(0)
    matrix = torch.randn(2048, 512)
    found, exact = squared_norms([matrix]).item(), matrix.double().square().sum().item()
    assert abs(found / exact - 1) < 1e-8


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_ranks_with_whole_rows_add_up_what_one_rank_does(parts):
    torch.manual_seed(0)
    matrix = torch.randn(50, 96)
    whole = squared_norms([matrix]).sum()
    split = squared_norms(list(matrix.chunk(parts))).sum()
    torch.testing.assert_close(split, whole, rtol=1e-15, atol=0)  # the order of sums in float64, and no more


def test_vectors_are_summed_in_float64_as_ranks_have_any_part_of_them():
    torch.manual_seed(0)
    vector = torch.randn(1000)
    assert torch.equal(squared_norms([vector]), squared_norms_reference([vector]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad):
    matrix = torch.ones(4, 4)
    matrix[2, 1] = bad
    assert not squared_norms([matrix]).isfinite().any()


@pytest.mark.parametrize(
    ("x", "want"),
    [
        (torch.ones(2, 3), True),
        (torch.ones(3), False),
        (torch.ones(2, 3, dtype=torch.bfloat16), False),
        (torch.ones(1, 1).expand(1, MAX_ROW + 1), False),
    ],
)
def test_only_matrices_in_float32_go_by_rows(x, want):
    assert sums_rows(x) is want


def test_without_a_choice_all_sums_are_in_float64():
    with applied(Choice()):
        assert not sums_rows(torch.ones(2, 3))

"""The operator of experts multiplies each group of rows with its matrix, wherever it runs."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from crius.kernels import grouped_mm
from crius.kernels.choice import Choice, applied
from crius.kernels.grouped_mm import grouped_linear, permute
from crius.tools.dry_run.recorder import Recorder

# rows of each group
GROUPS = [(3, 0, 5, 1), (0, 0, 0), (7,), (0, 4), (40, 130, 1)]
# relative to the largest number: a rounding of sums and products, and of the result
ROUNDING = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


class OpNames(TorchDispatchMode):
    """Notes the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def inputs(groups, dtype=torch.float32, width=8, out=12):
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((sum(groups), width), (len(groups), out, width), (sum(groups), out))
    )
    ends = torch.tensor(groups).cumsum(0).int()
    return x.requires_grad_(), weight.requires_grad_(), ends, grad


def run(function, x, weight, ends, grad):
    y = function(x, weight, ends)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), grad)]


def reference(x, weight, ends):
    """Group by group in float64."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = zip(x.double().split(sizes), weight.double().unbind(), strict=True)
    return torch.cat([rows @ matrix.t() for rows, matrix in parts]).to(x.dtype)


def close(found, expected, dtype):
    for each, other in zip(found, expected, strict=True):
        assert each.dtype == dtype and each.shape == other.shape
        scale = float(other.double().abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(each, other, rtol=0, atol=ROUNDING[dtype] * scale)


@pytest.fixture(params=["torch", "onednn"])
def linear(request):
    if request.param == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    with applied(Choice(linear=request.param)):
        yield request.param


@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_it_multiplies_each_group_with_its_matrix(groups, dtype):
    given = inputs(groups, dtype)
    found = run(grouped_linear, *given)
    close(found, run(reference, *given), dtype)
    assert all((found[2][e] == 0).all() for e, rows in enumerate(groups) if rows == 0)


@pytest.mark.parametrize(
    ("groups", "widths", "count"),
    [((3, 0, 5, 1), (8, 16), 3), ((1,), (8, 16), 3), ((0, 0), (8, 16), 0), ((3, 2), (8, 12), 0), ((3, 2), (12, 8), 0)],
)
def test_torchs_kernel_multiplies_rows_of_whole_16_bytes(groups, widths, count, monkeypatch):
    monkeypatch.setattr(grouped_mm, "is_for_torch", lambda device_type, dtype: True)
    given = inputs(groups, torch.bfloat16, *widths)
    with OpNames() as ops:
        found = run(grouped_linear, *given)
    close(found, run(reference, *given), torch.bfloat16)
    assert ops.names.count("aten::_grouped_mm") == count


def test_a_gradient_is_the_derivative():
    x, weight, ends, _ = inputs((2, 0, 3), torch.float64, 2, 3)
    assert gradcheck(lambda x, weight: grouped_linear(x, weight, ends), (x, weight))


@pytest.mark.parametrize(
    "strided",
    [lambda grad: grad[:1, :1].expand(grad.shape), lambda grad: grad.t().contiguous().t(), lambda grad: grad[:1, :1]],
    ids=["expanded", "transposed", "sum"],
)
@pytest.mark.parametrize("groups", [(3, 0, 5, 1), (1,)], ids=str)
def test_a_gradient_may_have_any_strides(strided, groups):
    x, weight, ends, grad = inputs(groups)
    grad = strided(grad).expand(grad.shape)
    close(run(grouped_linear, x, weight, ends, grad), run(reference, x, weight, ends, grad), x.dtype)


def test_only_what_is_asked_for_gets_a_gradient():
    x, weight, ends, _ = inputs((3, 2))
    for frozen, other in ((x, weight), (weight, x)):
        frozen.requires_grad_(False)
        with FlopCounterMode(display=False) as counter:
            grouped_linear(x, weight, ends).sum().backward()
        frozen.requires_grad_()
        assert frozen.grad is None and other.grad is not None
        other.grad = None
        assert counter.get_total_flops() == 2 * 2 * 5 * 8 * 12


@pytest.mark.parametrize("ends", [[3, 4], [3, 6], [4, 3, 5], [-1, 5]], ids=str)
def test_ends_that_are_not_those_of_the_rows_are_refused(ends):
    x, weight, *_ = inputs((5, *[0] * (len(ends) - 1)))
    with pytest.raises(ValueError, match=r"must ascend to the number of rows, 5, but are \["):
        grouped_linear(x, weight, torch.tensor(ends, dtype=torch.int32))


def test_a_row_has_the_same_bits_in_a_group_of_any_size(linear):
    """From 4 rows on for PyTorch's own float32 product: MKL has other kernels for fewer."""
    x, weight, _, grad = inputs((300,), width=64, out=48)
    whole = run(grouped_linear, x, weight, torch.tensor([300], dtype=torch.int32), grad)
    parts = torch.tensor([4, 9, 29, 99, 115, 260, 300], dtype=torch.int32)
    split = run(grouped_linear, x, weight.detach().expand(7, -1, -1).clone().requires_grad_(), parts, grad)
    assert torch.equal(whole[0], split[0]) and torch.equal(whole[1], split[1])


def test_shapes_that_do_not_go_together_are_refused():
    x, weight, ends, _ = inputs((3, 2))
    for wrong in ((x[:, :4], weight, ends), (x, weight[:1], ends), (x, weight.double(), ends)):
        with pytest.raises(RuntimeError, match="x "):
            grouped_linear(*wrong)


@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_a_group_reads_no_row_of_another(dtype):
    """NaN in the rows and the matrix of one group stays there."""
    x, weight, ends, grad = inputs((40, 130, 1), dtype)
    clean = run(grouped_linear, x, weight, ends, grad)
    with torch.no_grad():
        x[40:170], weight[1], grad[40:170] = torch.nan, torch.nan, torch.nan
    y, grad_x, grad_weight = run(grouped_linear, x, weight, ends, grad)
    for found, expected in ((y, clean[0]), (grad_x, clean[1])):
        assert found[40:170].isnan().all()
        assert torch.equal(found[:40], expected[:40]) and torch.equal(found[170:], expected[170:])
    assert torch.equal(grad_weight[::2], clean[2][::2])


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_tiles_of_a_group_are_its_own_rows():
    x, weight, _, _ = inputs((300,))
    y = torch.full((300, 12), torch.nan)
    grouped_mm._multiply_tiles(x.detach(), weight[0].detach(), slice(5, 140), y)
    assert y[5:140].isfinite().all() and y[:5].isnan().all() and y[140:].isnan().all()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_shapes_are_known_without_contents(dtype):
    given = inputs((3, 0, 5, 1), dtype)
    expected = [(each.shape, each.dtype) for each in run(grouped_linear, *given)]
    meta = [each.detach().to("meta").requires_grad_(each.requires_grad) for each in given]
    assert [(each.shape, each.dtype) for each in run(grouped_linear, *meta)] == expected
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(each) for each in given]
        assert [(each.shape, each.dtype) for each in run(grouped_linear, *fake)] == expected


def test_flops_are_those_of_the_rows():
    """The same by PyTorch's counter and in a dry run: forward, and two gradients."""
    given = inputs((3, 0, 5, 1))
    with FlopCounterMode(display=False) as counter, Recorder({}) as recorder:
        run(grouped_linear, *given)
    assert counter.get_total_flops() == sum(recorder.flops.values()) == 3 * 2 * 9 * 8 * 12


def moe(x, ids, *weights):
    """Experts of tokens ``(T, D)``, ``ids`` ``(T, K)``: SwiGLU without what weighs it."""
    order = ids.flatten().argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0]))
    counts = torch.zeros(len(weights[0]), dtype=torch.int64).scatter_add(0, ids.flatten(), torch.ones_like(order))
    ends = counts.cumsum(0).int()
    rows = permute(x, order, inverse, ids.shape[1])
    hidden = torch.nn.functional.silu(grouped_linear(rows, weights[0], ends)) * grouped_linear(rows, weights[2], ends)
    y = grouped_linear(hidden, weights[1], ends)
    return permute(y, inverse, order).unflatten(0, (-1, ids.shape[1])).sum(1)


def plain_moe(x, ids, *weights):
    rows = [
        torch.nn.functional.silu(weights[0][e] @ row) * (weights[2][e] @ row)
        for row, experts in zip(x, ids, strict=True)
        for e in experts
    ]
    y = [weights[1][e] @ row for row, e in zip(rows, ids.flatten(), strict=True)]
    return torch.stack(y).unflatten(0, ids.shape).sum(1)


def tokens(count):
    generator = torch.Generator().manual_seed(count)
    shapes = ((count, 8), (4, 12, 8), (4, 8, 12), (4, 12, 8))
    x, *weights = ((torch.randn(*shape, generator=generator) / 4).requires_grad_() for shape in shapes)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(count)])
    return x, ids, weights


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_experts_are_one_graph_for_any_number_of_tokens(backend):
    """And recomputed ones too; ``eager`` here is what nothing compiles."""

    def recomputed(x, ids, *weights):
        return checkpoint(moe, x, ids, *weights, use_reentrant=False)

    counter = CompileCounterWithBackend(backend)
    compiled = [
        torch.compile(function, backend=counter, fullgraph=True, dynamic=True) if backend != "eager" else function
        for function in (moe, recomputed)
    ]
    for count in (5, 9, 14):
        x, ids, weights = tokens(count)
        expected = plain_moe(x, ids, *weights)
        gradients = torch.autograd.grad(expected.sin().sum(), (x, *weights))
        for function in compiled:
            found = function(x, ids, *weights)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), (x, *weights)), gradients)
    assert counter.frame_count == 2 * (backend != "eager")


def test_a_permutation_is_differentiated_by_its_inverse():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(12)
    assert gradcheck(lambda x: permute(x, order, order.argsort(), 3), x)
    assert torch.equal(permute(x, order, order.argsort(), 3), x[order // 3])
    assert permute(x[:0], order[:0], order[:0], 3).shape == (0, 3)


def test_bfloat16_on_a_gpu_is_torchs_kernel_and_the_host_reads_nothing():
    """The forward, which on a transposed matrix is the gradient of the rows, and the gradient of the weight."""
    with FakeTensorMode(), OpNames() as ops:
        x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((9, 8), (4, 16, 8)))
        grad, ends = torch.empty(9, 16, dtype=x.dtype, device="cuda"), torch.empty(4, dtype=torch.int32, device="cuda")
        ops.names.clear()
        for rows, matrices in ((x, weight), (grad, weight.transpose(1, 2))):
            assert grouped_linear(rows, matrices, ends).shape == (9, matrices.shape[1])
        assert grouped_mm._grad_weight(grad, x, ends).shape == weight.shape
        assert ops.names.count("aten::_grouped_mm") == 3
        assert not {"aten::_local_scalar_dense", "aten::item", "aten::_to_copy", "aten::copy_"} & set(ops.names)

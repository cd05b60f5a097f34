"""Attention gives the same numbers by every backend, and takes the one that was chosen."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode

from crius.kernels import attention
from crius.kernels.attention import (
    _compiled,
    _softcapped_attention,
    causal_attention,
    document_mask,
    masked_attention,
)
from crius.kernels.choice import Choice, applied

FLASH, MATH, FLEX = (Choice(attention=(name,)) for name in ("flash", "math", "flex"))
POSITIONS = torch.cat([torch.arange(n) for n in (70, 1, 129, 56)])[None].repeat(2, 1)
POSITIONS[1] = torch.arange(256)


def qkv(tokens, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(2, heads, tokens, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]


class Operators(TorchDispatchMode):
    """Names of the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def output_and_gradients(attend, inputs):
    output = attend(*inputs)
    torch.manual_seed(1)
    return [output, *torch.autograd.grad(output, inputs, torch.randn_like(output))]


@pytest.mark.parametrize("tokens", [1, 17, 256])
def test_math_and_flash_compute_the_same(tokens):
    inputs = qkv(tokens)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    want = output_and_gradients(lambda *inputs: _softcapped_attention(*inputs, mask, None, 0.0), inputs)
    for chosen in (FLASH, MATH):
        with applied(chosen):
            found = output_and_gradients(causal_attention, inputs)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)  # float32: another order of sums


@pytest.mark.parametrize(
    ("chosen", "is_flash"),
    [(Choice(), True), (FLASH, True), (MATH, False), (Choice(attention=("flex", "math")), False)],
)
def test_the_chosen_backend_runs(chosen, is_flash):
    mask = torch.ones(32, 32, dtype=torch.bool)
    for attend in (causal_attention, lambda *inputs: masked_attention(*inputs, mask)):
        with applied(chosen), Operators() as seen:
            attend(*qkv(32))
        assert any("flash_attention" in name for name in seen.names) == is_flash


@pytest.mark.parametrize(
    ("chosen", "dtype", "device", "heads"),
    [
        (Choice(), torch.float32, "cuda", 4),
        (Choice(), torch.bfloat16, "cuda", 2),
        (MATH, torch.float32, "cuda", 2),
        (Choice(), torch.float32, "cpu", 2),
        (Choice(attention=("efficient",)), torch.bfloat16, "cuda", 4),
    ],
)
def test_keys_are_repeated_where_the_only_kernel_takes_no_shared_heads(chosen, dtype, device, heads, monkeypatch):
    given = []
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", lambda q, *kv, **_: given.extend(kv))
    with FakeTensorMode(), applied(chosen):
        causal_attention(*(torch.empty(2, n, 8, 16, dtype=dtype, device=device) for n in (4, 2, 2)))
    assert [x.shape[1] for x in given] == [heads, heads]


@pytest.mark.parametrize("chosen", [Choice(), MATH, Choice(attention=("cudnn", "flash", "efficient", "math"))])
def test_a_chosen_order_compiles_in_one_graph(chosen):
    inputs = qkv(32)
    with applied(chosen):
        torch._dynamo.reset()
        attend = torch.compile(causal_attention, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(attend(*inputs), causal_attention(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("softcap", "window"), [(0.0, 0), (0.5, 0), (0.0, 50)])
def test_flex_sees_what_the_dense_mask_shows(softcap, window):
    inputs = [x.detach() for x in qkv(256)]
    want = masked_attention(*inputs, document_mask(POSITIONS, window=window), softcap=softcap)
    with applied(FLEX):
        blocks = document_mask(POSITIONS, window=window)
        assert isinstance(blocks, BlockMask)
        got = masked_attention(*inputs, blocks, softcap=softcap)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # float32: another order of sums
    for other in ((POSITIONS.flip(0), softcap), (POSITIONS, softcap + 0.1)):
        changed = masked_attention(*inputs, document_mask(other[0]), softcap=other[1])
        assert not torch.allclose(changed, want, atol=1e-3)


def test_flex_leaves_out_blocks_without_a_pair():
    starts = torch.arange(512)[None] % 128  # documents of one block each
    with applied(FLEX):
        blocks = document_mask(starts)
    assert blocks.sparsity() == 75.0  # of 4 x 4 blocks the diagonal stays


@pytest.mark.parametrize(("device_type", "is_compiled"), [("cuda", True), ("cpu", False)])
def test_blocks_of_flex_are_found_by_compiled_code_on_a_gpu_alone(device_type, is_compiled):
    def find():
        return None

    assert (_compiled(find, device_type) is not find) == is_compiled

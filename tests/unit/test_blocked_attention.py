"""Attention that keeps its probabilities computes what PyTorch's does, and is taken where it pays."""

from dataclasses import replace

import pytest
import torch
from harness import llama
from test_rules import facts_of
from torch.autograd import gradcheck
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from crius.config import resolve as rule
from crius.config.layout import Layout
from crius.host import ATTENTION_BLOCK
from crius.kernels.attention import causal_attention
from crius.kernels.choice import Choice, applied, resolve
from crius.kernels.cpu import blocked_attention as blocked
from crius.tools.plan.memory import layer_bytes
from crius.tools.plan.workload import Workload
from crius.train.setup import run_kernels

BLOCKED = Choice(attention=("blocked",))
FLOAT32 = {"rtol": 2e-5, "atol": 2e-5}  # sums of up to 160 products in another order
# batch, query heads, key/value heads, tokens, head dim, head dim of the values
SHAPES = [
    (1, 1, 1, 32, 8, 8),
    (2, 4, 2, 64, 16, 16),
    (3, 6, 6, 96, 8, 12),
    (2, 8, 1, 160, 32, 32),
]


def qkv(shape=SHAPES[1], dtype=torch.float32, in_rows=True):
    """Inputs as a model has them, heads behind tokens in memory, or as they are made."""
    torch.manual_seed(0)
    batch, heads, kv_heads, tokens, width, value_width = shape
    sizes = ((heads, width), (kv_heads, width), (kv_heads, value_width))
    if in_rows:
        made = [torch.randn(batch, tokens, *size, dtype=dtype).transpose(1, 2) for size in sizes]
    else:
        made = [torch.randn(batch, heads, tokens, width, dtype=dtype) for heads, width in sizes]
    return [x.requires_grad_() for x in made]


def reference(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def run(attend, inputs):
    output = attend(*inputs)
    torch.manual_seed(1)
    return [output.detach(), *torch.autograd.grad(output, inputs, torch.randn(output.shape, dtype=output.dtype))]


@pytest.mark.parametrize("in_rows", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_computes_what_pytorch_does(shape, in_rows):
    inputs = qkv(shape, in_rows=in_rows)
    torch.testing.assert_close(run(blocked.blocked_attention, inputs), run(reference, inputs), **FLOAT32)


@pytest.mark.parametrize("shape", [(1, 2, 1, 32, 2, 3), (1, 1, 1, 64, 2, 2)], ids=str)
def test_a_gradient_is_the_derivative(shape):
    assert gradcheck(blocked.blocked_attention, qkv(shape, torch.float64), fast_mode=True)


def test_a_token_sees_none_behind_it():
    q, k, v = (x.detach() for x in qkv())
    before = blocked.blocked_attention(q, k, v)
    for token in (1, 31, 32, 40, 63):
        later = [x.clone() for x in (q, k, v)]
        for x in later:
            x[:, :, token:] += 1
        after = blocked.blocked_attention(*later)
        assert torch.equal(after[:, :, :token], before[:, :, :token])
        assert not torch.equal(after[:, :, token], before[:, :, token])


def test_large_scores_stay_finite():
    inputs = [(x.detach() * 1e4).requires_grad_() for x in qkv()]
    output, *gradients = run(blocked.blocked_attention, inputs)
    torch.testing.assert_close(output, reference(*inputs), rtol=1e-5, atol=0.1)  # of 4e4
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_the_same_inputs_give_the_same_bits_with_and_without_gradients():
    inputs = qkv()
    first, second = run(blocked.blocked_attention, inputs), run(blocked.blocked_attention, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with torch.no_grad():
        assert torch.equal(blocked.blocked_attention(*inputs), first[0])


def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch():
    q, k, v = (x.detach() for x in qkv((4, 4, 2, 64, 16, 16)))
    whole = blocked.blocked_attention(q, k, v)
    alone = [blocked.blocked_attention(q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i in range(4)]
    torch.testing.assert_close(torch.cat(alone), whole, rtol=1e-6, atol=1e-6)


def test_operators_are_what_their_schemas_and_shapes_say():
    q, k, v = (x.detach() for x in qkv())
    parts = blocked._blocks(q, 2), blocked._rows(k), blocked._rows(v)
    torch.library.opcheck(torch.ops.crius.attend.default, parts)
    y, p = torch.ops.crius.attend.default(*parts)
    torch.library.opcheck(torch.ops.crius.attend_backward.default, (torch.randn_like(y), *parts, p))


def test_it_compiles_in_one_graph():
    inputs = qkv()
    with applied(BLOCKED):
        torch._dynamo.reset()
        attend = torch.compile(causal_attention, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(run(attend, inputs), run(causal_attention, inputs), rtol=0, atol=0)


def test_it_keeps_its_inputs_and_the_pairs_of_all_blocks_but_the_last():
    inputs, kept = qkv(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        blocked.blocked_attention(*inputs)
    batch, heads, _, tokens, _, _ = SHAPES[1]
    pairs = batch * heads * tokens * (tokens - ATTENTION_BLOCK) // 2
    assert sum(x.numel() for x in kept) == sum(x.numel() for x in inputs) + pairs


def test_the_planner_counts_the_probabilities():
    model, tokens = llama(num_layers=1, dim=64, ffn_dim=96, num_heads=4, num_kv_heads=2), 64
    work = Workload(model=model, layout=Layout(), seq_len=tokens, param_bytes=4, pointwise="fused")
    blocked_, flash = (
        layer_bytes(replace(work, keeps_probabilities=keeps), model.dense[1]).none for keeps in (True, False)
    )
    assert (blocked_ - flash) * tokens == 4 * 4 * (tokens * (tokens - ATTENTION_BLOCK) // 2 - tokens)  # less log-sums


def test_flops_are_those_of_the_matmuls_over_all_pairs():
    """As PyTorch counts the fused kernels of a GPU; it does not know that of a CPU."""
    batch, heads, _, tokens, width, value_width = SHAPES[1]
    with FlopCounterMode(display=False) as forward:
        output = blocked.blocked_attention(*qkv())
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert forward.get_total_flops() == 2 * batch * heads * tokens**2 * (width + value_width)
    assert backward.get_total_flops() == 2 * forward.get_total_flops()


@pytest.mark.parametrize(
    ("is_taken", "inputs"),
    [
        (True, qkv()),
        (False, [x[:, :, :33] for x in qkv()]),
        (False, [qkv()[0][:, :, :32], *qkv()[1:]]),
        (False, [x.bfloat16() for x in qkv()]),
        (False, [x.double() for x in qkv()]),
        (False, [x[:0] for x in qkv()]),
    ],
    ids=["taken", "33 tokens", "fewer queries", "bfloat16", "float64", "empty"],
)
def test_what_it_does_not_take_goes_to_pytorch(is_taken, inputs, monkeypatch):
    taken = []
    forward = blocked._Blocked.forward
    monkeypatch.setattr(blocked._Blocked, "forward", staticmethod(lambda *args: taken.append(1) or forward(*args)))
    with applied(BLOCKED):
        got = causal_attention(*inputs)
    assert bool(taken) == is_taken
    torch.testing.assert_close(got, reference(*inputs), **FLOAT32)


AUTO = ["--training.mixed_precision_param", "float32", "--training.seq_len", "256"]


@pytest.mark.parametrize(
    ("flags", "is_amd", "want"),
    [
        (AUTO, True, True),
        (AUTO, False, False),
        ([*AUTO, "--kernels.attention", "blocked"], False, True),
        ([*AUTO, "--kernels.attention", "flash"], True, False),
        ([*AUTO, "--training.seq_len", "512"], True, True),
        ([*AUTO, "--training.seq_len", "544"], True, False),
        ([*AUTO, "--training.seq_len", "100"], True, False),
        ([*AUTO, "--training.mixed_precision_param", "bfloat16"], True, False),
        ([*AUTO, "--model.attention_mask", "document"], True, False),
        ([*AUTO, "--parallelism.context_parallel_degree", "2"], True, False),
        ([*AUTO, "--activation_checkpoint.mode", "full"], True, True),  # which changes no bit of a run
    ],
)
def test_where_a_run_on_a_cpu_takes_it(flags, is_amd, want, monkeypatch):
    monkeypatch.setattr(rule, "is_wide_amd_cpu", lambda: is_amd)
    config = facts_of(flags).config
    assert rule.keeps_probabilities(config, llama()) == want
    assert ("blocked" in run_kernels(config, torch.device("cpu")).attention) == want


@pytest.mark.parametrize(("instructions", "why"), [("avx512_bf16", "it needs float32"), ("", "")])
def test_an_automatic_dtype_is_that_of_the_cpu(instructions, why, monkeypatch):
    monkeypatch.setattr(rule, "bfloat16_instructions", lambda: instructions)
    config = facts_of(["--training.mixed_precision_param", "auto", "--training.seq_len", "256"]).config
    assert rule.obstacle(config, llama())[0] == why


def test_a_gpu_never_takes_it():
    found = resolve("auto", "auto", "auto", device_type="cuda", keeps_probabilities=True)
    assert "blocked" not in found.attention

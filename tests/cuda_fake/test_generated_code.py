"""What ``--compile.enable`` generates for a block of the 8B model on compute capability 9.0. Nothing of it runs.

The counts are those of torch 2.13: as many matmuls and calls of attention as the model has, and as few other kernels.
"""

import importlib.util
import math
import re
from collections import Counter

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="needs the package triton: pip install triton"
    ),
]

TOKENS = 8192
BLOCK = (
    f"--compile.enable --model.flavor 8b --model.num_layers 1 --model.vocab_size 16032 --training.seq_len {TOKENS} "
    "--training.global_batch_size 1"
).split()
ASYNC = ("--parallelism.tensor_parallel_degree", "2", "--parallelism.enable_async_tensor_parallel")
FLOAT8 = ("--quantize.dense.float8.enable", "--quantize.dense.auto_filter", "off")
_CALL = re.compile(
    r"extern_kernels\.(mm|_scaled_mm|_grouped_mm)\(|torch\.ops\.(?:aten|torch_attn)\.(\w+)\.\w+\("
    r"|torch\.ops\._c10d_functional\.(\w+)\.|= torch\.ops\.symm_mem\.(\w+)\."
)
_ATTENTION = "_scaled_dot_product_cudnn_attention"
_COLLECTIVE_OR_MATMUL = (
    *("all_gather_into_tensor", "reduce_scatter_tensor", "fused_all_gather_matmul", "fused_matmul_reduce_scatter"),
    *("fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter", "mm", "_scaled_mm"),
)


def calls(code: str) -> Counter[str]:
    """How often generated code calls each operator, and any Triton kernel, by the name ``triton``."""
    lines = [line for line in code.splitlines() if not line.strip().startswith(("#", "assert", "import"))]
    found = Counter(name for line in lines for name in map("".join, _CALL.findall(line)))
    found["triton"] = sum(bool(re.match(r"\s*triton_\w+\.run\(", line)) for line in lines)
    return found


def generated(fake_gpu, *flags: str) -> list[str]:
    seen = fake_gpu.step([*BLOCK, *flags], compiles=True)
    assert seen["reads"] == []
    return seen["code"]


def test_a_block_is_its_matmuls_one_attention_and_six_kernels(fake_gpu):
    """Backward twice the matmuls and eight kernels: norms, RoPE and SwiGLU are fused with what is beside them."""
    forward, backward = map(calls, generated(fake_gpu))
    assert (forward["mm"], forward[_ATTENTION]) == (7, 1)
    assert (backward["mm"], backward[f"{_ATTENTION}_backward"], backward[_ATTENTION]) == (14, 1, 0)
    assert forward["triton"] <= 6 and backward["triton"] <= 8


def test_selective_recomputation_repeats_three_matmuls_and_no_attention(fake_gpu):
    forward, backward = map(calls, generated(fake_gpu, "--activation_checkpoint.mode", "selective"))
    assert (forward["mm"], forward[_ATTENTION]) == (7, 1)
    assert (backward["mm"], backward[f"{_ATTENTION}_backward"], backward[_ATTENTION]) == (17, 1, 0)


def test_tensor_parallelism_gathers_and_scatters_twice_in_each_direction(fake_gpu):
    for code in generated(fake_gpu, "--parallelism.tensor_parallel_degree", "2"):
        found = calls(code)
        assert (found["all_gather_into_tensor"], found["reduce_scatter_tensor"], found["wait_tensor"]) == (2, 2, 4)


@pytest.mark.parametrize(
    "flags, forward, backward",
    [
        pytest.param(
            (),
            {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2},
            {"fused_all_gather_matmul": 2, "mm": 12, "reduce_scatter_tensor": 2},
            id="bfloat16",
        ),
        pytest.param(
            FLOAT8,
            {"fused_all_gather_scaled_matmul": 2, "fused_scaled_matmul_reduce_scatter": 2},
            {"all_gather_into_tensor": 2, "_scaled_mm": 14, "reduce_scatter_tensor": 2},
            id="float8_tensorwise",
        ),
        pytest.param(
            (*FLOAT8, "--quantize.dense.float8.recipe", "rowwise"),
            {"all_gather_into_tensor": 2, "_scaled_mm": 5, "fused_scaled_matmul_reduce_scatter": 2},
            {"all_gather_into_tensor": 2, "_scaled_mm": 14, "reduce_scatter_tensor": 2},
            id="float8_rowwise",
        ),
    ],
)
def test_async_tensor_parallelism_fuses_collectives_with_matmuls(fake_gpu, flags, forward, backward):
    """All of the forward's, but for gathers of what each row scales by itself. Of the backward's those that scatter
    a sum of several matmuls are no pattern of the pass, nor are gathers of gradients that are rounded after."""
    for code, expected in zip(generated(fake_gpu, *ASYNC, *flags), (forward, backward), strict=True):
        found = calls(code)
        assert {name: found[name] for name in _COLLECTIVE_OR_MATMUL if found[name]} == expected


@pytest.mark.parametrize(("recompute", "repeated"), [("none", 0), ("selective", 3)])
def test_a_document_mask_is_attention_by_ends_and_no_matrix_of_all_pairs(recompute, repeated, fake_gpu):
    """As many kernels as without a mask, in one graph forward and one backward for all steps."""
    flags = ("--model.attention_mask", "document", "--activation_checkpoint.mode", recompute)
    codes = generated(fake_gpu, *flags)
    forward, backward = map(calls, codes)
    assert (forward["mm"], forward["_varlen_attn"], backward["mm"]) == (7, 1, 14 + repeated)
    assert (backward["_varlen_attn_backward"], backward["_varlen_attn"]) == (1, 0)
    assert forward["triton"] <= 6 and (backward["triton"] <= 8 or repeated)
    assert not [code for code in codes if f"{TOKENS}, {TOKENS})" in code or "efficient_attention" in code]


def test_a_window_is_attention_by_ends_and_no_matrix_of_all_pairs(fake_gpu):
    codes = generated(fake_gpu, "--model.words", '{"pattern": [{"window": 32}]}')
    forward, backward = map(calls, codes)
    assert (forward["_varlen_attn"], backward["_varlen_attn_backward"]) == (1, 1)
    assert not [code for code in codes if f"{TOKENS}, {TOKENS})" in code or "efficient_attention" in code]


@pytest.mark.parametrize(
    "flags",
    [
        ("--model.attention_mask", "document", "--kernels.attention", "flex"),
        ("--model.words", '{"attention_softcap": 50.0}'),
    ],
    ids=["documents", "softcap"],
)
def test_flex_attention_makes_no_matrix_of_all_pairs_of_tokens(flags, fake_gpu):
    """Two templates forward and backward; the mask is blocks of 128 x 128."""
    codes = generated(fake_gpu, *flags)
    assert not [code for code in codes if f"{TOKENS}, {TOKENS})" in code]
    assert [code for code in codes if re.search(r"triton_tem_\w*flex_attention", code)]
    assert sum(calls(code)["mm"] for code in codes) == 21


def test_a_compiled_loss_writes_no_float32_logits(fake_gpu):
    """What it makes of the logits, ``(tokens of a chunk, vocabulary)``, is their gradient in bfloat16."""
    *_, code = generated(fake_gpu, "--compile.loss")
    assert set(calls(code)) == {"triton"}
    buffers = re.findall(r"empty_strided_cuda\(\((\d+), 16032\), .*?, torch\.(\w+)\)", code)
    assert [dtype for _, dtype in buffers] in ([], ["bfloat16"]), buffers


def test_a_block_with_experts_is_grouped_products_and_no_buffer_of_all_experts(fake_gpu):
    """Rows are as many as tokens have choices; nothing has a row for each pair of token and expert."""
    tokens, experts, dim = 2048, 32, 2048
    flags = f"--compile.enable --model.name qwen3_moe --model.flavor 30b-a3b --model.num_experts {experts} "
    flags += f"--model.num_layers 1 --model.vocab_size 16032 --training.seq_len {tokens} --training.global_batch_size 1"
    seen = fake_gpu.step(flags.split(), compiles=True)
    assert seen["reads"] == [] and seen["splits"] == 0
    forward, backward = map(calls, seen["code"])
    assert (forward["_grouped_mm"], backward["_grouped_mm"]) == (3, 6)
    sizes = [
        math.prod(map(int, shape.split(",")))
        for code in seen["code"]
        for shape in re.findall(r"empty_strided_cuda\(\(([\d, ]*\d),?\s*\)", code)
    ]
    weights = experts * 768 * dim
    assert sizes and max(sizes) <= max(weights, tokens * 8 * dim) < tokens * experts * dim

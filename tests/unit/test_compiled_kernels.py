"""What inductor makes of a feed-forward layer on a CPU: which operator multiplies, what stays for the backward, and
for how long its code may be used again."""

import shutil
from pathlib import Path

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.compiler.config as compiler_config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.utils import run_and_get_code

import crius.parallel.compile as compile_module
from crius.config.training import CompileConfig
from crius.kernels.choice import Choice, applied
from crius.models.layers import FeedForward
from crius.parallel.compile import prepare_compile

TOKENS, DIM, WIDTH = 64, 32, 96


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """torch.compile as a run on a CPU sets it up, with a cache of its own; put back afterwards."""
    try:
        get_cpp_compiler()
    except Exception as error:  # of several classes, by version of torch
        pytest.skip(f"no C++ compiler: {error}")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    kept = (
        dynamo_config.patch(recompile_limit=dynamo_config.recompile_limit),
        inductor_config.patch(compile_threads=inductor_config.compile_threads),
        functorch_config.patch(
            ban_recompute_materialized_backward=functorch_config.ban_recompute_materialized_backward
        ),
        compiler_config.patch(cache_key_tag=compiler_config.cache_key_tag),
    )
    with kept[0], kept[1], kept[2], kept[3], applied(Choice(linear="onednn", pointwise="fused")):
        prepare_compile(CompileConfig(enable=True, cache_dir=str(tmp_path)), for_cpu=True)
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_feed_forward_keeps_no_product_and_calls_onednn_itself(compiler):
    torch.manual_seed(0)
    layer, x = FeedForward(DIM, WIDTH), torch.randn(TOKENS, DIM, requires_grad=True)
    upstream = torch.randn(TOKENS, DIM)
    compiled, kept = torch.compile(layer, fullgraph=True), []

    def step(function):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = function(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], upstream)]

    wanted = step(layer)
    assert sum(t.shape == (TOKENS, WIDTH) for t in kept) == 3, "gate and up for SwiGLU, the product for the last matmul"
    kept.clear()
    got, codes = run_and_get_code(step, compiled)
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
    assert sum(t.shape == (TOKENS, WIDTH) for t in kept) == 2, "gate and up alone"
    calls = [code.count("torch.ops.mkldnn._linear_pointwise.default(") for code in codes]
    assert calls == [3, 6]
    assert not any("torch.ops.crius.mkldnn_linear.default(" in code for code in codes)


@pytest.mark.slow
def test_compiled_code_is_used_again_until_a_kernel_is_another(compiler, tmp_path, monkeypatch):
    package, layer, x = tmp_path / "crius", FeedForward(DIM, WIDTH), torch.randn(TOKENS, DIM)
    ours = Path(compile_module.__file__).parents[1]
    shutil.copytree(ours / "kernels", package / "kernels")
    original = compile_module._kernels_tag

    def found() -> str:
        """What the cache says to a new process of the Crius whose sources lie in ``package``."""
        monkeypatch.setattr(compile_module, "_kernels_tag", lambda: original(package))
        prepare_compile(CompileConfig(enable=True, cache_dir=str(tmp_path)), for_cpu=True)
        torch._dynamo.reset()
        before = compile_module._cache_counters()
        torch.compile(layer, fullgraph=True)(x)
        (outcome,) = compile_module._cache_counters() - before
        return outcome

    assert [found(), found()] == ["miss", "hit"]
    with open(package / "kernels" / "cpu" / "linear.py", "a") as file:
        file.write("# another kernel\n")
    assert [found(), found()] == ["miss", "hit"]

"""Each fast path computes what its reference does, is taken where it should be, and nowhere else."""

from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from harness import llama
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import gradcheck
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from crius import host
from crius.config.training import ActivationCheckpointConfig
from crius.errors import ConfigError
from crius.kernels import choice
from crius.kernels.choice import Choice, applied, resolve
from crius.kernels.cpu import linear, pointwise
from crius.models import registry
from crius.models.llama3 import Llama3Config
from crius.parallel.activation_checkpoint import apply_activation_checkpoint

FAST = Choice(linear="onednn", pointwise="fused")
FUNCTIONS = {
    "rms_norm": pointwise._RMSNorm,
    "rotary": pointwise._Rotary,
    "swiglu": pointwise._SwiGLU,
    "linear": linear._Linear,
}
TINY = Llama3Config(
    dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=50, rope_theta=1e4, rope_scaling=None
)
# float32: both paths round a few times each, and a gradient of a weight sums up to 33 rows
TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.float64: {"rtol": 1e-12, "atol": 1e-12}}


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def tables(batch, tokens, width, dtype):
    angles = torch.randn(batch, tokens, 1, width // 2, dtype=dtype)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def case(name, dtype=torch.float32, shape=(3, 11)):
    """The public function, its reference, and inputs of odd sizes."""
    torch.manual_seed(0)
    if name == "rms_norm":
        inputs = [leaf(*shape, 7, dtype=dtype), leaf(7, dtype=dtype), 1e-5]
        return pointwise.rms_norm, pointwise.rms_norm_reference, inputs
    if name == "rotary":
        x = leaf(*shape, 3, 6, dtype=dtype)
        return pointwise.rotary, pointwise.rotary_reference, [x, *tables(*shape, 6, dtype)]
    if name == "swiglu":
        inputs = [leaf(*shape, 5, dtype=dtype), leaf(*shape, 5, dtype=dtype)]
        return pointwise.swiglu, pointwise.swiglu_reference, inputs
    return linear.linear, linear.reference, [leaf(*shape, 7, dtype=dtype), leaf(9, 7, dtype=dtype)]


def run(function, inputs, upstream=None):
    """Output and gradients."""
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    output = function(*inputs)
    torch.manual_seed(1)
    gradients = torch.autograd.grad(output, leaves, torch.randn(output.shape, dtype=output.dtype)) if leaves else ()
    return [output.detach(), *gradients]


@pytest.fixture
def fast():
    with applied(FAST):
        yield


@pytest.fixture
def taken(fast, monkeypatch):
    """How often each fast path was taken."""
    counts = dict.fromkeys(FUNCTIONS, 0)
    for name, function in FUNCTIONS.items():

        def forward(*args, _name=name, _forward=function.forward):
            counts[_name] += 1
            return _forward(*args)

        monkeypatch.setattr(function, "forward", staticmethod(forward))
    return counts


@pytest.mark.parametrize("name", ["rms_norm", "rotary", "swiglu"])
def test_a_gradient_is_the_derivative(name, fast):
    function, _, inputs = case(name, torch.float64, shape=(2, 3))
    assert gradcheck(function, inputs)


@pytest.mark.parametrize("shape", [(3, 11), (1, 1), (1, 33), (0, 4)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_fast_path_equals_its_reference(name, shape, fast):
    dtype = torch.float32 if name == "linear" else torch.float64
    function, reference, inputs = case(name, dtype, shape)
    torch.testing.assert_close(run(function, inputs), run(reference, inputs), **TOLERANCE[dtype])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_takes_the_fast_path_once(name, taken):
    function, reference, inputs = case(name)
    torch.testing.assert_close(run(function, inputs), run(reference, inputs), **TOLERANCE[torch.float32])
    assert taken == dict.fromkeys(FUNCTIONS, 0) | {name: 1}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inputs_and_gradients_of_any_strides_are_taken(name, taken):
    function, reference, (x, *others) = case(name)
    wide = torch.randn(*x.shape[:-1], 2 * x.shape[-1])
    strided = wide[..., ::2].requires_grad_()
    swapped = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    for value in (strided, swapped, torch.randn(x.shape[-1]).expand(x.shape).requires_grad_()):
        inputs = [value, *others]
        torch.testing.assert_close(run(function, inputs), run(reference, inputs), **TOLERANCE[torch.float32])
        want, got = (torch.autograd.grad(f(*inputs).sum(), value)[0] for f in (reference, function))  # expanded ones
        torch.testing.assert_close(got, want, **TOLERANCE[torch.float32])
    assert taken[name] == 6


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "linear"])
def test_an_input_without_gradient_gets_none(name, frozen, fast):
    function, reference, inputs = case(name)
    inputs[frozen] = inputs[frozen].detach()
    torch.testing.assert_close(run(function, inputs), run(reference, inputs), **TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_without_gradients_the_numbers_are_the_same_bits(name, taken):
    function, _, inputs = case(name)
    with torch.no_grad():
        quiet = function(*inputs)
    assert not quiet.requires_grad and torch.equal(quiet, function(*inputs))
    assert taken[name] == 2


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_output_is_no_view_so_that_a_module_may_return_it(name, fast):
    function, _, inputs = case(name)
    assert not function(*inputs)._is_view()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_output_that_is_used_twice_and_an_input_too(name, fast):
    function, reference, (x, *others) = case(name)

    def twice(call):
        return run(lambda y: (first := call(y, *others)) * first + call(y * 2, *others), [x])

    torch.testing.assert_close(twice(function), twice(reference), rtol=1e-4, atol=1e-4)  # values up to 30


@pytest.mark.parametrize("name", FUNCTIONS)
def test_recomputation_gives_the_same_bits(name, taken):
    function, _, inputs = case(name)
    want = run(function, inputs)
    got = run(lambda *args: checkpoint(function, *args, use_reentrant=False), inputs)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert taken[name] == 3  # of the second run once more in the backward


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_second_derivative_is_refused_not_wrong(name, fast):
    function, _, inputs = case(name)
    (gradient,) = torch.autograd.grad(function(*inputs).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


class Other(Tensor):
    """Stands for DTensor and whatever else gives operators another meaning."""


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("to", "count"),
    [(lambda x: x.bfloat16(), 3), (lambda x: x.as_subclass(Other), 3), (lambda x: x.as_subclass(Other), 1)],
    ids=["bfloat16", "subclass", "one subclass"],
)
def test_other_tensors_take_the_reference(name, to, count, taken):
    function, reference, inputs = case(name)
    for place, x in enumerate(inputs[:count]):
        inputs[place] = to(x.detach()).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
    got, want = run(function, inputs), run(reference, inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert taken[name] == 0


@pytest.mark.parametrize(
    ("x", "weight", "want"),
    [((2, 7), (9, 7), True), ((1, 1), (1, 1), True), ((7,), (9, 7), False), ((0, 7), (9, 7), False)]
    + [((2, 7), (0, 7), False)],
)
def test_onednn_multiplies_matrices_that_are_not_empty(x, weight, want, fast):
    assert linear.when(torch.empty(x), torch.empty(weight)) is want


@pytest.mark.parametrize("name", FUNCTIONS)
def test_without_a_choice_nothing_is_fast(name, taken):
    function, _, inputs = case(name)
    with applied(Choice()):
        run(function, inputs)
    assert taken[name] == 0


def compiled_operators(function, inputs):
    """Names of the operators of the compiled forward and backward, and the results."""
    graphs = []

    def backend(graph, examples):
        graphs.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    from_graph = run(
        torch.compile(function, backend=aot_autograd(fw_compiler=backend), fullgraph=True),
        inputs,
    )
    return graphs, from_graph


@pytest.mark.parametrize("shape", [(3, 11), (2, 64)])  # the latter has groups of 32 rows
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_compiler_sees_computes_the_reference(name, shape, fast):
    function, reference, inputs = case(name, shape=shape)
    operators, got = compiled_operators(function, inputs)
    assert operators != compiled_operators(reference, inputs)[0], "it has a form of its own for a compiler"
    torch.testing.assert_close(got, run(reference, inputs), **TOLERANCE[torch.float32])
    assert operators.count("crius.mkldnn_linear.default") == (3 if name == "linear" else 0)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_choice_or_in_bfloat16_a_compiler_sees_the_reference(name, dtype):
    function, reference, inputs = case(name, dtype)
    with applied(Choice() if dtype == torch.float32 else FAST):
        assert compiled_operators(function, inputs)[0] == compiled_operators(reference, inputs)[0]


def loss_and_gradients(model, tokens):
    model.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def tiny_model(tokens=16):
    torch.manual_seed(0)
    return registry.build(llama(TINY)), torch.randint(0, TINY.vocab_size, (2, tokens))


def test_the_whole_model_takes_them_and_computes_the_same(taken):
    model, tokens = tiny_model()
    got = loss_and_gradients(model, tokens)
    layers = TINY.num_layers
    assert taken == {"rms_norm": 2 * layers + 1, "rotary": 2 * layers, "swiglu": layers, "linear": 7 * layers + 1}
    with applied(Choice()):
        want = loss_and_gradients(model, tokens)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)  # sums over 32 tokens in another order


@pytest.mark.parametrize("saved", ["matmul", "matmul_every_other", "attention"])
def test_selective_checkpointing_keeps_the_same_results_of_either_kernel(saved):
    matches = []
    for taken in (Choice(), replace(FAST, attention=("blocked",))):
        with applied(taken):
            model, tokens = tiny_model(tokens=32)
            want = loss_and_gradients(model, tokens)
            config = ActivationCheckpointConfig(mode="selective", save_ops=(saved,))
            blocks = apply_activation_checkpoint(model, llama(TINY).plan, config, compile_enabled=False)
            got = loss_and_gradients(model, tokens)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        matches.append(blocks.matches())
    assert matches[0] == matches[1] and matches[0][saved] > 0


def test_flops_of_either_matmul_are_counted_alike():
    counts = []
    for taken in (Choice(), FAST):
        model, tokens = tiny_model()
        with applied(taken), FlopCounterMode(display=False) as counter:
            loss_and_gradients(model, tokens)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def saved_bytes(function, inputs):
    """Bytes that the forward keeps besides its inputs."""
    known, kept = {x.data_ptr() for x in inputs if isinstance(x, Tensor)}, {}

    def pack(x):
        if x.data_ptr() not in known:
            kept[x.data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = function(*inputs)
    return sum(x.nbytes for x in kept.values()), output


@pytest.mark.parametrize("name", ["swiglu", "rotary", "linear"])
def test_a_fast_path_keeps_nothing_but_its_inputs(name, fast):
    function, reference, inputs = case(name)
    assert saved_bytes(function, inputs)[0] == 0
    assert saved_bytes(reference, inputs)[0] > 0 or name != "swiglu"


VARLEN = ("varlen", "flex")


@pytest.mark.parametrize(
    ("asked", "device_type", "known", "want"),
    [
        (("auto", "auto", "auto"), "cpu", {}, ("onednn", "fused", ())),
        (("auto", "auto", "auto"), "cpu", {"keeps_probabilities": True}, ("onednn", "fused", ("blocked",))),
        (("auto", "auto", "blocked"), "cpu", {}, ("onednn", "fused", ("blocked",))),
        (("torch", "torch", "math"), "cpu", {}, ("torch", "torch", ("math",))),
        (("auto", "auto", "auto"), "cuda", {}, ("torch", "torch", ("flash", "efficient", "math"))),
        *(
            (
                ("auto", "auto", "auto"),
                "cuda",
                {"capability": card, "cudnn": 91501},
                ("torch", "torch", ("cudnn", "flash", "efficient", "math")),
            )
            for card in ((9, 0), (10, 0))
        ),
        (("auto", "auto", "auto"), "cuda", {"capability": (9, 0), "cudnn": 91002}, ("torch", "torch", ())),
        (("auto", "auto", "auto"), "cuda", {"capability": (12, 0), "cudnn": 92000}, ("torch", "torch", ())),
        (
            ("auto", "auto", "auto"),
            "cuda",
            {"capability": (8, 0), "cudnn": 92000},
            ("torch", "torch", ("flash", "efficient", "math")),
        ),
        (
            ("auto", "auto", "auto"),
            "cuda",
            {"capability": (9, 0), "has_mask": True, "no_varlen": "it needs 16-bit numbers"},
            ("torch", "torch", ("flash", "efficient", "math")),
        ),
        (
            ("auto", "auto", "auto"),
            "cuda",
            {"capability": (7, 5), "has_mask": True},
            ("torch", "torch", ("flash", "efficient", "math")),
        ),
        (("auto", "auto", "auto"), "cuda", {"has_mask": True}, ("torch", "torch", ("varlen", "flex"))),
        *(
            (("auto", "auto", "auto"), "cuda", {"capability": card, "has_mask": True}, ("torch", "torch", VARLEN))
            for card in ((8, 0), (9, 0))
        ),
        (("auto", "auto", "auto"), "cpu", {"has_mask": True, "no_varlen": "a CPU"}, ("onednn", "fused", ())),
        (("auto", "auto", "flash3"), "cuda", {}, ("torch", "torch", ("flash",))),
        (("auto", "auto", "flash4"), "cuda", {"has_mask": True}, ("torch", "torch", ("varlen",))),
        (("auto", "auto", "flex"), "cuda", {"has_mask": True}, ("torch", "torch", ("flex",))),
    ],
)
def test_what_auto_comes_to(asked, device_type, known, want, monkeypatch):
    monkeypatch.setattr(choice, "is_wide_amd_cpu", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    found = resolve(*asked, device_type=device_type, **known)
    assert (found.linear, found.pointwise, found.attention) == want


@pytest.mark.parametrize(
    ("vendor", "flags", "want"),
    [
        ("AuthenticAMD", "fma avx2 avx512f avx512vl", "onednn"),
        ("AuthenticAMD", "fma avx2", "torch"),
        ("GenuineIntel", "fma avx2 avx512f", "torch"),
    ],
)
def test_onednn_is_for_amd_with_avx512(vendor, flags, want, tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n")
    monkeypatch.setattr(host, "_CPUINFO", file)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert resolve("auto", "auto", "auto", device_type="cpu").linear == want


HOPPER, BLACKWELL, DATA_CENTRE_AMPERE = {"capability": (9, 0)}, {"capability": (10, 0)}, {"capability": (8, 0)}
SPLIT, MASK = {"is_split": True}, {"has_mask": True}


@pytest.mark.parametrize(
    ("asked", "known", "installed", "want", "why"),
    [
        ("auto", HOPPER | SPLIT, "flash_attn_interface", 3, "cuDNN missing"),
        ("auto", HOPPER | MASK, "flash_attn_interface", 3, "auto: document mask"),
        ("auto", BLACKWELL | MASK, "flash_attn.cute", 4, "auto: document mask"),
        ("auto", HOPPER | MASK, "", 2, "FlashAttention 2: flash_attn_interface cannot be imported (build hopper"),
        ("auto", HOPPER, "flash_attn_interface", 2, "cuDNN missing"),
        ("auto", HOPPER | MASK | SPLIT | {"no_varlen": "split"}, "flash_attn_interface", 2, "not varlen: split"),
        ("auto", DATA_CENTRE_AMPERE | SPLIT, "flash_attn_interface", 2, "GPU before Hopper"),
        ("flash", HOPPER | SPLIT, "flash_attn_interface", 2, ""),
        ("flash3", HOPPER, "flash_attn_interface", 3, ""),
        ("flash4", HOPPER, "flash_attn.cute", 4, ""),
        ("flash3", {}, "", 3, ""),
    ],
)
def test_later_versions_of_flash_attention_run_where_they_are_installed(
    asked, known, installed, want, why, monkeypatch
):
    monkeypatch.setattr(choice, "_is_installed", lambda package: package == installed)
    found = resolve("auto", "auto", asked, device_type="cuda", **known)
    assert found.flash == want and why in dict(found.reasons)["attention"]
    assert (f"with FlashAttention {want}" in str(found)) == (want != 2)


@pytest.mark.parametrize(
    ("asked", "known", "installed", "why"),
    [
        ("flash3", HOPPER, "", "flash_attn_interface cannot be imported (build hopper"),
        ("flash4", BLACKWELL, "", "flash_attn.cute cannot be imported (pip install flash-attn-4)"),
        ("flash3", BLACKWELL, "flash_attn_interface", "it is for compute capability 9.0"),
        ("flash4", DATA_CENTRE_AMPERE, "flash_attn.cute", "it is for compute capability 9.0 and 10.0"),
    ],
)
def test_a_version_of_flash_attention_that_cannot_run_is_refused(asked, known, installed, why, monkeypatch):
    monkeypatch.setattr(choice, "_is_installed", lambda package: package == installed)
    with pytest.raises(ConfigError) as found:
        resolve("auto", "auto", asked, device_type="cuda", **known)
    assert why in str(found.value) and asked in str(found.value)


def test_a_package_that_is_missing_or_built_for_another_torch_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "broken_flash.py").write_text("raise ImportError('undefined symbol: aoti_torch')")
    monkeypatch.syspath_prepend(tmp_path)
    found = [choice._is_installed(name) for name in ("torch.nn", "no_such_package.cute", "broken_flash")]
    assert found == [True, False, False]


@pytest.mark.parametrize(("version", "want"), [(2, []), (3, ["FA3"])])
def test_torch_is_told_of_a_later_version(version, want, monkeypatch):
    told = []
    monkeypatch.setattr(choice, "activate_flash_attention_impl", told.append)
    with choice.applied(choice.Choice(flash=version)):
        choice.activate_flash()
    assert told == want


@pytest.mark.parametrize(
    ("asked", "known", "flag"),
    [
        (("onednn", "auto", "auto"), {"device_type": "cuda"}, "--kernels.linear torch"),
        (("auto", "fused", "auto"), {"device_type": "cuda"}, "--kernels.pointwise torch"),
        (("auto", "auto", "cudnn"), {"device_type": "cpu"}, "--kernels.attention auto"),
        (("auto", "auto", "flash3"), {"device_type": "cpu"}, "--kernels.attention auto"),
        (("auto", "auto", "blocked"), {"device_type": "cuda"}, "--kernels.attention auto"),
    ],
)
def test_what_cannot_run_is_an_error_with_a_fix(asked, known, flag):
    with pytest.raises(ConfigError) as found:
        resolve(*asked, **known)
    assert found.value.fix == flag


def test_the_log_says_what_is_taken_and_why():
    assert str(resolve("torch", "auto", "math", device_type="cpu")) == (
        "linear torch (as asked), pointwise fused (auto: CPU), attention math (as asked)"
    )

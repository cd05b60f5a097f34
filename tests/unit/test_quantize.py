"""Low-precision linear layers: which are swapped, and that they compute what their formats say, no more and no less."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

from crius.config.low_precision import LinearChoice
from crius.config.training import DenseQuantizeConfig, Float8Config, MXFP8Config
from crius.errors import EnvironmentError, PlanError
from crius.quantize import convert as convert_module
from crius.quantize.convert import convert, missing_matmuls

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8 = {
    recipe: DenseQuantizeConfig(float8=Float8Config(enable=True, recipe=recipe))
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
}
SECTIONS = {**FLOAT8, "mxfp8": DenseQuantizeConfig(mxfp8=MXFP8Config(enable=True))}
GATHER = DenseQuantizeConfig(float8=Float8Config(enable=True, enable_fsdp_float8_all_gather=True))


def choice(name, shape, *, padded=None, is_converted=True, local=None):
    local = local or shape
    return LinearChoice(
        name=name, shape=shape, local=local, padded=padded or local, is_converted=is_converted, reason=""
    )


def converted(section, out_features, in_features, *, padded=None, bias=False):
    """A layer of a drawn weight in the precision of ``section``, emulated."""
    model = nn.ModuleDict({"w": nn.Linear(in_features, out_features, bias=bias)})
    shape, section = (out_features, in_features), replace(section, pad_inner_dim=padded is not None)
    assert convert(model, [choice("w", shape, padded=padded)], section, emulate=True).linears == 1
    with torch.no_grad():
        model["w"].weight.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    return model["w"]


def three_products(layer, tokens):
    """Input, gradient, and what the layer makes of them: output, gradient of the input, gradient of the weight."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(*tokens, layer.in_features, generator=generator, requires_grad=True)
    grad = torch.randn(*tokens, layer.out_features, generator=generator) * 1e-3
    y = layer(x)
    y.backward(grad)
    return x.detach(), grad, (y.detach(), x.grad, layer.weight.grad)


def rounded(x, dtype, dim):
    """``x`` in float8 and back, scaled to its largest number, of the whole or along ``dim`` by a power of two."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim=dim, keepdim=True)
    scale = torch.finfo(dtype).max / largest.double()
    scale = scale.float() if dim is None else scale.float().log2().floor().exp2()
    return (x * scale).to(dtype).float() / scale


def in_blocks(x, dim):
    """``x`` in E4M3 and back: for each 32 numbers along ``dim`` the least power of two at which none saturates."""
    blocks = x.movedim(dim, -1).unflatten(-1, (-1, 32))
    exponent = (blocks.abs().amax(dim=-1, keepdim=True) / 448).log2().ceil()
    values = (blocks / exponent.exp2()).to(E4M3).float() * exponent.exp2()
    return values.flatten(-2).movedim(-1, dim)


def expected(recipe, x, w, grad):
    """The three products of rounded numbers, as the recipe rounds them for each."""
    if recipe == "tensorwise":
        x, w, grad = rounded(x, E4M3, None), rounded(w, E4M3, None), rounded(grad, E5M2, None)
        return x @ w.T, grad @ w, grad.T @ x
    if recipe == "rowwise":
        forward = rounded(x, E4M3, 1) @ rounded(w, E4M3, 1).T
        return forward, rounded(grad, E4M3, 1) @ rounded(w, E4M3, 0), rounded(grad, E4M3, 0).T @ rounded(x, E4M3, 0)
    if recipe == "rowwise_with_gw_hp":
        forward = rounded(x, E4M3, 1) @ rounded(w, E4M3, 1).T
        largest = torch.finfo(E4M3).max / w.abs().max().double()
        scale = largest.float().log2().floor().exp2()
        return forward, rounded(grad, E4M3, 1) @ ((w * scale).to(E4M3).float() / scale), grad.T @ x
    forward = in_blocks(x, 1) @ in_blocks(w, 1).T
    return forward, in_blocks(grad, 1) @ in_blocks(w, 0), in_blocks(grad, 0).T @ in_blocks(x, 0)


@pytest.mark.parametrize("recipe", SECTIONS)
def test_a_layer_multiplies_rounded_numbers_and_adds_its_bias_as_it_is(recipe):
    layer = converted(SECTIONS[recipe], 96, 64, bias=True)
    x, grad, (y, *gradients) = three_products(layer, (32, 2))
    x, grad = x.flatten(0, 1), grad.flatten(0, 1)
    weight = layer.weight.detach()
    found = (y - layer.bias.detach(), *gradients)
    torch.testing.assert_close(layer.bias.grad, grad.sum(dim=0))
    exact = (x @ weight.T, grad @ weight, grad.T @ x)
    for got, want, plain in zip(found, expected(recipe, x, weight, grad), exact, strict=True):
        got = got.flatten(0, -2)
        torch.testing.assert_close(
            got, want, rtol=1e-5, atol=1e-6 * float(want.abs().max())
        )  # the order of float32 sums
        error = float((got - plain).norm() / plain.norm())
        is_exact = recipe == "rowwise_with_gw_hp" and plain is exact[2]
        assert error == 0 if is_exact else 0.01 < error < 0.08  # E4M3 keeps 3 bits: up to 2**-4, E5M2 2**-3


@pytest.mark.parametrize("recipe", SECTIONS)
def test_padding_changes_no_number(recipe):
    """A padded layer is a larger one whose added rows, columns and tokens are zero."""
    unit = 32 if recipe == "mxfp8" else 16
    small = converted(SECTIONS[recipe], 3 * unit - 6, 2 * unit - 4, padded=(3 * unit, 2 * unit))
    large = converted(SECTIONS[recipe], 3 * unit, 2 * unit)
    with torch.no_grad():
        large.weight.zero_()
        large.weight[: small.out_features, : small.in_features] = small.weight
    x, grad, found = three_products(small, (3, 7))
    wide_x = torch.zeros(-(-21 // unit) * unit, large.in_features)
    wide_grad = torch.zeros(len(wide_x), large.out_features)
    wide_x[:21, : small.in_features], wide_grad[:21, : small.out_features] = x.flatten(0, 1), grad.flatten(0, 1)
    wide_x.requires_grad_()
    y = large(wide_x)
    y.backward(wide_grad)
    want = (
        y[:21, : small.out_features].view_as(found[0]),
        wide_x.grad[:21, : small.in_features].view_as(found[1]),
        large.weight.grad[: small.out_features, : small.in_features],
    )
    for got, right in zip(found, want, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=0)


@pytest.mark.parametrize("recipe", SECTIONS)
def test_bfloat16_stays_bfloat16(recipe):
    layer = converted(SECTIONS[recipe], 64, 32).to(torch.bfloat16)
    x = torch.randn(2, 32, 32, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert {y.dtype, x.grad.dtype, layer.weight.grad.dtype} == {torch.bfloat16}


def test_the_chosen_layers_are_swapped_and_keep_their_weights():
    model = nn.ModuleDict({"a": nn.Linear(32, 32, bias=False), "b": nn.Linear(32, 32, bias=False), "c": nn.Identity()})
    weights = {name: module.weight for name, module in model.items() if name != "c"}
    choices = [choice(name, (32, 32), is_converted=False) for name in "abc"]
    found = convert(model, choices, GATHER, emulate=True)
    assert (found.linears, found.gathered) == (0, 0)
    choices = [choice("a", (32, 32)), choice("b", (32, 32), is_converted=False), choice("c", (32, 32))]
    found = convert(model, choices, FLOAT8["tensorwise"], emulate=True)  # c stands for a layer of another stage
    assert (found.linears, found.gathered) == (1, 0)
    assert [type(module).__name__ for module in model.values()] == ["Float8Linear", "Linear", "Identity"]
    assert all(model[name].weight is weight for name, weight in weights.items())


def test_a_layer_that_the_models_config_does_not_name_is_an_error():
    model = nn.ModuleDict({"a": nn.Linear(32, 32, bias=False)})
    for wrong in ([], [choice("a", (32, 64))]):
        with pytest.raises(PlanError, match=r"a of shape \(32, 32\)"):
            convert(model, wrong, FLOAT8["tensorwise"], emulate=True)


def test_only_weights_whose_rows_the_shards_divide_are_gathered_in_float8():
    model = nn.ModuleDict({name: nn.Linear(32, rows, bias=False) for name, rows in (("a", 32), ("b", 48))})
    choices = [choice("a", (32, 32)), choice("b", (48, 32), local=(16, 32))]
    assert convert(model, choices, GATHER, emulate=True, shard_degree=32).gathered == 1
    assert [hasattr(model[name].weight, "fsdp_pre_all_gather") for name in "ab"] == [True, False]
    alone = nn.ModuleDict({"a": nn.Linear(32, 33, bias=False)})
    assert convert(alone, [choice("a", (33, 32))], GATHER, emulate=True).gathered == 1


def test_a_shared_weight_is_gathered_as_it_is():
    model = nn.ModuleDict({"a": nn.Embedding(32, 32), "b": nn.Linear(32, 32, bias=False)})
    model["b"].weight = model["a"].weight
    assert convert(model, [choice("b", (32, 32))], GATHER, emulate=True).gathered == 0
    assert model["b"].weight is model["a"].weight


def test_a_missing_or_old_torchao_is_an_error_with_the_line_that_installs_it(monkeypatch):
    model = nn.ModuleDict({"a": nn.Linear(32, 32, bias=False)})
    for version in ("0.16.0", ""):
        monkeypatch.setattr(convert_module, "_torchao_version", lambda version=version: version)
        with pytest.raises(EnvironmentError, match=r"needs torchao>=0.18") as error:
            convert(model, [choice("a", (32, 32))], FLOAT8["tensorwise"], emulate=True)
        assert "install" in error.value.fix
    monkeypatch.setattr(convert_module, "_torchao_version", lambda: "0.18")
    assert convert(model, [choice("a", (32, 32))], FLOAT8["tensorwise"], emulate=True).linears == 1


class Autotuner:
    """As Triton 3.9's."""

    def __init__(self, fn, arg_names, configs, key, reset_to_zero=None, *, warmup=None):
        if unknown := set(key) - set(arg_names):
            raise ValueError(f"key contains names that are not kernel arguments: {unknown}")
        self.key, self.more = key, (reset_to_zero, warmup)


def test_on_a_gpu_a_kernel_of_torchao_may_be_tuned_by_what_it_has_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(convert_module, "find_spec", lambda name: name)
    monkeypatch.setattr(convert_module, "import_module", lambda name: SimpleNamespace(Autotuner=Autotuner))
    with convert_module.usable_torchao():
        tuner = Autotuner(None, ["n", "k"], [], ["n", "num_elements"], ["k"], warmup=3)
    assert (tuner.key, tuner.more) == (["n"], (["k"], 3))
    with pytest.raises(ValueError, match="num_elements"):  # everybody else's kernels are checked
        Autotuner(None, ["n", "k"], [], ["num_elements"])


@pytest.mark.slow
def test_importing_torchao_prints_nothing():
    code = "from crius.quantize.convert import usable_torchao\nwith usable_torchao(): import crius.quantize.backend"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.long
def test_torchao_is_not_imported_without_low_precision():
    code = "import sys, crius.train.job; assert not [name for name in sys.modules if name.startswith('torchao')]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("kind", "capability", "missing"),
    [
        ("float8", (8, 0), "float8 matmuls need compute capability 8.9, this GPU has 8.0"),
        ("float8", (8, 9), ""),
        ("float8", (9, 0), ""),
        ("mxfp8", (9, 0), "MXFP8 matmuls need compute capability 10.0, this GPU has 9.0"),
        ("mxfp8", (10, 0), ""),
    ],
)
def test_a_gpu_is_asked_what_it_can_multiply(kind, capability, missing, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert missing_matmuls(kind, "cuda") == missing
    assert missing_matmuls(kind, "cpu").startswith("this device has no")


@pytest.mark.parametrize(
    ("card", "missing"),
    [("gfx942:sramecc+", {"mxfp8"}), ("gfx950", {"mxfp8"}), ("gfx90a", {"float8", "mxfp8"})],
)
def test_a_card_of_amd_has_float8_from_cdna3_on_and_no_mxfp8(monkeypatch, card, missing):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(gcnArchName=card))
    for kind in ("float8", "mxfp8"):
        assert bool(missing_matmuls(kind, "cuda")) == (kind in missing)


@pytest.mark.parametrize(
    ("recipe", "emulate", "want"),
    [
        ("rowwise", False, True),
        ("rowwise_with_gw_hp", False, True),
        ("tensorwise", False, False),
        ("rowwise", True, False),
    ],
)
def test_compiled_rowwise_float8_rounds_where_eager_code_does(recipe, emulate, want):
    """Else a scale that recomputation makes anew differs from the first, and can be NaN (pytorch/pytorch#150859)."""
    model = nn.ModuleDict({"w": nn.Linear(32, 16, bias=False, device="meta")})
    with inductor_config.patch(emulate_precision_casts=False):
        convert(model, [choice("w", (16, 32))], FLOAT8[recipe], emulate=emulate)
        assert inductor_config.emulate_precision_casts is want

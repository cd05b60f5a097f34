"""Moments and weights in fewer bits, stochastic rounding, Muon, and parameters with settings of their own."""

import logging
import math
from dataclasses import replace

import pytest
import torch
from harness import llama
from torch import nn

from crius.config.param_groups import parse_group
from crius.config.training import OptimizerConfig
from crius.models import registry
from crius.optim import build as build_module
from crius.optim import muon, storage
from crius.optim.build import IMPLEMENTATIONS, build_optimizer, parameter_groups, state_bytes
from crius.optim.state import fill_copies, to_load, to_save
from crius.optim.storage import places_of, random_bits, round_to_bfloat16, stream

SMALL = llama(num_layers=2)
PLAN = replace(SMALL.plan, embeddings=("tok_embeddings",))
LR = 1e-2
CPU = torch.device("cpu")


def toy(dtype=torch.float32):
    """Parameters named as a model's: matrices of a layer, a vector, an embedding; 4,099 numbers do not fill blocks."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "tok_embeddings.weight": (64, 64),
        "layers.0.attention.wq.weight": (64, 96),
        "layers.0.attention.wo.weight": (96, 64),
        "layers.0.attention_norm.weight": (4099,),
        "output.weight": (64, 65),
    }
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def build(parameters, **config):
    config = OptimizerConfig(lr=LR, **config)
    return build_optimizer(parameters.items(), PLAN, config, seed=5)


def set_gradients(parameters, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters.values():
        gradient = torch.randn(parameter.shape, generator=generator) * (1 + step % 3)
        parameter.grad = gradient.to(parameter.dtype)


def trained(steps=20, dtype=torch.float32, **config):
    parameters = toy(dtype)
    optimizer = build(parameters, **config)
    for step in range(steps):
        set_gradients(parameters, step)
        optimizer.step()
    return parameters, optimizer


def snapshot(parameters, optimizer):
    tensors = [*parameters.values()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in tensors]


# --- which implementation


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float32_states_are_torchs_adamw_to_the_last_bit(implementation):
    got, optimizer = trained(5, implementation=implementation)
    assert isinstance(optimizer, torch.optim.AdamW)
    want = toy()
    theirs = torch.optim.AdamW(
        [
            {"params": [p for name, p in want.items() if "norm" in name or "tok" in name], "weight_decay": 0.0},
            {"params": [p for name, p in want.items() if "norm" not in name and "tok" not in name]},
        ],
        **{"lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.1, **IMPLEMENTATIONS[implementation]},
    )
    for step in range(5):
        set_gradients(want, step)
        theirs.step()
    assert all(torch.equal(got[name], want[name]) for name in want)


# distance from the float32 run relative to how far that moved; measured 0.0033 and 0.017. 8 bits have steps of about
# 1 % of a number near its block's largest, coarser ones below
CLOSE = {"bfloat16": 0.01, "8bit": 0.04}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("state_dtype", CLOSE)
def test_states_in_fewer_bits_train_nearly_as_float32(state_dtype, implementation):
    want, _ = trained()
    got, optimizer = trained(state_dtype=state_dtype, implementation=implementation)
    for name, parameter in got.items():
        moved = (want[name] - toy()[name]).norm()
        assert 0 < (parameter - want[name]).norm() / moved < CLOSE[state_dtype], name
    dtypes = {optimizer.state[parameter]["exp_avg"].dtype for parameter in got.values()}
    assert dtypes == {torch.bfloat16 if state_dtype == "bfloat16" else torch.uint8}


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_state_that_is_saved_is_loaded_to_the_last_bit(name, state_dtype):
    parameters, optimizer = trained(3, name=name, state_dtype=state_dtype)
    saved = to_save(optimizer, {parameter: key for key, parameter in parameters.items()})
    names = {parameter: key for key, parameter in toy().items()}
    other = build({key: parameter for parameter, key in names.items()}, name=name, state_dtype=state_dtype)
    targets, finish = to_load(other, names, saved)
    for key, target in targets.items():
        target.copy_(saved[key])
    finish()
    loaded = to_save(other, names)
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    exact, theirs = trained(3, name=name)
    for key, value in to_save(theirs, {parameter: key for key, parameter in exact.items()}).items():
        assert (saved[key].float() - value).norm() <= 0.02 * value.norm(), key


def test_a_state_without_scales_gets_those_of_its_blocks():
    parameters, optimizer = trained(3, state_dtype="8bit")
    saved = to_save(optimizer, {parameter: key for key, parameter in parameters.items()})
    saved = {key: value for key, value in saved.items() if "_scale." not in key}
    names = {parameter: key for key, parameter in toy().items()}
    other = build({key: parameter for parameter, key in names.items()}, state_dtype="8bit")
    targets, finish = to_load(other, names, saved)
    for key, target in targets.items():
        target.copy_(saved[key])
    finish()
    loaded = to_save(other, names)
    for key, value in saved.items():
        assert (loaded[key] - value).norm() <= 0.02 * value.norm(), key


def test_a_parameter_that_has_the_name_of_another_gets_its_numbers_and_a_state_of_its_own():
    first, loaded = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([first, loaded])
    loaded.grad = torch.ones(3)
    optimizer.step()
    with torch.no_grad():
        fill_copies(optimizer, {first: "w", loaded: "w"})
    assert torch.equal(first, loaded)
    assert torch.equal(optimizer.state[first]["exp_avg"], optimizer.state[loaded]["exp_avg"])
    assert optimizer.state[first]["exp_avg"] is not optimizer.state[loaded]["exp_avg"]


def test_one_weight_in_bfloat16_is_rounded_as_all_are():
    parameters = toy()
    parameters["output.weight"] = nn.Parameter(parameters["output.weight"].to(torch.bfloat16))
    assert not isinstance(build(parameters), torch.optim.AdamW)


def test_the_state_of_another_optimizer_is_not_loaded():
    parameters, optimizer = trained(1, name="muon")
    names = {parameter: key for key, parameter in parameters.items()}
    saved = to_save(optimizer, names)
    other = build(parameters)
    targets, _ = to_load(other, names, saved)
    assert {key.rpartition(".")[0] for key in targets} == set(parameters) - set(MATRICES)
    assert {names[parameter] for parameter in other.state} == set(parameters) - set(MATRICES)


def test_matrices_are_iterated_on_two_ranks_at_a_time_the_most_expensive_first():
    """Costs of 2 x 2 x 300, 4 x 4 x 100 and 8 x 8 x 8 multiplications."""
    shapes = [(8, 8), (300, 2), (4, 100)]
    parameters = {f"layers.0.w{place}.weight": nn.Parameter(torch.ones(shape)) for place, shape in enumerate(shapes)}
    optimizer = build(parameters, name="muon")
    set_gradients(parameters, 0)
    optimizer._holders[None].size = 2
    assert [[tuple(job.matrix.shape) for job in jobs] for _, jobs in optimizer._rounds()] == [
        [(4, 100), (300, 2)],
        [(8, 8)],
    ]


def test_small_parameters_keep_float32_moments_in_8_bit_runs():
    parameters = {"layers.0.attention.wq.weight": nn.Parameter(torch.ones(4, 1023))}
    optimizer = build(parameters, state_dtype="8bit")
    set_gradients(parameters, 0)
    optimizer.step()
    [state] = optimizer.state.values()
    assert state["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "8bit"])
def test_the_memory_that_is_printed_is_the_memory_that_is_taken(state_dtype, name, dtype, caplog, monkeypatch):
    monkeypatch.setattr(build_module, "_memory", lambda groups, store, config: f"{state_bytes(groups, store)}")
    with caplog.at_level(logging.INFO, logger="crius.optim"):
        _, optimizer = trained(1, dtype, name=name, state_dtype=state_dtype)
    held = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert caplog.messages[-1] == f"optimizer: {held}"


@pytest.mark.parametrize("config", [{}, {"state_dtype": "bfloat16"}, {"state_dtype": "8bit"}, {"name": "muon"}])
def test_pieces_of_a_parameter_step_as_the_whole(config, monkeypatch):
    want, _ = trained(3, torch.bfloat16, **config)
    monkeypatch.setattr(storage, "CHUNK", 1024)
    got, _ = trained(3, torch.bfloat16, **config)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_that_the_device_skips_changes_nothing(name, state_dtype, dtype):
    parameters, optimizer = trained(2, dtype, name=name, state_dtype=state_dtype)
    before = snapshot(parameters, optimizer)
    for parameter in parameters.values():
        parameter.grad.fill_(math.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(map(torch.equal, snapshot(parameters, optimizer), before))
    optimizer.found_inf = torch.zeros(())
    set_gradients(parameters, 2)
    optimizer.step()
    want, theirs = trained(3, dtype, name=name, state_dtype=state_dtype)
    assert all(map(torch.equal, snapshot(parameters, optimizer), snapshot(want, theirs)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_loaded_state_goes_on_as_if_it_had_not_stopped(name, state_dtype, dtype):
    config = {"name": name, "state_dtype": state_dtype}
    parameters, optimizer = trained(2, dtype, **config)
    saved = optimizer.state_dict()  # not copied: both go on from it
    again = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    loaded = build(again, **config)
    loaded.load_state_dict(saved)
    for named, one in ((parameters, optimizer), (again, loaded)):
        set_gradients(named, 7)
        for group in one.param_groups:
            group["lr"] = LR / 2
        one.step()
    assert all(map(torch.equal, snapshot(again, loaded), snapshot(parameters, optimizer)))


def test_a_parameter_without_gradient_is_left_alone():
    for name in ("adamw", "muon"):
        parameters = toy(torch.bfloat16)
        optimizer = build(parameters, name=name)
        set_gradients(parameters, 0)
        parameters["layers.0.attention.wq.weight"].grad = None
        optimizer.step()
        changed = {name for name, before in toy(torch.bfloat16).items() if not torch.equal(before, parameters[name])}
        assert changed == set(parameters) - {"layers.0.attention.wq.weight"}


# --- stochastic rounding


def rounded(values, seed=0, field=0, step=0):
    places = torch.arange(values.numel()).view(values.shape)
    return round_to_bfloat16(values, random_bits(stream(seed, "w"), torch.tensor(float(step)), places), field)


@pytest.mark.parametrize("field", [0, 1, 2])
@pytest.mark.parametrize("value", [1 + 2**-10, -(1 + 2**-10), 3.14159, -1e-30, 1e-40])
def test_rounding_gives_the_two_neighbours_and_the_right_mean(value, field):
    values = torch.full((1 << 18,), value)
    found = rounded(values, field=field).double()
    low, high = found.unique().tolist()
    assert (
        low < values[0] < high
        and torch.nextafter(torch.tensor(low, dtype=torch.bfloat16), torch.tensor(math.inf, dtype=torch.bfloat16))
        == high
    )
    # the mean of n draws is off by the gap / 2 sqrt(n) at most, in one standard deviation
    assert abs(found.mean() - values[0].double()) < 4 * (high - low) / 2 / math.sqrt(values.numel())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_no_two_tensors_of_a_step_are_rounded_by_the_same_bits(name, monkeypatch):
    fields = []
    rounding = lambda values, bits, field: fields.append(field) or values  # noqa: E731
    monkeypatch.setattr(storage, "round_to_bfloat16", rounding)
    weight = {MATRICES[0]: toy(torch.bfloat16)[MATRICES[0]]}
    optimizer = build(weight, name=name, state_dtype="bfloat16")
    set_gradients(weight, 0)
    optimizer.step()
    assert len({*fields}) == len(fields) == (3 if name == "adamw" else 2)


def test_what_bfloat16_has_stays():
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-133, 3.3895e38, math.inf, -math.inf, math.nan])
    values = values.to(torch.bfloat16).float().repeat(1000)
    torch.testing.assert_close(rounded(values), values.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)
    odd_nan = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert rounded(odd_nan.repeat(1000)).isnan().all()


def test_random_bits_differ_by_seed_name_step_place_and_field():
    def draw(seed=0, name="w", step=0, first=0, field=0):
        bits = random_bits(stream(seed, name), torch.tensor(float(step)), torch.arange(first, first + 4096))
        return (bits >> 16 * field) & 0xFFFF

    base = draw()
    others = [draw(seed=1), draw(name="v"), draw(step=1), draw(first=4096), draw(field=1), draw(field=2)]
    for other in others:
        correlation = torch.corrcoef(torch.stack([base, other]).double())[0, 1]
        assert abs(correlation) < 4 / math.sqrt(4096)
    assert torch.equal(draw(first=100)[:10], base[100:110])


def test_random_bits_are_those_of_runs_that_resume():
    bits = random_bits(stream(7, "w"), torch.tensor(3.0), torch.arange(2))
    assert bits.tolist() == [9020604445986232047, 1546111640209391193]


@pytest.mark.parametrize(("rows", "columns"), [((0, 8), (0, 6)), ((2, 5), (0, 6)), ((0, 8), (2, 4)), ((3, 8), (3, 6))])
def test_places_of_a_shard_are_those_in_the_whole(rows, columns):
    want = torch.arange(48).view(8, 6)[slice(*rows), slice(*columns)]
    offset = (rows[0], columns[0])
    assert torch.equal(places_of(0, want.numel(), want.shape, offset, (8, 6), CPU), want.reshape(-1))
    assert torch.equal(places_of(2, 5, want.shape, offset, (8, 6), CPU), want.reshape(-1)[2:5])
    assert places_of(0, 1, (), (), (), CPU).tolist() == [0]


def test_small_updates_are_lost_to_nearest_and_kept_stochastically():
    """0.1 % of a weight is less than half of what bfloat16 can tell apart."""

    def moved(is_stochastic):
        parameters = {"layers.0.attention_norm.weight": nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))}
        config = OptimizerConfig(lr=1e-3, stochastic_rounding=is_stochastic)
        optimizer = build_optimizer(parameters.items(), PLAN, config, seed=0)
        for _ in range(50):
            for parameter in parameters.values():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        [parameter] = parameters.values()
        return 1 - parameter.detach().double().mean().item()

    assert moved(False) == 0
    assert moved(True) == pytest.approx(50 * 1e-3, rel=0.05)  # 4096 weights, each off by 2**-8 at most


def test_bfloat16_second_moments_follow_only_when_rounded_stochastically():
    """With beta2 0.999 a step takes 0.1 % of the way: to nearest the moment stays where it is."""

    def second_moment(is_stochastic):
        parameters = {"layers.0.attention_norm.weight": nn.Parameter(torch.ones(4096))}
        optimizer = build(parameters, beta2=0.999, state_dtype="bfloat16", stochastic_rounding=is_stochastic)
        for step in range(200):
            for parameter in parameters.values():
                parameter.grad = torch.full_like(parameter, 1.0 if step < 100 else 0.0)
            optimizer.step()
        [state] = optimizer.state.values()
        return state["exp_avg_sq"].double().mean().item()

    want = (1 - 0.999**100) * 0.999**100
    assert second_moment(True) == pytest.approx(want, rel=0.02)
    assert second_moment(False) != pytest.approx(want, rel=0.05)


# --- Muon

MATRICES = ("layers.0.attention.wq.weight", "layers.0.attention.wo.weight")


def test_coefficients_are_torchs():
    theirs = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]).defaults
    assert (muon.COEFFICIENTS, muon.EPS) == (theirs["ns_coefficients"], theirs["eps"])


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_in_bfloat16_is_torchs_to_the_last_bit(adjust, nesterov):
    got, want = toy(), toy()
    names = {parameter: name for name, parameter in got.items()}
    ours = muon.Muon(
        [{"params": [got[name] for name in MATRICES], "lr": LR, "weight_decay": 0.1}],
        storage.Storage(names, "float32", True, 0),
        **{"momentum": 0.9, "nesterov": nesterov, "ns_steps": 5, "adjust_lr": adjust, "dtype": torch.bfloat16},
    )
    theirs = torch.optim.Muon(
        [want[name] for name in MATRICES],
        **{"lr": LR, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust},
    )
    for step in range(4):
        for parameters, optimizer in ((got, ours), (want, theirs)):
            set_gradients(parameters, step)
            optimizer.step()
    assert all(torch.equal(got[name], want[name]) for name in MATRICES)


@pytest.mark.parametrize("shape", [(48, 96), (96, 48)])
def test_an_orthogonal_matrix_has_singular_values_near_1(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = muon.orthogonalize(matrix, 5)
    assert found.shape == matrix.shape
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6 and values.max() < 1.3  # the band of the quintic iteration
    assert (found * (u @ v)).sum() / found.norm() / (u @ v).norm() > 0.95


def test_muon_is_for_the_matrices_inside_blocks_and_adamw_for_the_rest():
    with torch.device("meta"):
        model = registry.build(SMALL)
    config = OptimizerConfig(name="muon")
    groups = {group.name: group for group in parameter_groups(model.named_parameters(), SMALL.plan, config)}
    assert [*groups] == ["decayed", "embeddings", "1d", "muon"]
    assert groups["muon"].optimizer == "muon" and len(groups["muon"].members) == 2 * 7
    assert all(name.startswith("layers.") and "norm" not in name for name in groups["muon"].members.values())
    assert {name for name, group in groups.items() if group.optimizer == "adamw"} == {"decayed", "embeddings", "1d"}
    assert set(groups["decayed"].members.values()) == {"output.weight"}


def test_muon_leaves_routers_to_adamw():
    facts = registry.SPECS["qwen3_moe"].describe("debug")
    with torch.device("meta"):
        model = registry.build(facts)
    groups = parameter_groups(model.named_parameters(), facts.plan, OptimizerConfig(name="muon", weight_decay=0.5))
    found = [(group.name, group.optimizer, group.weight_decay) for group in groups]
    decayed = [("decayed", "adamw", 0.5), ("router", "adamw", 0.5)]
    assert found == [*decayed, ("embeddings", "adamw", 0.0), ("1d", "adamw", 0.0), ("muon", "muon", 0.5)]
    assert {name.rpartition("router")[1:] for name in groups[1].members.values()} == {("router", ".weight")}


# --- settings of single parameters


def test_the_first_entry_that_fits_a_parameter_counts(caplog):
    parameters = toy()
    with caplog.at_level(logging.INFO, logger="crius.optim"):
        optimizer = build(
            parameters,
            param_groups=(
                "wo: weight_decay=0.25 optimizer=muon",
                "attention.*: lr_factor=0.5",
                "attention_norm.weight: weight_decay=0.5",
            ),
        )
    names = {parameter: name for name, parameter in parameters.items()}
    found = {
        names[parameter]: (
            *(group["name"], group["lr"] / LR, group["lr_factor"], group["weight_decay"]),
            "momentum" in group,
        )
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert found == {
        "tok_embeddings.weight": ("embeddings", 1.0, 1.0, 0.0, False),
        "layers.0.attention.wq.weight": ("attention.*/decayed", 0.5, 0.5, 0.1, False),
        "layers.0.attention.wo.weight": ("wo/muon", 1.0, 1.0, 0.25, True),
        "layers.0.attention_norm.weight": ("attention_norm.weight/1d", 1.0, 1.0, 0.5, False),
        "output.weight": ("decayed", 1.0, 1.0, 0.1, False),
    }
    same = build(parameters, param_groups=("wq: lr_factor=0.5", "wo: lr_factor=0.25"))
    assert [group["lr_factor"] for group in same.param_groups] == [1.0, 1.0, 1.0, 0.5, 0.25]
    assert caplog.messages[0].startswith("optimizer: muon and adamw fused, 5 groups: decayed 1 tensor, 4,160 ")
    assert "attention.*/decayed 1 tensor, 6,144 parameters, weight decay 0.1, lr x 0.5" in caplog.messages[0]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("wq", "not of the form"),
        ("wq: lr_factor", "not of the form"),
        (": lr_factor=1", "not of the form"),
        ("wq: lr=1", "unknown key lr"),
        ("wq: lr_factor=1 lr_factor=2", "twice"),
        ("wq: lr_factor=-1", "0 or more"),
        ("wq: weight_decay=nan", "finite"),
        ("wq: weight_decay=x", "not a number"),
        ("wq: optimizer=sgd", "not adamw or muon"),
    ],
)
def test_an_entry_that_is_not_of_its_form_says_why(text, what):
    with pytest.raises(ValueError, match=what):
        parse_group(text)

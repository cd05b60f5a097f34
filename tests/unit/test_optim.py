"""The learning rate of every step, and which parameters decay."""

import itertools
import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness import llama
from torch import nn

from crius.config.training import LRSchedulerConfig, OptimizerConfig
from crius.models import registry
from crius.optim import build
from crius.optim.build import IMPLEMENTATIONS, WarmupStableDecay, build_optimizer, decay_class, parameter_groups

SMALL = llama(num_layers=2)


def factors(steps, **config):
    schedule = WarmupStableDecay(LRSchedulerConfig(**config), steps)
    return [schedule.factor(step) for step in range(steps)]


def torchtitan_factors(steps, *, warmup_steps, decay_ratio=None, decay_type="linear", min_lr_factor=0.0):
    """torchtitan's linear_warmup_stable_decay, written anew from its definition."""
    warmup = min(warmup_steps, steps)
    decay = steps - warmup if decay_ratio is None else min(round(steps * decay_ratio), steps - warmup)
    stable = steps + 1 - warmup - decay
    curve = []
    for index in range(steps):
        if index < warmup:
            curve.append((index + 1) / warmup)
        elif index < warmup + stable:
            curve.append(1.0)
        else:
            progress = (index + 1 - warmup - stable) / decay
            left = {
                "linear": 1 - progress,
                "sqrt": 1 - progress**0.5,
                "cosine": (1 + math.cos(math.pi * progress)) / 2,
            }[decay_type]
            curve.append(min_lr_factor + (1 - min_lr_factor) * left)
    return curve


GRID = [
    {"warmup_steps": warmup, "decay_ratio": ratio, "decay_type": shape, "min_lr_factor": least}
    for warmup, ratio, shape, least in itertools.product(
        (0, 1, 2, 7, 50), (None, 0.0, 0.2, 0.55, 1.0), ("linear", "sqrt", "cosine"), (0.0, 0.1, 1.0)
    )
]

TABLE = [
    (10, {"warmup_steps": 2}, [1 / 2, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
    (4, {"warmup_steps": 0}, [1, 3 / 4, 2 / 4, 1 / 4]),
    (10, {"warmup_steps": 2, "decay_ratio": 0.4}, [1 / 2, 1, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
    (10, {"warmup_steps": 2, "decay_ratio": 0.0}, [1 / 2, *[1] * 9]),
    # the progress of 4 decay steps is 0, 1/4, 2/4, 3/4
    (6, {"warmup_steps": 2, "decay_type": "sqrt"}, [1 / 2, 1, 1, 1 / 2, 1 - 0.5**0.5, 1 - 0.75**0.5]),
    (6, {"warmup_steps": 2, "decay_type": "cosine"}, [1 / 2, 1, 1, (1 + 0.5**0.5) / 2, 1 / 2, (1 - 0.5**0.5) / 2]),
    (6, {"warmup_steps": 2, "min_lr_factor": 0.2}, [1 / 2, 1, 1, 0.8, 0.6, 0.4]),
    (3, {"warmup_steps": 3}, [1 / 3, 2 / 3, 1]),
    (1, {"warmup_steps": 0}, [1]),
]


@pytest.mark.parametrize(("steps", "config", "want"), TABLE, ids=[str(row[1]) for row in TABLE])
def test_schedule_is_the_table(steps, config, want):
    assert len(want) == steps
    assert factors(steps, **config) == pytest.approx(want, rel=1e-12)  # float64 rounding


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 40])
def test_schedule_equals_torchtitans_and_never_trains_at_zero(steps):
    for config in GRID:
        curve = factors(steps, **config)
        assert curve == pytest.approx(torchtitan_factors(steps, **config), rel=1e-12, abs=1e-15), config  # rounding
        assert all(0 < factor <= 1 for factor in curve), config
        decaying = curve[min(config["warmup_steps"], steps) :]
        assert decaying == sorted(decaying, reverse=True), config


def test_warmup_longer_than_the_run_is_clamped_and_said(caplog):
    with caplog.at_level(logging.INFO, logger="crius.optim"):
        curve = factors(4, warmup_steps=200)
    assert curve == [1 / 4, 2 / 4, 3 / 4, 1]
    assert caplog.messages == ["lr_scheduler: warmup_steps 200 clamped to the 4 steps of the run"]


def test_decay_longer_than_what_the_warmup_leaves_is_clamped_and_said(caplog):
    with caplog.at_level(logging.INFO, logger="crius.optim"):
        curve = factors(10, warmup_steps=6, decay_ratio=0.8)
    assert curve == pytest.approx([*[(i + 1) / 6 for i in range(6)], 1, 3 / 4, 2 / 4, 1 / 4], rel=1e-12)
    assert caplog.messages == ["lr_scheduler: decay of 8 steps clamped to the 4 after warmup"]


def test_a_schedule_that_fits_says_nothing(caplog):
    factors(10, warmup_steps=2, decay_ratio=0.8)
    factors(10, warmup_steps=10)
    assert not caplog.messages


NORMS = {f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("attention_norm", "ffn_norm")} | {"norm.weight"}
EMBEDDINGS = {"tok_embeddings.weight"}


def model_of(tied=False):
    with torch.device("meta"):
        return registry.build(llama(num_layers=2, tied_embeddings=tied))


def group_names(model, tied=False, **flags):
    """Group to the names of its parameters."""
    plan = llama(num_layers=2, tied_embeddings=tied).plan
    groups = parameter_groups(model.named_parameters(), plan, OptimizerConfig(**flags))
    return {group.name: set(group.members.values()) for group in groups}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("decay_1d", [False, True])
@pytest.mark.parametrize("decay_embeddings", [False, True])
def test_norms_and_embeddings_decay_only_when_asked(tied, decay_1d, decay_embeddings):
    model = model_of(tied)
    names = {name for name, _ in model.named_parameters()}
    assert ("output.weight" in names) == (not tied)  # tied, it is the embedding, and decays as such
    kept = {"1d": set() if decay_1d else NORMS, "embeddings": set() if decay_embeddings else EMBEDDINGS}
    want = {"decayed": names - kept["1d"] - kept["embeddings"], **{group: held for group, held in kept.items() if held}}
    assert group_names(model, tied, decay_1d=decay_1d, decay_embeddings=decay_embeddings) == want


def test_each_of_several_embeddings_is_one():
    plan = replace(llama(num_layers=2).plan, embeddings=("tok_embeddings", "positions"))
    weight = nn.Parameter(torch.zeros(2, 2))
    found = [decay_class(f"{name}.weight", weight, plan, OptimizerConfig()) for name in ("tok_embeddings", "positions")]
    assert found == ["embeddings", "embeddings"]


def test_optimizer_gets_each_parameter_once_with_its_groups_decay(caplog):
    model = model_of()
    with caplog.at_level(logging.INFO, logger="crius.optim"):
        optimizer = build_optimizer(
            model.named_parameters(), SMALL.plan, OptimizerConfig(weight_decay=0.3, beta2=0.9, eps=1e-6), seed=0
        )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))
    assert {group["name"]: group["weight_decay"] for group in optimizer.param_groups} == {
        "decayed": 0.3,
        "embeddings": 0.0,
        "1d": 0.0,
    }
    assert {(group["betas"], group["eps"]) for group in optimizer.param_groups} == {((0.9, 0.9), 1e-6)}
    assert caplog.messages == [
        "optimizer: adamw fused, 3 groups: decayed 15 tensors, 458,752 parameters, weight decay 0.3; "
        "embeddings 1 tensor, 65,536 parameters, weight decay 0.0; 1d 5 tensors, 640 parameters, weight decay 0.0",
        "optimizer: states 0.004 GiB per rank (float32), weights 0.002, gradients 0.002",
    ]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_implementation_is_the_one_asked_for(implementation):
    optimizer = build_optimizer(
        model_of().named_parameters(), SMALL.plan, OptimizerConfig(implementation=implementation), seed=0
    )
    asked = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
    assert {name: optimizer.defaults[name] for name in asked} == asked


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("name", "devices"), [("adamw", ["cuda"]), ("muon", ["cuda"]), ("adamw", ["cuda", "cpu"])])
def test_only_fused_optimizers_and_muon_skip_a_step_on_a_gpu(implementation, name, devices, monkeypatch):
    places = itertools.cycle(map(torch.device, devices))
    monkeypatch.setattr(build, "local_tensor", lambda parameter: SimpleNamespace(device=next(places)))
    config = OptimizerConfig(name=name, implementation=implementation)
    optimizer = build_optimizer(model_of().named_parameters(), SMALL.plan, config, seed=0)
    assert optimizer.takes_found_inf == (implementation == "fused" and devices == ["cuda"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decay_shrinks_the_decayed_group_only(implementation):
    """With gradient 0 all that AdamW does is ``w *= 1 - lr * weight_decay``."""
    model = nn.ModuleDict({"tok_embeddings": nn.Embedding(4, 3), "layers": nn.Linear(3, 4)})
    plan = replace(SMALL.plan, embeddings=("tok_embeddings",))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = OptimizerConfig(implementation=implementation, lr=0.5, weight_decay=0.25)
    optimizer = build_optimizer(model.named_parameters(), plan, config, seed=0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.5 * 0.25 if name == "layers.weight" else 1.0
        assert torch.equal(parameter, before[name] * factor), name  # 7/8 is exact in float32

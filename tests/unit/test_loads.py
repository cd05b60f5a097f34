"""Figures of the loads of experts, and the warning that names dead ones."""

import logging
import math

import pytest
import torch

from crius.config.moe import MoEConfig
from crius.errors import EffectError
from crius.metrics.loads import IDLE_STEPS, ExpertLoads
from crius.models.registry import SPECS

MODEL = SPECS["qwen3_moe"].describe("debug")
LAYERS, EXPERTS = 4, 8


class Step:
    """Gives the loads counts that the test sets; ``after(counts)`` is one step with its record."""

    def __init__(self, advice="try this"):
        self.counts = torch.ones(LAYERS, EXPERTS + 1, dtype=torch.int64)
        self.loads = ExpertLoads(MODEL, lambda: self.counts.flatten(), torch.device("cpu"), advice=advice)

    def after(self, counts):
        self.counts = torch.cat((counts, torch.zeros(LAYERS, 1, dtype=torch.int64)), 1)
        numbers = self.loads.numbers(int(counts[0].sum()) // MODEL.top_k)
        return self.loads.taken({name: value.item() for name, value in numbers.items()})


def counts(dead=()):
    """Even loads but for the dead experts of layer 1, whose tokens expert 7 has."""
    table = torch.full((LAYERS, EXPERTS), MODEL.top_k)
    for expert in dead:
        table[1, expert], table[1, 7] = 0, table[1, 7] + MODEL.top_k
    return table


def test_figures_of_even_and_uneven_loads():
    step = Step()
    even, uneven = step.after(counts()), step.after(counts(dead=[0]))
    assert (even["load_max_over_mean"], even["dead_experts"]) == (1, 0)
    assert even["load_entropy"] == pytest.approx(1)
    assert (uneven["load_max_over_mean"], uneven["dead_experts"]) == (2, 1)
    shares = [0.25, *[0.125] * 6]
    assert uneven["load_entropy"] == pytest.approx(-sum(p * math.log(p) for p in shares) / math.log(8))


def test_a_warning_names_each_expert_once_also_where_another_one_revives(caplog):
    caplog.set_level(logging.WARNING, "crius.metrics")
    step = Step()
    for dead in ([2], [2], [5]):
        for _ in range(IDLE_STEPS):
            step.after(counts(dead))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "1 of 32 had no token in the last 10 steps, new among them: layers.1 expert 2; try this" in texts[0]
    assert "layers.1 expert 5" in texts[1] and "expert 2" not in texts[1]


def test_other_ranks_do_not_warn(caplog):
    step = Step(advice="")
    for _ in range(IDLE_STEPS):
        step.after(counts([2]))
    assert caplog.records == []


def test_a_lost_token_ends_the_run():
    step = Step()
    lost = counts()
    lost[2, 3] -= 1
    with pytest.raises(EffectError, match="differ from the tokens of a step times top_k by 1"):
        step.after(lost)


@pytest.mark.parametrize(
    ("given", "has_bias", "start"),
    [
        ({}, False, "raise --moe.aux_loss_coefficient"),
        ({"aux_loss": "none"}, False, "give --moe.aux_loss sequence"),
        ({"aux_loss": "none"}, True, "raise --moe.bias_update_rate"),
    ],
)
def test_advice_is_about_what_balances_the_run(given, has_bias, start):
    assert MoEConfig(**given).advice(has_bias).startswith(start)

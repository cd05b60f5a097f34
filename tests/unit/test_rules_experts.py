"""What is refused about experts and how they are split over ranks, with a fix that works."""

import importlib.metadata
from types import SimpleNamespace

import pytest
from harness import layout_flags
from test_rules import facts_of

from crius.config import rules
from crius.config.layout import parse_layout
from crius.config.rules_moe import (
    muon_needs_matrices,
)

ROUTED = ["--model.name", "qwen3_moe"]


def facts_on(layout, flags):
    degrees = parse_layout(layout)
    batch = 2 * degrees.batch * degrees.pp
    return facts_of([*layout_flags(layout, batch), *flags], ranks=degrees.num_ranks)


@pytest.mark.parametrize("layout", ["fsdp2_ep2", "tp2", "hsdp2x2_ep2"])
def test_the_oldest_torch_splits_experts_over_ranks_too(layout, monkeypatch):
    facts = facts_on(layout, ROUTED)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [SimpleNamespace(version="2.11.0")])
    rules.check(facts)


@pytest.mark.parametrize(
    "layout",
    ["fsdp2_ep2", "fsdp4_ep4", "hsdp2x2_ep2", "tp2_ep2", "fsdp2_tp2_ep4", "cp2_ep2", "tp8", "fsdp16", "fsdp16_ep8",
     "pp2_fsdp2_ep2", "fsdp4+reshard2"],
)  # fmt: skip
def test_experts_can_be_split_over_all_ranks_that_share_a_layer(layout):
    rules.check(facts_on(layout, ROUTED))


def test_widths_that_tensor_parallelism_does_not_split_need_not_be_divided():
    rules.check(facts_on("tp4", [*ROUTED, "--model.expert_ffn_dim", "90"]))


def test_muon_is_refused_where_it_would_get_experts_of_some_layers():
    muon = [*ROUTED, "--optimizer.name", "muon", "--optimizer.param_groups"]
    assert len(list(muon_needs_matrices(facts_on("1", [*muon, "layers.0:optimizer=adamw"])))) == 1
    assert list(muon_needs_matrices(facts_on("1", [*muon, "feed_forward.experts:optimizer=adamw"]))) == []

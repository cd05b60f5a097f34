"""What is refused about experts and how they are split over ranks, with a fix that works."""

import importlib.metadata
from types import SimpleNamespace

import pytest
import sigmoid_moe
from harness import layout_flags
from test_rules import facts_of, repairs

from crius.config import rules
from crius.config.layout import parse_layout
from crius.config.rules_experts import (
    EXPERT_RULES,
    expert_parallel_divides,
    experts_are_not_resharded,
    experts_split_evenly,
)
from crius.config.rules_moe import (
    MOE_RULES,
    balance_is_of_sequences,
    experts_are_enough,
    groups_have_enough,
    muon_needs_matrices,
    router_learns,
    settings_need_experts,
    some_layer_has_experts,
)
from crius.config.rules_training import reproducible_excludes
from crius.models import registry

DENSE, ROUTED = ["--model.name", "llama3"], ["--model.name", "qwen3_moe"]
GROUPED = ["--model.name", "sigmoid_moe", "--model.flavor", "small"]
EXPERTS, REPRODUCIBLE = "--parallelism.expert_parallel_degree", "--training.reproducible"

# rule, layout, other flags, in the sentence, in "fix"
CASES = [
    (expert_parallel_divides, "fsdp2_ep2", DENSE, "and llama3/debug has none", f"{EXPERTS} 1"),
    (
        expert_parallel_divides,
        "fsdp4_ep3",
        ROUTED,
        "the number of experts of qwen3_moe/debug, 8, and the ranks that share a layer, 4",
        f"{EXPERTS} 2",
    ),
    (
        expert_parallel_divides,
        "fsdp2_tp2_ep8",
        ROUTED,
        "does not divide the ranks that share a layer, 4",
        f"{EXPERTS} 4",
    ),
    (
        expert_parallel_divides,
        "ddp4_ep2",
        ROUTED,
        "does not divide the ranks that share a layer, 1",
        "the layout hsdp2x2_ep2",
    ),
    (
        expert_parallel_divides,
        "pp2_ddp2_ep2",
        ROUTED,
        "does not divide the ranks that share a layer, 1",
        "the layout fsdp2_ep2",
    ),
    (
        experts_split_evenly,
        "fsdp16",
        [*ROUTED, "--model.expert_ffn_dim", "100"],
        "16 FSDP ranks share 8 experts of a layer and do not divide 100, rows of each",
        f"{EXPERTS} 4",
    ),
    (experts_split_evenly, "fsdp20_ep2", ROUTED, "share 4 experts of a layer and do not divide", "shard_degree 4"),
    (experts_are_not_resharded, "fsdp4_ep2+reshard2", ROUTED, "is not possible with expert_parallel", "mode never"),
    (experts_are_not_resharded, "fsdp16+reshard2", ROUTED, "where experts are split inside", "mode never"),
    (
        reproducible_excludes,
        "fsdp2_ep2",
        [*ROUTED, REPRODUCIBLE],
        "expert_parallel_degree 2 does not go",
        f"{EXPERTS} 1",
    ),
    (reproducible_excludes, "tp2", [*ROUTED, REPRODUCIBLE], "tensor_parallel_degree 2 does not go", "degree 1"),
    (balance_is_of_sequences, "1", [*ROUTED, "--moe.aux_loss", "batch"], "aux_loss batch must be", "aux_loss sequence"),
    (settings_need_experts, "1", [*DENSE, "--moe.aux_loss", "none"], "llama3/debug has no experts", "leave it out"),
    (experts_are_enough, "1", [*ROUTED, "--model.top_k", "9"], "top_k 9 is more than the 8", "--model.top_k 8"),
    (experts_are_enough, "1", [*ROUTED, "--model.ffn_dim", "64"], "all layers of qwen3_moe/debug have", "leave it out"),
    (router_learns, "1", [*ROUTED, "--model.top_k", "1", "--moe.aux_loss", "none"], "learn nothing", "model.top_k 2"),
    (some_layer_has_experts, "1", [*GROUPED, "--model.num_layers", "1"], "no layer with experts", "num_layers 2"),
    (groups_have_enough, "1", [*GROUPED, "--model.top_k", "6"], "best 2 of 4 groups", "--model.top_k 4"),
    (groups_have_enough, "1", [*GROUPED, "--model.num_experts", "10"], "4 equal groups", "--model.num_experts 12"),
    (groups_have_enough, "1", [*GROUPED, "--model.num_experts", "4"], "of two or more", "--model.num_experts 8"),
    (muon_needs_matrices, "1", [*ROUTED, "--optimizer.name", "muon"], "Muon does not update", "name adamw"),
]


@pytest.fixture(autouse=True)
def grouped_model(monkeypatch):
    monkeypatch.setitem(registry.SPECS, sigmoid_moe.SPEC.name, sigmoid_moe.SPEC)
    monkeypatch.setattr(registry, "FLAVORS", {*registry.FLAVORS, *sigmoid_moe.SPEC.flavors})


def facts_on(layout, flags):
    degrees = parse_layout(layout)
    batch = 2 * degrees.batch * degrees.pp
    return facts_of([*layout_flags(layout, batch), *flags], ranks=degrees.num_ranks)


@pytest.mark.parametrize(("rule", "layout", "flags", "what", "fix"), CASES)
def test_a_rule_of_experts_names_the_value_and_a_fix_that_works(rule, layout, flags, what, fix):
    facts = facts_on(layout, flags)
    [error] = rule(facts)
    assert what in error.what
    assert fix in error.fix
    for mended in repairs([*layout_flags(layout, 2 * facts.num_ranks), *flags], error.fix):
        assert list(rule(facts_of(mended, ranks=facts.num_ranks))) == [], mended


def test_every_rule_of_experts_has_a_case():
    assert {*MOE_RULES, *EXPERT_RULES} - {case[0] for case in CASES} == set()


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

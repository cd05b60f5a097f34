"""The last value that a rule allows, and the first that it refuses."""

from dataclasses import replace

import pytest
from rule_cases import CONTEXT, PIPELINE, REPLICATE, RESHARD, ROUTED, SHARD, TENSOR
from test_rules import facts_of

from crius.config import rules, rules_layout, rules_lora, rules_moe, rules_training

LENGTH = "--training.seq_len"
BUDGET = ["--activation_checkpoint.mode", "memory_budget", "--compile.enable", "--activation_checkpoint.memory_budget"]
AUX, Z = "--moe.aux_loss_coefficient", "--moe.z_loss_coefficient"

# rule, flags, the last value that is allowed, the first that is not, what else is known if anything is
BOUNDS = [
    (rules_layout.degrees_match_ranks, [SHARD], "2", "1", {"ranks": 2}),
    (rules_layout.ranks_fit_gpus, [SHARD], "2", "3", {"num_gpus": 2}),
    (rules_layout.shared_gpu_takes, [SHARD], "4", "5", {"num_gpus": 1, "sharing": "nccl"}),
    (rules_layout.reshard_degree_divides, [SHARD, "4", RESHARD], "2", "1"),
    (rules_layout.reshard_degree_divides, [SHARD, "4", RESHARD], "2", "4"),
    (rules_layout.reshard_groups_need_all_ranks, [SHARD, "4", RESHARD, "2", PIPELINE], "1", "2"),
    (rules.ranges, [*BUDGET], "1", "1.01"),
    (
        rules_layout.activation_checkpoint_options,
        ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_option"],
        "1",
        "0",
    ),
    (rules_moe.router_learns, [*ROUTED, "--model.top_k", "1", AUX], "1e-3", "0"),
    (rules_moe.router_learns, [*ROUTED, "--model.top_k", "1", AUX, "0", Z], "1e-3", "0"),
    (rules_lora.adapters_have_a_size, ["--lora.rank"], "64", "65"),
    (rules.sizes, ["--checkpoint.interval"], "2147483647", "2147483648"),
    (rules.sizes, ["--training.steps"], "9223372036854775807", "9223372036854775808"),
    (rules.sizes, ["--model.vocab_size"], "16777216", "16777217"),
    (rules.sizes, ["--model.num_layers"], "100000", "100001"),
    (rules.sizes, ["--model.ffn_dim"], "1048576", "1048577"),
    (rules.sizes, [*ROUTED, "--model.num_experts"], "65536", "65537"),
    (rules.sizes, ["--training.global_batch_size", "64", LENGTH], "1073741824", "1073741825"),
    (rules_training.sdc_checks_have_an_object, ["--sdc.recompute_interval", "1", PIPELINE], "1", "2"),
    (rules_training.sdc_checks_have_an_object, ["--sdc.replica_interval", "1", REPLICATE], "2", "1"),
]


@pytest.mark.parametrize(("rule", "flags", "allowed", "refused", "known"), [(*row, {})[:5] for row in BOUNDS])
def test_a_rule_refuses_from_the_first_value_that_does_not_work(rule, flags, allowed, refused, known):
    assert list(rule(facts_of([*flags, allowed], **known))) == []
    assert len(list(rule(facts_of([*flags, refused], **known)))) == 1


@pytest.mark.parametrize("cores", [4, 5, 8])
def test_a_core_bears_8_ranks_and_a_small_machine_32(cores):
    facts = replace(facts_of([SHARD, "2"]), num_cores=cores)
    most = max(32, 8 * cores)
    assert list(rules_layout.ranks_fit_gpus(replace(facts, local_ranks=most))) == []
    [error] = rules_layout.ranks_fit_gpus(replace(facts, local_ranks=most + 1))
    assert f"more than {most} of them" in error.why


# tensor-parallel ranks, context-parallel ranks, their method, and what a sequence must be a multiple of: each
# context-parallel rank has an early and a late part, which its tensor-parallel ranks cut again
UNITS = [(2, 1, "all_gather", 2), (1, 2, "all_gather", 4), (2, 2, "all_gather", 4), (4, 3, "all_gather", 12)]
UNITS += [(1, 3, "all_gather", 6), (1, 2, "ulysses", 2), (2, 4, "ulysses", 8)]


@pytest.mark.parametrize(("tp", "cp", "method", "unit"), UNITS)
def test_a_sequence_has_an_equal_part_for_each_rank(tp, cp, method, unit):
    flags = [TENSOR, str(tp), CONTEXT, str(cp), "--parallelism.context_parallel_method", method]
    found = {}
    for length in (unit - 1, unit, unit + 1, 3 * unit - 1):
        found[length] = [error.fix for error in rules_layout.sequence_divides(facts_of([*flags, LENGTH, str(length)]))]
    assert found == {
        unit - 1: [f"{LENGTH} {unit}"],
        unit: [],
        unit + 1: [f"{LENGTH} {unit}, or {2 * unit}"],
        3 * unit - 1: [f"{LENGTH} {2 * unit}, or {3 * unit}"],
    }


# the words of a range, values inside it, and values outside
WORDS = {
    "at least 1": ((1, 2), (0, -1)),
    "-1 or at least 1": ((-1, 1), (0, -2)),
    "0 or more": ((0, 1), (-1,)),
    "above 0": ((1e-9,), (0,)),
    "at least 10": ((10,), (9,)),
    "at least 2": ((2,), (1,)),
    "in [0, 1)": ((0, 0.99), (-0.01, 1)),
    "in [0, 1]": ((0, 1), (-0.01, 1.01)),
    "-1 or more": ((-1,), (-2,)),
}


def test_the_words_of_a_range_say_which_numbers_are_in_it():
    for row in rules.RANGES:
        inside, outside = WORDS[row.right]
        assert all(map(row.is_right, (*inside, *map(float, row.examples.values())))), row
        assert not any(map(row.is_right, outside)), row


ZEROS = (
    *(f"parallelism.{name}_parallel_degree" for name in ("tensor", "pipeline", "expert", "context")),
    *("parallelism.data_parallel_shard_degree", "training.local_batch_size", "training.seq_len"),
    *(f"model.{name}" for name in ("dim", "num_heads", "num_kv_heads", "head_dim", "vocab_size")),
)


def test_a_size_of_0_is_refused_and_ends_no_other_rule():
    for name in ZEROS:
        facts = facts_of([TENSOR, "2", "--model.num_kv_heads", "4", f"--{name}=0"], ranks=4)
        assert [error for rule in rules.RULES for error in rule(facts) if name in error.where], name
    for flags in (["--model.name", "qwen3_moe", "--model.num_layers", "0"], [PIPELINE, "2", "--model.dim=-7"]):
        facts = facts_of(flags, ranks=4)
        assert [error for rule in rules.RULES for error in rule(facts) if "is not positive" in error.what], flags

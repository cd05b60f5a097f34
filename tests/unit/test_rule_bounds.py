"""The last value that a rule allows, the first that it refuses, and the numbers of a fix."""

from dataclasses import replace

import pytest
from rule_cases import CONTEXT, PIPELINE, REPLICATE, RESHARD, ROUTED, SCHEDULE, SHARD, TENSOR
from test_rules import facts_of

from crius.config import (
    rules,
    rules_data,
    rules_debugging,
    rules_experts,
    rules_layout,
    rules_lora,
    rules_moe,
    rules_pipeline,
    rules_training,
)
from crius.config.run import replace_fields

LENGTH, TOTAL, LOCAL = "--training.seq_len", "--training.global_batch_size", "--training.local_batch_size"
ULYSSES = ["--parallelism.context_parallel_method", "ulysses"]
EXPERTS = "--parallelism.expert_parallel_degree"
BUDGET = ["--activation_checkpoint.mode", "memory_budget", "--compile.enable", "--activation_checkpoint.memory_budget"]
TRACE = ["--profiler.enable", "--profiler.start_step", "2", "--profiler.num_steps", "3"]
LAST_GPU = {"num_gpus": 1, "sharing": "nccl"}
STREAM = ["--data.source", "huggingface", "--data.path", "x"]
AUX, Z = "--moe.aux_loss_coefficient", "--moe.z_loss_coefficient"

# rule, flags, the last value that is allowed, the first that is not, what else is known if anything is
BOUNDS = [
    (rules_layout.degrees_match_ranks, [SHARD], "2", "1", {"ranks": 2}),
    (rules_layout.ranks_fit_gpus, [SHARD], "32", "33"),
    (rules_layout.ranks_fit_gpus, [SHARD], "2", "3", {"num_gpus": 2}),
    (rules_layout.shared_gpu_takes, [SHARD], "4", "5", LAST_GPU),
    (rules_layout.shared_gpu_takes, [PIPELINE], "1", "2", LAST_GPU | {"sharing": "gloo"}),
    (rules_layout.reshard_degree_divides, [SHARD, "4", RESHARD], "2", "1"),
    (rules_layout.reshard_degree_divides, [SHARD, "4", RESHARD], "2", "4"),
    (rules_layout.reshard_degree_divides, [SHARD, "2", RESHARD, "2", CONTEXT], "2", "1"),
    (rules_layout.reshard_groups_need_all_ranks, [SHARD, "4", RESHARD, "2", PIPELINE], "1", "2"),
    (rules_layout.tensor_parallel_divides, [TENSOR], "8", "16"),
    (rules_layout.ulysses_divides, [*ULYSSES, CONTEXT], "8", "16"),
    (rules_layout.ulysses_divides, [*ULYSSES, TENSOR, "4", CONTEXT], "2", "4"),
    (rules_layout.gradient_sync_under_pipeline, ["--training.gradient_sync", "immediate", PIPELINE], "1", "2"),
    (rules_layout.compile_flags_have_effect, ["--compile.enable", "--compile.backend", "cudagraphs", SHARD], "1", "2"),
    (rules_layout.activation_checkpoint_options, [*BUDGET], "0", "-0.01"),
    (rules_layout.activation_checkpoint_options, [*BUDGET], "1", "1.01"),
    (
        rules_layout.activation_checkpoint_options,
        ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_option"],
        "1",
        "0",
    ),
    (rules_pipeline.modules_split, [PIPELINE], "8", "9"),
    (rules_pipeline.microbatches_suit, [TOTAL, "8", LOCAL, "2", PIPELINE], "4", "5"),
    (rules_debugging.profiler_window, [*TRACE, "--training.steps"], "4", "3"),
    (rules_debugging.profiler_window, [*TRACE, "--training.steps", "9", "--profiler.interval"], "3", "1"),
    (rules_experts.expert_parallel_divides, [*ROUTED, SHARD, "4", EXPERTS], "4", "8"),
    (rules_experts.experts_are_not_resharded, [*ROUTED, SHARD, "4", RESHARD, "2", EXPERTS], "1", "2"),
    (rules_moe.router_learns, [*ROUTED, AUX, "0", "--model.top_k"], "2", "1"),
    (rules_moe.router_learns, [*ROUTED, "--model.top_k", "1", AUX], "1e-3", "0"),
    (rules_moe.router_learns, [*ROUTED, "--model.top_k", "1", AUX, "0", Z], "1e-3", "0"),
    (rules_lora.adapters_have_a_size, ["--lora.rank"], "64", "65"),
    (rules_lora.adapters_have_a_size, ["--lora.rank"], "0", "-1"),
    (rules_lora.adapters_have_a_size, ["--lora.alpha"], "1e-9", "0"),
    (rules_training.sdc_checks_have_an_object, ["--sdc.recompute_interval", "1", PIPELINE], "1", "2"),
    (rules_training.sdc_checks_have_an_object, [PIPELINE, "2", "--sdc.recompute_interval"], "0", "1"),
    (rules_training.sdc_checks_have_an_object, ["--sdc.replica_interval", "1", REPLICATE], "2", "1"),
    (rules_training.virtual_shards_cut_the_batch, ["--training.reproducible", TOTAL, "8", LOCAL], "1", "2"),
    (rules_data.virtual_shards_split, [*STREAM, SHARD, "2", "--data.virtual_shards"], "2", "1"),
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


FIXES = [
    (rules_layout.degrees_match_ranks, [REPLICATE, "3"], "start 6 ranks, or lower a degree", {"ranks": 5}),
    (rules_layout.ulysses_divides, [*ULYSSES, TENSOR, "8", CONTEXT, "2"], f"{CONTEXT} 1, or "),
    (rules_pipeline.modules_split, [PIPELINE, "9"], f"{PIPELINE} 3"),
    (rules_pipeline.modules_split, [PIPELINE, "8", SCHEDULE, "interleave_zero_bubble"], f"{PIPELINE} 4"),
    (rules_pipeline.modules_split, [PIPELINE, "9", SCHEDULE, "dualpipev"], f"{PIPELINE} 3"),
    (rules_pipeline.microbatches_suit, [PIPELINE, "4", TOTAL, "24", LOCAL, "8"], f"{LOCAL} 6"),
    (rules_pipeline.microbatches_suit, [PIPELINE, "4", SHARD, "2", TOTAL, "6"], f"{TOTAL} 8 {LOCAL} -1"),
    (rules_debugging.profiler_window, [*TRACE, "--profiler.interval", "1"], "--profiler.interval 30"),
    (rules_lora.adapters_have_a_size, ["--lora.rank", "65"], "--lora.rank 16, or "),
]


@pytest.mark.parametrize(("rule", "flags", "fix", "known"), [(*row, {})[:4] for row in FIXES])
def test_the_numbers_of_a_fix_are_the_nearest_that_work(rule, flags, fix, known):
    [error] = rule(facts_of(flags, **known))
    assert error.fix.startswith(fix)


# tensor-parallel ranks, context-parallel ranks, their method, and what a sequence must be a multiple of: each
# context-parallel rank has an early and a late part, which its tensor-parallel ranks cut again
UNITS = [(2, 1, "all_gather", 2), (1, 2, "all_gather", 4), (2, 2, "all_gather", 4), (4, 3, "all_gather", 12)]
UNITS += [(1, 3, "all_gather", 6), (1, 2, "ulysses", 2), (2, 4, "ulysses", 8)]


@pytest.mark.parametrize(("tp", "cp", "method", "unit"), UNITS)
def test_a_sequence_has_an_equal_part_for_each_rank(tp, cp, method, unit):
    flags = [TENSOR, str(tp), CONTEXT, str(cp), "--parallelism.context_parallel_method", method]
    found = {}
    for length in (1, unit - 1, unit, unit + 1, 3 * unit - 1, 3 * unit):
        found[length] = [error.fix for error in rules_layout.sequence_divides(facts_of([*flags, LENGTH, str(length)]))]
    too_short = [f"{LENGTH} {unit}"]
    assert found == {
        1: too_short,
        unit - 1: too_short,
        unit: [],
        unit + 1: [f"{LENGTH} {unit}, or {2 * unit}"],
        3 * unit - 1: [f"{LENGTH} {2 * unit}, or {3 * unit}"],
        3 * unit: [],
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
    for name, is_right, right, example in rules.RANGES:
        inside, outside = WORDS[right]
        assert all(map(is_right, (*inside, float(example)))), name
        assert not any(map(is_right, outside)), name


LARGEST = {
    "training.seq_len": 2**31 - 1,
    "training.steps": 2**63 - 1,
    "debug.seed": 2**63 - 1,
    "model.vocab_size": 2**24,
    "model.num_layers": 100_000,
    "model.ffn_dim": 2**20,
    "model.num_experts": 2**16,
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_sizes_are_those_that_tensors_can_have(name):
    facts = facts_of([TOTAL, "1"])
    for value, count in ((LARGEST[name], 0), (LARGEST[name] + 1, 1)):
        changed = replace(facts, config=replace_fields(facts.config, {name: value}))
        assert [error.fix for error in rules.sizes(changed)] == [f"--{name} {LARGEST[name]}"] * count


def test_a_step_has_at_most_2_to_the_36_tokens():
    assert list(rules.sizes(facts_of([LENGTH, str(2**30), TOTAL, "64"]))) == []
    [error] = rules.sizes(facts_of([LENGTH, str(2**30), LOCAL, "65"]))
    assert error.fix == f"{LENGTH} {2**36 // 65}"


AROUND = {
    "tensor": [TENSOR, "2", "--quantize.dense.float8.enable"],
    "ulysses": [*ULYSSES, CONTEXT, "2"],
    "pipeline": [PIPELINE, "2", SCHEDULE, "zbv_zero_bubble", "--lora.rank", "4"],
    "experts": [*ROUTED, SHARD, "2", EXPERTS, "2"],
}
ZEROS = (
    *(f"parallelism.{name}_parallel_degree" for name in ("tensor", "pipeline", "expert")),
    *("parallelism.data_parallel_shard_degree", "training.local_batch_size", "training.seq_len"),
    *(f"model.{name}" for name in ("dim", "num_heads", "num_kv_heads", "head_dim", "vocab_size")),
)


@pytest.mark.parametrize("around", AROUND)
def test_a_size_of_0_is_refused_and_ends_no_other_rule(around):
    for name in ZEROS:
        facts = facts_of([*AROUND[around], f"--{name}=0"], ranks=4)
        assert [error for rule in rules.RULES for error in rule(facts) if name in error.where], name

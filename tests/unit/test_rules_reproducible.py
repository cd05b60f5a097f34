"""What is refused about reproducible runs and about checks for corruption, with a fix that works."""

import pytest
from test_rules import facts_of

from crius.config import rules
from crius.config.resolve import batch_sizes
from crius.config.rules_training import (
    REPRODUCIBLE_RULES,
    equal_bits_need_deterministic_kernels,
    reproducible_excludes,
    sdc_checks_have_an_object,
    virtual_shards_cut_the_batch,
)
from crius.host import Machine
from crius.train.inputs import resolve

ON, SHARDS = "--training.reproducible", "--training.virtual_shards"
SHARD, PIPELINE = "--parallelism.data_parallel_shard_degree", "--parallelism.pipeline_parallel_degree"
TENSOR, REPLICATE = "--parallelism.tensor_parallel_degree", "--parallelism.data_parallel_replicate_degree"
GLOBAL, LOCAL = "--training.global_batch_size", "--training.local_batch_size"
FLOAT8 = "--quantize.dense.float8."

# rule, flags, in the sentence, flags that mend it as "fix" says
CASES = [
    (virtual_shards_cut_the_batch, [SHARDS, "4"], "has no effect without training.reproducible", [ON]),
    (virtual_shards_cut_the_batch, [ON, SHARDS, "6"], "virtual_shards 6 is not a power of two", [SHARDS, "4"]),
    (
        virtual_shards_cut_the_batch,
        [ON, SHARDS, "4", SHARD, "8"],
        "8 data-parallel ranks do not divide the 4 virtual shards of a training.reproducible run; legal: 1, 2, 4.",
        [SHARDS, "8"],
    ),
    (
        virtual_shards_cut_the_batch,
        [ON, GLOBAL, "16", LOCAL, "4"],
        "local_batch_size 4 is not the 2 sequences of a virtual shard",
        [LOCAL, "-1"],
    ),
    (
        reproducible_excludes,
        [ON, PIPELINE, "2"],
        "pipeline_parallel_degree 2 does not go with training.reproducible",
        [PIPELINE, "1"],
    ),
    (
        reproducible_excludes,
        [ON, "--training.gradient_sync", "deferred"],
        "gradient_sync deferred does not go with",
        ["--training.gradient_sync", "default"],
    ),
    (
        reproducible_excludes,
        [ON, f"{FLOAT8}enable", f"{FLOAT8}enable_fsdp_float8_all_gather"],
        "enable_fsdp_float8_all_gather does not go with",
        [f"{FLOAT8}no_enable_fsdp_float8_all_gather"],
    ),
    (
        reproducible_excludes,
        [ON, "--optimizer.state_dtype", "8bit"],
        "state_dtype 8bit does not go with",
        ["--optimizer.state_dtype", "bfloat16"],
    ),
    (
        reproducible_excludes,
        [ON, "--optimizer.implementation", "fused"],
        "implementation fused does not go with",
        ["--optimizer.implementation", "foreach"],
    ),
    (
        sdc_checks_have_an_object,
        ["--sdc.recompute_interval", "5", PIPELINE, "2"],
        "recompute_interval 5 does not go with pipeline parallelism",
        ["--sdc.recompute_interval", "0"],
    ),
    (
        sdc_checks_have_an_object,
        ["--sdc.replica_interval", "5", SHARD, "2"],
        "replica_interval 5 has no effect: every weight is on one rank only",
        ["--sdc.replica_interval", "0"],
    ),
]


@pytest.mark.parametrize(("rule", "flags", "what", "mended"), CASES)
def test_what_does_not_go_together_is_refused_with_a_fix_that_works(rule, flags, what, mended):
    [error] = rule(facts_of(flags))
    assert what in error.what
    assert error.where.startswith("--")
    assert error.why or "no effect" in error.what
    assert " ".join(mended) in error.fix
    assert list(rule(facts_of([*flags, *mended]))) == []


@pytest.mark.parametrize("needs", [[ON], ["--sdc.recompute_interval", "5"]], ids=["reproducible", "sdc"])
def test_equal_bits_on_a_gpu_need_the_deterministic_kernels_that_they_turn_on(needs):
    off = [*needs, "--debug.no_deterministic"]
    [error] = equal_bits_need_deterministic_kernels(facts_of(off, num_gpus=1))
    assert f"off does not go with {needs[0].removeprefix('--')} on a GPU" in error.what
    assert list(equal_bits_need_deterministic_kernels(facts_of(off))) == []
    assert list(equal_bits_need_deterministic_kernels(facts_of(needs, num_gpus=1))) == []


@pytest.mark.parametrize(
    ("flags", "device", "saved", "want"),
    [
        ([ON], "cuda", None, True),
        (["--sdc.recompute_interval", "5"], "cuda", None, True),
        ([ON], "cuda", {"debug.deterministic": False}, True),
        ([ON, "--debug.no_deterministic"], "cuda", None, False),
        ([ON], "cpu", None, None),
        ([ON], "cpu", {"debug.deterministic": True}, True),
        ([], "cuda", None, None),
        (["--debug.deterministic"], "cpu", None, True),
    ],
)
def test_deterministic_kernels_are_turned_on_where_bits_are_compared_on_a_gpu(flags, device, saved, want):
    found = resolve(facts_of(flags).asked, Machine(device=device), saved=saved)
    assert found.config.debug.deterministic is want
    is_decided = want is True and "--debug.deterministic" not in flags
    assert ("debug.deterministic" in found.reasons) == is_decided


def test_the_fused_update_is_refused_only_where_it_is_on_the_host():
    fused = [ON, "--optimizer.implementation", "fused"]
    assert list(reproducible_excludes(facts_of(fused, num_gpus=1))) == []
    assert len(list(reproducible_excludes(facts_of([*fused, "--training.enable_cpu_offload"], num_gpus=1)))) == 1


def test_ranks_that_are_no_power_of_two_are_told_to_be():
    [error] = virtual_shards_cut_the_batch(facts_of([ON, SHARD, "3", GLOBAL, "24"]))
    assert "3 data-parallel ranks do not divide the 8 virtual shards" in error.what
    assert error.fix == "other degrees of [parallelism]"


@pytest.mark.parametrize("shards", ["0", "-2"])
def test_no_virtual_shards_are_refused_by_every_rule_that_counts_with_them(shards):
    found = [problem.what for rule in rules.RULES for problem in rule(facts_of([ON, SHARDS, shards]))]
    assert found == [f"training.virtual_shards {shards} must be at least 1."]


def test_a_batch_that_is_no_multiple_of_the_virtual_shards_is_refused_once():
    flags = [ON, SHARD, "2", GLOBAL, "12"]
    [error] = [problem for rule in rules.RULES for problem in rule(facts_of(flags))]
    assert error.what == "global_batch_size 12 is not a multiple of the 8 virtual shards."
    assert error.fix.startswith("--training.global_batch_size 16")
    rules.check(facts_of([*flags, GLOBAL, "16"]))


@pytest.mark.parametrize(
    "flags",
    [
        [ON, SHARD, "8"],
        [ON, SHARD, "2", TENSOR, "2", REPLICATE, "2", "--optimizer.name", "muon"],
        [ON, GLOBAL, "16", LOCAL, "2", "--optimizer.state_dtype", "bfloat16"],
        ["--sdc.recompute_interval", "5", "--sdc.replica_interval", "5", TENSOR, "2"],
        ["--sdc.replica_interval", "5", PIPELINE, "2", REPLICATE, "2"],
    ],
)
def test_what_goes_together_is_accepted(flags):
    rules.check(facts_of(flags))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("flags", "local"), [([], 1), ([GLOBAL, "32"], 4), ([LOCAL, "2"], 2)])
def test_a_microbatch_is_a_virtual_shard_on_any_number_of_ranks(ranks, flags, local):
    sizes = batch_sizes(facts_of([ON, *flags]).config.training, ranks)
    assert (sizes.local, sizes.total, sizes.accumulation) == (local, 8 * local, 8 // ranks)


def test_the_rules_are_among_those_of_a_run():
    assert set(REPRODUCIBLE_RULES) <= set(rules.RULES)

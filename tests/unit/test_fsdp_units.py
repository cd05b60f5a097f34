"""Where FSDP is needed, which weights it frees after the forward, and what a step then sends, without ranks."""

import pytest
import torch
from harness import llama, parse

from crius.config.layout import Layout
from crius.config.run import RunConfig
from crius.config.training import TrainingConfig
from crius.models import registry
from crius.parallel.fsdp import GradientSync, describe_units, needs_fsdp, plan_units

FACTS = llama(num_layers=2)
MIB = FACTS.num_parameters / 2**20
NAMES = ("dtype", "mixed_precision_param", "mixed_precision_reduce", "gradient_sync")


def meta_model():
    with torch.device("meta"):
        return registry.build(FACTS)


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ("float32 float32 float32 default", False),
        ("float32 float32 float32 deferred", False),
        ("float32 bfloat16 float32 default", True),
        ("float32 float32 bfloat16 default", True),
        ("bfloat16 bfloat16 float32 default", False),
        ("bfloat16 bfloat16 float32 deferred", True),
    ],
)
def test_fsdp_is_left_out_where_it_would_change_nothing(words, want):
    training = TrainingConfig(**dict(zip(NAMES, words.split(), strict=True)))
    assert needs_fsdp(Layout(), RunConfig(training=training)) == want
    assert needs_fsdp(Layout(dp_replicate=2), RunConfig(training=training))


@pytest.mark.parametrize(
    ("flag", "value", "kept", "told"),
    [
        ("reshard_after_forward_mode", "default", [True, True, True, False], "gathered twice per microbatch, no"),
        ("reshard_after_forward_mode", "always", [True] * 4, "gathered twice per microbatch, no"),
        ("reshard_after_forward_mode", "never", [False] * 4, f"gathered once per step, {2 * MIB:,.1f} MiB are kept"),
        ("reshard_after_forward_mode", "2", [2] * 4, f"gathered twice, {MIB:,.1f} MiB kept in 2 parts"),
        ("pipeline_parallel_degree", "2", [False] * 4, "gathered once per microbatch, "),
    ],
)
def test_a_unit_is_freed_as_asked_and_the_log_says_its_cost(flag, value, kept, told):
    config = parse([f"--parallelism.{flag}", value, "--training.mixed_precision_param", "bfloat16"])
    units = plan_units(FACTS.plan, meta_model(), config.parallelism)
    assert [unit.reshard_after_forward for unit in units] == kept
    assert told in describe_units(units, Layout(dp_shard=2), config.parallelism, config.training)[0]
    assert "no communication" in describe_units(units, Layout(dp_replicate=2), config.parallelism, config.training)[0]


@pytest.mark.parametrize(
    ("mode", "layout", "told"),
    [
        ("default", Layout(dp_shard=2, dp_replicate=2), "4 reduce-scatter + 1 all-reduce per unit and step, only"),
        ("immediate", Layout(dp_replicate=2), "4 all-reduce per unit and step, only"),
        ("deferred", Layout(dp_shard=2), f"1 reduce-scatter per unit and step, {4 * MIB:,.1f} MiB of unsharded"),
    ],
)
def test_the_log_says_what_a_step_of_four_microbatches_sends(mode, layout, told):
    config = parse(["--training.gradient_sync", mode, "--training.mixed_precision_reduce", "float32"])
    assert GradientSync(meta_model(), config.parallelism, config.training).describe(layout, 4).startswith(told)

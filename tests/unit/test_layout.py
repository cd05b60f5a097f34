"""One spelling of a layout, everywhere."""

from dataclasses import replace

import pytest

from crius.config.layout import OPTIONS, Layout, apply_layout, batch_unit, option_changes, parse_layout
from crius.config.parallelism import ParallelismConfig
from crius.config.pipeline import microbatch_unit
from crius.config.resolve import batch_sizes
from crius.config.run import RunConfig
from crius.config.toml_file import differences, flatten
from crius.config.training import TrainingConfig
from crius.errors import ConfigError, LayoutError

SPELLINGS = [
    ("1", Layout(), 1),
    ("ddp4", Layout(dp_replicate=4), 4),
    ("fsdp8", Layout(dp_shard=8), 8),
    ("hsdp2x4", Layout(dp_replicate=2, dp_shard=4), 8),
    ("tp2", Layout(tp=2), 2),
    ("cp4", Layout(cp=4), 4),
    ("ep2", Layout(ep=2), 1),
    ("accum4", Layout(accum=4), 1),
    ("hsdp2x2_tp2", Layout(dp_replicate=2, dp_shard=2, tp=2), 8),
    ("pp2_fsdp2_accum3", Layout(pp=2, dp_shard=2, accum=3), 4),
    ("pp2_fsdp2_cp2_tp2_ep4_accum2", Layout(pp=2, dp_shard=2, cp=2, tp=2, ep=4, accum=2), 16),
    ("pp4+zbv_zero_bubble", Layout(pp=4, options=("zbv_zero_bubble",)), 4),
    ("1+selective2+compile", Layout(options=("selective2", "compile")), 1),
]


@pytest.mark.parametrize(("text", "layout", "ranks"), SPELLINGS)
def test_a_spelling_is_a_layout_and_back(text, layout, ranks):
    assert parse_layout(text) == layout
    assert str(layout) == text
    assert layout.num_ranks == ranks


@pytest.mark.parametrize(("text", "layout", "ranks"), SPELLINGS)
def test_the_degrees_of_a_config_are_a_layout_on_as_many_ranks(text, layout, ranks):
    config = apply_layout(RunConfig(training=TrainingConfig(global_batch_size=96)), layout).parallelism
    assert Layout.of(config, ranks) == replace(layout, accum=1, options=())
    with pytest.raises(LayoutError, match=f"the degrees multiply to {ranks} ranks, but there are {ranks + 1}: pp"):
        Layout.of(config, ranks + 1)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("tp2_fsdp2", "fsdp2_tp2"),
        ("ddp2_fsdp4", "hsdp2x4"),
        ("hsdp1x4", "fsdp4"),
        ("hsdp4x1", "ddp4"),
        ("fsdp1_tp1", "1"),
        ("1_accum4", "accum4"),
        (" fsdp2 ", "fsdp2"),
    ],
)
def test_other_spellings_have_one_canonical_form(text, canonical):
    assert str(parse_layout(text)) == canonical


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fdsp2", "fdsp2 is not a layout term, did you mean fsdp?"),
        ("fsdp", "fsdp is not a layout term"),
        ("fsdp0", "fsdp0 is not a layout term"),
        ("fsdp2x2", "fsdp2x2 is not a layout term"),
        ("hsdp4", "hsdp4 is not a layout term"),
        ("2", "2 is not a layout term"),
        ("", "an empty term"),
        ("fsdp2__tp2", "an empty term"),
        ("FSDP2", "FSDP2 is not a layout term"),
        ("fsdp2_hsdp2x2", "sets dp_shard a second time"),
        ("tp2_tp2", "sets tp a second time"),
        ("pp2+zbv", "zbv is not a layout option"),
        ("1+compiled", "did you mean compile?"),
        ("1+full+selective", "both set activation_checkpoint.mode"),
        ("pp2+gpipe+1f1b", "both set parallelism.pipeline_parallel_schedule"),
        ("1+", "an empty option"),
    ],
)
def test_what_is_no_layout_is_named(text, says):
    with pytest.raises(ConfigError, match=says.replace("?", r"\?").replace("+", r"\+")) as caught:
        parse_layout(text)
    assert caught.value.fix


@pytest.mark.parametrize("option", [*OPTIONS, "selective3", "reshard2"])
def test_every_option_changes_exactly_its_fields(option):
    changes = option_changes(option)
    before = apply_layout(RunConfig(), parse_layout("pp2"))
    after = apply_layout(RunConfig(), parse_layout(f"pp2+{option}"))
    own = {name for name in differences(before, after) if not name.startswith("training.") or name in changes}
    assert own == {name for name, value in changes.items() if option_default(name) != value}


def option_default(name):
    return flatten(RunConfig())[name]


@pytest.mark.parametrize("text", [text for text, layout, _ in SPELLINGS if layout.accum != 3])
def test_a_layout_sets_degrees_and_microbatches_of_the_same_global_batch(text):
    layout = parse_layout(text)
    config = apply_layout(RunConfig(training=TrainingConfig(global_batch_size=32)), layout)
    parallelism = config.parallelism
    assert parallelism.total_ranks(1) == layout.num_ranks
    assert parallelism.expert_parallel_degree == layout.ep
    ranks = layout.dp_replicate * layout.dp_shard
    sizes = batch_sizes(config.training, ranks, microbatch_unit(parallelism))
    assert sizes.total == 32
    assert sizes.accumulation == layout.accum * microbatch_unit(parallelism)


def test_a_layout_replaces_every_degree_of_the_config():
    busy = ParallelismConfig(pipeline_parallel_degree=2, tensor_parallel_degree=4, data_parallel_replicate_degree=2)
    placed = apply_layout(RunConfig(parallelism=busy), parse_layout("fsdp2"))
    assert placed.parallelism == ParallelismConfig(data_parallel_shard_degree=2)


def test_an_open_global_batch_is_filled_so_that_it_splits():
    config = apply_layout(RunConfig(), parse_layout("fsdp3_accum5"))
    assert config.training.global_batch_size == 15
    assert config.training.local_batch_size == 1
    assert batch_unit(RunConfig(), parse_layout("fsdp3_accum5")) == 15


def test_a_batch_that_does_not_split_is_refused():
    config = RunConfig(training=TrainingConfig(global_batch_size=16))
    with pytest.raises(LayoutError, match="16 is not a multiple of 3 data-parallel ranks x 1 microbatches") as caught:
        apply_layout(config, parse_layout("fsdp3"))
    assert "18" in caught.value.fix

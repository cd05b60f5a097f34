"""The search: legal layouts only, the rules of choosing, and flags that a run takes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from harness import ROOT, llama, parse

from crius.config.layout import Layout
from crius.config.rules import RULES, extras_installed
from crius.config.run import replace_fields
from crius.errors import ConfigError, LayoutError
from crius.models.registry import SPECS
from crius.tools.plan.explain import explain
from crius.tools.plan.hardware import hardware
from crius.tools.plan.holdings import model_parameters
from crius.tools.plan.legal import Case, layouts, violations
from crius.tools.plan.plan import make_plan, recommend
from crius.tools.plan.render import flags
from crius.tools.plan.search import (
    ENOUGH_HEADROOM,
    TIE,
    best,
    family_of,
    fewest_gpus,
    fewest_with,
    fits_on,
    score,
    search,
    usable_bytes,
)
from crius.tools.plan.shapes import NOT_TRAINABLE_YET, shape_named
from crius.tools.plan.variants import overrides
from crius.tools.plan.workload import from_config
from crius.units import GIB

START_RULES = [rule for rule in RULES if rule is not extras_installed]  # torchao need not be here


BASE = parse(["--training.mixed_precision_param", "bfloat16"])


def case(flavor="8b", gpus=8, gpu="h100-96g", seq_len=8192, **fields):
    """A case; ``fields`` have ``__`` for the dots and are pinned."""
    given = {name.replace("__", "."): value for name, value in fields.items()}
    return Case(
        config=replace_fields(BASE, {"model.flavor": flavor, "training.seq_len": seq_len, **given}),
        shape=llama(flavor),
        hardware=hardware(gpu),
        num_gpus=gpus,
        pinned=frozenset(given),
    )


def num_axes(candidate):
    return len(family_of(candidate.workload.layout))


CASES = {
    "8b on a node": case(),
    "8b on 3 GPUs": case(gpus=3),
    "8b in float8 on two nodes": case(gpus=16, quantize__dense__float8__enable=True),
    "8b with a batch of 4 on 16 GPUs": case(gpus=16, training__global_batch_size=4),
    "8b with long sequences": case(seq_len=131_072, training__global_batch_size=8),
    "1b, tied": case("1b", gpus=4, seq_len=2048),
    "70b on 64": case("70b", gpus=64),
    "70b in a pipeline": case("70b", gpus=64, parallelism__pipeline_parallel_degree=4),
    "debug on a CPU": case("debug", gpus=2, gpu="cpu", seq_len=256, training__device="cpu"),
    "contexts of debug on a CPU": case(
        "debug", gpus=2, gpu="cpu", seq_len=256, training__device="cpu", parallelism__context_parallel_degree=2
    ),
}


@pytest.fixture(scope="module")
def found():
    return {name: search(one) for name, one in CASES.items()}


@pytest.fixture(scope="module")
def winners(found):
    return {name: best(one.fitting, one.case.hardware) for name, one in found.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_run_with_the_settings_is_what_was_planned_and_its_rules_hold(name, found, winners):
    """Of the winner, and of the best of each set of axes: what a plan says is what the flags do."""
    one = CASES[name]
    chosen = {family_of(other.workload.layout): other for other in found[name].fitting}
    for candidate in (winners[name], *chosen.values()):
        given = overrides(one, candidate.workload)
        config = replace_fields(one.config, given)
        origins = dict.fromkeys(given, "command line")

        def origin(name, origins=origins):
            return origins.get(name, "default")

        assert violations(config, one.facts, one.num_gpus, START_RULES, origin) == []
        device = "cuda" if one.on_gpu else "cpu"
        run = from_config(config, one.facts, one.num_gpus, device=device)
        assert replace(run, stage_layers=()) == candidate.workload  # which splits in the same way: test_planner_memory


@pytest.mark.long
def test_pasted_flags_give_the_settings(winners):
    name = "8b in float8 on two nodes"
    settings = overrides(CASES[name], winners[name].workload)
    pasted = parse([part for flag in flags(settings) for part in flag.split()])
    assert all(replace_fields(pasted, {field: value}) == pasted for field, value in settings.items())


@pytest.mark.parametrize(("num_microbatches", "mode"), [(1, None), (2, "deferred")])
def test_gradients_are_deferred_by_a_flag_where_there_are_several_microbatches(num_microbatches, mode):
    one = CASES["8b on a node"]
    planned = from_config(one.config, one.facts, one.num_gpus)
    workload = replace(planned, num_microbatches=num_microbatches, gradient_sync="deferred")
    assert overrides(one, workload).get("training.gradient_sync") == mode


@pytest.mark.parametrize("name", CASES)
def test_everything_found_fits_and_uses_all_gpus(name, found):
    one = CASES[name]
    assert found[name].fitting
    for candidate in found[name].fitting:
        layout = candidate.workload.layout
        assert layout.num_ranks == one.num_gpus
        assert candidate.memory.total <= usable_bytes(one.hardware)
        assert candidate.workload.microbatch * candidate.workload.num_microbatches * layout.batch == (
            one.global_batch_size
        )
        assert layout.tp <= one.hardware.gpus_per_node


@pytest.mark.parametrize("name", CASES)
def test_an_axis_more_is_taken_only_for_more_than_the_error_of_the_model(name, found):
    """Where memory is not short; else a lighter layout may have an axis more."""
    pool = found[name].fitting
    winner = best(pool, replace(CASES[name].hardware, memory_bytes=2**60))
    fewer = [one for one in pool if num_axes(one) < num_axes(winner)]
    highest = max(map(score, pool))
    assert score(winner) >= highest * (1 - TIE)
    assert all(score(one) < highest * (1 - TIE) for one in fewer)
    gained = 1 - max((one.tokens_per_second for one in fewer), default=0.0) / winner.tokens_per_second
    assert not fewer or gained > 0


def test_an_option_that_gains_less_than_a_hundredth_of_the_fastest_is_left_out():
    found = []
    for speed, mode in ((100.0, "deferred"), (99.2, "immediate"), (98.3, "immediate")):
        workload = SimpleNamespace(layout=Layout(), reshard="default", gradient_sync=mode, stages_per_rank=1)
        found.append(SimpleNamespace(workload=workload, tokens_per_second=speed, headroom=lambda hardware: 1.0))
    assert best(found, hardware("h100")).tokens_per_second == 99.2


def lighter(candidate, pool):
    """Candidates within 5 % of the fastest that need at least 10 % less memory."""
    least, most = 0.95 * max(one.tokens_per_second for one in pool), 0.9 * candidate.memory.total
    return [one for one in pool if one.tokens_per_second >= least and one.memory.total <= most]


@pytest.mark.parametrize("name", CASES)
def test_where_memory_is_short_nothing_as_fast_is_lighter(name, found, winners):
    winner, one = winners[name], CASES[name]
    assert winner.headroom(one.hardware) >= ENOUGH_HEADROOM or not lighter(winner, found[name].fitting)


def test_mixtral_on_16_cards_shares_its_experts_and_leaves_memory():
    """Without: 72.5 of 73.6 GiB, and slower."""
    settings = ["--training.mixed_precision_param", "bfloat16", "--model.name", "mixtral", "--model.flavor", "8x7b"]
    config = replace_fields(parse(settings), {"training.seq_len": 8192})
    model = SPECS["mixtral"].describe("8x7b")
    plan = make_plan(Case(config=config, shape=model, hardware=hardware("a100-80g"), num_gpus=16), is_brief=True)
    assert str(plan.winner.workload.layout) == "fsdp16_ep8"
    assert plan.winner.memory.total < 63 * GIB and not lighter(plan.winner, plan.found.fitting)


def test_pure_fsdp_is_the_start():
    """Up to 10 billion parameters on a node nothing more is needed."""
    plan = make_plan(case())
    assert str(plan.winner.workload.layout) == "fsdp8"
    assert plan.winner.workload.activation_checkpoint == "none"
    assert "Start with pure FSDP: it fits" in "\n".join(explain(plan.found, plan.winner))


def test_a_batch_below_the_ranks_forces_another_axis(winners, found):
    name = "8b with a batch of 4 on 16 GPUs"
    assert winners[name].workload.layout.batch <= 4
    said = "\n".join(explain(found[name], winners[name]))
    assert "Pure FSDP is not possible: 4 sequences of a step do not split over 16 ranks." in said


def test_long_sequences_are_split(winners):
    layout = winners["8b with long sequences"].workload.layout
    assert layout.cp * layout.tp > 1


def test_tied_embeddings_take_a_pipeline(found):
    assert {one.workload.layout.pp for one in found["1b, tied"].fitting} >= {1, 2, 4}


def test_what_is_pinned_stays(found):
    assert {one.workload.layout.pp for one in found["70b in a pipeline"].fitting} == {4}
    one = case(activation_checkpoint__mode="full", training__local_batch_size=2, compile__enable=False)
    fitting = search(one).fitting
    assert {(c.workload.activation_checkpoint, c.workload.microbatch, c.workload.compile) for c in fitting} == {
        ("full", 2, False)
    }
    virtual = {"training__reproducible": True, "training__virtual_shards": 128, "training__global_batch_size": 256}
    fitting = search(case(**virtual)).fitting
    assert {
        (one.workload.microbatch, one.workload.gradient_sync) for one in fitting if one.workload.layout.pp == 1
    } == {(2, "immediate")}
    shards = case(parallelism__data_parallel_shard_degree=4, parallelism__tensor_parallel_degree=2)
    assert {str(layout) for layout in layouts(shards)} == {"fsdp4_tp2"}


def test_the_fewest_gpus_are_enough_and_half_of_them_are_not():
    one = case("70b", gpus=8)
    least = fewest_gpus(one)
    assert least > 8
    assert fits_on(replace(one, num_gpus=least))
    assert not fits_on(replace(one, num_gpus=least // 2))


@pytest.mark.parametrize("node", [8, 6, 7])
def test_the_fewest_gpus_are_no_more_than_those_of_a_plan_that_fits(node):
    """Any number within a node, also where a node is no power of two."""
    wide = replace(hardware("gb300"), gpus_per_node=node)
    one = replace(case("70b", gpus=6, gpu="gb300"), hardware=wide)
    assert fits_on(one)
    least = fewest_gpus(one, fits=True)
    assert least == fewest_gpus(replace(one, num_gpus=2)) == 5
    assert not fits_on(replace(one, num_gpus=4))


@pytest.mark.parametrize(("enough", "least"), [(3, 3), (8, 8), (9, 16), (37, 40)])
def test_the_fewest_gpus_beyond_a_node_are_whole_nodes(enough, least, monkeypatch):
    monkeypatch.setattr("crius.tools.plan.search.fits_on", lambda one: one.num_gpus >= enough)
    assert fewest_gpus(case(gpus=4)) == least


@pytest.mark.parametrize(
    ("gpus", "seq_len", "local", "total"),
    [(8, 8192, 1, 8), (3, 8192, 1, 9), (1000, 32_768, 1, 500), (4096, 8192, 1, 2048), (1000, 32_768, 3, 375)],
)
def test_a_batch_that_nobody_gave_splits_over_ranks_and_has_a_limit(gpus, seq_len, local, total):
    one = case(gpus=gpus, seq_len=seq_len, training__local_batch_size=local)
    assert one.global_batch_size == total
    assert total % local == 0
    assert next(layouts(one), None) is not None


def test_a_schedule_that_splits_the_backward_is_planned_as_it_runs():
    """Without compile and recomputation, which its rules refuse."""
    degree = {"parallelism__pipeline_parallel_degree": 2}
    one = case(parallelism__pipeline_parallel_schedule="zbv_zero_bubble", **degree)
    winner = make_plan(one, is_brief=True).winner.workload
    assert (winner.schedule, winner.compile, winner.activation_checkpoint) == ("zbv_zero_bubble", False, "none")


def test_what_fits_and_no_run_takes_is_refused_with_the_rule():
    given = {"parallelism__pipeline_parallel_degree": 2, "activation_checkpoint__mode": "full"}
    one = case(parallelism__pipeline_parallel_schedule="zbv_zero_bubble", **given)
    with pytest.raises(LayoutError, match="activation_checkpoint.mode full does not go with") as error:
        make_plan(one, is_brief=True)
    assert error.value.where == "--activation_checkpoint.mode (given)"


def test_experts_are_searched_in_fewer_layouts_unless_degrees_are_given():
    one = replace(case(gpus=64), shape=SPECS["qwen3_moe"].describe("30b-a3b"))
    assert all(layout.cp == 1 or layout.tp == 1 for layout in layouts(one))
    assert all(layout.ep <= 8 or layout.tp <= 2 for layout in layouts(one))
    fields = {"parallelism.tensor_parallel_degree": 4}
    given = replace(one, config=replace_fields(one.config, fields), pinned=frozenset(fields))
    assert any(layout.cp > 1 and layout.ep > 8 for layout in layouts(given))


NO_OTHERS = {f"parallelism__{axis}_parallel_degree": 1 for axis in ("tensor", "pipeline", "context")}


@pytest.mark.parametrize(
    ("one", "least", "keeps"),
    [
        (case("70b", gpu="h100-80g", parallelism__pipeline_parallel_degree=2), 32, True),
        (case(gpus=2, gpu="rtx-4090", parallelism__data_parallel_shard_degree=2, **NO_OTHERS), 8, False),
    ],
)
def test_the_fewest_gpus_keep_the_degrees_that_were_given_where_any_number_can(one, least, keeps):
    assert fewest_with(one) == (least, keeps)
    assert fits_on(one.on(least)) == keeps


def test_what_is_accumulated_counts_in_the_fewest_gpus():
    """One sequence a microbatch on five of these needs more than two at once."""
    assert fewest_gpus(case(gpus=4, gpu="l4", seq_len=4096, optimizer__state_dtype="8bit")) == 5


@pytest.mark.long
def test_ranks_of_a_cpu_share_its_memory():
    whole = case("1b", gpus=1, gpu="cpu", seq_len=512, training__device="cpu")
    assert whole.on(4).hardware.memory_bytes * 4 == whole.hardware.memory_bytes
    assert case(gpus=1).on(4).hardware == case(gpus=1).hardware
    least = fewest_gpus(whole)
    assert least == 0 or fits_on(whole.on(least))


@pytest.mark.parametrize(("group", "found"), [(2, {"fsdp8", "fsdp4_cp2", "hsdp2x4"}), (8, set()), (3, set())])
def test_reshard_groups_are_part_of_the_shards(group, found):
    one = case(parallelism__reshard_after_forward_mode=group)
    assert {str(layout) for layout in layouts(one)} >= found
    assert all(layout.fsdp > group and layout.tp == layout.pp == 1 for layout in layouts(one))
    assert bool(list(layouts(one))) == bool(found)
    for candidate in search(one).fitting[:1]:  # FSDP takes the text for "never"
        settings = overrides(one, candidate.workload)
        assert settings["parallelism.reshard_after_forward_mode"] == group
        assert isinstance(replace_fields(one.config, settings).parallelism.reshard_after_forward_mode, int)


@pytest.mark.long
def test_an_impossible_case_names_the_fewest_gpus():
    one = case(gpus=1, gpu="rtx-4090")
    with pytest.raises(LayoutError, match="does not fit on 1 x rtx-4090") as error:
        recommend(replace(one, pinned=frozenset()))
    assert f"use {fewest_gpus(one)} GPUs" in error.value.fix
    assert "--training.enable_cpu_offload" in error.value.fix
    larger = case(flavor="405b", gpus=8)
    with pytest.raises(LayoutError) as error:
        recommend(replace(larger, pinned=frozenset()))
    assert "--training.enable_cpu_offload" not in error.value.fix, "no host has that much memory"


def test_recommended_settings_are_for_the_run_and_leave_its_batch():
    one = case(gpus=16)
    config = replace_fields(one.config, {"training.global_batch_size": 32})
    one = replace(one, config=config, pinned=frozenset({"training.global_batch_size"}))
    winner, reasons = recommend(one)
    run = replace_fields(config, overrides(one, winner.workload))
    assert run.training.global_batch_size == 32
    assert violations(run, one.facts, 16, START_RULES) == []
    assert from_config(run, one.facts, 16).tokens_per_rank == 2 * 8192
    assert reasons[-1].startswith("Taken: ")


def test_a_plan_says_what_was_rejected_and_why():
    plan = make_plan(case())
    assert len({(one.workload.layout, one.workload.schedule) for one in plan.rows}) == len(plan.rows) == 5
    assert plan.rejected and all(one.reason for one in plan.rejected)
    changes = {one.text for one in plan.nearby}
    assert {"TP 2 instead of 1", "float8", "activation checkpointing full", "without compile"} <= changes
    in_float8 = {one.text for one in make_plan(case(quantize__dense__float8__enable=True)).nearby}
    assert "bfloat16 instead of float8" in in_float8 and "float8" not in in_float8


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *[("deepseek-v3-671b", 671.0), ("deepseek-v2-lite-16b", 15.7), ("gpt-oss-120b", 116.8)],
    ],
)
def test_shapes_have_the_published_number_of_parameters(name, billions):
    assert model_parameters(NOT_TRAINABLE_YET[name]) / 1e9 == pytest.approx(billions, rel=0.005)


def test_ranks_share_experts_only_where_fsdp_can_split_what_each_has():
    """Of 512 ranks each would have a part of 768 rows: 1.5; with ep 2 it is a 256th."""
    one = replace(case(gpus=512), shape=SPECS["qwen3_moe"].describe("30b-a3b"))
    found = {layout.ep for layout in layouts(one) if layout.dp_shard == 512}
    assert 1 not in found and {2, 8} <= found


@pytest.mark.parametrize("name", ["deepseek-v2-lite-16b", "mixtral/8x7b"])
def test_experts_can_be_planned(name):
    model, _, flavor = name.partition("/")
    shape = SPECS[model].describe(flavor) if flavor else NOT_TRAINABLE_YET[name]
    one = replace(case(gpus=256, seq_len=4096), shape=shape)
    one = replace(one, config=replace_fields(one.config, {"parallelism.tensor_parallel_degree": 1}))
    narrow = replace(one, pinned=frozenset({"parallelism.tensor_parallel_degree"}), num_gpus=128)
    found = search(narrow).fitting
    assert found
    assert best(found, one.hardware).workload.model == shape


def test_a_shape_of_a_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        "num_layers = 4\ndim = 512\nffn_dim = 1024\nnum_heads = 8\nnum_kv_heads = 4\nhead_dim = 64\nvocab_size = 1000\n"
    )
    assert shape_named(str(file), "").name == "mine"
    sizes = "ffn_dim = true\nnum_heads = 8\nnum_kv_heads = 2\nvocab_size = 9\ngated = 1\nattention = 'x'\n"
    file.write_text(f"num_layers = 0\ndims = 512\nname = 3\n{sizes}")
    with pytest.raises(ConfigError) as error:
        shape_named(str(file), "")
    whole = "is not a whole number above 0."
    for problem in (
        *(f"num_layers = 0 {whole}", f"ffn_dim = True {whole}", "name = 3 is not a text.", "dim is missing."),
        *("no field dims, did you mean dim?", "gated = 1 is not true or false.", "'x' is not one of gqa, mla."),
    ):
        assert problem in str(error.value)


CUBE = {
    "parallelism__data_parallel_shard_degree": 8,
    "parallelism__tensor_parallel_degree": 8,
    "parallelism__pipeline_parallel_degree": 8,
    "training__global_batch_size": 256,
    "training__local_batch_size": 4,
    "activation_checkpoint__mode": "full",
}
PUBLISHED = {
    "8B, 8 GPUs, FSDP": ("8b", 8, {"compile__enable": False}),
    "and compile": ("8b", 8, {}),
    "and float8": ("8b", 8, {"quantize__dense__float8__enable": True}),
    "70B, 256 GPUs, FSDP 32 x TP 8, float8": ("70b", 256, {"parallelism__enable_async_tensor_parallel": False}),
    "and async TP": ("70b", 256, {}),
    "405B, 512 GPUs, 8 x 8 x 8, float8, 1F1B": ("405b", 512, {"parallelism__pipeline_parallel_schedule": "1f1b"}),
    "interleaved": ("405b", 512, {"parallelism__pipeline_parallel_schedule": "interleave_1f1b"}),
}
SETTINGS = {
    "8b": {
        "parallelism__data_parallel_shard_degree": 8,
        "training__global_batch_size": 16,
        "training__local_batch_size": 2,
        "activation_checkpoint__mode": "selective",
    },
    "70b": {
        "quantize__dense__float8__enable": True,
        "parallelism__data_parallel_shard_degree": 32,
        "parallelism__tensor_parallel_degree": 8,
        "training__global_batch_size": 512,
        "training__local_batch_size": 16,
        "activation_checkpoint__mode": "full",
    },
    "405b": {"quantize__dense__float8__enable": True, "parallelism__pipeline_parallel_stages_per_rank": -1, **CUBE},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_documented_cases_are_what_the_planner_says(name):
    """And what was measured: tokens/s within 14 %, memory within 16 %, on the small side for Crius keeps less."""
    flavor, gpus, fields = PUBLISHED[name]
    if name == "interleaved":
        fields = {**fields, "parallelism__pipeline_parallel_stages_per_rank": 2}
    one = case(flavor, gpus, kernels__linear_cross_entropy="off", **{**SETTINGS[flavor], **fields})
    candidate = best(search(one).fitting, one.hardware)
    [row] = [line for line in (ROOT / "docs/planner.md").read_text().splitlines() if line.startswith(f"| {name} |")]
    tps, gib, planned_tps, planned_gib = (float(cell.replace(",", "")) for cell in row.split("|")[2:6])
    assert candidate.tokens_per_second == pytest.approx(planned_tps, rel=0.03)
    assert candidate.memory.total / 2**30 == pytest.approx(planned_gib, rel=0.03)
    assert planned_tps == pytest.approx(tps, rel=0.14)
    assert planned_gib == pytest.approx(gib, rel=0.16)

"""Which linear layers are converted, counted anew from the shapes, and what is said of it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from harness import llama, parse
from rule_cases import FLOAT8, TENSOR

from crius.config.low_precision import FLOAT8_BLOCK, MXFP8_BLOCK, _is_small, linear_choices, parts, summary, table
from crius.config.training import DenseQuantizeConfig, Float8Config
from crius.errors import PlanError
from crius.train.inputs import describe_known_model

DENSE = "--quantize.dense."
MXFP8 = f"{DENSE}mxfp8.enable"
ROWWISE = [FLOAT8, f"{DENSE}float8.recipe", "rowwise"]
PADDED_OUTPUT = [f"{DENSE}include", "output", f"{DENSE}pad_inner_dim"]


def choices(flags, accelerated=False):
    config = parse(flags)
    model = describe_known_model(config)
    return linear_choices(config, model, model.plan, accelerated=accelerated)


def shares(flags):
    """``(out, in)`` on a rank of the seven linear layers of a block, by hand from the sizes."""
    config = parse(flags)
    model, ranks = describe_known_model(config), config.parallelism.tensor_parallel_degree
    head = model.dim // model.num_heads
    queries, keys = model.num_heads // ranks * head, max(1, model.num_kv_heads // ranks) * head
    dim, hidden = model.dim, model.ffn_dim // ranks
    return {
        **{"wq": (queries, dim), "wk": (keys, dim), "wv": (keys, dim), "wo": (dim, queries)},
        **{"w1": (hidden, dim), "w2": (dim, hidden), "w3": (hidden, dim)},
    }


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize(("flag", "unit"), [(FLOAT8, 16), (MXFP8, 32)])
def test_a_layer_is_converted_where_its_share_of_both_dims_divides(flag, unit, degree):
    flags = [flag, TENSOR, str(degree)]
    wanted = {name: dims for name, dims in shares(flags).items() if not any(size % unit for size in dims)}
    found = choices(flags)
    assert [choice.name for choice in found if choice.is_converted] == [
        f"layers.{i}.{'attention' if name in ('wq', 'wk', 'wv', 'wo') else 'feed_forward'}.{name}"
        for i in range(8)
        for name in wanted
    ]
    assert {choice.name.rpartition(".")[2]: choice.local for choice in found[:-1]} == shares(flags)
    assert summary(found).startswith(f"{8 * len(wanted)} converted, {57 - 8 * len(wanted)} kept: ")
    assert summary(found).endswith("output (sensitive)")


def test_float8_converts_the_debug_model_on_every_degree_but_mxfp8_only_on_some():
    """The counts themselves, so that a slip in the sums of both sides shows."""
    converted = [
        [sum(choice.is_converted for choice in choices([flag, TENSOR, degree])) for degree in "1248"]
        for flag in (FLOAT8, MXFP8)
    ]
    assert converted == [[56, 56, 56, 56], [56, 56, 40, 0]]  # 16 wide key/value heads, then all 16 and 48 wide
    assert (FLOAT8_BLOCK, MXFP8_BLOCK) == (16, 32)


@pytest.mark.parametrize(("degree", "local", "padded"), [("2", 1128, 1136), ("4", 564, 576), ("8", 282, 288)])
def test_a_vocabulary_of_2256_is_kept_by_default_and_padded_on_demand(degree, local, padded):
    flags = [FLOAT8, "--model.vocab_size", "2256", TENSOR, degree]
    assert summary(choices(flags)) == "56 converted, 1 kept: output (sensitive)"
    *_, output = choices([*flags, *PADDED_OUTPUT])
    assert (output.shape, output.local, output.padded) == ((2256, 128), (local, 128), (padded, 128))
    assert output.reason == f"padded {local} x 128 -> {padded} x 128"
    assert summary(choices([*flags, *PADDED_OUTPUT])) == "57 converted, 0 kept"


def test_an_included_layer_that_does_not_divide_says_the_whole_sum():
    flags = [FLOAT8, "--model.vocab_size", "2256", TENSOR, "8", f"{DENSE}include", "output"]
    *_, output = choices(flags)
    assert (output.is_converted, output.padded) == (False, output.local)
    assert output.reason == "out 2256 / 8 = 282, 282 mod 16 = 10"


def test_a_vocabulary_whose_last_rank_alone_does_not_divide_is_found():
    """DTensor splits 63 rows over 4 ranks as 16, 16, 16 and 15."""
    *_, output = choices([FLOAT8, "--model.vocab_size", "63", TENSOR, "4", f"{DENSE}include", "output"])
    assert output.reason == "out 63 / 4 = 16 and 15, 15 mod 16 = 15"
    assert output.local == (16, 128)


@pytest.mark.parametrize("flags", [ROWWISE, [FLOAT8]], ids=["rowwise", "tensorwise"])
def test_the_small_key_and_value_layers_of_8b_are_kept_where_speed_is_the_point(flags):
    """1024 x 4096: at or below 2048 rows (rowwise) and below 1025 rows of up to 4096 (tensorwise)."""
    found = choices([*flags, "--model.flavor", "8b"], accelerated=True)
    assert summary(found) == "160 converted, 65 kept: 64 too small (wk, wv), output (sensitive)"
    kept = {choice.name.rpartition(".")[2] for choice in found if choice.reason == "too small to gain"}
    assert kept == {name for name, (rows, _) in shares(["--model.flavor", "8b"]).items() if rows == 1024}


@pytest.mark.parametrize(
    ("flags", "converted"),
    [
        ([FLOAT8], 7 * 126),  # every layer has 16,384 columns, or as many rows
        (ROWWISE, 4 * 126),  # wq, wk and wv have 2048 rows or fewer
        ([*ROWWISE, f"{DENSE}include", "wq"], 5 * 126),
        ([*ROWWISE, f"{DENSE}auto_filter", "off"], 7 * 126),
        ([*ROWWISE, f"{DENSE}float8.emulate"], 7 * 126),
        ([FLOAT8, f"{DENSE}float8.recipe", "rowwise_with_gw_hp"], 4 * 126),
        ([MXFP8], 4 * 126),
    ],
)
def test_405b_on_eight_tensor_parallel_ranks_is_filtered_by_what_a_rank_multiplies(flags, converted):
    found = choices([*flags, "--model.flavor", "405b", TENSOR, "8"], accelerated=True)
    assert sum(choice.is_converted for choice in found) == converted
    assert len(found) == 7 * 126 + 1


@pytest.mark.parametrize(
    ("flags", "accelerated", "is_filtered"),
    [([], True, True), ([], False, False), (["on"], False, True), (["off"], True, False), (["auto"], True, True)],
)
def test_the_auto_filter_follows_the_device_unless_it_is_told(flags, accelerated, is_filtered):
    chosen = [f"{DENSE}auto_filter", *flags] if flags else []
    found = choices([FLOAT8, *chosen], accelerated)
    assert any(choice.reason == "too small to gain" for choice in found) == is_filtered


@pytest.mark.parametrize(
    ("recipe", "small", "large"),
    [
        ("tensorwise", [(1024, 4096)], [(1025, 4096), (1024, 4097)]),
        ("rowwise", [(2048, 65_536), (65_536, 1024), (4096, 2048)], [(4097, 2048), (4096, 2049), (4097, 1025)]),
    ],
)
def test_a_layer_is_small_up_to_the_sizes_that_torchao_measured(recipe, small, large):
    dense = DenseQuantizeConfig(float8=Float8Config(enable=True, recipe=recipe))
    assert all(_is_small(dense, shape) for shape in small)
    assert not any(_is_small(dense, shape) for shape in large)


def test_a_pattern_decides_before_all_else_and_exclude_before_include():
    flags = [FLOAT8, f"{DENSE}auto_filter", "on", f"{DENSE}include", "layers.0", f"{DENSE}include", "output"]
    found = choices([*flags, f"{DENSE}exclude", "attention.wk"])
    assert [choice.name for choice in found if choice.is_converted] == [
        *(f"layers.0.attention.{name}" for name in ("wq", "wv", "wo")),
        *(f"layers.0.feed_forward.{name}" for name in ("w1", "w2", "w3")),
        "output",
    ]
    assert found[1].reason == "excluded by attention.wk"


@pytest.mark.parametrize("flag", [FLOAT8, MXFP8])
def test_a_tied_output_layer_is_converted_on_demand(flag):
    *_, output = choices([flag, "--model.flavor", "1b", f"{DENSE}include", "output"])
    assert (output.name, output.is_converted) == ("output", True)


@pytest.mark.parametrize(
    ("style", "heads", "degree", "wanted"),
    [
        ("colwise", 4, 8, (8, 32)),
        ("logits", 4, 8, (8, 32)),
        ("rowwise", 4, 8, (64, 4)),
        ("colwise_heads", 8, 4, (16, 32)),
        ("colwise_heads", 4, 8, (16, 32)),  # one of 4 heads, on two ranks each
        ("", 4, 8, (64, 32)),
        ("a style to come", 4, 1, (64, 32)),
    ],
)
def test_a_style_splits_the_dim_it_is_named_for(style, heads, degree, wanted):
    outs, ins = parts(style, heads, degree)
    assert (-(-64 // outs), -(-32 // ins)) == wanted


def test_a_style_that_splits_an_unknown_dim_is_refused():
    with pytest.raises(PlanError, match="the style diagonal does not say which dim of a linear layer it splits"):
        parts("diagonal", 4, 2)


def test_rows_of_the_plan_are_whole_names_and_a_layer_without_one_is_not_split():
    """``output`` is the output layer alone, not every layer of that name."""
    linears = {"output": (64, 64), "adapter.output": (64, 64)}
    model = SimpleNamespace(linears=linears, num_kv_heads=4)
    plan = replace(llama().plan, tensor_parallel={"output": "logits"})
    outer, inner = linear_choices(parse([FLOAT8, TENSOR, "4"]), model, plan, accelerated=False)
    assert (outer.reason, outer.local) == ("sensitive", (16, 64))
    assert (inner.is_converted, inner.local) == (True, (64, 64))


def test_the_table_has_one_row_for_layers_that_differ_only_in_their_number():
    lines = table(choices([FLOAT8, "--model.num_layers", "2", f"{DENSE}exclude", "layers.1.attention.wk"]))
    assert [line.split() for line in lines[:4]] == [
        ["layer", "count", "out", "x", "in", "precision", "reason"],
        ["layers.*.attention.wq", "x", "2", "128", "x", "128", "converted"],
        ["layers.0.attention.wk", "x", "1", "64", "x", "128", "converted"],
        ["layers.*.attention.wv", "x", "2", "64", "x", "128", "converted"],
    ]
    assert "layers.1.attention.wk     x 1    64 x 128   kept       excluded by layers.1.attention.wk" in lines


def test_the_table_ends_with_shares_and_the_price_of_padding():
    """6 rows of zeros for 282; weights stand for FLOPs, since a token is multiplied once with each."""
    flags = [FLOAT8, "--model.vocab_size", "2256", TENSOR, "8"]
    block = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 384 * 128
    share = 8 * block / (8 * block + 2256 * 128)
    kept, padded = table(choices(flags)), table(choices([*flags, *PADDED_OUTPUT]))
    assert kept[-1] == (
        "56 converted, 1 kept: output (sensitive); "
        f"converted: {100 * share:.1f}% of the linear layers' weights and FLOPs"
    )
    mine = 8 * sum(rows * columns for rows, columns in shares(flags).values()) + 282 * 128
    assert padded[-1].endswith(
        f"converted: 100.0% of the linear layers' weights and FLOPs; padding adds {100 * 6 / 282:.1f}% to the weights "
        f"and FLOPs of 1 of them, {100 * 6 * 128 / mine:.2f}% to all layers"
    )
    assert "per rank" in padded[0]
    assert padded[-2].split() == "output x 1 2256 x 128 282 x 128 converted padded 282 x 128 -> 288 x 128".split()

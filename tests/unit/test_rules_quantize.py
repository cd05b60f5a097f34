"""What is refused about low precision before anything starts, with a fix that works."""

import pytest
from rule_cases import CONTEXT, FLOAT8, PIPELINE, SHARD, TENSOR
from test_rules import facts_of, repairs, without

from crius.config import rules, rules_quantize
from crius.errors import ConfigError, LayoutError

DENSE = "--quantize.dense."
MXFP8 = f"{DENSE}mxfp8.enable"
RECIPE = f"{DENSE}float8.recipe"
GATHER = f"{DENSE}float8.enable_fsdp_float8_all_gather"
EXCLUDE, INCLUDE, PAD, FILTER = (f"{DENSE}{name}" for name in ("exclude", "include", "pad_inner_dim", "auto_filter"))
VOCABULARY = "--model.vocab_size"
LENGTH, BATCH = "--training.seq_len", ("--training.global_batch_size", "1", "--training.local_batch_size", "1")

# rule, flags, in the sentence, in "from", in "fix"
CASES = [
    (
        rules_quantize.one_low_precision,
        [FLOAT8, MXFP8],
        "float8 and mxfp8 are both enabled",
        f"{FLOAT8} (command line), {MXFP8} (command line)",
        f"leave out {MXFP8}",
    ),
    (
        rules_quantize.patterns_fit_layers,
        [FLOAT8, EXCLUDE, "output_layer"],
        "exclude output_layer matches no linear layer of llama3/debug, did you mean output?",
        EXCLUDE,
        f"{EXCLUDE} output",
    ),
    (
        rules_quantize.patterns_fit_layers,
        [EXCLUDE, "output_layer"],
        "exclude output_layer matches no linear layer",
        EXCLUDE,
        f"{EXCLUDE} output",
    ),
    (
        rules_quantize.patterns_fit_layers,
        [FLOAT8, INCLUDE, "output", INCLUDE, "atention.wk"],
        "include atention.wk matches no linear layer of llama3/debug, did you mean attention.wk?",
        INCLUDE,
        f"{INCLUDE} output {INCLUDE} attention.wk",
    ),
    (
        rules_quantize.patterns_fit_layers,
        [FLOAT8, EXCLUDE, "wq,wk"],
        "exclude wq,wk matches no linear layer of llama3/debug: repeat the flag for each pattern.",
        EXCLUDE,
        f"{EXCLUDE} wq {EXCLUDE} wk",
    ),
    (
        rules_quantize.patterns_fit_layers,
        [FLOAT8, EXCLUDE, "layers.8"],
        "exclude layers.8 matches no linear layer of llama3/debug, whose layers are 0 to 7.",
        EXCLUDE,
        f"{EXCLUDE} layers.7",
    ),
    (
        rules_quantize.patterns_fit_layers,
        [FLOAT8, EXCLUDE, "zzzz"],
        "exclude zzzz matches no linear layer of llama3/debug.",
        EXCLUDE,
        "the linear layers are layers.*.attention.wq, layers.*.attention.wk, ",
    ),
    (
        rules_quantize.patterns_fit_layers,
        [FLOAT8, EXCLUDE, "wk", INCLUDE, "layers.3", INCLUDE, "output"],
        "exclude wk and --quantize.dense.include layers.3 both fit layers.3.attention.wk",
        INCLUDE,
        f"{INCLUDE} output",
    ),
    (
        rules_quantize.included_layers_divide,
        [FLOAT8, TENSOR, "8", VOCABULARY, "2256", INCLUDE, "output"],
        "output: out 2256 / 8 = 282, 282 mod 16 = 10.",
        INCLUDE,
        f"{VOCABULARY} 2304, or {PAD}, or leave out {INCLUDE}",
    ),
    (
        rules_quantize.included_layers_divide,
        [FLOAT8, TENSOR, "2", VOCABULARY, "301", INCLUDE, "output"],
        "output: out 301 / 2 = 151 and 150, 151 mod 16 = 7.",
        INCLUDE,
        f"{VOCABULARY} 320",
    ),
    (
        rules_quantize.included_layers_divide,
        [MXFP8, TENSOR, "8", INCLUDE, "wo", INCLUDE, "output"],
        "layers.*.attention.wo: in 128 / 8 = 16, 16 mod 32 = 16.",
        INCLUDE,
        f"{PAD}, or {INCLUDE} output",
    ),
    (
        rules_quantize.tokens_divide,
        [FLOAT8, LENGTH, "1000", *BATCH],
        "1 sequences x 1000 tokens = 1000 tokens, 1000 mod 16 = 8",
        f"{LENGTH} (command line)",
        f"{LENGTH} 992, or {PAD}",
    ),
    (
        rules_quantize.tokens_divide,
        [MXFP8, CONTEXT, "2", LENGTH, "40", *BATCH],
        "1 sequences x 40 tokens / 2 context-parallel ranks = 20 tokens, 20 mod 32 = 20",
        LENGTH,
        f"{LENGTH} 64",
    ),
    (
        rules_quantize.tokens_divide,
        [FLOAT8, TENSOR, "4", PIPELINE, "2", LENGTH, "20", "--training.global_batch_size", "8"],
        "1 sequences x 20 tokens = 20 tokens",
        LENGTH,
        f"{LENGTH} 16",
    ),
    *[
        (
            rules_quantize.quantize_flags_have_effect,
            flags,
            f"{flags[0]} has no effect without {needed}",
            flags[0],
            f"{needed}, or leave out {flags[0]}",
        )
        for flags, needed in (
            ([RECIPE, "rowwise"], FLOAT8),
            ([GATHER], FLOAT8),
            ([f"{DENSE}float8.precompute_scale"], FLOAT8),
            ([f"{DENSE}float8.emulate", MXFP8], FLOAT8),
            ([f"{DENSE}mxfp8.emulate", FLOAT8], MXFP8),
            ([EXCLUDE, "output"], FLOAT8),
            ([INCLUDE, "output"], FLOAT8),
            ([FILTER, "on"], FLOAT8),
            ([PAD], FLOAT8),
        )
    ],
    (
        rules_quantize.float8_gather_suits,
        [FLOAT8, f"{DENSE}float8.precompute_scale"],
        f"precompute_scale has no effect without {GATHER}",
        f"{DENSE}float8.precompute_scale",
        GATHER,
    ),
    (
        rules_quantize.float8_gather_suits,
        [FLOAT8, GATHER, f"{DENSE}float8.precompute_scale", "--training.enable_cpu_offload"],
        "precompute_scale has no effect with --training.enable_cpu_offload",
        f"{DENSE}float8.precompute_scale",
        f"leave out {DENSE}float8.precompute_scale",
    ),
    (
        rules_quantize.float8_gather_suits,
        [FLOAT8, GATHER, RECIPE, "rowwise_with_gw_hp"],
        f"{GATHER} does not go with recipe rowwise_with_gw_hp",
        f"{GATHER} (command line), {RECIPE} (command line)",
        f"{RECIPE} tensorwise",
    ),
    (
        rules_quantize.float8_gather_suits,
        [FLOAT8, GATHER, PAD, VOCABULARY, "2256", TENSOR, "8", INCLUDE, "output"],
        f"{GATHER} does not go with {PAD}, which pads output from 282 x 128 to 288 x 128",
        GATHER,
        f"leave out {GATHER}",
    ),
    (
        rules_quantize.something_is_converted,
        [MXFP8, TENSOR, "8"],
        "would convert nothing: 0 converted, 57 kept: 8 with out 128 / 8 = 16, 16 mod 32 = 16 (wq), ",
        MXFP8,
        f"{PAD}, or leave out {MXFP8}",
    ),
    (
        rules_quantize.something_is_converted,
        [FLOAT8, FILTER, "on"],
        "would convert nothing: 0 converted, 57 kept: 56 too small (wq, wk, wv, wo, w1, w2, w3), output (sensitive).",
        FLOAT8,
        f"{FILTER} off, or leave out",
    ),
    (
        rules_quantize.something_is_converted,
        [FLOAT8, EXCLUDE, "layers"],
        "would convert nothing: 0 converted, 57 kept: 56 excluded by layers ",
        FLOAT8,
        f"leave out {EXCLUDE}",
    ),
    (
        rules_quantize.chunked_loss_has_its_layer,
        [FLOAT8, INCLUDE, "output", "--kernels.linear_cross_entropy", "chunked"],
        "kernels.linear_cross_entropy chunked does not go with an output layer in low precision",
        f"{FLOAT8} (command line)",
        "--kernels.linear_cross_entropy off",
    ),
]


@pytest.mark.parametrize(("rule", "flags", "what", "where", "fix"), CASES)
def test_a_low_precision_rule_names_the_value_where_it_came_from_and_a_fix_that_works(rule, flags, what, where, fix):
    [error] = rule(facts_of(flags))
    assert isinstance(error, ConfigError)
    assert what in error.what
    assert where in error.where
    assert fix in error.fix
    for option in error.fix.split(", or "):
        for mended in alternatives(flags, option):
            assert list(rule(facts_of(mended))) == [], f"{mended} is what the fix says"


def alternatives(flags, option):
    """``flags`` mended as ``option`` says: a flag left out, turned on, or given other values."""
    if option.startswith("leave out"):
        return [without(flags, option)]
    return repairs(flags, option) or ([[*flags, option]] if option.startswith("--") else [])


def test_every_low_precision_rule_has_a_case():
    assert {case[0] for case in CASES} == set(rules_quantize.QUANTIZE_RULES)


@pytest.mark.parametrize("degree", ["2", "4", "8"])
def test_a_vocabulary_that_does_not_divide_is_legal_while_the_output_layer_is_kept(degree):
    assert problems([FLOAT8, VOCABULARY, "2256", TENSOR, degree]) == []
    assert problems([FLOAT8, VOCABULARY, "2256", TENSOR, degree, INCLUDE, "output", PAD]) == []
    [error] = problems([FLOAT8, VOCABULARY, "2256", TENSOR, degree, INCLUDE, "output"])
    assert isinstance(error, LayoutError)


@pytest.mark.parametrize(
    "flags",
    [
        [FLOAT8, VOCABULARY, "2560", TENSOR, "8", INCLUDE, "output"],  # 2560 / 8 = 320 = 20 x 16
        [FLOAT8, RECIPE, "rowwise_with_gw_hp", LENGTH, "1000", *BATCH],  # whose gradients of weights are not float8
        [FLOAT8, PAD, LENGTH, "1000", *BATCH],
        [FLOAT8, LENGTH, "1000", "--training.global_batch_size", "2", "--training.local_batch_size", "2"],
        [MXFP8, "--model.flavor", "1b", INCLUDE, "output"],  # tied, but its weight stays a plain tensor
        [FLOAT8, GATHER, PAD, SHARD, "2"],  # pads nothing
        [FLOAT8, GATHER, f"{DENSE}float8.precompute_scale", SHARD, "2"],
        [MXFP8, TENSOR, "8", PAD],
    ],
)
def test_what_works_breaks_no_rule(flags):
    assert problems(flags) == []


def test_other_faults_of_a_low_precision_run_are_reported_by_their_own_rules_alone():
    flags = [
        FLOAT8,
        INCLUDE,
        "output",
        TENSOR,
        "3",
        VOCABULARY,
        "2256",
        "--training.global_batch_size",
        "10",
        SHARD,
        "4",
    ]
    assert len(problems(flags)) == 2  # degree 3 and batch 10
    assert len(problems([FLOAT8, "--model.flavor", "7b", EXCLUDE, "nothing"])) == 1
    assert len(problems([FLOAT8, LENGTH, "0"])) == 1
    assert len(problems([FLOAT8, TENSOR, "0"])) == 1


def problems(flags):
    facts = facts_of(flags)
    return [problem for rule in rules.RULES if rule is not rules.extras_installed for problem in rule(facts)]

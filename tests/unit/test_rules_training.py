"""What is refused about the optimizer before anything starts, with a fix that works."""

import shlex

import pytest
from test_rules import facts_of

from crius.config import rules_training
from crius.errors import ConfigError

GROUPS = "--optimizer.param_groups"
FORM = rules_training.param_groups_are_well_formed
FIT = rules_training.param_groups_fit_parameters
EFFECT = rules_training.optimizer_flags_have_effect

# rule, flags, in the sentence, in "fix"
CASES = [
    (
        FORM,
        [GROUPS, "attention.wq lr_factor=2"],
        "is not of the form PATTERN: key=value",
        f"e.g. {GROUPS} 'attention.wq",
    ),
    (FORM, [GROUPS, "attention.wq: lr=2"], "has the unknown key lr.", f"e.g. {GROUPS} 'attention.wq"),
    (FORM, [GROUPS, "wq: lr_factor=-2"], "has lr_factor=-2, which must be finite and 0 or more", "e.g. "),
    (FORM, [GROUPS, "wq: optimizer=sgd"], "has optimizer=sgd, which is not adamw or muon", "e.g. "),
    (
        FIT,
        [GROUPS, "atention.wq: lr_factor=2"],
        "atention.wq fits no parameter of llama3/debug, did you mean attention.wq?",
        f"{GROUPS} 'attention.wq: lr_factor=2'",
    ),
    (FIT, [GROUPS, "zzzzzz: weight_decay=0"], "zzzzzz fits no parameter of llama3/debug.", "leave out "),
    (
        FIT,
        [GROUPS, "layers.0: optimizer=muon"],
        "gives layers.*.attention_norm.weight, layers.*.ffn_norm.weight to Muon, which takes matrices only",
        f"{GROUPS} 'layers.*.attention_norm.weight: optimizer=adamw' "
        f"{GROUPS} 'layers.*.ffn_norm.weight: optimizer=adamw' "
        f"{GROUPS} 'layers.0: optimizer=muon'",
    ),
    (
        EFFECT,
        ["--optimizer.muon_momentum", "0.9"],
        "muon_momentum has no effect with optimizer.name adamw",
        "leave out --optimizer.muon_momentum, or --optimizer.name muon",
    ),
    (
        EFFECT,
        ["--optimizer.no_stochastic_rounding", "--optimizer.state_dtype", "8bit"],
        "stochastic_rounding has no effect with training.dtype float32 and optimizer.state_dtype 8bit",
        "--optimizer.state_dtype bfloat16",
    ),
]


@pytest.mark.parametrize(("rule", "flags", "what", "fix"), CASES)
def test_an_optimizer_rule_names_the_value_and_a_fix_that_works(rule, flags, what, fix):
    [error] = rule(facts_of(flags))
    assert isinstance(error, ConfigError)
    assert what in error.what
    assert f"{flags[0].replace('no_', '')} (command line)" == error.where
    assert fix in error.fix
    typed = shlex.split(error.fix.removeprefix("e.g. "))
    mended = [] if error.fix.startswith("leave out") else typed
    assert list(rule(facts_of(mended))) == [], f"{mended} is what the fix says"


@pytest.mark.parametrize(
    "flags",
    [
        [GROUPS, "attention_norm: lr_factor=1", GROUPS, "ffn_norm: weight_decay=0", GROUPS, "layers.0: optimizer=muon"],
        [GROUPS, "wq: optimizer=muon", "--optimizer.muon_momentum", "0.9"],
        ["--optimizer.name", "muon", "--optimizer.muon_ns_steps", "3"],
        ["--training.dtype", "bfloat16", "--optimizer.no_stochastic_rounding"],
        [GROUPS, "norm.weight: weight_decay=0.1", GROUPS, "output: lr_factor=0.5", GROUPS, "attention.w*: lr_factor=2"],
    ],
)
def test_what_has_an_effect_is_accepted(flags):
    assert [error for rule in rules_training.OPTIMIZER_RULES for error in rule(facts_of(flags))] == []


def test_every_optimizer_rule_has_a_case():
    assert {case[0] for case in CASES} == set(rules_training.OPTIMIZER_RULES)

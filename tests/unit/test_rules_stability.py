"""What is refused about the stability policies, with a fix that works."""

import pytest
from test_rules import facts_of

from crius.config import rules
from crius.config.rules_training import STABILITY_RULES, stability_flags_have_effect
from crius.errors import ConfigError

PREFIX = "--stability."

# flags, in the sentence, in "from"
CASES = [
    ([f"{PREFIX}spike", "off", f"{PREFIX}spike_zscore", "5"], "spike_zscore has no effect with stability.spike off"),
    ([f"{PREFIX}spike", "off", f"{PREFIX}window", "50"], "window has no effect with stability.spike off"),
    ([f"{PREFIX}snapshot_interval", "9"], "snapshot_interval has no effect with stability.nonfinite stop"),
    (
        [f"{PREFIX}nonfinite", "skip", f"{PREFIX}snapshot_interval", "9"],
        "snapshot_interval has no effect with stability.nonfinite skip",
    ),
    (
        [f"{PREFIX}spike", "stop", f"{PREFIX}max_consecutive", "2"],
        "max_consecutive has no effect with stability.nonfinite stop and spike stop",
    ),
]


@pytest.mark.parametrize(("flags", "what"), CASES)
def test_a_setting_of_another_policy_is_refused_with_a_fix_that_works(flags, what):
    [error] = stability_flags_have_effect(facts_of(flags))
    assert isinstance(error, ConfigError)
    assert what in error.what
    assert error.where == f"{flags[-2]} (command line)"
    fix, policy = error.fix.removeprefix("e.g. ").split()
    kept = [token for pair in zip(flags[::2], flags[1::2], strict=True) if pair[0] != fix for token in pair]
    assert list(stability_flags_have_effect(facts_of([*kept, fix, policy]))) == []


@pytest.mark.parametrize(
    "flags",
    [
        ["window", "50", "spike_zscore", "5", "max_consecutive", "2"],
        ["nonfinite", "rollback", "snapshot_interval", "9", "spike", "off", "max_consecutive", "2"],
        ["spike", "skip", "max_consecutive", "2"],
    ],
)
def test_settings_of_the_policies_that_are_on_are_accepted(flags):
    given = [PREFIX + token if index % 2 == 0 else token for index, token in enumerate(flags)]
    rules.check(facts_of(given))


def test_a_window_of_fewer_than_ten_steps_is_refused():
    [error] = rules.ranges(facts_of([f"{PREFIX}window", "9"]))
    assert error.what == "stability.window 9 must be at least 10."


def test_the_rules_of_stability_are_among_those_of_a_run():
    assert set(STABILITY_RULES) <= set(rules.RULES)

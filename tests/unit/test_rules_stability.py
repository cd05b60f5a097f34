"""What is refused about the stability policies, with a fix that works."""

import pytest
from test_rules import facts_of

from crius.config import rules
from crius.config.rules_training import STABILITY_RULES

PREFIX = "--stability."


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

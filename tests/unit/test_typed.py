"""What is typed: flags that are given again, and how far a misspelt name is from a known one."""

import pytest

from crius.config.argv import normalized_argv
from crius.config.names import _edits

STEPS, LENGTH = "--training.steps", "--training.seq_len"


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ([STEPS, "1", LENGTH, "2", STEPS, "3", LENGTH, "4", STEPS, "5"], [LENGTH, "4", STEPS, "5"]),
        ([f"{STEPS}=1", LENGTH, "2", STEPS, "3"], [LENGTH, "2", STEPS, "3"]),
        ([STEPS, STEPS, "5"], [STEPS, "5"]),
        ([STEPS, LENGTH, "2", STEPS, "5"], [LENGTH, "2", STEPS, "5"]),
        (["verify", "--steps", "3", "--lr", "1"], ["verify", "--steps", "3", "--optimizer.lr", "1"]),
    ],
)
def test_the_last_of_several_values_stays_in_its_place(typed, kept):
    assert normalized_argv(typed) == kept


@pytest.mark.parametrize(
    ("a", "b", "number"),
    [
        *[("", "abc", 3), ("kitten", "sitting", 3)],
        *[("ab", "ba", 1), ("abx", "bax", 1), ("abcd", "badc", 2), ("ca", "abc", 3)],
    ],
)
def test_edits_are_insertions_deletions_replacements_and_swaps(a, b, number):
    assert _edits(a, b) == _edits(b, a) == number

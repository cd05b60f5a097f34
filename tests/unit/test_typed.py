"""What is typed: flags that are given again, and how far a misspelt name is from a known one."""

import pytest

from crius.config.argv import normalized_argv
from crius.config.names import _edits, meant, nearest_typo

STEPS, LENGTH, PATH = "--training.steps", "--training.seq_len", "--data.path"


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ([STEPS, "1", LENGTH, "2", STEPS, "3", LENGTH, "4", STEPS, "5"], [LENGTH, "4", STEPS, "5"]),
        ([STEPS, "1", "--recipe", "a", LENGTH, "2", "--recipe", "b"], [STEPS, "1", LENGTH, "2", "--recipe", "b"]),
        ([f"{STEPS}=1", LENGTH, "2", STEPS, "3"], [LENGTH, "2", STEPS, "3"]),
        ([STEPS, STEPS, "5"], [STEPS, "5"]),
        ([STEPS, LENGTH, "2", STEPS, "5"], [LENGTH, "2", STEPS, "5"]),
        (["--compile.enable", LENGTH, "2", "--compile.no_enable"], [LENGTH, "2", "--compile.no_enable"]),
        ([PATH, "a", PATH, "b"], [PATH, "a", PATH, "b"]),
        (["--compile.enable", "False", STEPS, "1"], ["--compile.enable=false", STEPS, "1"]),
        (["plan", "--model", "llama3", "--steps", "3"], ["plan", "--model.name", "llama3", STEPS, "3"]),
        (["verify", "--steps", "3", "--lr", "1"], ["verify", "--steps", "3", "--optimizer.lr", "1"]),
    ],
)
def test_the_last_of_several_values_stays_in_its_place(typed, kept):
    assert normalized_argv(typed) == kept


@pytest.mark.parametrize(
    ("a", "b", "number"),
    [
        *[("", "", 0), ("a", "a", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2)],
        *[("ab", "ba", 1), ("xab", "xba", 1), ("abx", "bax", 1), ("abcd", "badc", 2), ("ca", "abc", 3)],
        *[("abc", "abd", 1), ("abc", "xbc", 1), ("abc", "ac", 1), ("ac", "abc", 1), ("aab", "aba", 1)],
    ],
)
def test_edits_are_insertions_deletions_replacements_and_swaps(a, b, number):
    assert _edits(a, b) == _edits(b, a) == number


@pytest.mark.parametrize(
    ("written", "known", "is_typo"),
    [
        *[("lr", "lx", False), ("eps", "epx", True), ("eps", "exx", False)],
        *[("seq_len", "seq_lem", True), ("seq_len", "seq_lxm", False), ("seq_lens", "seq_lexx", True)],
        *[("seq_lens", "seq_lxxx", False), ("data.lr", "dxta.lr", True), ("data.lr", "dxxa.lr", False)],
        *[("model.lr", "mxxel.lr", True), ("model.lr", "mxxxl.lr", False), ("model.lr", "modl.lr", True)],
    ],
)
def test_a_long_name_may_differ_more_than_a_short_one(written, known, is_typo):
    assert nearest_typo(written, [known]) == known * is_typo


def test_the_nearest_of_several_names_is_meant():
    assert nearest_typo("warmup_stepz", ["warmup_stxxz", "warmup_steps"]) == "warmup_steps"


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("gc_interval", "training.gc_interval"),
        ("interval", ""),
        ("debug.seed.x", "debug.seed"),
        ("nowhere.nothing", ""),
    ],
)
def test_a_name_without_its_section_is_found_where_one_section_has_it(name, instead):
    known = ["training.gc_interval", "checkpoint.interval", "validation.interval", "debug.seed", "a.b.gc_interval"]
    assert meant(name, known) == (instead, "")

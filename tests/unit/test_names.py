"""Names that are not there: which known name was meant, and the words that are a flag's value."""

import functools
import itertools

import pytest

from crius.config.names import _edits, nearest_typo


@pytest.mark.parametrize(
    ("written", "known", "typo_of"),
    [
        ("7b", ["8b", "70b", "405b"], ""),
        ("8B", ["8b", "70b"], "8b"),
        ("80b", ["8b", "70b"], ""),
        ("h1000", ["h100"], "h100"),
        ("llama", ["llama3"], "llama3"),
        ("job.dir", ["job.name", "job.run_dir"], ""),
        ("model.dim", ["model.name"], ""),
        ("training.stpes", ["training.steps", "training.seq_len"], "training.steps"),
        ("optimzer.lr", ["optimizer.lr", "training.steps"], "optimizer.lr"),
        ("optimiser.lr", ["optimizer.lr"], "optimizer.lr"),
        ("opptimiser.lr", ["optimizer.lr", "optimizer.eps"], "optimizer.lr"),
        ("moe.name", ["job.name"], ""),
        ("float16", ["float32", "bfloat16"], ""),
        ("bflaot16", ["float32", "bfloat16"], "bfloat16"),
        ("lt", ["lr"], ""),  # last parts of 2, 3, 7 and 8 characters
        ("lrr", ["lr"], "lr"),
        ("abcdefg", ["abcdexy"], ""),
        ("abcdefgh", ["abcdefxy"], "abcdefxy"),
        ("abcdefgh", ["abcdexyz"], ""),
        ("abcd.name", ["abxy.name"], ""),  # sections of 4 and 5
        ("abcde.name", ["abcxy.name"], "abcxy.name"),
        ("abcde.name", ["abxyz.name"], ""),
    ],
)
def test_only_a_typo_is_guessed(written, known, typo_of):
    assert nearest_typo(written, known) == typo_of


def test_edits_are_the_fewest_that_turn_a_word_into_another():
    @functools.cache
    def fewest(a, b):
        if not a or not b:
            return len(a) + len(b)
        ways = [fewest(a[1:], b) + 1, fewest(a, b[1:]) + 1, fewest(a[1:], b[1:]) + (a[0] != b[0])]
        if a[:2] == b[1::-1] and len(a[:2]) == 2:
            ways.append(fewest(a[2:], b[2:]) + 1)
        return min(ways)

    words = ["".join(letters) for size in range(4) for letters in itertools.product("abc", repeat=size)]
    for a, b in itertools.product(words, repeat=2):
        assert _edits(a, b) == fewest(a, b), (a, b)

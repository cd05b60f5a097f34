"""What is typed: flags that are given again, and how far a misspelt name is from a known one."""

import pytest

from crius.cli import add_verbs
from crius.cli.app import app, train_verb
from crius.config.command_line import Reader, last_of_each
from crius.config.load import RunSources
from crius.config.names import _edits

STEPS, LENGTH = "--training.steps", "--training.seq_len"
add_verbs()


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ([STEPS, "1", LENGTH, "2", STEPS, "3", LENGTH, "4", STEPS, "5"], [LENGTH, "4", STEPS, "5"]),
        ([f"{STEPS}=1", LENGTH, "2", STEPS, "3"], [LENGTH, "2", STEPS, "3"]),
        ([STEPS, STEPS, "5"], [STEPS, "5"]),
        ([STEPS, LENGTH, "2", STEPS, "5"], [LENGTH, "2", STEPS, "5"]),
        (["--steps", "3", "--training.seq-len=1"], [STEPS, "3", f"{LENGTH}=1"]),
        (["--compile.no_enable", STEPS, "3", "--compile.enable"], [STEPS, "3", "--compile.enable"]),
        (["--data.path", "a", "--data.path", "b"], ["--data.path", "a", "--data.path", "b"]),
    ],
)
def test_the_last_of_several_values_stays_in_its_place(typed, kept):
    assert last_of_each(typed, train_verb().arguments()) == kept


@pytest.mark.parametrize(
    ("a", "b", "number"),
    [
        *[("", "abc", 3), ("kitten", "sitting", 3)],
        *[("ab", "ba", 1), ("abx", "bax", 1), ("abcd", "badc", 2), ("ca", "abc", 3)],
    ],
)
def test_edits_are_insertions_deletions_replacements_and_swaps(a, b, number):
    assert _edits(a, b) == _edits(b, a) == number


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["--optimizer.lr", "-1e-3", "--model.rope_theta=-1"], {"optimizer.lr": -1e-3, "model.rope_theta": -1.0}),
        (["--compile.enable", "--data.no_shuffle", "FALSE"], {"compile.enable": True, "data.shuffle": True}),
        (["--training.steps", "1e3", "--training.seq_len", "0x10"], {"training.steps": 1000, "training.seq_len": 16}),
        (["--job.name=-a", "--data.path", "b", "--data.path", "c=d"], {"job.name": "-a", "data.path": ("b", "c=d")}),
        (["--parallelism.reshard_after_forward_mode", "4"], {"parallelism.reshard_after_forward_mode": 4}),
        (["--activation-checkpoint.selective-option", "op"], {"activation_checkpoint.selective_option": "op"}),
        (["--model.tied_embeddings=No"], {"model.tied_embeddings": False}),
        (["--compile.no_enable=yes", "--data.no_shuffle=0"], {"compile.enable": False, "data.shuffle": True}),
    ],
)
def test_words_become_values(words, given):
    arguments = train_verb().arguments()
    assert list(Reader("train", arguments).read(words)) == []
    assert {name: one.value() for name, one in arguments.items() if one.source} == given


def test_all_mistakes_of_a_command_line_are_found():
    words = ["a", "--top_k", "--zzz", "3", "--seed=4", "--temperature", "b", "c"]
    verb, _ = app.find(["generate"])
    found = [error.what for error in Reader("generate", verb.arguments(), positional=["source"]).read(words)]
    said = [
        "--top_k has no value.",
        "unknown flag --zzz: there is no such setting.",
        "c is neither a flag nor the value of one.",
    ]
    assert found == said
    twice = Reader("generate", verb.arguments(), positional=["source"]).read(["a", "--source", "b"])
    assert [error.what for error in twice] == ["a is neither a flag nor the value of one."]


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--optimizer.lr", "1", "m", "d"], ("--optimizer.lr", "1")),
        (["m", "--compile.enable", "true", "d", "--dry"], ("--compile.enable", "true")),
        (["m", "d", "--zzz", "--lr=3", "x"], ("--zzz", "--lr=3", "x")),
    ],
)
def test_a_verb_that_hands_flags_on_keeps_its_own_words(words, settings):
    verb, rest = app.find(["tune", *words])
    values = verb.call(rest, RunSources()).values
    assert (values["model"], values["data"], values["settings"]) == ("m", "d", settings)

"""What ``--help`` shows: one screen, whole sections, or everything; its texts are docstrings."""

import re

import harness
import pytest

from crius import cli
from crius.cli.help import COMMON, SECTIONS, _cut
from crius.config.run import RunConfig
from crius.config.toml_file import flatten

DEFAULTS = flatten(RunConfig())


@pytest.fixture
def crius(capsys):
    """Run one command in this process; gives exit code, stdout and stderr."""

    def run(*argv):
        code = cli.main(list(argv))
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def show(crius, monkeypatch):
    """The lines of a page of help, on a terminal of 110 columns."""
    monkeypatch.setenv("COLUMNS", "110")

    def lines(*argv):
        code, out, err = crius(*argv)
        assert (code, err) == (0, "")
        return out.splitlines()

    return lines


@pytest.mark.parametrize("verb", ["train", "plan", "verify chaos"])
def test_the_first_page_fits_a_screen(show, verb):
    """Flags of the verb stand first, then the common ones in groups, one line each; the end says how to see more."""
    lines = show(*verb.split(), "--help")
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 110
    flags = [flag for line in lines for flag in re.findall(r"^  (?:[A-Z]+ )?--([\w.]+)", line)]
    common = [name for names in COMMON.values() for name in names]
    assert flags[-len(common) :] == common
    assert flags[0] and not any("." in flag for flag in flags[: -len(common)])
    assert "--help SECTION" in lines[-1] and "--help all" in lines[-1] and "crius config explain KEY" in lines[-1]


def test_common_settings_exist_and_have_a_text(show):
    names = [name for group in COMMON.values() for name in group]
    assert set(names) <= set(DEFAULTS) and len(names) == len(set(names))
    lines = {line.split()[0]: line for line in show("train", "--help") if line.startswith("  --")}
    for name in names:
        assert len(re.findall(r"[a-z]+", lines[f"--{name}"].split("  ", 2)[2])) >= 3, lines[f"--{name}"]


@pytest.mark.full
def test_a_narrow_terminal_gets_one_line_for_a_flag():
    lines = harness.crius("train", "--help", COLUMNS="80").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("--parallelism.tensor_parallel_degree INT  Ranks that share" in line for line in lines)


def test_sections_are_printed_whole(show):
    lines = show("train", "--help", "comm", "quantize.dense", "--training.steps", "3")
    flags = {line.split()[0][2:] for line in lines if line.startswith("  --")}
    assert flags == {name for name in DEFAULTS if name.startswith(("comm.", "quantize.dense."))}
    assert lines[0] == "[comm] Timeouts of the process groups:"
    assert "      Seconds after which an unfinished collective fails. Also the limit of the rendezvous." in lines


def test_all_is_everything_with_the_flags_of_the_verb_first(show):
    lines = show("verify", "parity", "--help=all")
    flags = [line.split()[0][2:] for line in lines if line.startswith("  --")]
    assert set(DEFAULTS) | {"layouts", "timeout"} <= set(flags)
    assert flags.index("layouts") < flags.index("model.name")
    assert [line[1:].split("]")[0] for line in lines if line.startswith("[")] == list(SECTIONS)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("train --help paralelism", ("did you mean parallelism?", "model, training, parallelism")),
        ("plan --help comm zzz", ("no section is called zzz.", "checkpoint, launch", "job, all")),
        ("train --help job.nam", ("no setting is called job.nam.", "--help job")),
        ("generate --help model", ("no section is called model.", "with one or more of all")),
    ],
)
def test_an_unknown_section_is_an_error_that_lists_them(crius, argv, said):
    code, out, err = crius(*argv.split())
    assert (code, out) == (2, "")
    assert all(words in err for words in said), err


@pytest.mark.parametrize("argv", ["-V", "--version=3", "verify --steps 3", "config --json show"])
def test_a_flag_in_place_of_a_verb_is_an_error(crius, argv):
    code, out, err = crius(*argv.split())
    assert (code, out) == (2, "")
    assert "is not a verb of crius" in err


def test_a_verb_may_follow_help_where_verbs_are_listed(crius):
    assert "Takes the flags of train" in crius("verify", "--help")[1]
    assert "--seed" in crius("generate", "--help", "all")[1]


@pytest.mark.parametrize(
    ("text", "width", "want"),
    [
        ("One clause, and more. Another.", 40, "One clause, and more"),
        ("One clause, and more. Another.", 15, "One clause"),
        ("A, which is a long sentence without a stop", 20, "A, which is a ..."),
        ("What 3.5 is (of ten)", 14, "What 3.5 is"),
    ],
)
def test_a_text_is_cut_at_a_clause_or_a_word(text, width, want):
    assert _cut(text, width) == want

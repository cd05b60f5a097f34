"""``crius data show``: of a configuration, of a run, of a stream; and whether steps or epochs say how long a run is."""

import io
import json
import logging

import numpy as np
import pytest

from crius import cli
from crius.cli.settings import run_of
from crius.config.run import replace_fields
from crius.data.sample_log import Attempt, SampleLog, source_digest
from crius.data.show import CLOSE, OPEN, ShownDocument, coloured, documents_of
from crius.data.source import Rows
from crius.errors import ConfigError
from crius.tokens.tokenizer import ByteTokenizer
from crius.train.inputs import check_steps_left, open_run_corpus
from crius.train.setup import MARKED, _ConsoleHandler

SIZES = ["--training.seq_len", "32", "--training.global_batch_size", "4", "--validation.interval", "0"]


@pytest.fixture
def text(tmp_path, monkeypatch):
    """Flags of a run on 20 documents."""
    monkeypatch.chdir(tmp_path)
    lines = (json.dumps({"text": f"text {number} " + "ab" * number}) for number in range(20))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return ["--data.source", "jsonl", "--data.path", "a.jsonl", "--data.cache_dir", "cache", *SIZES]


@pytest.fixture
def show(capsys):
    """Exit code, stdout as JSON if asked for, and stderr."""

    def run(*argv):
        code = cli.main(["data", "show", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, json.loads(out)["samples"] if "--json" in argv else out, err

    return run


def test_a_step_of_a_run_to_come_is_its_samples_in_the_order_of_the_run(text, show):
    corpus = open_run_corpus(run_of(*text), 1).train
    _, found, _ = show(*text, "--step", "3", "--json")
    assert [one["sample"] for one in found] == [8, 9, 10, 11]
    rows = corpus.read(range(8, 12))
    for row, one in enumerate(found):
        begins = [document["begin"] for document in one["documents"]]
        assert begins == [place for place in range(32) if rows.positions[row, place] == 0]
        for name, array in (("tokens", rows.tokens), ("labels", rows.labels)):
            assert [value for document in one["documents"] for value in document[name]] == array[row].tolist()
    code, out, _ = show(*text, "--sample", "5")
    assert code == 0 and out.startswith("=== sample 5: 32 tokens, 32 trained on, ") and OPEN in out and CLOSE in out
    assert [line.split(":")[0] for line in show(*text)[1].splitlines() if "===" in line] == [
        "=== sample 0",
        "=== sample 1",
    ]


@pytest.mark.parametrize(
    ("tokens", "labels", "is_padding"),
    [([0, 0], [-100, -100], True), ([0, 0], [0, -100], False), ([0, 5], [-100, -100], False)],
)
def test_padding_of_documents_has_no_label_and_only_its_own_id(tokens, labels, is_padding):
    rows = Rows(*(np.array([[7, *part]]) for part in (tokens, labels, [0, 1])))
    rows.positions[0, 0] = 0
    first, last = documents_of(rows, 0, ByteTokenizer())
    assert (first.begin, first.end, last.begin, last.end) == (0, 1, 1, 3)
    assert (first.is_padding, last.is_padding) == (False, is_padding)


def test_a_token_after_which_nothing_is_trained_on_is_shown_as_such():
    tokens = np.frombuffer(b"abcd", np.uint8)[None].astype(np.int64)
    labels = np.array([[-100, ord("c"), -100, -100]])
    [shown] = documents_of(Rows(tokens, labels, np.arange(4)[None]), 0, ByteTokenizer())
    assert shown.parts == [("ab", False), ("c", True), ("d", False)]


@pytest.mark.parametrize(
    ("limit", "text"),
    [(0, "ab⟦cde⟧"), (1, "a ... and 4 more characters"), (3, "ab⟦c⟧ ... and 2 more characters"), (5, "ab⟦cde⟧")],
)
def test_a_text_is_cut_to_its_limit_and_the_rest_is_counted(limit, text):
    shown = ShownDocument(0, 2, 0, False, [1, 2], [-100, 2], [("ab", False), ("cde", True)])
    assert shown.text(in_colour=False, limit=limit) == text


def test_a_text_cannot_make_a_mark():
    shown = ShownDocument(0, 2, 0, False, [1, 2], [-100, 2], [(f"{OPEN}x{CLOSE}", False), ("y", True)])
    assert shown.text(in_colour=False) == rf"\u27e6x\u27e7{OPEN}y{CLOSE}"


def test_a_file_of_settings_says_the_run_and_nothing_else_does(text, show, tmp_path):
    lines = ["[data]", 'source = "jsonl"', 'path = ["a.jsonl"]', 'cache_dir = "cache"', "[training]", "seq_len = 32"]
    (tmp_path / "run.toml").write_text("\n".join([*lines, "epochs = 1", "[validation]", "interval = 0"]))
    code, found, _ = show("run.toml", "--sample", "1", "--json")
    assert code == 0 and [one["sample"] for one in found] == [1]
    number = open_run_corpus(run_of("--config", "run.toml"), 1).train.num_samples
    code, _, err = show("run.toml", "--sample", number)
    assert code == 2 and f"there is no sample {number}" in err and f"the run has samples 0 to {number - 1}" in err
    code, _, err = show("run.toml", "--training.seq_len", "16")
    assert code == 2 and "run.toml has all settings" in err and "--config run.toml" in err
    code, _, err = show(*text, "--step", "101")
    assert code == 2 and "there is no step 101" in err and "the run has 100 steps" in err
    code, _, err = show(*text, "--data.too_long", "drop")
    assert code == 2 and "data.too_long has no effect" in err


def test_a_run_shows_what_its_log_says_also_where_it_went_back(text, show, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text(
        '[data]\nsource = "jsonl"\npath = ["a.jsonl"]\ncache_dir = "cache"\n[training]\n'
        "seq_len = 32\nglobal_batch_size = 4\n[validation]\ninterval = 0\n"
    )
    digest = source_digest(open_run_corpus(run_of(*text), 1).train.identity)
    sizes = {"ranks": 2, "batch": 4, "epoch_samples": 0, "source": digest}
    for attempt, (after, steps) in enumerate(((0, 3), (1, 2))):  # the second one has other samples: another batch
        for rank in (0, 1):
            log = SampleLog(folder, rank, Attempt(attempt=attempt, after=after, sample=4 * after, **sizes))
            for step in range(after + 1, after + steps + 1):
                log.write(step, [10 * attempt + 4 * step + rank, 10 * attempt + 4 * step + 2 + rank])
            log.close()
    assert [one["sample"] for one in show(folder, "--step", "1", "--json")[1]] == [4, 5, 6, 7]
    assert [one["sample"] for one in show(folder, "--step", "3", "--json")[1]] == [22, 23, 24, 25]
    code, _, err = show(folder, "--step", "4")
    assert code == 2 and "step 4 is not in the sample log" in err
    (tmp_path / "a.jsonl").write_text('{"text": "' + "others " * 200 + '"}\n')
    for asked in (("--step", "3"), ("--sample", "0")):
        code, _, err = show(folder, *asked)
        assert code == 1 and "attempt 1 of the run read other data" in err


def test_a_run_without_a_log_goes_by_the_tokens_of_its_steps(text, show, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text(
        '[data]\nsource = "jsonl"\npath = ["a.jsonl"]\ncache_dir = "cache"\n[training]\n'
        "seq_len = 32\n[validation]\ninterval = 0\n"
    )
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 5, "loss": 1.0, "tokens": 5 * 6 * 32}) + "\n")
    assert [one["sample"] for one in show(folder, "--step", "2", "--json")[1]] == list(range(6, 12))


def test_a_stream_is_read_up_to_the_sample(tmp_path, monkeypatch, show):
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    rows = (json.dumps({"text": f"row {number} " * 9}) for number in range(40))
    (tmp_path / "data" / "a.jsonl").write_text("\n".join(rows))
    flags = [
        "--data.source",
        "huggingface",
        "--data.path",
        str(tmp_path / "data"),
        "--data.virtual_shards",
        "2",
        *SIZES,
    ]
    code, found, err = show(*flags, "--sample", "6", "--sample", "3", "--json")
    assert code == 0, err
    assert [one["sample"] for one in found] == [3, 6]
    source = open_run_corpus(run_of(*flags), 1).train
    want = {number: source.read([number]).tokens[0].tolist() for number in range(7)}
    for one in found:
        assert [token for document in one["documents"] for token in document["tokens"]] == want[one["sample"]]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
@pytest.mark.parametrize("no_color", ["", "1"])
def test_the_log_is_coloured_on_a_terminal_alone(stream, no_color, monkeypatch):
    monkeypatch.setenv("NO_COLOR", no_color)
    out = stream()
    monkeypatch.setattr("sys.stdout", out)
    for extra in ({MARKED: True}, {}):
        text = f"a {OPEN}b{CLOSE}"
        _ConsoleHandler().emit(logging.makeLogRecord({"msg": text, **extra}))
    marked = coloured(text) if stream is Terminal and not no_color else text
    assert out.getvalue() == f"{marked}\n{text}\n"


@pytest.mark.parametrize(
    ("flags", "steps", "epochs"),
    [
        ([], 100, -1),
        (["--training.epochs", "2"], 10_000, 2),
        (["--recipe", "smollm2_sft"], 10_000, 1),
        (["--recipe", "smollm2_sft", "--training.steps", "7"], 7, -1),
        (["--config", "a.toml"], 10_000, 3),
        (["--config", "a.toml", "--config", "b.toml"], 5, -1),
        (["--config", "b.toml", "--config", "a.toml"], 10_000, 3),
    ],
)
def test_steps_or_epochs_are_those_of_the_stronger_source(flags, steps, epochs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("[training]\nepochs = 3\n")
    (tmp_path / "b.toml").write_text("[training]\nsteps = 5\n")
    training = run_of(*flags).training
    assert (training.steps, training.epochs) == (steps, epochs)


def test_steps_of_a_checkpoint_do_not_end_epochs_which_count_samples():
    check_steps_left(7, replace_fields(run_of("--training.epochs", "2"), {"training.steps": 5}))
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        check_steps_left(7, run_of("--training.steps", "5"))

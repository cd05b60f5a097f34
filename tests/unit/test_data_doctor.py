"""``crius data doctor``: each finding, by small files; and ``crius data tokenizer``."""

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sft_samples import CHATML, conversations, tokenizer_folder, write_conversations

from crius import cli
from crius.cli.settings import run_of
from crius.config.data import DataConfig, TokenizerConfig
from crius.data.chat.conversations import read_conversations
from crius.data.work import chat_encoder
from crius.errors import DataError
from crius.tokens.tokenizer import build_tokenizer
from crius.tools.data_audit.doctor import Bar

ASK = {"role": "user", "content": "Hi"}
GOOD = {"messages": [ASK, {"role": "assistant", "content": "Ho"}]}
REFUSED = {
    "{": "the line is not JSON",
    "[]": "the row is a list",
    '{"a": 1}': "the columns of the conversation are not clear",
    '{"messages": "Hi"}': "is text, not a list of messages",
    '{"messages": [{"role": "elf", "content": "Hi"}]}': "the unknown role 'elf'",
    '{"messages": [{"role": "user", "content": "Hi"}]}': "no message of the assistant",
    '{"messages": [{"role": "assistant", "content": "\\ud83d"}]}': "lone surrogate",
    "\udcff": "is not UTF-8",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def doctor(here, capsys):
    """Exit code and report, of a file with these rows."""

    def examine(rows, *flags, name="a.jsonl"):
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (here / name).write_bytes("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))
        code = cli.main(["data", "doctor", name, *map(str, flags), "--json"])
        out, err = capsys.readouterr()
        assert out, err
        return code, json.loads(out)

    return examine


def answer(text, **more):
    return {"messages": [ASK, {"role": "assistant", "content": text, **more}]}


@pytest.mark.parametrize("line", REFUSED)
def test_what_a_run_refuses_is_refused_and_the_rows_after_it_are_read(line, here, doctor):
    code, found = doctor([GOOD, line, answer("x"), line], "--data.format", "chat")
    assert (code, found["rows"], found["ready"]) == (1, 4, False)
    (refused,) = found["refused"]
    assert REFUSED[line] in refused["reason"] and (refused["rows"], refused["first"]) == (2, "a.jsonl:2")
    rows = read_conversations(DataConfig(source="jsonl"), [Path("a.jsonl")])
    assert refused["reason"] == next(row.what for row in rows if isinstance(row, DataError))


def test_good_rows_are_ready_and_the_flags_are_those_of_a_run(doctor):
    code, found = doctor([GOOD, answer("x")])
    assert (code, found["refused"], found["tokens"]) == (0, [], None)
    data = run_of(*found["flags"]).data
    assert (data.source, data.format, data.path) == ("jsonl", "chat", ("a.jsonl",))


def test_the_flags_do_not_leave_out_the_only_row(doctor):
    assert "skip" not in doctor([answer(5)])[1]["flags"] and "skip" in doctor([GOOD, answer(5)])[1]["flags"]


def test_a_file_that_is_cut_is_not_ready_without_bad_rows(here, capsys):
    (here / "a.jsonl.gz").write_bytes(gzip.compress(f"{json.dumps(GOOD)}\n".encode() * 9)[:-9])
    assert cli.main(["data", "doctor", "a.jsonl.gz", "--data.bad_rows", "skip", "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["ready"]


def test_keys_empty_answers_and_repetitions_are_counted(doctor):
    odd = {**answer(" "), "id": 3, "system": "Be brief."}
    called = answer(None, tool_calls=[{"type": "function"}])
    _, found = doctor([GOOD, odd, called, answer("x", id=1), GOOD, {**GOOD, "id": 4}, odd])
    assert found["unused_keys"] == {"'id' of rows": 3}
    assert found["empty_answers"] == {"rows": 2, "first": "a.jsonl:2"}
    assert found["exact_duplicates"] == {"rows": 3, "first": "a.jsonl:5", "like": "a.jsonl:1"}


def test_lengths_and_masks_are_those_of_the_encoder(here, doctor):
    folder = tokenizer_folder(here / "tokenizer")
    rows = [*conversations(40), answer("x", weight=0), answer("y", id=1)]
    code, found = doctor(rows, "--tokenizer.path", folder)
    config = TokenizerConfig(path=str(folder))
    data = DataConfig(source="jsonl", format="chat")
    encoder = chat_encoder(data, config, build_tokenizer(config))
    samples = list(encoder.encode(read_conversations(data, [here / "a.jsonl"])))
    lengths = sorted(len(sample.ids) for sample in samples)
    tokens = found["tokens"]
    assert code == 0
    assert (tokens["total"], tokens["least"], tokens["most"]) == (sum(lengths), lengths[0], lengths[-1])
    assert tokens["trained"] == sum(int(sample.is_target.sum()) for sample in samples)
    assert found["conversations_without_a_token_to_train_on"] == {"rows": 1, "first": "a.jsonl:41"}
    assert found["unused_keys"] == {"'id' of messages": 1}
    run = run_of(*found["flags"])
    assert run.training.seq_len // 2 < lengths[-1] <= run.training.seq_len and run.model.attention_mask == "document"


def test_a_conversation_that_the_template_refuses_is_one_row_of_many(here, doctor):
    folder = tokenizer_folder(here / "tokenizer")
    refuse = "{% if 'bad' in messages[0].content %}{{ raise_exception('no') }}{% endif %}<|endoftext|>" * 2
    (folder / "chat_template.jinja").write_text(refuse + CHATML)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}')
    bad = {"messages": [{"role": "user", "content": "bad"}, {"role": "assistant", "content": "x"}]}
    code, found = doctor([GOOD, bad, GOOD], "--tokenizer.path", folder)
    assert code == 1 and [one["first"] for one in found["refused"]] == ["a.jsonl:2"]
    assert found["double_BOS"] == {"rows": 2, "first": "a.jsonl:1"} and found["tokens"]["total"] > 0


def test_a_corpus_without_a_token_to_train_on_is_not_ready(here, doctor):
    code, found = doctor([answer("x", weight=0)], "--tokenizer.path", tokenizer_folder(here / "tokenizer"))
    assert (code, found["refused"], found["tokens"]["trained"]) == (1, [], 0)


def test_documents_are_counted_with_the_token_that_ends_them(doctor):
    rows = [{"text": "abc", "url": 1}, {"text": ""}, {"text": "abcde"}, {"text": "abc"}]
    code, found = doctor(rows, "--tokenizer.path", "byte")
    assert (code, found["format"], found["rows"]) == (0, "documents", 4)
    assert found["tokens"]["total"] == found["tokens"]["trained"] == 4 + 6 + 4
    assert found["empty_documents"]["first"] == "a.jsonl:2"
    assert found["exact_duplicates"] == {"rows": 1, "first": "a.jsonl:4", "like": "a.jsonl:1"}
    assert found["unused_keys"] == {"'url' of rows": 1}


def test_parquet_is_read_by_its_columns(here, doctor):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{**GOOD, "id": 1}, {"messages": [ASK], "id": 2}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), here / "a.parquet")
    assert cli.main(["data", "doctor", "a.parquet"]) == 1
    (here / "rows").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows[:1]), here / "rows/b.parquet")
    assert cli.main(["data", "doctor", "rows"]) == 0


def test_near_duplicates_are_like_an_earlier_row(doctor):
    pytest.importorskip("rensa")
    text = "the quick brown fox jumps over the lazy dog and runs from the very slow cat at "
    rows = [answer(text + "night"), answer("something else is written here"), answer(text + "dawn")]
    assert "near_duplicates" not in doctor(rows)[1]
    assert doctor(rows, "--near")[1]["near_duplicates"] == {"rows": 1, "first": "a.jsonl:3", "like": "a.jsonl:1"}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["doctor", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["doctor", ".", "--data.source", "tokens"], "has no files with rows"),
        (["tokenizer", "a", "--data.path", "nowhere"], "nowhere does not exist"),
        (["tokenizer", "a", "--vocab", "10"], "257 ids"),
        (["tokenizer", "full"], "full exists and is not an empty folder"),
    ],
)
def test_a_wrong_place_is_one_line_and_exit_code_2(argv, says, here, capsys):
    (here / "full").mkdir()
    (here / "full/file").write_text("x")
    assert cli.main(["data", *argv]) == 2
    assert says in capsys.readouterr().err


def test_the_text_names_the_first_line_of_each_reason(here, capsys):
    (here / "a.jsonl").write_text(f"{json.dumps(GOOD)}\n{{\n")
    assert cli.main(["data", "doctor", "a.jsonl"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("a.jsonl: jsonl, chat, 2 rows, 1 refused\n  1 refused, first a.jsonl:2: the line is not JSON")
    assert out.splitlines()[-1].startswith("flags: --data.source jsonl --data.format chat --data.path a.jsonl")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_bar_is_for_terminals_only(is_terminal):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    bar = Bar(100, stream)
    bar.show(50, 7)
    bar.close()
    assert ("50% " in stream.getvalue() and "7 rows" in stream.getvalue()) == is_terminal
    assert bool(stream.getvalue()) == is_terminal


def test_a_tokenizer_is_the_same_twice_and_a_run_takes_it(here, capsys, monkeypatch):
    write_conversations(here / "a.jsonl", 60)
    hub = here / "hub/models--meta-llama--Llama-3.2-1B/snapshots/1"
    tokenizer_folder(hub)
    monkeypatch.setenv("HF_HUB_CACHE", str(here / "hub"))
    for name in ("one", "two"):
        assert cli.main(["data", "tokenizer", name, "--data.path", "a.jsonl", "--vocab", "300"]) == 0
    assert (here / "one/tokenizer.json").read_bytes() == (here / "two/tokenizer.json").read_bytes()
    built = build_tokenizer(TokenizerConfig(path="one"))
    assert (built.vocab_size, built.eos_id) == (300, 0)
    text = "Answer 3.1! ¿Où?"
    assert built.decode(built.encode(text)) == text and len(built.encode(text)) < len(text.encode())
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in table[1:3]] == [["one", "300"], ["byte", "257"]] and table[2][2] == "1.00"
    assert table[3][:2] == ["Llama", "3"] and float(table[1][2]) > 1


BASELINE = """
from pathlib import Path
from crius.config.data import DataConfig, TokenizerConfig
from crius.data.chat.conversations import read_conversations
from crius.data.chat.mask import _batches, _task
from crius.tokens.tokenizer import build_tokenizer
from crius.data.work import chat_encoder
config = TokenizerConfig(path="tokenizer")
data = DataConfig(source="jsonl", format="chat")
tokenizer = build_tokenizer(config)
with chat_encoder(data, config, tokenizer)._renderer() as renderer:
    for batch in _batches(read_conversations(data, [Path("a.jsonl")])):
        tokenizer.encode_marked_texts([answer.text for answer in renderer.render([_task(chat) for chat in batch])])
"""


@pytest.mark.slow  # 60 CPU seconds
def test_the_doctor_is_as_fast_as_what_it_reads_by_and_needs_little_memory(here):
    """A tenth of 200,000 conversations of 200 tokens: 3 CPU seconds for the rows, 1.6 times rendering with masks."""
    from pydoc_data.topics import topics

    text = " ".join(" ".join(topics.values()).split())
    roles = ("user", "assistant", "user", "assistant")
    with (here / "a.jsonl").open("w") as file:
        for number in range(20_000):
            places = range(number * 37, number * 37 + 800, 200)
            parts = [text[place % 300_000 :][:200] for place in places]
            turns = [{"role": role, "content": part} for role, part in zip(roles, parts, strict=True)]
            file.write(json.dumps({"messages": turns}) + "\n")
    assert cli.main(["data", "tokenizer", "tokenizer", "--data.path", "a.jsonl"]) == 0
    (here / "tokenizer/chat_template.jinja").write_text(CHATML)

    def cost(*argv):
        """CPU seconds and the most memory in KB."""
        process = subprocess.Popen([sys.executable, *argv], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        assert status == 0
        return used.ru_utime + used.ru_stime, used.ru_maxrss

    doctor = ("-m", "crius", "data", "doctor", "a.jsonl")
    start, _ = cost(*doctor, "--help")
    rows, most = cost(*doctor)
    alone, _ = cost("-c", BASELINE)
    both, most_of_both = cost(*doctor, "--tokenizer.path", "tokenizer")
    assert rows - start < 3 and both < 1.6 * alone
    assert max(most, most_of_both) < 500_000

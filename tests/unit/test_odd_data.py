"""Rows as people have them: each file is read with the right text and mask, or refused with words that help."""

import gzip
import itertools
import json

import pytest
from sft_samples import tokenizer_folder

from crius.__main__ import main
from crius.cli.settings import run_of
from crius.config.data import DataConfig, TokenizerConfig, ValidationConfig
from crius.data.chat.conversations import Conversation
from crius.data.corpus import open_corpus
from crius.data.documents import find_files
from crius.data.infer import infer
from crius.data.prepare import prepare
from crius.data.rows import BAD_ROWS, Refusals
from crius.data.show import CLOSE, OPEN
from crius.data.work import chat_encoder, read_records
from crius.errors import CriusError, DataError
from crius.tokens.tokenizer import build_tokenizer

HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
ROW = {"messages": HI}
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
PAIR = {"prompt": "Hi", "completion": "Ho"}
ALPACA = {"instruction": "Hi", "input": "", "output": "Ho"}
SPOKEN = [{"speaker": "customer", "utterance": "Hi"}, {"speaker": "agent", "utterance": "Ho"}]
SPEAKERS = "conversation=messages,speaker=role,utterance=content,customer=user,agent=assistant"
QUOTED = json.dumps(HI).replace('"', '""')
BOM = b"\xef\xbb\xbf"


def said(*messages):
    """Text of a conversation in ChatML with marks around what is trained on; messages are (role, text, is trained)."""
    text = ""
    for role, content, is_trained in messages:
        turn = f"{content}<|im_end|>\n"
        text += f"<|im_start|>{role}\n" + (f"{OPEN}{turn}{CLOSE}" if is_trained else turn)
    return text


WANT = [said(("user", "Hi", False), ("assistant", "Ho", True))]


def lines(*rows, end="\n"):
    return "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + end for row in rows)


def parquet(*rows):
    def write(path):
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(list(rows)), path)

    return write


def asked(question):
    return [said(("user", question, False), ("assistant", "Ho", True))]


def with_system(text):
    return [said(("system", text, False), ("user", "Hi", False), ("assistant", "Ho", True))]


# name of a file, or of a folder of files by name: content; flags; texts
READ = {
    "messages": ({"a.jsonl": lines(ROW)}, {}, WANT),
    "ndjson": ({"a.ndjson": lines(ROW)}, {}, WANT),
    "lines in .json": ({"a.json": lines(ROW, ROW)}, {}, WANT * 2),
    "one line in .json": ({"a.json": lines(ROW)}, {}, WANT),
    "an array": ({"a.json": json.dumps([ROW, ROW], indent=2)}, {}, WANT * 2),
    "an array in one line": ({"a.json": json.dumps([ROW, ROW])}, {}, WANT * 2),
    "an array in .jsonl": ({"a.jsonl": "\n[\n" + ",\n".join([json.dumps(ROW)] * 3) + "\n]\n\n"}, {}, WANT * 3),
    "an array behind a BOM": ({"a.json": BOM + json.dumps([ROW], indent=1).encode()}, {}, WANT),
    "an array with CRLF": ({"a.json": json.dumps([ROW, ROW], indent=1).replace("\n", "\r\n")}, {}, WANT * 2),
    "a packed array": ({"a.json.gz": gzip.compress(json.dumps([ROW]).encode())}, {}, WANT),
    "no suffix": ({"chats": lines(ROW)}, {}, WANT),
    "a BOM": ({"a.jsonl": BOM + lines(ROW).encode()}, {}, WANT),
    "CRLF": ({"a.jsonl": lines(ROW, ROW, end="\r\n")}, {}, WANT * 2),
    "commas behind rows": ({"a.jsonl": lines(ROW, ROW, end=",\r\n")}, {}, WANT * 2),
    "packed lines": ({"a.jsonl.gz": gzip.compress(lines(ROW).encode())}, {}, WANT),
    "blank lines and no last newline": ({"a.jsonl": "\n\n" + lines(ROW) + "  \n" + json.dumps(ROW)}, {}, WANT * 2),
    "ShareGPT": ({"a.jsonl": lines({"conversations": SHAREGPT})}, {}, WANT),
    "ShareGPT, system": ({"a.jsonl": lines({"system": "S", "conversations": SHAREGPT})}, {}, with_system("S")),
    "bots": ({"a.jsonl": lines({"messages": [HI[0], HI[1] | {"role": "bot"}]})}, {}, WANT),
    "capitals": ({"a.jsonl": lines({"messages": [HI[0] | {"role": "User"}, HI[1] | {"role": "ASSISTANT"}]})}, {}, WANT),
    "JSON text": ({"a.jsonl": lines({"messages": json.dumps(HI)})}, {}, WANT),
    "JSON text in CSV": ({"a.csv": f'id,messages\n1,"{QUOTED}"\n'}, {}, WANT),
    "CSV": ({"a.csv": "prompt,completion\nHi,Ho\nHi,Ho\n"}, {}, WANT * 2),
    "CSV of Excel": ({"a.csv": BOM + b"question; answer\r\nHi;Ho\r\n"}, {}, WANT),
    "TSV": ({"a.tsv": 'prompt\tcompletion\nHi, "you\tHo\n'}, {}, asked('Hi, "you')),
    "CSV, quoted": ({"a.csv": 'prompt,completion\n"H\ni, ""x""",Ho\n\nHi,Ho\n'}, {}, asked('H\ni, "x"') + WANT),
    "packed CSV": ({"a.csv.gz": gzip.compress(b"prompt,completion\nHi,Ho\n")}, {}, WANT),
    "Alpaca": ({"a.jsonl": lines(ALPACA)}, {}, WANT),
    "Alpaca, array": ({"a.json": json.dumps([ALPACA] * 2, indent=2)}, {}, WANT * 2),
    "Alpaca, input": (
        {"a.jsonl": lines(ALPACA | {"input": "x"}, ALPACA)},
        {"data.columns": ["instruction=prompt,input=prompt,output=completion"]},
        asked("Hi\n\nx") + WANT,
    ),
    "speakers": ({"a.jsonl": lines({"conversation": SPOKEN})}, {"data.columns": [SPEAKERS]}, WANT),
    "speakers, flags": ({"a.jsonl": lines({"conversation": SPOKEN})}, {"data.columns": SPEAKERS.split(",")}, WANT),
    "a column": ({"a.jsonl": lines({"chat": HI})}, {"data.columns": ["chat"]}, WANT),
    "two columns": ({"a.csv": "q,a\nHi,Ho\n"}, {"data.columns": ["q", "a"]}, WANT),
    "two meanings": ({"a.csv": "q,a\nHi,Ho\n"}, {"data.columns": ["q=prompt,a=completion"]}, WANT),
    "a column in an object": ({"a.jsonl": lines({"d": {"chat": HI}})}, {"data.columns": ["d.chat"]}, WANT),
    "a meaning in an object": ({"a.jsonl": lines({"d": {"e": SHAREGPT}})}, {"data.columns": ["d.e=messages"]}, WANT),
    "a system by meaning": (
        {"a.jsonl": lines(PAIR | {"sys": "S"})},
        {"data.columns": ["prompt=prompt,completion=completion,sys=system"]},
        with_system("S"),
    ),
    "parts": (
        {"a.jsonl": lines({"messages": [HI[0] | {"content": [{"type": "text", "text": "Hi"}]}, HI[1]]})},
        {},
        WANT,
    ),
    "parts without keys": ({"a.jsonl": lines({"messages": [HI[0] | {"content": ["H", "i"]}, HI[1]]})}, {}, WANT),
    "weights": (
        {"a.jsonl": lines({"messages": [*HI, HI[0], HI[1] | {"weight": 0}, HI[0], HI[1] | {"train": False}]})},
        {},
        [
            said(
                *[("user", "Hi", False), ("assistant", "Ho", True)],
                *[("user", "Hi", False), ("assistant", "Ho", False)] * 2,
            )
        ],
    ),
    "keys of null": ({"a.jsonl": lines({"tools": None, "messages": [HI[0] | {"name": None}, HI[1]]})}, {}, WANT),
    "other scripts": ({"a.jsonl": lines(PAIR | {"prompt": "Grüße, 你好"})}, {}, asked("Grüße, 你好")),
    "parquet": ({"a.parquet": parquet(ROW | {"id": 1}, ROW | {"id": 2})}, {}, WANT * 2),
    "parquet without suffix": ({"part-0": parquet(ROW)}, {}, WANT),
    "parquet, JSON in bytes": ({"a.parquet": parquet({"messages": json.dumps(HI).encode()})}, {}, WANT),
    "parquet, bytes": ({"a.parquet": parquet({"prompt": b"Hi", "completion": b"Ho"})}, {}, WANT),
    "parquet, speakers": ({"a.parquet": parquet({"conversation": SPOKEN})}, {"data.columns": [SPEAKERS]}, WANT),
    "a folder": ({"d/a.jsonl": lines(ROW), "d/b/c.jsonl.gz": gzip.compress(lines(ROW).encode())}, {}, WANT * 2),
    "a folder with notes": ({"d/a.csv": "prompt,completion\nHi,Ho", "d/info.json": "{}", "d/x.txt": "x"}, {}, WANT),
    "a folder of arrays": ({"d/a.json": json.dumps([ROW]), "d/README.md": "x"}, {}, WANT),
    "CSV and TSV": ({"d/a.csv": "prompt,completion\nHi,Ho", "d/b.tsv": "prompt\tcompletion\nHi\tHo"}, {}, WANT * 2),
    "texts": ({"a.jsonl": lines({"text": "one"}, {"text": "", "id": 1}, {"text": "two"})}, {}, ["one", "two"]),
    "texts, array": ({"a.json": json.dumps([{"text": "one"}, {"text": "two"}])}, {}, ["one", "two"]),
    "texts, CSV": ({"a.csv": 'id,text\n1,"one, two"\n2,\n'}, {}, ["one, two"]),
    "texts, bytes": ({"a.parquet": parquet({"text": "grün".encode()})}, {}, ["grün"]),
    "texts by name": ({"a.jsonl": lines({"body": "one"})}, {"data.text_field": ["body"]}, ["one"]),
    "texts in an object": ({"a.jsonl": lines({"d": {"text": "one"}})}, {"data.text_field": ["d.text"]}, ["one"]),
    "texts of a dotted key": ({"a.jsonl": lines({"d.text": "one"})}, {"data.text_field": ["d.text"]}, ["one"]),
    "texts of a struct": ({"a.parquet": parquet({"d": {"text": "one"}})}, {"data.text_field": ["d.text"]}, ["one"]),
    "a text and a pair": ({"a.jsonl": lines(ALPACA | {"text": "one"})}, {}, ["one"]),
    "a text file": ({"a.txt": "one\r\ntwo\n"}, {}, ["one\r\ntwo\n"]),
    "Markdown": ({"a.md": "# one\n"}, {}, ["# one\n"]),
    "a text without suffix": ({"LICENSE": "[one]\n"}, {}, ["[one]\n"]),
    "an empty conversation": (
        {"a.jsonl": lines({"conversations": []}, ROW, ROW)},
        {"data.bad_rows": ["skip"]},
        WANT * 2,
    ),
    "a null text": ({"a.jsonl": lines({"text": "one"}, {"text": None})}, {"data.bad_rows": ["skip"]}, ["one"]),
    "a broken line": ({"a.jsonl": lines(ROW, '{"messages": [', ROW)}, {"data.bad_rows": ["skip"]}, WANT * 2),
    "a short row": ({"a.csv": "prompt,completion\nHi,Ho\nHi\nHi,Ho\n"}, {"data.bad_rows": ["skip"]}, WANT * 2),
    "a broken quote": ({"a.csv": 'prompt,completion\n"H"i,Ho\nHi,Ho\n'}, {"data.bad_rows": ["skip"]}, WANT),
    "a line in Latin-1": (
        {"a.jsonl": lines(ROW).encode() + '{"prompt": "ü"}\n'.encode("latin1")},
        {"data.bad_rows": ["skip"]},
        WANT,
    ),
}

# content; flags; words of the error
REFUSED = {
    "objects in several lines": ({"a.jsonl": json.dumps(ROW, indent=2)}, {}, "jq -c . FILE writes them"),
    "a list of Python": ({"a.csv": f'messages\n"{HI}"\n'}, {}, "text can be the JSON of such a list"),
    "UTF-16": ({"a.jsonl": lines(ROW).encode("utf-16")}, {}, "iconv -f UTF-16 -t UTF-8"),
    "Latin-1": ({"a.csv": "prompt,completion\nHi,Hü\n".encode("latin1")}, {}, "iconv -f LATIN1 -t UTF-8"),
    "a spreadsheet": ({"a.csv": b"PK\x03\x04\xff\xff"}, {}, "looks compressed: unpack it first"),
    "no row": ({"a.csv": "prompt,completion\n"}, {"data.columns": ["a=prompt,b=completion"]}, "has no conversation"),
    "a cut array": ({"a.json": json.dumps([ROW, ROW])[:-30]}, {}, "the array is not JSON"),
    "more behind an array": ({"a.json": f"[\n{json.dumps(ROW)}]\n3"}, {}, "the array is not JSON: Extra data"),
    "Alpaca with input": (
        {"a.jsonl": lines(ALPACA | {"input": "x"})},
        {},
        "--data.columns instruction=prompt,input=prompt,output=completion",
    ),
    "Alpaca with history": (
        {"a.jsonl": lines(ALPACA | {"history": [["a", "b"]]})},
        {},
        "--data.columns instruction=prompt,output=completion leaves out",
    ),
    "unknown keys": ({"a.jsonl": lines({"conversation": SPOKEN})}, {}, "--data.columns conversation if these are"),
    "unknown keys of messages": (
        {"a.jsonl": lines({"conversation": SPOKEN})},
        {"data.columns": ["conversation"]},
        "--data.columns speaker=role,utterance=content",
    ),
    "an unknown role": ({"a.jsonl": lines({"messages": [HI[0] | {"role": "customer"}]})}, {}, "customer=user"),
    "unknown roles": (
        {"a.jsonl": lines({"messages": [HI[0] | {"role": "my customer"}, HI[1] | {"role": "agent"}]})},
        {},
        "--data.columns 'my customer=user,agent=assistant'",
    ),
    "an unknown role that answers": (
        {"a.jsonl": lines({"messages": [HI[0], HI[1] | {"role": "agent"}]})},
        {},
        "--data.columns agent=assistant",
    ),
    "rows under a key": (
        {"a.json": json.dumps({"data": [{"messages": HI}] * 3})},
        {},
        """python -c 'import json; print(json.dumps(json.load(open(""",
    ),
    "rows under two keys": ({"a.json": json.dumps({"a": [ROW], "b": [ROW] * 2})}, {}, "whose 'a' has 1 rows"),
    "rows of Python": ({"a.jsonl": f"{ROW}\n"}, {}, "json.dumps(row)"),
    "a number": ({"a.jsonl": lines(PAIR | {"completion": 5})}, {}, "write text there"),
    "a null": ({"a.jsonl": lines({"messages": [HI[0], HI[1] | {"content": None}]})}, {}, "write its text"),
    "messages without an object": ({"a.jsonl": lines(HI, HI)}, {}, "jq -c '{messages: .}' FILE"),
    "a list of texts": ({"a.json": '["Hi", "Ho"]'}, {}, '{"text": "Once"}'),
    "a role misspelled": ({"a.jsonl": lines({"messages": [HI[0] | {"role": "asistant"}]})}, {}, "asistant=assistant"),
    "a missing value": ({"a.jsonl": lines({"d": {}})}, {"data.columns": ["d.chat"]}, "the row has no value d.chat"),
    "two kinds": ({"a.jsonl": lines(ROW), "b.csv": "text\nx\n"}, {}, "a.jsonl is jsonl data, and"),
    "a folder of two kinds": ({"d/a.jsonl": lines(ROW), "d/b.csv": "text\nx\n"}, {}, "--data.source csv or --data"),
    "Arrow files": ({"d/data-0.arrow": b"x", "d/state.json": "{}"}, {}, "to_parquet"),
    "no first row": ({"a.csv": "Hi,Ho\nA,B\n"}, {}, "no key 'text'; its keys: Hi, Ho"),
    "a column twice": ({"a.csv": "text,text\nA,B\n"}, {}, "two columns are called 'text'"),
    "pairs in lists": ({"a.jsonl": lines({"conversations": [["Hi", "Ho"]]})}, {}, "message 1 is a list, not an object"),
    "an image": (
        {"a.jsonl": lines({"messages": [HI[0] | {"content": [{"type": "image"}]}]})},
        {},
        "is not text: image",
    ),
    "no answer": ({"a.jsonl": lines({"messages": HI[:1]})}, {}, "no message of the assistant"),
    "bytes that are no text": ({"a.parquet": parquet({"text": b"\xff"})}, {}, "bytes that are not UTF-8: 0xff"),
    "a null text later": ({"a.jsonl": lines({"text": "one"}, {"text": None})}, {}, "--data.bad_rows skip"),
    "two null texts": (
        {"a.jsonl": lines({"text": "one"}, {"text": None}, {"text": 5})},
        {"data.bad_rows": ["skip"]},
        "2 of 3 rows cannot be used; at most 1 %",
    ),
}


def write(folder, files):
    """Write the files, and return the paths that a user would give."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [str(folder / name) for name in dict.fromkeys(name.split("/")[0] for name in files)]


def records(folder, files, flags):
    """What a run reads, by the values that it infers."""
    given = {"data.path": write(folder, files), **flags}
    settings = {name.removeprefix("data."): value[-1] for name, value in given.items()} | {
        name.removeprefix("data."): value for name, value in infer(given).items() if name.startswith("data.")
    }
    lists = {name: tuple(given.get(f"data.{name}", ())) for name in ("path", "columns")}
    data = DataConfig(**settings | lists)
    refusals = Refusals(data.bad_rows)
    found = list(refusals.accepted(read_records(data, find_files(data))))
    refusals.text()
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return TokenizerConfig(path=str(tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))))


@pytest.fixture(scope="module")
def texts(tmp_path_factory, tokenizer):
    """The texts of all inputs, with marks; all conversations are encoded together, which is cheap."""
    built = build_tokenizer(tokenizer)
    found = {}
    for name, (files, flags, _) in READ.items():
        try:
            found[name] = records(tmp_path_factory.mktemp("data"), files, flags)
        except CriusError as error:
            found[name] = [error]
    chats = [one for rows in found.values() for one in rows if isinstance(one, Conversation)]
    samples = chat_encoder(DataConfig(format="chat"), tokenizer, built).encode(chats)
    marked = {id(chat): text_of(sample, built) for chat, sample in zip(chats, samples, strict=True)}
    return {name: [marked.get(id(one), getattr(one, "text", str(one))) for one in rows] for name, rows in found.items()}


def text_of(sample, tokenizer):
    text = ""
    for is_target, run in itertools.groupby(zip(sample.ids, sample.is_target, strict=True), key=lambda one: one[1]):
        part = tokenizer.decode([int(token) for token, _ in run], with_special=True)
        text += f"{OPEN}{part}{CLOSE}" if is_target else part
    return text


@pytest.mark.parametrize("name", READ)
def test_an_odd_file_is_read_with_the_right_text_and_mask(name, texts):
    assert texts[name] == READ[name][2]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_in_words_that_help(name, tmp_path):
    files, flags, words = REFUSED[name]
    with pytest.raises(CriusError) as caught:
        records(tmp_path, files, flags)
    assert words in str(caught.value)


def test_a_folder_of_two_kinds_is_one_problem(tmp_path, capsys):
    write(tmp_path, {"a.jsonl": lines(ROW), "b.csv": "text\nx\n"})
    assert main(["config", "show", "--recipe", "tune", "--data.path", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"ConfigError: folder {tmp_path} has files of several kinds")


# flags behind --data.path FILE with conversations: source, format and mask of the run
DECIDED = {
    "": ("jsonl", "chat", "document"),
    "--data.format documents": ("jsonl", "documents", "causal"),
    "--data.source text": ("text", "documents", "causal"),
    "--model.attention_mask causal": ("jsonl", "chat", "causal"),
    "--data.no_packing": ("jsonl", "chat", "causal"),
    "--config own.toml": ("csv", "documents", "causal"),
    "--recipe smollm2_sft --data.path texts.csv": ("csv", "chat", "document"),
}


@pytest.mark.parametrize("flags", DECIDED)
def test_a_given_value_wins_over_what_the_data_looks_like(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path,
        {"a.jsonl": lines(ROW), "texts.csv": "text\nx\n", "own.toml": '[data]\nsource = "csv"\nformat = "documents"'},
    )
    path = [] if "--data.path" in flags else ["--data.path", "a.jsonl"]
    run = run_of(*path, *flags.split())
    assert (run.data.source, run.data.format, run.model.attention_mask) == DECIDED[flags]


TEXTS = lines(*({"text": f"text {number}"} for number in range(9)), {"text": None})


def test_rows_that_are_left_out_are_counted_by_reason_and_listed(tmp_path, tokenizer):
    refused = {"messages": [HI[0], HI[1] | {"content": "\ud83d"}]}
    write(tmp_path, {"a.jsonl": lines(*[ROW] * 250), "b.jsonl": json.dumps(refused) + "\n{\n"})
    data = DataConfig(source="jsonl", format="chat", path=(str(tmp_path),), bad_rows="skip")
    meta = prepare(data, tokenizer, tmp_path / "out")
    assert meta.num_documents == 250
    head, *rest = (tmp_path / "out" / BAD_ROWS).read_text().splitlines()
    assert head == f"# 2 of 252 rows are left out, listed in {BAD_ROWS}"
    places = [line.partition("\t")[0] for line in rest if not line.startswith("# ")]
    assert len(rest) == 4 and places == [f"{tmp_path / 'b.jsonl'}:{number}" for number in (1, 2)]


def test_a_conversation_that_the_template_refuses_is_a_bad_row(tmp_path, tokenizer):
    folder = tokenizer_folder(tmp_path / "strict")
    template = folder / "chat_template.jinja"
    rule = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the user begins') }}{% endif %}"
    template.write_text(rule + template.read_text())
    write(tmp_path, {"a.jsonl": lines({"messages": HI[::-1]}, ROW, ROW)})
    data = DataConfig(source="jsonl", format="chat", path=(str(tmp_path / "a.jsonl"),), bad_rows="skip")
    meta = prepare(data, TokenizerConfig(path=str(folder)), tmp_path / "out")
    assert meta.num_documents == 2 and "a.jsonl:1\tthe chat template" in (tmp_path / "out" / BAD_ROWS).read_text()


def test_a_cached_corpus_without_its_bad_rows_is_not_taken_for_a_whole_one(tmp_path):
    write(tmp_path, {"a.jsonl": TEXTS})
    settings = {"source": "jsonl", "path": (str(tmp_path / "a.jsonl"),), "cache_dir": str(tmp_path / "cache")}
    byte = TokenizerConfig()
    nothing = ValidationConfig(interval=0, fraction=0)
    sizes = {"seq_len": 8, "global_batch_size": 1, "vocab_size": 257, "seed": 0}
    for _ in range(2):  # tokenised, and from the cache
        corpus = open_corpus(DataConfig(**settings, bad_rows="skip"), byte, nothing, **sizes)
        assert corpus.bad_rows.startswith("# 1 of 10 rows are left out") and "a.jsonl:10\tthe" in corpus.bad_rows
    with pytest.raises(DataError, match="null, not text"):
        open_corpus(DataConfig(**settings), byte, nothing, **sizes)

"""Conversations in files: the forms that they have, and that each way to be bad is one error with file and row."""

import datetime
import decimal
import gzip
import json
import sys

import pytest

from crius.config.data import DataConfig
from crius.data import rows
from crius.data.chat.conversations import read_conversations
from crius.data.documents import find_files, read_pieces
from crius.data.rows import Refusals
from crius.errors import DataError, EnvironmentError

HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
GOOD = {"messages": HI}
CALL = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]


def zstd(content):
    return pytest.importorskip("zstandard").ZstdCompressor().compress(content)


def read(path, source="jsonl", **settings):
    data = DataConfig(format="chat", source=source, path=(str(path),), **settings)
    return list(Refusals("refuse").accepted(read_conversations(data, find_files(data))))


def write(path, *values):
    path.write_text("".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values))
    return path


def parquet(path, records, **options):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(records), path, **options)
    return path


def shown(conversation):
    return [tuple(message.values()) for message in conversation.messages]


USER, ASSISTANT = ("user", "Hi"), ("assistant", "Ho")
FORMS = {
    "messages": (GOOD, {}, [USER, ASSISTANT]),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        {},
        [USER, ASSISTANT],
    ),
    "ShareGPT with a system": (
        {"system": "S", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        {},
        [("system", "S"), USER, ASSISTANT],
    ),
    "prompt and completion": ({"prompt": "Hi", "completion": "Ho", "id": 7}, {}, [USER, ASSISTANT]),
    "prompt and response": ({"prompt": "Hi", "response": "Ho"}, {}, [USER, ASSISTANT]),
    "instruction": ({"instruction": "Hi", "input": "", "output": "Ho"}, {}, [USER, ASSISTANT]),
    "messages go first": (GOOD | {"prompt": "other", "completion": "x"}, {}, [USER, ASSISTANT]),
    "a column by name": ({"chat": HI, "messages": []}, {"columns": ("chat",)}, [USER, ASSISTANT]),
    "two columns by name": ({"q": "Hi", "a": "Ho", "prompt": 1}, {"columns": ("q", "a")}, [USER, ASSISTANT]),
    "a prompt of messages": (
        {"prompt": [*HI, {"role": "user", "content": "Hi"}], "completion": [HI[1]]},
        {},
        [USER, (*ASSISTANT, 0), USER, ASSISTANT],  # what a prompt has of the assistant has weight 0
    ),
    **{
        f"{key} {value}": (
            {"messages": [HI[0] | {key: value}, HI[1] | {key: value}, HI[1] | {key: not value}]},
            {},
            [("user", "Hi", *own), (*ASSISTANT, *first), (*ASSISTANT, *second)],
        )
        for key, value, own, first, second in (("train", False, (), (0,), ()), ("train", True, (1,), (), (0,)))
    },
    "loss false": ({"messages": [HI[0] | {"loss": True}, HI[1] | {"loss": False}]}, {}, [USER, (*ASSISTANT, 0)]),
    "masked": ({"messages": [HI[0] | {"masked": False}, HI[1] | {"masked": True}]}, {}, [USER, (*ASSISTANT, 0)]),
    "marks that agree": (
        {"messages": [HI[0], HI[1] | {"weight": 1, "train": True, "masked": False}]},
        {},
        [USER, ASSISTANT],
    ),
    "no marks but values": (
        {"messages": [HI[0], HI[1] | {"loss": 0.25, "train": "no"}]},
        {},
        [USER, (*ASSISTANT, 0.25, "no")],
    ),
    "parts of text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"text": "i"}]}, HI[1]]},
        {},
        [USER, ASSISTANT],
    ),
    "keys of null": ({"messages": [HI[0] | {"tool_calls": None, "name": None}, HI[1]]}, {}, [USER, ASSISTANT]),
    "an empty turn": ({"messages": [HI[0], {"role": "assistant", "content": ""}]}, {}, [USER, ("assistant", "")]),
    "an empty list of tools": (GOOD | {"tools": "  "}, {}, [USER, ASSISTANT]),
    "a call of a tool": (
        {"messages": [HI[0], {"role": "assistant", "content": None, "tool_calls": CALL}]},
        {},
        [USER, ("assistant", None, CALL)],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_conversation_is_read_in_every_form(form, tmp_path):
    row, settings, want = FORMS[form]
    (found,) = read(write(tmp_path / "a.jsonl", row), **settings)
    assert shown(found) == want and found.tools is None and found.where == f"{tmp_path / 'a.jsonl'}:1"


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]'])
def test_tools_are_objects_or_their_text(tools, tmp_path):
    (found,) = read(write(tmp_path / "a.jsonl", GOOD | {"tools": tools}))
    assert found.tools == ({"name": "f"},)


def row_with(**changes):
    return {"messages": [HI[0], HI[1] | changes]}


BAD = {
    "no assistant": ({"messages": HI[:1]}, "no message of the assistant"),
    "no messages": ({"messages": []}, "'messages' is empty"),
    "text for messages": ({"messages": "Hi"}, "'messages' is text, not a list"),
    "a number for messages": ({"messages": 5}, "'messages' is a number (5)"),
    "a message of text": ({"messages": [HI[0], "Ho"]}, "message 2 is text"),
    "a content of a number": (row_with(content=5), "the content of message 2 is a number (5), not text"),
    "no content": ({"messages": [HI[0], {"role": "assistant"}]}, "message 2 has no content"),
    "an image": (row_with(content=[{"type": "image", "url": "x"}]), "a part that is not text: image"),
    "an unknown role": (row_with(role="asistant"), "unknown role 'asistant'"),
    "no role": ({"messages": [{"content": "x"}, *HI]}, "message 1 has no role"),
    "a role of a list": (row_with(role=["assistant"]), "unknown role"),
    "a strange weight": (row_with(weight=0.5), "message 2 has the weight 0.5"),
    "a strange weight of a user": ({"messages": [HI[0] | {"weight": 2}, HI[1]]}, "message 1 has the weight 2"),
    "a weight and a mark": (
        row_with(weight=1, train=False),
        'trained on, and that it is not: {"weight": 1, "train": false',
    ),
    "two marks": (
        row_with(train=True, masked=True),
        'message 2 says that it is trained on, and that it is not: {"train"',
    ),
    "a mark of a user": (
        {"messages": [HI[0] | {"weight": 0, "train": True}, HI[1]]},
        "message 1 says that it is trained",
    ),
    "calls that are no list": (row_with(tool_calls={"a": 1}), "tool_calls of message 2"),
    "half a character": (row_with(content="\ud83d"), "lone surrogate \\ud83d"),
    "half a character in a call": (row_with(tool_calls=[{"a": "\ud83d"}]), "lone surrogate"),
    "a deep call": (row_with(tool_calls=json.loads("[" * 150 + "]" * 150)), "nested more than 100"),
    "tools that are no list": (GOOD | {"tools": {"a": 1}}, "'tools' is an object"),
    "a tool that is no object": (GOOD | {"tools": [{"name": "f"}, "g"]}, "'tools' is a list, not a list of objects"),
    "tools of broken text": (GOOD | {"tools": "[{"}, "not JSON"),
    "a list for a row": ([GOOD], "the row is a list"),
    "no column": ({"text": "Hi"}, "are not clear; the columns are: text"),
    "columns in an object": ({"a": {"b": "c", "d": "e"}}, "the columns are: a, a.b, a.d"),
    "two pairs": ({"prompt": "a", "completion": "b", "response": "c"}, "prompt and completion or prompt and response"),
    "a pair of a number": ({"prompt": "a", "completion": 5}, "'completion' is a number (5), not text"),
    **{
        f"a pair beside {name}": ({"instruction": "a", name: ["b"], "output": "c"}, f"has 'instruction' and {name!r}")
        for name in ("input", "context", "history", "system_prompt")
    },
    "broken JSON": ('{"messages": [', "not JSON"),
    "a preference pair": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference pairs"),
}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"chosen": HI, "rejected": HI},
    ],
)
def test_preference_pairs_are_read_with_the_columns_of_their_error(row, tmp_path):
    file = write(tmp_path / "a.jsonl", row)
    with pytest.raises(DataError) as caught:
        read(file)
    assert len(read(file, columns=tuple(caught.value.fix.split()[1::2]))) == 1


@pytest.mark.parametrize("what", BAD)
def test_a_bad_row_is_one_error_with_file_and_row(what, tmp_path):
    row, words = BAD[what]
    file = write(tmp_path / "a.jsonl", GOOD, "", row, GOOD)
    with pytest.raises(DataError) as caught:
        read(file)
    error = caught.value
    assert words in f"{error.what} {error.why}"
    assert error.where == f"{file}:3"


def test_a_column_that_is_missing_is_named_with_those_that_are_there(tmp_path):
    file = write(tmp_path / "a.jsonl", {"chat": HI})
    with pytest.raises(DataError, match="no column 'chats'; the columns are: chat") as caught:
        read(file, columns=("chats",))
    assert caught.value.fix == "--data.columns chat"
    with pytest.raises(DataError, match="no column 'chats'; the columns are: chat"):
        read(parquet(tmp_path / "a.parquet", [{"chat": HI}]), source="parquet", columns=("chats",))


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_a_file_without_a_row_is_an_error(suffix, tmp_path):
    file = tmp_path / f"a.{suffix}"
    file.write_bytes({"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstd}[suffix](b"\n\n"))
    with pytest.raises(DataError, match="has no conversation") as caught:
        read(file)
    assert caught.value.where == str(file)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_files_are_read_and_a_cut_or_damaged_one_is_an_error(kind, tmp_path):
    line = json.dumps(GOOD).encode() + b"\n"
    pack = {"gz": gzip.compress, "zst": zstd}[kind]
    content = pack(line * 500) + pack(b"".join(json.dumps(GOOD | {"id": n}).encode() + b"\n" for n in range(500)))
    file = tmp_path / f"a.jsonl.{kind}"
    file.write_bytes(content)
    assert [found.where for found in read(tmp_path)][-1] == f"{file}:1000"
    for broken in (content[:-9], content[: len(content) // 2]):
        file.write_bytes(broken)
        with pytest.raises(DataError, match="ends in the middle") as caught:
            read(file)
        assert caught.value.where == str(file)
    for broken in (b"\x00" + content[1:], content[:40] + b"\xff" * 40 + content[80:], line):
        file.write_bytes(broken)
        with pytest.raises(DataError, match=r"decompressed|cannot be read|not JSON|UTF-8") as caught:
            read(file)
        assert str(file) in caught.value.where


def test_a_file_and_the_same_one_compressed_are_refused(tmp_path):
    write(tmp_path / "a.jsonl", GOOD)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(DataError, match="the same file twice"):
        read(tmp_path)


def test_documents_are_read_from_parquet_and_from_compressed_lines(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    data = DataConfig(source="jsonl", path=(str(tmp_path),))
    assert [piece.text for piece in read_pieces(data, find_files(data))] == ["one", "two"]
    parquet(tmp_path / "a.parquet", [{"text": "one", "n": 1}, {"text": "two", "n": 2}])
    data = DataConfig(source="parquet", path=(str(tmp_path),))
    assert [piece.text for piece in read_pieces(data, find_files(data))] == ["one", "two"]
    with pytest.raises(DataError, match=r"no key 'body'; its keys: text, n") as caught:
        list(read_pieces(DataConfig(source="parquet", path=data.path, text_field="body"), find_files(data)))
    assert "text_field text" in caught.value.fix


def test_parquet_has_what_its_rows_have_and_no_more(tmp_path):
    """A column has the keys of all its rows; those that a row lacks are null in it."""
    called = {"messages": [HI[0], {"role": "assistant", "content": None, "tool_calls": CALL}], "tools": [{"name": "f"}]}
    other = [{"type": "function", "function": {"name": "g", "arguments": {"b": "x"}}}]
    again = {"messages": [HI[0], {"role": "assistant", "content": None, "tool_calls": other}], "tools": None}
    file = parquet(tmp_path / "a.parquet", [GOOD | {"tools": None}, called, again])
    plain, first, second = read(file, source="parquet")
    assert (shown(plain), plain.tools) == ([USER, ASSISTANT], None)
    assert (shown(first), first.tools) == ([USER, ("assistant", None, CALL)], ({"name": "f"},))
    assert (shown(second), second.tools) == ([USER, ("assistant", None, other)], None)
    assert [found.where for found in (plain, second)] == [f"{file}, row 1", f"{file}, row 3"]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"at": datetime.datetime(2024, 1, 2)}, "'at' of message 1 is of type datetime"),
        ({"at": b"x"}, "'at' of message 1 is of type bytes"),
        ({"at": decimal.Decimal("1.5")}, "'at' of message 1 is of type Decimal"),
        ({"role": b"x"}, "message 1 has the unknown role b'x'"),
        ({"content": b"\xff"}, "the content of message 1 is bytes that are not UTF-8"),
        ({"weight": decimal.Decimal(2)}, "message 1 has the weight"),
        ({"weight": decimal.Decimal(0), "train": True}, 'message 1 says .* it is not: {"weight": 0, "train": true}'),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_what_json_lacks_is_named_in_a_message_of_parquet(told, words, tmp_path):
    file = parquet(tmp_path / "a.parquet", [{"messages": [HI[0] | told, HI[1] | told]}])
    with pytest.raises(DataError, match=words) as caught:
        read(file, source="parquet")
    assert caught.value.where == f"{file}, row 1"


@pytest.mark.parametrize(
    ("kind", "unit", "value"), [("date32", (), 10**8), ("timestamp", ("us",), 10**18), ("duration", ("s",), 2**62)]
)
def test_a_time_of_parquet_that_python_lacks_is_an_error(kind, unit, value, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    times = pa.array([value], getattr(pa, kind)(*unit))
    message = pa.StructArray.from_arrays([pa.array(["user"]), times], ["role", "content"])
    pq.write_table(pa.table({"messages": pa.ListArray.from_arrays([0, 1], message)}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="cannot be read as parquet") as caught:
        read(tmp_path / "a.parquet", source="parquet")
    assert "as text" in caught.value.fix


def test_a_bad_row_of_parquet_is_named(tmp_path):
    file = parquet(tmp_path / "a.parquet", [GOOD, {"messages": HI[:1]}])
    with pytest.raises(DataError, match="no message of the assistant") as caught:
        read(file, source="parquet")
    assert caught.value.where == f"{file}, row 2"
    with pytest.raises(DataError, match="'id' is a number"):
        read(parquet(file, [GOOD | {"id": 5}]), source="parquet", columns=("id",))


@pytest.mark.parametrize("is_dictionary", [False, True])
def test_a_row_of_parquet_has_a_most_length_however_short_the_file_is(is_dictionary, tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 1 << 20)
    long = "x" * (3 << 20)
    for number, texts in enumerate(([long], ["a"] * 4 + [long], ["a" * 1000, "b" * 2000] * 1000)):
        column = pa.array(texts).dictionary_encode() if is_dictionary else pa.array(texts)
        pq.write_table(pa.table({"text": column}), tmp_path / f"{number}.parquet", compression="zstd")
    for number, where in enumerate(("row group 1", "row 5")):
        file = tmp_path / f"{number}.parquet"
        assert file.stat().st_size < 10_000
        with pytest.raises(DataError, match="a row is longer than 1 MiB") as caught:
            list(rows.parquet_rows(file, list))
        assert caught.value.where == f"{file}, {where}"
    assert len(list(rows.parquet_rows(tmp_path / "2.parquet", list))) == 2000


def test_a_parquet_file_that_is_cut_or_damaged_is_an_error(tmp_path):
    chats = [{"messages": [HI[0], {"role": "assistant", "content": f"{n} " * 50}]} for n in range(2000)]
    file = parquet(tmp_path / "a.parquet", chats, row_group_size=500, compression="gzip", use_dictionary=False)
    content = file.read_bytes()
    assert len(read(file, source="parquet")) == 2000
    middle = len(content) // 2
    hole = content[: middle - 2000] + bytes(4000) + content[middle + 2000 :]
    for broken, row in ((content[:-100], 1), (b"", 1), (b"messages", 1), (hole, 2)):
        file.write_bytes(broken)
        with pytest.raises(DataError, match=r"cannot be read as parquet") as caught:
            read(file, source="parquet")
        assert caught.value.where.startswith(f"{file}, row ") and (row == 1) == caught.value.where.endswith(", row 1")


@pytest.mark.parametrize(("package", "name"), [("zstandard", "a.jsonl.zst"), ("pyarrow", "a.parquet")])
def test_a_missing_package_is_named_with_an_install_line(package, name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(EnvironmentError, match=package) as caught:
        read(tmp_path / name, source="parquet" if package == "pyarrow" else "jsonl")
    assert "install" in caught.value.fix

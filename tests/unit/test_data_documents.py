"""Documents: what is read, and that each kind of bad input is one error that says where."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from crius.config.data import DataConfig
from crius.data import documents, rows
from crius.data.documents import Piece, document_text, find_files, read_pieces
from crius.data.rows import Refusals
from crius.data.source import MAX_IDENTITY, storable_identity
from crius.errors import ConfigError, DataError, MissingPathError


def read(source, *patterns, **options):
    data = DataConfig(source=source, path=tuple(map(str, patterns)), **options)
    return list(Refusals("refuse").accepted(read_pieces(data, find_files(data))))


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_files_and_globs_are_read_sorted_and_once(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        write(tmp_path / name, name)
    pieces = read("text", tmp_path / "*.txt", tmp_path / "a.txt", tmp_path / "c.md")
    assert pieces == [Piece("a.txt", True), Piece("b.txt", True), Piece("c.md", True)]


@pytest.mark.parametrize("source, suffix, other", [("text", ".txt", ".jsonl"), ("jsonl", ".jsonl", ".txt")])
def test_a_folder_stands_for_the_files_of_its_kind_in_it_and_below(tmp_path, source, suffix, other):
    folder = tmp_path / "my [books]"
    (folder / "sub" / "deep").mkdir(parents=True)
    for name in ("b", "a", "sub/c", "sub/deep/d"):
        write(folder / (name + suffix), '{"text": "x"}')
        write(folder / (name + other), "x")
    want = [folder / (name + suffix) for name in ("a", "b", "sub/c", "sub/deep/d")]
    assert list(find_files(DataConfig(source=source, path=(str(folder),)))) == want
    assert len(read(source, folder, folder / "sub", folder / f"a{suffix}")) == 4
    (tmp_path / "notes").mkdir()
    for name in ("a.jpg", "a.md"):
        write(tmp_path / "notes" / name, "x")
    with pytest.raises(
        DataError, match=rf"no {suffix} file(?s:.)*it has .jpg, .md files(?s:.)*--data.path '.*/notes/\*.md'"
    ):
        read(source, tmp_path / "notes")


def test_jsonl_skips_blank_lines_and_empty_texts_and_a_byte_order_mark(tmp_path):
    file = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "one"}\n\n  \n{"text": ""}\n{"text": "tw\\u00f6"}')
    assert read("jsonl", file) == [Piece("one", True), Piece("twö", True)]


@pytest.mark.parametrize("text", ["line\nof ü text\n  indented\n" * 40, "ü" * 500, " " * 300 + "x", "\n" * 700])
def test_a_long_text_file_is_read_in_pieces_that_join_to_it(tmp_path, monkeypatch, text):
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)
    pieces = read("text", write(tmp_path / "a.txt", text))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 1


def test_stdlib_has_the_library_without_tests_in_a_fixed_order():
    files = find_files(DataConfig())
    assert files == find_files(DataConfig())
    names = {file.name for file in files}
    assert {"argparse.py", "pathlib.py"} <= names and len(files) > 300
    assert not any(
        {"test", "tests", "idle_test", "site-packages", "__pycache__"} & set(file.parts[-4:]) for file in files
    )
    assert list(files) != sorted(files)


# where, and what the message has to say, as {name} of the file that is written
BAD_LINES = {
    "corrupt": (b'{"text": "a"}\n{"text": "b", oops}\n', ["{name}:2", "column 15"]),
    "cut short": (b'{"text": "a"}\n\n{"text": "b', ["{name}:3", "not JSON"]),
    "list": (b'{"text": "a"}\n["a"]\n', ["{name}:2", "a list", "'text'"]),
    "number too long": (b'{"text": "a"}\n{"n": ' + b"1" * 5000 + b"}\n", ["{name}:2"]),
    "deep": (b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", ["{name}:1"]),
    "other key": (b'{"txt": "a", "id": 1}\n', ["{name}:1", "txt, id", "--data.text_field txt"]),
    "unlike key": (b'{"id": 1, "body": "a"}\n', ["{name}:1", "id, body", "--data.text_field body"]),
    "question and answer": (
        b'{"id": "1", "customer": "Why so?", "reply": "So."}\n',
        ["--data.columns customer --data.columns reply if these are", "else --data.text_field customer"],
    ),
    "number": (b'{"text": "a"}\n{"text": 7}\n', ["{name}:2", "a number (7)"]),
    "null": (b'{"text": null}\n', ["{name}:1", "null"]),
    "surrogate": (b'{"text": "ab\\ud800"}\n', ["{name}:1", "surrogate \\ud800 at character 2"]),
    "not UTF-8": (b'{"text": "a"}\n{"text": "\xff"}\n', ["{name}:2", "byte 24", "0xff"]),
}


@pytest.mark.parametrize("content, wants", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_one_error_with_file_and_line(tmp_path, content, wants):
    file = write(tmp_path / "a.jsonl", content)
    with pytest.raises(DataError) as caught:
        read("jsonl", file)
    for want in wants:
        assert want.format(name=file) in str(caught.value)


def test_a_line_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 1 << 20)
    file = write(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "' + b"x" * (1 << 20))
    with pytest.raises(DataError, match=r"a.jsonl:2(?s:.)*jq -c"):
        read("jsonl", file)


@pytest.mark.parametrize("encoding", ["UTF-16", "LATIN1"])
def test_text_in_another_encoding_is_converted_by_the_command_that_is_printed(encoding, tmp_path):
    file = write(tmp_path / "my text.txt", "caf\u00e9\n".encode(encoding))
    with pytest.raises(DataError) as caught:
        read("text", file)
    command = caught.value.fix.partition(" if it is")[0]
    if shutil.which("iconv"):
        subprocess.run(command, shell=True, check=True)
        assert (tmp_path / "my text.utf8.txt").read_text(encoding="utf-8") == "caf\u00e9\n"
    assert f"-f {encoding} " in command


def test_text_that_is_not_utf8_names_line_and_byte_also_behind_the_first_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)
    file = write(tmp_path / "a.txt", b"0123456789\n" * 30 + b"abc\xfe\n")
    with pytest.raises(DataError) as caught:
        read("text", file)
    assert f"{file}:31" in str(caught.value) and "byte 333 " in str(caught.value)


def test_a_compressed_file_is_recognised(tmp_path):
    with pytest.raises(DataError, match="unpack it first"):
        read("jsonl", write(tmp_path / "a.jsonl", b"\x1f\x8b\x08\x00"))


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_paths_that_are_no_files_are_refused_with_what_to_type(tmp_path, source):
    (tmp_path / "sub").mkdir()
    (tmp_path / "file.txt").write_text("a")
    for pattern, want in {
        "none*": "no file matches",
        "none": "does not exist.*no URL is read",
        "files.txt": "--data.path .*file.txt",
        "sub": r"give another --data.path, or put \.\w+ files there",
        "su*": r"1 folders do",
    }.items():
        with pytest.raises(MissingPathError, match=f"(?s){want}"):
            read(source, tmp_path / pattern)
    with pytest.raises(DataError, match="--data.path FILE"):
        read(source)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a regular file"):
        read(source, tmp_path / "pipe")


def test_stdlib_refuses_a_path():
    with pytest.raises(ConfigError, match="takes no path"):
        find_files(DataConfig(path=("a.txt",)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_named(tmp_path):
    file = write(tmp_path / "a.txt", "a")
    file.chmod(0)
    with pytest.raises(DataError, match=r"a.txt cannot be read: Permission denied"):
        read("text", file)


@pytest.mark.parametrize("row", [{"messages": [], "id": "x"}, {"prompt": "a", "completion": "b"}])
def test_conversations_that_are_read_as_documents_are_told_how_to_be_read(row):
    with pytest.raises(DataError, match="no key 'text'") as caught:
        document_text(row, "text", "here")
    assert caught.value.fix.startswith("--data.format chat")


def test_a_file_that_vanishes_is_named(tmp_path):
    data = DataConfig(source="text", path=(str(write(tmp_path / "a.txt", "a")),))
    files = find_files(data)
    files[0].unlink()
    with pytest.raises(DataError, match=r"a.txt cannot be read: No such file"):
        list(read_pieces(data, files))


def test_keys_that_are_not_text_do_not_break_the_message():
    with pytest.raises(DataError, match="its keys: none"):
        document_text({}, "text", "here")


def test_the_corpus_opens_without_torch():
    """The parent process of a run opens the corpus before any worker exists, and torch takes 2 s to import."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import crius.data.corpus, crius.data.prepare\n"
        "assert not {'datasets', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(documents.__file__).parents[2])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([("a", True), ("b", False), ("c", True)], [("a", True), ("b", False), ("c", True)]),
        ([("a", False), ("", True)], [("a", False), ("", True)]),
        ([("a", False), ("", False)], [("a", False), ("", True)]),  # the file ends the document
        ([("", False), ("", True), ("a", True)], [("a", True)]),
        ([], []),
    ],
)
def test_documents_of_a_package_end_once_and_are_not_empty(given, wanted):
    found = documents._foreign_pieces(lambda file, field: iter(given), "mine", Path("f"), "text")
    assert [tuple(piece) for piece in found] == wanted


@pytest.mark.parametrize("given", [[("a\ud800", True)], [("a",)], [(1, True)], 3])
def test_what_a_package_gets_wrong_is_one_error_with_its_name(given):
    with pytest.raises(DataError, match="data.source mine failed on f"):
        list(documents._foreign_pieces(lambda file, field: iter(given), "mine", Path("f"), "text"))


@pytest.mark.parametrize(
    ("text", "is_kept"), [("a" * MAX_IDENTITY, True), ("a" * (MAX_IDENTITY + 1), False), ("a\n", False)]
)
def test_the_identity_of_data_is_one_that_a_checkpoint_takes(text, is_kept):
    found = storable_identity(text)
    assert found.isprintable() and len(found) <= MAX_IDENTITY
    assert (found == text) == is_kept
    assert is_kept or found.endswith(f"(sha256 {hashlib.sha256(text.encode()).hexdigest()})")

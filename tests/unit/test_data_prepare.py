"""Token folders and their cache: written whole or not at all, the same for any number of workers, built once."""

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import fork_server
import numpy as np
import pytest
from harness import ROOT, crius, parse

from crius import cli
from crius import new_folder as new_folder_module
from crius.config.data import DataConfig, TokenizerConfig
from crius.data import cache, documents, work
from crius.data import prepare as prepare_module
from crius.data.cache import cache_folder, open_cached
from crius.data.prepare import prepare
from crius.data.tokens import TokenFile
from crius.errors import ConfigError, DataError
from crius.host import Machine
from crius.tokens.tokenizer import ByteTokenizer
from crius.train.inputs import open_run_corpus, resolve

BYTE = TokenizerConfig()
FILES = ["documents.bin", "hashes.bin", "meta.json", "token_bytes.bin", "tokens.bin"]


def jsonl(folder: Path, texts, name="a.jsonl") -> DataConfig:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return DataConfig(source="jsonl", path=(str(folder / name),), cache_dir=str(folder / "cache"))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_each_document_is_followed_by_the_end_id_and_starts_where_documents_bin_says(tmp_path):
    meta = prepare(jsonl(tmp_path, ["ab", "", "c", "ü"]), BYTE, tmp_path / "out")
    file = TokenFile(tmp_path / "out")
    assert file.tokens.tolist() == [97, 98, 256, 99, 256, *"ü".encode(), 256]
    assert file.documents.tolist() == [0, 3, 5]
    assert file.token_bytes.tolist() == [1] * 256 + [0]
    assert (meta.num_tokens, meta.num_documents, meta.max_token_id, meta.dtype) == (8, 3, 256, "uint16")
    assert file.meta == meta
    assert sorted(contents(tmp_path / "out")) == FILES


def test_sha256_in_meta_is_that_of_the_files(tmp_path):
    meta = prepare(jsonl(tmp_path, ["ab"]), BYTE, tmp_path / "out")
    assert meta.sha256 == {name: cache._hash(tmp_path / "out" / name) for name in meta.sha256}


def test_any_number_of_workers_writes_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "CHUNK_CHARACTERS", 300)
    data = jsonl(tmp_path, [f"document {number} " * (number % 7) for number in range(200)])
    for workers in (1, 2, 3):
        prepare(data, BYTE, tmp_path / f"out{workers}", num_workers=workers)
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2") == contents(tmp_path / "out3")


def test_chunks_do_not_change_what_is_written(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    data = DataConfig(source="text", path=(str(tmp_path / "a.txt"),))
    prepare(data, BYTE, tmp_path / "whole")
    monkeypatch.setattr(work, "CHUNK_CHARACTERS", 30)
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)
    prepare(data, BYTE, tmp_path / "pieces")
    assert contents(tmp_path / "whole") == contents(tmp_path / "pieces")


def test_ids_above_65535_are_stored_in_32_bits(tmp_path):
    tok = ByteTokenizer()
    tok.vocab_size, tok.eos_id = 100_000, 99_999
    tok.token_bytes = lambda: np.ones(100_000, np.int32)
    pieces = [documents.Piece("a", True)]
    meta = prepare_module.write(tmp_path / "out", work.document_work(pieces, tok, BYTE), tok, source="test")
    assert meta.dtype == "uint32" and meta.max_token_id == 99_999
    assert TokenFile(tmp_path / "out").tokens.tolist() == [97, 99_999]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_fails_leaves_nothing_behind(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(work, "CHUNK_PIECES", 1)
    data = jsonl(tmp_path, ["a"] * 20)
    with open(data.path[0], "a") as file:
        file.write("{\n")
    with pytest.raises(DataError, match=r"a.jsonl:21"):
        prepare(data, BYTE, tmp_path / "out", num_workers=workers)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_an_empty_corpus_is_refused(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match=r"corpus is empty(?s:.)*a.txt(?s:.)*give files with text"):
        prepare(DataConfig(source="text", path=(str(tmp_path / "a.txt"),)), BYTE, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize("words", [5, 400, 6000])
def test_the_train_command_that_is_printed_works_as_printed(tmp_path, monkeypatch, capsys, words):
    """A tokenizer with more ids than the default model has rows, and less text than default sequences need."""
    from test_data_boundary import tokenizer_in

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my books").mkdir()
    (tmp_path / "my books" / "a.txt").write_text("the cat and the dog " * words)
    tokenizer_in(tmp_path / "tok", template="<s> $A", vocabulary=600)
    given = ["--data.source", "text", "--data.path", "my books/", "--tokenizer.path", "tok"]
    assert cli.main(["data", "prepare", "my data", *given, "--data.no_add_bos", "--tokenizer.eos_token", "</s>"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"my data: [\d,]+ tokens of 1 documents in [\d.]+ s", printed[0])
    command = shlex.split(printed[1].removeprefix("train on it: "))
    flags = command[command.index("train") + 1 :]
    assert {"tok", "my data", "</s>", "--data.no_add_bos"} <= set(flags)
    assert ("--training.seq_len" in flags) == (words < 6000) and ("--validation.interval" in flags) == (words == 5)
    config = resolve(parse(flags), Machine(device="cpu")).config
    assert config.model.vocab_size == 640  # of the 600 ids, in sixty-fours
    open_run_corpus(config, 1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data.format", "chat", "--data.columns", "a", "--data.columns", "a"], "a, a must be one or two columns"),
        (["--data.format", "chat", *["--data.columns", "a", "--data.columns", "b", "--data.columns", "c"]], "a, b, c"),
        (["--data.format", "chat", "--data.no_add_eos"], "data.add_eos has no effect with data.format chat"),
        (["--data.format", "chat", "--data.text_field", "t"], "data.text_field has no effect"),
        (["--data.train_on", "last"], "data.train_on has no effect with data.format documents"),
    ],
)
def test_a_corpus_is_prepared_under_the_rules_of_a_run(flags, said, tmp_path, capsys):
    given = ["--data.source", "jsonl", "--data.path", "a.jsonl", "--tokenizer.path", "tok"]
    assert cli.main(["data", "prepare", str(tmp_path / "out"), *given, *flags]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_folder_that_is_in_use_is_refused_and_an_empty_one_taken(tmp_path):
    data = jsonl(tmp_path, ["a"])
    (tmp_path / "out").mkdir()
    prepare(data, BYTE, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(ConfigError, match="not an empty folder"):
        prepare(data, BYTE, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    with pytest.raises(ConfigError, match="not an empty folder"):
        prepare(data, BYTE, Path(data.path[0]))
    for source in ("huggingface", "tokens"):
        with pytest.raises(DataError, match="cannot be prepared"):
            prepare(DataConfig(source=source, path=("x",)), BYTE, tmp_path / "other")


def test_a_second_opening_reads_and_tokenises_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SETTLED_NS", -(1 << 62))  # the file was written just now
    data = jsonl(tmp_path, ["a", "b"])
    first = open_cached(data, BYTE, ByteTokenizer())
    monkeypatch.setattr(cache, "write", lambda *a, **k: pytest.fail("tokenised again"))
    monkeypatch.setattr(cache, "_hash", lambda file: pytest.fail("hashed again"))
    assert open_cached(data, BYTE, ByteTokenizer()).folder == first.folder


def test_the_key_is_the_content_not_the_path_or_the_time(tmp_path):
    one = open_cached(jsonl(tmp_path, ["a"]), BYTE, ByteTokenizer())
    same = open_cached(jsonl(tmp_path, ["a"], name="b.jsonl"), BYTE, ByteTokenizer())
    other = open_cached(jsonl(tmp_path, ["b"]), BYTE, ByteTokenizer())  # same path, same size, moments later
    assert one.folder == same.folder != other.folder
    assert other.tokens.tolist() == [98, 256]


def test_another_tokenizer_field_or_fate_of_bad_rows_is_another_entry(tmp_path):
    data = jsonl(tmp_path, [])
    Path(data.path[0]).write_text('{"text": "a", "body": "a"}\n')
    tok = ByteTokenizer()
    tok.fingerprint = "other"
    folders = {open_cached(data, BYTE, tok).folder}
    for one in (data, replace(data, text_field="body"), replace(data, bad_rows="skip")):
        folders.add(open_cached(one, BYTE, ByteTokenizer()).folder)
    assert len(folders) == 4


def test_the_hash_of_a_file_that_was_changed_just_now_is_not_kept(tmp_path, monkeypatch):
    data = jsonl(tmp_path, ["a"])
    os.utime(data.path[0], ns=(0, 0))  # its other time is of now
    for is_settled in (False, True):
        monkeypatch.setattr(cache, "SETTLED_NS", -(1 << 62) if is_settled else 60 * 10**9)
        open_cached(data, BYTE, ByteTokenizer())
        assert (tmp_path / "cache" / "index").exists() == is_settled


@pytest.mark.parametrize("damage", ["tokens.bin", "documents.bin", "meta.json"])
def test_a_damaged_entry_is_built_again_and_says_so(tmp_path, damage, caplog):
    data = jsonl(tmp_path, ["abc", "d"])
    folder = open_cached(data, BYTE, ByteTokenizer()).folder
    want = contents(folder)
    (folder / damage).write_bytes(want[damage][:-3])
    assert contents(open_cached(data, BYTE, ByteTokenizer()).folder) == want
    assert "tokenised again" in caplog.text and damage in caplog.text


def test_a_damaged_index_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SETTLED_NS", -(1 << 62))
    data = jsonl(tmp_path, ["a"])
    folder = open_cached(data, BYTE, ByteTokenizer()).folder
    (index,) = (tmp_path / "cache" / "index").iterdir()
    for content in (b"{", b"[]", b'{"a": 1}', b"\xff"):
        index.write_bytes(content)
        assert open_cached(data, BYTE, ByteTokenizer()).folder == folder


def test_a_failed_build_leaves_no_entry_and_fails_again_the_same_way(tmp_path):
    data = jsonl(tmp_path, ["a"])
    with open(data.path[0], "a") as file:
        file.write("{\n")
    errors = []
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            open_cached(data, BYTE, ByteTokenizer())
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert [path.suffix for path in (tmp_path / "cache" / "tokens").iterdir()] == [".lock"]


def test_what_a_killed_writer_left_is_removed(tmp_path):
    data = jsonl(tmp_path, ["a"])
    folder = open_cached(data, BYTE, ByteTokenizer()).folder
    (folder / "tokens.bin").unlink()
    leftovers = [folder.with_name(f"{name}.partial-0") for name in (folder.name, "0" * 32, "1" * 32)]
    for leftover in leftovers:
        leftover.mkdir()
    with new_folder_module._locked(leftovers[2]):  # written now
        open_cached(data, BYTE, ByteTokenizer())
    assert [leftover.exists() for leftover in leftovers] == [False, False, True]


def test_a_folder_that_is_collected_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    real, taken = new_folder_module._locked, []

    def locked(folder, *flags):
        if not taken:
            taken.append(folder.rmdir())
        return real(folder, *flags)

    monkeypatch.setattr(new_folder_module, "_locked", locked)
    prepare(jsonl(tmp_path, ["a"]), BYTE, tmp_path / "out")
    assert taken and sorted(contents(tmp_path / "out")) == FILES


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    data = jsonl(tmp_path, ["a"])
    real = cache.write

    def change(*args, **options):
        real(*args, **options)
        jsonl(tmp_path, ["other"])

    monkeypatch.setattr(cache, "write", change)
    with pytest.raises(DataError, match=r"a.jsonl changed while it was read"):
        open_cached(data, BYTE, ByteTokenizer())


def test_a_cache_that_cannot_be_written_names_the_flag(tmp_path):
    data = jsonl(tmp_path, ["a"])
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(DataError, match="--data.cache_dir DIR"):
        open_cached(data, BYTE, ByteTokenizer())


def test_the_cache_is_where_the_config_or_xdg_says(monkeypatch, tmp_path):
    assert cache_folder(DataConfig(cache_dir=str(tmp_path))) == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(DataConfig()) == tmp_path / "crius"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(DataConfig()) == tmp_path / ".cache" / "crius"


OPEN = """
import logging, sys, time
from crius.config.data import DataConfig
from crius.config.data import TokenizerConfig
from crius.data import cache, work
from crius.tokens.tokenizer import ByteTokenizer
logging.basicConfig(level="INFO", stream=sys.stdout)
real = work.read_pieces
def slow(*args):
    time.sleep(0.5)
    yield from real(*args)
work.read_pieces = slow
data = DataConfig(source="jsonl", path=(sys.argv[1],), cache_dir=sys.argv[2])
print("tokens", cache.open_cached(data, TokenizerConfig(), ByteTokenizer()).tokens.tolist())
"""


def test_processes_that_open_at_once_tokenise_once(tmp_path):
    data = jsonl(tmp_path, ["a", "b"])
    command = [sys.executable, "-c", OPEN, data.path[0], data.cache_dir]
    root = Path(cache.__file__).parents[2]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2)]
    logs = [worker.communicate(timeout=60)[0] for worker in workers]
    assert all("tokens [97, 256, 98, 256]" in log for log in logs)
    assert sum(log.count("tokenised jsonl") for log in logs) == 1


def test_what_a_killed_writer_left_is_removed_and_what_another_writes_now_is_not(tmp_path):
    data = jsonl(tmp_path, ["a"])
    left, written = tmp_path / "out.partial-left", tmp_path / "out.partial-written"
    left.mkdir()
    written.mkdir()
    with new_folder_module._locked(written):
        prepare(data, BYTE, tmp_path / "out")
    assert not left.exists() and written.exists()


ENDLESS = """
import itertools, sys, time
from multiprocessing.connection import Connection
from crius import cli
from crius.data import work
from crius.data.documents import Piece
work.CHUNK_PIECES = 1
def endless(data, files):
    for number in itertools.count():
        if number == 8:
            print("writes", flush=True)
        yield Piece("some text", True)
work.read_pieces = endless
if __name__ == "__mp_main__":  # a worker: a signal meets it halfway through a result
    send = Connection._send
    def slowly(self, content):
        send(self, content[:9])
        time.sleep(0.3)
        send(self, content[9:])
    Connection._send = slowly
if __name__ == "__main__":
    sys.exit(cli.main(["data", "prepare", "out", "--num_workers", "2"]))
"""


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [found for child in map(int, children) for found in (child, *descendants(child))]


@pytest.mark.long
def test_the_train_command_that_is_printed_trains(tmp_path):
    from test_data_boundary import tokenizer_in

    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("the cat and the dog " * 400)
    tokenizer_in(tmp_path / "tok", template="<s> $A", vocabulary=600)
    flags = ["--data.source", "text", "--data.path", "books/", "--tokenizer.path", "tok/", "--num_workers", "1"]
    environ = {"PATH": f"{fork_server.client().parent}:{os.environ['PATH']}"}
    done = crius("data", "prepare", "mydata", *flags, cwd=tmp_path, **environ)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()[1].removeprefix("train on it: ")
    ran = subprocess.run(
        f"{printed} --training.steps 1 --model.num_layers 1",
        **{"shell": True, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120, "check": False},
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )
    assert ran.returncode == 0 and "step 1/1" in ran.stdout + ran.stderr, ran.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_or_killed_preparation_ends_and_leaves_no_process_semaphore_or_folder(tmp_path, number):
    (tmp_path / "endless.py").write_text(ENDLESS)
    (tmp_path / "tmp").mkdir()
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    writer = subprocess.Popen([sys.executable, "endless.py"], stdout=subprocess.PIPE, cwd=tmp_path, env=environ)
    assert writer.stdout.readline() == b"writes\n"
    processes = descendants(writer.pid)
    semaphores = set(re.findall(r"/dev/shm/sem\S+", Path(f"/proc/{writer.pid}/maps").read_text()))
    assert len(processes) >= 3 and list(tmp_path.glob("out.partial-*"))
    writer.send_signal(number)
    assert writer.wait(30) == (143 if number == signal.SIGTERM else -number)
    writer.stdout.close()

    def left():
        paths = [*(Path(f"/proc/{pid}") for pid in processes), *map(Path, semaphores), *tmp_path.glob("out*")]
        paths += (tmp_path / "tmp").iterdir()
        return [path for path in paths if path.exists()]

    deadline = time.monotonic() + 20
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left()


def test_the_standard_library_is_a_corpus(tmp_path, caplog):
    caplog.set_level(logging.INFO, "crius.data")
    file = open_cached(DataConfig(cache_dir=str(tmp_path)), BYTE, ByteTokenizer())
    assert file.meta.num_tokens > 5_000_000
    assert len(caplog.records) == 1 and "tokenised stdlib of Python" in caplog.text

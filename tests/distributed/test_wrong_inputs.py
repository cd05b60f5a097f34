"""Wrong data and folders on four workers: one message that names the place, soon, and nothing left running."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from harness import TEXT, crius

from crius import cli

SECONDS = 20  # 10 are promised; machines that run tests are busy
WRONG_TOKEN = 60_000

FLAGS = [
    *("--parallelism.data_parallel_shard_degree", "4", "--training.device", "cpu", "--model.num_layers", "1"),
    *("--training.steps", "40", "--training.seq_len", "32", "--training.global_batch_size", "16"),
]


def text(path):
    return ["--data.source", "text", "--data.path", str(path)]


def jsonl(path):
    return ["--data.source", "jsonl", "--data.path", str(path)]


def write(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


def tokens_with_a_wrong_one(folder: Path) -> list[str]:
    """A token folder whose meta.json is right and whose tokens.bin has one id too many in its middle."""
    corpus = write(folder / "corpus.txt", TEXT.read_bytes()[:8_000])
    out = folder / "prepared"
    assert cli.main(["data", "prepare", str(out), *text(corpus), "--num_workers", "1"]) == 0
    tokens = np.memmap(out / "tokens.bin", dtype="<u2", mode="r+")
    tokens[len(tokens) // 2] = WRONG_TOKEN
    tokens.flush()
    # as a Crius before there were hashes of blocks wrote it, so that it is not the hash that is found wrong
    meta = json.loads((out / "meta.json").read_text())
    meta |= {"block_bytes": 0, "hashes_xxh3": ""}
    meta["sha256"]["tokens.bin"] = hashlib.sha256((out / "tokens.bin").read_bytes()).hexdigest()
    (out / "meta.json").write_text(json.dumps(meta))
    return ["--data.source", "tokens", "--data.path", str(out)]


# name: what is wrong (flags, given a folder), exit code, error class, what stderr says with {} for the folder
CASES = {
    "empty_corpus": (
        lambda folder: text(write(folder / "empty.txt", b"")),
        (1, "DataError", ["the corpus is empty", "--data.path"]),
    ),
    "corpus_smaller_than_a_batch": (
        lambda folder: text(write(folder / "short.txt", b"to be or not to be " * 10)),
        (1, "DataError", ["one step needs 16 sequences", "{}/short.txt"]),
    ),
    "not_utf8": (
        lambda folder: text(write(folder / "latin1.txt", b"a\nb\ncaf\xe9\n" * 2000)),
        (1, "DataError", ["is 0xe9, which is not UTF-8", "{}/latin1.txt:3"]),
    ),
    "corrupt_json_line": (
        lambda folder: jsonl(write(folder / "a.jsonl", b'{"text": "a"}\n{"text": "b}\n')),
        (1, "DataError", ["the line is not JSON", "{}/a.jsonl:2"]),
    ),
    "no_text_field": (
        lambda folder: jsonl(write(folder / "a.jsonl", b'{"text": "a"}\n\n{"txet": "b"}\n')),
        (1, "DataError", ["text", "{}/a.jsonl:3"]),
    ),
    "token_id_beyond_the_vocabulary": (
        tokens_with_a_wrong_one,
        (1, "DataError", ["token 4,000 of {}/prepared/tokens.bin", f"has id {WRONG_TOKEN}", "  rank   "]),
    ),
    "tokenizer_larger_than_the_model": (
        lambda folder: [*text(TEXT), "--model.vocab_size", "100"],
        (1, "DataError", ["257 ids", "rows for 100", "--model.vocab_size 257"]),
    ),
    "no_file_matches": (
        lambda folder: text(folder / "*.txt"),
        (2, "MissingPathError", ["no file matches {}/*.txt", "--data.path"]),
    ),
    "no_checkpoint_to_load": (
        lambda folder: ["--checkpoint.load_path", str(folder / "none")],
        (2, "MissingPathError", ["there is no checkpoint in {}/none", "--checkpoint.load_path"]),
    ),
    "unwritable_run_folder": (
        lambda folder: ["--job.run_dir", str(write(folder / "file", b"") / "run")],
        (1, "EnvironmentError", ["{}/file/run cannot be written", "--job.run_dir"]),
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES)
def test_a_wrong_input_is_one_message_in_time_with_no_process_left(case, tmp_path):
    spoil, (code, error_class, said) = CASES[case]
    wrong = spoil(tmp_path)
    run_dir = tmp_path / "run"
    flags = [*FLAGS, *wrong, *([] if "--job.run_dir" in wrong else ["--job.run_dir", str(run_dir)])]
    begin = time.monotonic()
    done = crius("train", *flags, timeout=4 * SECONDS, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert time.monotonic() - begin < SECONDS, done.stderr
    assert done.returncode == code, done.stderr
    assert done.stderr.count(error_class) == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    for phrase in said:
        assert phrase.format(tmp_path) in done.stderr
    assert processes_that_name(tmp_path) == []


def processes_that_name(folder: Path) -> list[str]:
    """Command lines of living processes, ours excepted, that have ``folder`` in them; workers keep their parent's."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if str(folder).encode() in command and int(entry.name) != os.getpid():
            found.append(command.decode(errors="replace"))
    return found


def test_a_process_that_names_the_folder_is_found(tmp_path):
    """The check above can fail."""
    assert processes_that_name(tmp_path) == []
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path)]) as child:
        deadline = time.monotonic() + SECONDS
        while not (found := processes_that_name(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.01)  # for an instant a new program has no command line yet
        child.kill()
    assert len(found) == 1

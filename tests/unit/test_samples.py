"""``--samples.every``: texts of the model while it trains, on one process."""

import dataclasses
import functools
import json
import logging
import re
import shutil
import time

import pytest
from harness import parse, read_metrics, run_job, train
from sft_samples import tokenizer_folder, write_conversations

from crius import cli
from crius.cli.settings import run_of
from crius.data.show import openings
from crius.kernels import choice
from crius.launch.local import run_workers
from crius.metrics.sinks import FIT
from crius.tools.generate import while_training
from crius.tools.generate.samples import forget, keep
from crius.tools.generate.settings import Settings
from crius.tools.report.history import read_run
from crius.tools.report.payload import payload
from crius.train.inputs import open_run_corpus

TINY = (
    "--training.steps 5 --model.num_layers 2 --model.dim 32 --training.seq_len 96 --training.device cpu "
    "--validation.interval 4 --validation.num_samples 8 --training.global_batch_size 8 --metrics.log_interval 1"
).split()
TEXTS = ["--samples.every", "2", "--checkpoint.interval", "2", "--checkpoint.keep_last", "3"]


def samples(run_dir):
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def curve(run_dir):
    return [(one["step"], one.get("loss"), one.get("grad_norm"), one.get("val_loss")) for one in read_metrics(run_dir)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples") / "run"
    train([*TINY, *TEXTS], folder)
    return folder


def test_texts_leave_the_curve_bit_for_bit_and_have_their_own_time(run, tmp_path):
    train(TINY, tmp_path / "without")
    assert curve(run) == curve(tmp_path / "without")
    assert json.loads((run / "summary.json").read_text())["seconds"]["samples"] > 0
    assert "samples" not in json.loads((tmp_path / "without/summary.json").read_text())["seconds"]


def slow_texts(loop):
    return dataclasses.replace(loop, texts=lambda: time.sleep(2))


@pytest.mark.full
def test_the_time_of_texts_is_not_that_of_steps(tmp_path):
    config = parse([*TINY, "--samples.every", "2"])
    target = functools.partial(run_job, config, tmp_path, time.monotonic(), prepare=slow_texts)
    assert run_workers(target, 1, tmp_path) == 0
    steps = [one["step_seconds"] for one in read_metrics(tmp_path) if "loss" in one]
    assert len(steps) == 5 and max(steps) < 1.5
    assert json.loads((tmp_path / "summary.json").read_text())["seconds"]["samples"] > 5.9


def test_each_text_is_a_line_of_the_log_and_of_the_file_and_is_in_the_report(run):
    found = samples(run)
    assert [one["step"] for one in found] == [2, 2, 2, 4, 4, 4, 5, 5, 5]
    assert len({one["prompt"] for one in found}) == 3
    log = (run / "logs/rank-0.log").read_text().splitlines()
    assert "samples: 3 prompts from held-out data, continued every 2 steps" in log
    assert [line.split(" | ")[0] for line in log if line.startswith("sample at")] == [
        f"sample at step {one['step']}  {one['prompt']}" for one in found
    ]
    [shown] = payload([read_run(run)])["runs"]
    assert [one["step"] for one in shown["samples"]] == [2, 4, 5] * 3


def test_a_text_is_what_generate_makes_of_the_checkpoint_of_that_step(run, capsys):
    for step in (2, 4):
        own = [one for one in samples(run) if one["step"] == step]
        flags = [word for one in own for word in ("--prompt", one["prompt"])]
        place = str(run / f"checkpoints/step-{step:08}")
        capsys.readouterr()
        with choice.applied(choice.current()):
            assert (
                cli.main(["generate", place, *flags, "--max_new_tokens", "64", "--temperature", "0.4", "--json"]) == 0
            )
        answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(one["text"], one["tokens"]) for one in answers] == [(one["text"], one["tokens"]) for one in own]


@pytest.mark.full
def test_a_resumed_run_rewrites_the_texts_after_its_checkpoint(run, tmp_path):
    again = tmp_path / "run"
    shutil.copytree(run, again)
    for step in (4, 5):
        shutil.rmtree(again / f"checkpoints/step-{step:08}")
    (again / "newest_checkpoint.json").unlink()
    changed = [{**one, "text": "of a step that is repeated"} if one["step"] > 2 else one for one in samples(run)]
    (again / "samples.jsonl").write_text(
        "".join(f"{json.dumps(one)}\n" for one in [*changed, {**changed[-1], "step": 3}])
    )
    train([*TINY, *TEXTS], again)
    found = samples(again)
    assert [one for one in found if one["step"] == 2] == [one for one in samples(run) if one["step"] == 2]
    texts = [(one["step"], one["prompt"], one["text"], one["tokens"]) for one in found]
    assert sorted(texts) == sorted((one["step"], one["prompt"], one["text"], one["tokens"]) for one in samples(run))


def test_only_texts_of_later_steps_are_forgotten(tmp_path):
    for step in (2, 4, 6):
        keep(tmp_path, step, [("a", f"of {step}", [1])], Settings(), pytest.fail)
    forget(tmp_path, 4)
    assert [(one["step"], one["text"], one["tokens"]) for one in samples(tmp_path)] == [
        (2, "of 2", [1]),
        (4, "of 4", [1]),
    ]


def test_a_line_is_safe_and_as_wide_as_the_terminal(monkeypatch, tmp_path, caplog):
    logging.getLogger("crius").propagate = True
    monkeypatch.setattr(while_training, "log", logging.getLogger("samples"))
    with caplog.at_level(logging.INFO):
        while_training._log(3, "two\nwords", "\x1b[2J" + "a" * 100)
    [record] = caplog.records
    assert record.getMessage().startswith("sample at step 3  two words | \\x1b[2Jaaa")
    assert getattr(record, FIT)(40) == record.getMessage()[:40]


@pytest.fixture
def flags(tmp_path):
    text = "".join(f"{number}word " for number in range(300))
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"Begin {n} here: {text}"}) + "\n" for n in range(40))
    )
    data = ["--data.source", "jsonl", "--data.path", str(tmp_path / "a.jsonl"), "--data.cache_dir", str(tmp_path)]
    return [*data, "--training.seq_len", "3000", "--training.global_batch_size", "2"]


def test_prompts_are_the_first_words_of_held_out_documents_if_a_sequence_has_a_beginning(flags):
    corpus = open_run_corpus(run_of(*flags, "--validation.fraction", "0.3"), 1)
    found = openings(corpus, 3)
    numbers = [int(re.fullmatch(r"Begin (\d+) here: 0word", one.text)[1]) for one in found]
    assert numbers == sorted(set(numbers)) and min(numbers) >= 28
    for one in found:
        assert one.ids == list(one.text.encode())


def test_without_held_out_data_prompts_are_of_the_training_data(flags):
    corpus = open_run_corpus(run_of(*flags, "--validation.interval", "0", "--validation.fraction", "0"), 1)
    found = openings(corpus, 3)
    assert len(found) == 3 and all(re.search(r"here:|\dword", one.text) for one in found)


def test_a_whole_sequence_within_a_document_gives_whole_words(flags):
    corpus = open_run_corpus(run_of(*flags, "--training.seq_len", "64"), 1)
    for one in openings(corpus, 3):
        assert all(re.fullmatch(r"\d+word|Begin|here:|\d+", word) for word in one.text.split()), one


def test_a_stream_without_validation_has_no_prompt():
    class Stream:
        num_shards = 8

    class Corpus:
        held_out = {}
        train = Stream()

    assert openings(Corpus(), 3) == []


def test_a_prompt_of_chats_ends_where_the_first_answer_begins(tmp_path):
    file, folder = write_conversations(tmp_path / "chat.jsonl", 43), tokenizer_folder(tmp_path / "tok")
    flags = [
        "--data.source",
        "jsonl",
        "--data.format",
        "chat",
        "--data.path",
        str(file),
        "--tokenizer.path",
        str(folder),
    ]
    flags += ["--data.cache_dir", str(tmp_path / "cache"), "--model.attention_mask", "document"]
    flags += ["--training.seq_len", "192", "--training.global_batch_size", "8", "--validation.fraction", "0.2"]
    corpus = open_run_corpus(run_of(*flags, "--model.vocab_size", "320"), 1)
    held = corpus.held_out[""]
    found = openings(corpus, 3)
    assert len(found) == 3
    for one in found:
        whole = corpus.tokenizer.decode(one.ids, with_special=True)
        assert whole.endswith("<|im_start|>assistant\n") and whole.count("assistant") == 1
        assert any(held.read([row]).tokens[0, : len(one.ids)].tolist() == one.ids for row in range(held.num_samples))


def test_a_mixture_has_prompts_of_each_source(tmp_path):
    entries = []
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 3000)
        entries.append(json.dumps({"name": name, "source": "text", "path": str(tmp_path / f"{name}.txt"), "weight": 1}))
    flags = [word for entry in entries for word in ("--data.mix", entry)]
    sizes = ["--training.seq_len", "64", "--training.global_batch_size", "2", "--data.cache_dir", str(tmp_path)]
    for more in ([], ["--validation.interval", "0"]):
        corpus = open_run_corpus(run_of(*flags, *sizes, *more), 1)
        assert [one.text for one in openings(corpus, 4)] == ["one one one one", "two two two two"]

"""Runs on conversations: one curve on every layout, whole epochs over kills and ranks, and what a step trained on."""

import json
import re
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from harness import layout_flags, parse, read_metrics, run, run_job, steps_of, train
from sft_samples import tokenizer_folder, write_conversations

from crius import cli
from crius.data.show import CLOSE, OPEN
from crius.data.source import NO_LABEL
from crius.launch.local import run_workers
from crius.train.inputs import open_run_corpus

BATCH = 8


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Flags of a run on 43 conversations, whose last batch has one sequence of eight."""
    folder = tmp_path_factory.mktemp("chat")
    file, tokenizer = write_conversations(folder / "chat.jsonl", 43), tokenizer_folder(folder / "tok")
    return [
        *("--data.source", "jsonl", "--data.format", "chat", "--data.path", str(file), "--tokenizer.path"),
        *(str(tokenizer), "--data.cache_dir", str(folder / "cache"), "--model.attention_mask", "document"),
        *("--training.seq_len", "192", "--training.global_batch_size", str(BATCH), "--model.num_layers", "2"),
        *("--validation.interval", "100", "--validation.fraction", "0.1", "--training.epochs", "1"),
        *("--model.vocab_size", "320", "--optimizer.lr", "3e-4", "--launch.max_failures_at_step", "2"),
    ]


@pytest.fixture(scope="module")
def one_device(chat, tmp_path_factory):
    return train(chat, tmp_path_factory.mktemp("one"))


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["fsdp4", "fsdp2_tp2", "pp2", "cp2"])
def test_packed_conversations_and_a_last_batch_of_padding_give_one_curve(layout, chat, one_device, tmp_path):
    corpus = open_run_corpus(parse(chat), 1)
    assert corpus.train.num_samples % BATCH == 1, "of fsdp4's ranks three have nothing in the last step"
    records = train([*chat, *layout_flags(layout, BATCH)], tmp_path)
    for name in ("loss", "grad_norm"):
        want, got = ([record[name] for record in steps_of(found)] for found in (one_device, records))
        assert len(want) == corpus.train.num_samples // BATCH + 1
        assert got == pytest.approx(want, rel=2e-5)  # float32: only the order of sums differs
    assert records[-1]["val_loss"] == pytest.approx(one_device[-1]["val_loss"], rel=2e-6)


@pytest.mark.long
def test_a_last_batch_of_padding_keeps_reproducible_sums(chat, tmp_path):
    """A virtual shard without a label is one too: the same bits on one rank and on four."""
    flags = [*chat, "--training.reproducible", "--validation.interval", "0", "--model.num_layers", "1"]
    one, four = (
        [(record["loss"], record["grad_norm"]) for record in steps_of(train([*flags, *more], tmp_path / name))]
        for name, more in (("one", []), ("four", layout_flags("fsdp4", BATCH)))
    )
    assert one == four and len(one) == 5


def shown(capsys, *argv):
    capsys.readouterr()
    assert cli.main(["data", "show", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["samples"]


@pytest.mark.long
def test_epochs_survive_kills_and_other_ranks_and_every_step_can_be_shown(chat, tmp_path, monkeypatch, capsys):
    """Two epochs on two ranks, killed in the first; a third one on four ranks with another batch."""
    saved = ["--checkpoint.enable", "--checkpoint.interval", "3", "--checkpoint.mode", "sync"]
    saved += ["--validation.interval", "0"]
    monkeypatch.setenv("CRIUS_FAULT", "kill:step=5,rank=1")
    assert run([*chat, *saved, *layout_flags("fsdp2", BATCH), "--training.epochs", "2"], tmp_path, True) == 0
    monkeypatch.delenv("CRIUS_FAULT")
    more = ["--training.epochs", "3", "--training.global_batch_size", "12"]
    records = train([*chat, *saved, *layout_flags("fsdp4", 12), *more], tmp_path)
    assert cli.main(["data", "audit", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    corpus = open_run_corpus(parse(chat), 1).train
    assert f"samples  {3 * corpus.num_samples} (0 to {3 * corpus.num_samples - 1})" in said
    assert "0 repeated, 0 skipped" in said and re.search(r"^ +0 +2 +1 to 3 +1$", said, re.M), said

    last = max(record["step"] for record in steps_of(records))
    steps = {step: shown(capsys, tmp_path, "--step", step) for step in range(1, last + 1)}
    assert [one["sample"] for step in steps.values() for one in step] == list(range(3 * corpus.num_samples))
    trained = [
        one for step in steps.values() for sample in step for one in sample["documents"] if not one["is_padding"]
    ]
    assert sorted(one["conversation"] for one in trained) == sorted(3 * list(range(39))), "each one three times"
    rows = corpus.read([one["sample"] for one in steps[4]])
    for row, one in enumerate(steps[4]):
        for name, array in (("tokens", rows.tokens), ("labels", rows.labels)):
            assert [value for document in one["documents"] for value in document[name]] == array[row].tolist()
    for one in trained:
        said = "".join(part["text"] for part in one["parts"] if part["is_trained"])
        assert "Answer" in said and "Question" not in said
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert log.count(f"{OPEN}trained on{CLOSE}:\n") == 6, "two conversations of each of three starts"
    assert re.search(f"assistant\n{OPEN}Answer [\\d.]+!*<\\|im_end\\|>\n{CLOSE}", log)

    capsys.readouterr()
    assert cli.main(["data", "show", str(tmp_path), "--step", str(last + 1)]) == 2
    assert "is not in the sample log" in capsys.readouterr().err
    with open(chat[chat.index("--data.path") + 1], "a") as file:
        file.write('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    assert cli.main(["data", "show", str(tmp_path), "--step", "1"]) == 1
    assert "read other data" in capsys.readouterr().err


def without_labels(loop):
    """A loop whose second batch has no label on any rank."""

    def place(batch):
        placed = loop.place(batch)
        is_second = min(number for number in batch.sample_ids if number >= 0) // BATCH == 1
        return replace(placed, labels_BT=torch.full_like(placed.labels_BT, NO_LABEL)) if is_second else placed

    return replace(loop, place=place)


def test_a_batch_without_any_label_has_loss_0_and_changes_nothing_for_good(chat, tmp_path):
    config = parse([*chat, *layout_flags("fsdp2", BATCH), "--training.epochs", "-1", "--training.steps", "3"])
    work = partial(run_job, config, tmp_path, time.monotonic(), prepare=without_labels)
    assert run_workers(work, 2, tmp_path) == 0
    records = steps_of(read_metrics(tmp_path))
    assert [record["loss"] == 0 for record in records] == [False, True, False]
    assert records[1]["grad_norm"] == 0 and records[2]["grad_norm"] > 0

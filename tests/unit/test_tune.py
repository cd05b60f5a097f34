"""``crius tune``: what is chosen, and a model and conversations that become a tuned model with one command."""

import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import crius
from sft_samples import tokenizer_folder

from crius.config.data import DataConfig, TokenizerConfig
from crius.config.run import RunConfig, replace_fields
from crius.data.samples import pack
from crius.errors import DataError, OutOfMemoryError
from crius.tokens.renderer import render_chats
from crius.tokens.template import read_template
from crius.tokens.tokenizer import build_tokenizer
from crius.tools.tune.chatml import write_chatml
from crius.tools.tune.choices import (
    LEAST_STEPS,
    Choices,
    held_out_fraction,
    learning_rate,
    schedule_for,
    seq_len_for,
    trains_all,
)
from crius.tools.tune.choose import about_answers, choose_weights
from crius.tools.tune.counted import counted
from crius.tools.tune.held_out import HeldConversation, change, compared
from crius.tools.tune.model import opened

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("sequences", [1, 2, 7, 30, 69, 1000, 100_000])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_set_of_any_size_gets_50_steps_of_whole_batches(sequences, ranks):
    batch, epochs, steps = schedule_for(sequences, ranks)
    assert batch % ranks == 0 and epochs >= 3
    assert steps == -(-epochs * sequences // batch) >= LEAST_STEPS
    assert schedule_for(sequences, ranks, batch=24, epochs=1) == (24, 1, -(-sequences // 24))
    given = schedule_for(sequences, ranks, batch=24)
    assert given[0] == 24 and given[2] >= LEAST_STEPS
    assert schedule_for(sequences, ranks, epochs=2)[1] == 2


@pytest.mark.parametrize(
    ("lengths", "context", "want"),
    [
        ([40] * 99 + [5000], 0, 128),  # one of a hundred is cut
        ([60] * 200, 0, 128),
        ([76] * 200, 0, 1024),  # six in 512 tokens leave 13 % of padding
        ([76] * 200, 256, 256),
        ([3000] * 100, 0, 4096),
        ([9000] * 100, 0, 4096),
        ([9000] * 100, 2048, 2048),
        ([128], 0, 128),
        ([76] * 30, 0, 128),  # fewer sequences would need more epochs
    ],
)
def test_a_sequence_has_room_for_conversations_and_little_padding(lengths, context, want):
    chosen, why = seq_len_for(np.array(lengths), context)
    assert chosen == want
    longer = sum(one > want for one in lengths)
    assert why.startswith(f"{longer:,} of {len(lengths)} conversations" if longer else "all conversations fit")
    cut = np.minimum(lengths, want)
    padding = 1 - cut.sum() / (want * (len(pack(cut, want, 0).firsts) - 1))
    assert f"{padding:.0%} padding" in why


@pytest.mark.parametrize(("number", "held"), [(10, 1), (200, 20), (1000, 20), (100_000, 2000)])
def test_twenty_conversations_are_held_out_but_a_tenth_at_most(number, held):
    assert round(held_out_fraction(number) * number) == held


def test_all_weights_are_trained_where_the_data_is_large():
    assert trains_all(1_000_000, 50_000)[0] and not trains_all(1_000_000, 49_999)[0]
    assert learning_rate(135 * 10**6, adapters=True)[0] > learning_rate(8 * 10**9, adapters=True)[0]
    assert learning_rate(135 * 10**6, adapters=False)[0] < learning_rate(135 * 10**6, adapters=True)[0]


def test_what_was_given_is_not_chosen():
    chosen = Choices({"optimizer.lr": "1"})
    chosen.take("optimizer.lr", 2, "why")
    chosen.take("lora.rank", 8, "few")
    assert chosen.words() == ["--lora.rank", "8"] and chosen.lines() == ["  lora.rank 8   few"]


def test_a_question_ends_where_the_first_answer_begins():
    one = HeldConversation([1, 2, 3, 4, 5, 6, 7], [False, False, True, True, False, False, True])
    assert (one.question, one.answer) == ([1, 2], [3, 4])


def test_a_change_is_paired():
    mean, error = change([3.0, 1.0, 2.0], [2.5, 0.5, 1.5])
    assert mean == pytest.approx(-0.5) and error == pytest.approx(0, abs=1e-12)
    assert change([1.0, 1.0], [0.0, 2.0]) == (0.0, pytest.approx(1.0))


def test_the_change_of_one_conversation_has_no_error():
    after = SimpleNamespace(losses=[1.0], answers=[])
    assert compared(None, [], {"losses": [2.0]}, after)[-1].endswith(
        "2.000 -> 1.000 nats per token of their answers (-1.000)"
    )


def test_empty_answers_are_counted(tmp_path):
    (tmp_path / "own.csv").write_text("prompt,completion\nHi,a\nHi, \nHi,b\n")
    [line] = about_answers(DataConfig(source="csv", format="chat", path=(str(tmp_path),)))
    assert line.startswith(f"  1 of 3 answers are empty, first {tmp_path}/own.csv:3: ")


def test_answers_that_are_all_empty_are_refused(tmp_path):
    (tmp_path / "own.csv").write_text("prompt,completion\nHi,\nHo,\n")
    with pytest.raises(DataError, match="all 2 answers of the assistant are empty"):
        about_answers(DataConfig(source="csv", format="chat", path=(str(tmp_path),)))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a random model of two layers, ``base``, and 60 conversations, ``own.jsonl``."""
    folder = tmp_path_factory.mktemp("tune")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=264, max_position_embeddings=256)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "base")
    tokenizer_folder(folder / "base")
    rows = [
        [{"role": "user", "content": f"{number}+1?"}, {"role": "assistant", "content": f"It is {number + 1}."}]
        for number in range(60)
    ]
    (folder / "own.gguf").touch()
    (folder / "own.csv").write_text("my frage,antwort\n1+1?,2\n2+2?,4\n")
    (folder / "own.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("ranks", ["1", pytest.param("4", marks=pytest.mark.full)])
def test_a_dry_tune_says_why_and_its_command_is_that_run(ranks, place):
    words = ("--nproc", ranks, "--training.device", "cpu", "--optimizer.lr", "1e-3")
    done = crius("tune", "base", "own.jsonl", "--dry", *words, cwd=place)
    assert done.returncode == 0, done.stderr
    assert not (place / "runs").exists()
    words = re.search(r"crius (train --recipe .*)$", done.stdout, re.MULTILINE)[1].split()
    for name, value in zip(words[1::2], words[2::2], strict=True):
        if name.removeprefix("--") not in (
            "recipe",
            "checkpoint.init_from",
            "data.path",
            "job.run_dir",
            "optimizer.lr",
            "nproc",
            "training.device",
        ):
            assert re.search(rf"^  {name[2:]} {value} +\S", done.stdout, re.MULTILINE), name
    assert done.stdout.count("⟦It is") == 2 and re.search(r"about \d+ s of training", done.stdout)
    shown = crius("config", "show", *words[1:], cwd=place)
    assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize("names", [("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("<|endoftext|>",)])
def test_a_base_without_a_template_gets_chatml_and_the_tokens_that_it_lacks(names, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={letter: n for n, letter in enumerate("abc")}, merges=[]))
    model.add_special_tokens(list(names))
    (tmp_path / "old").mkdir()
    model.save(str(tmp_path / "old/tokenizer.json"))
    (tmp_path / "old/tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "model_max_length": 64}')
    added = write_chatml(str(tmp_path / "old"), tmp_path / "new")
    assert added == [name for name in ("<|im_start|>", "<|im_end|>") if name not in names]
    new = build_tokenizer(TokenizerConfig(path=str(tmp_path / "new")))
    assert new.vocab_size == 6
    assert json.loads((tmp_path / "new/tokenizer_config.json").read_text())["model_max_length"] == 64
    text = "".join(
        render_chats(read_template(str(tmp_path / "new")), [[{"role": "user", "content": "a"}]], {}, is_dated=True)
    )
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert list(new.encode_marked("<|im_start|>ab<|im_end|>")) == [4, 0, 1, 5]


@pytest.mark.parametrize(
    ("given", "takes_all", "only_all", "fits", "want"),
    [
        ({}, True, False, 1, {}),
        ({}, True, False, 2, {"lora.rank": "16", "lora.alpha": "32"}),
        ({}, False, False, 1, {"lora.rank": "16", "lora.alpha": "32"}),
        ({}, False, False, 2, {"lora.rank": "16", "lora.alpha": "32", "lora.base": "nf4"}),
        ({"lora.rank": "4"}, False, False, 1, {}),
        ({}, True, True, 1, {}),
    ],
)
def test_the_first_way_that_fits_the_memory_is_taken(given, takes_all, only_all, fits, want):
    seen = []

    def memory(words):
        seen.append(words)
        return (1.0 if len(seen) == fits else 3.0) * 2**30, 2.0 * 2**30

    chosen = Choices(given)
    choose_weights(["--x"], chosen, 10**9, memory, "why", takes_all=takes_all, only_all=only_all)
    rate = chosen.values.pop("optimizer.lr")
    assert chosen.values == want
    assert float(rate) == learning_rate(10**9, adapters=bool(want or given))[0]
    assert "why; 1.0 of 2.0 GiB" in " ".join(chosen.reasons.values())


def test_a_model_that_fits_in_no_way_is_refused_with_what_each_takes():
    with pytest.raises(OutOfMemoryError, match=r"nothing fits into 2\.0 GiB of memory: 3\.0, 3\.0 GiB are needed"):
        choose_weights([], Choices({}), 1, lambda words: (3 * 2**30, 2 * 2**30), "", takes_all=False, only_all=False)


@pytest.mark.parametrize(
    ("names", "ranks", "more", "saved", "want"),
    [
        ("EB", 1, {}, {}, {"E": 3, "B": 2}),  # 46 sequences, 69 steps
        ("EB", 4, {}, {}, {"E": 5, "B": 4}),  # 58 steps
        ("EB", 3, {"training.local_batch_size": 2}, {}, {"E": 7, "B": 6}),
        ("EB", 2, {"training.reproducible": True}, {}, {"E": 9, "B": 8}),  # 8 virtual shards
        ("E", 1, {"B": 23}, {}, {"E": 25}),
        ("E", 1, {}, {}, {"E": 9}),  # of 8
        ("B", 1, {"training.epochs": 18}, {}, {"B": 16}),
        ("B", 1, {"training.steps": 7}, {}, {"B": 2}),
        ("EB", 1, {}, {"E": 2, "B": 5}, {"E": 2, "B": 5}),  # the checkpoint's
        ("EB", 1, {}, {"E": -1, "B": 23}, {"E": 25, "B": 23}),  # it was to end after its steps
    ],
)
def test_auto_is_a_number_that_follows_from_the_sequences(names, ranks, more, saved, want, tmp_path):
    named = {"E": "training.epochs", "B": "training.global_batch_size"}
    (tmp_path / "own.txt").write_text("a" * 47 * 32)
    settings = {"data.source": "text", "data.path": (str(tmp_path / "own.txt"),), "training.seq_len": 32}
    settings |= {"validation.interval": 0} | {named.get(name, name): value for name, value in more.items()}
    config = replace_fields(RunConfig(), settings)
    found, said = counted(config, [named[n] for n in names], ranks, {named[n]: number for n, number in saved.items()})
    assert found == {named[name]: number for name, number in want.items()}
    assert "46 sequences an epoch" in said


@pytest.mark.long
def test_auto_in_a_file_or_as_a_flag_is_written_as_numbers(tmp_path):
    (tmp_path / "own.txt").write_text("a" * 47 * 32)
    (tmp_path / "auto.toml").write_text('[training]\nepochs = "auto"\n')
    words = "train --config auto.toml --training.global_batch_size AUTO --training.seq_len 32 --data.path own.txt"
    words += " --validation.interval 0 --checkpoint.no_enable --job.run_dir run --model.num_layers 1"
    done = crius(*words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "auto: training.epochs 3, training.global_batch_size 2: 69 steps of 2" in done.stderr
    written = tomllib.loads((tmp_path / "run/run.toml").read_text())["training"]
    assert (written["epochs"], written["global_batch_size"]) == (3, 2)
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 69


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("config", "show", "--training.epochs", "auto"), "training.epochs auto is for crius train"),
        (("plan", "--training.global_batch_size", "auto"), "training.global_batch_size auto is for crius train"),
        (("train", "--training.epochs", "auto", "--training.steps", "4"), "both give the length of the run"),
        (("train", "--training.epochs", "auto", "--data.source", "huggingface", "--data.path", "a/b"), "with a stream"),
        (
            ("train", "--training.global_batch_size", "auto", "--data.source", "huggingface", "--data.path", "a/b"),
            "which a stream does not tell",
        ),
        (("train", "--training.steps", "auto"), "training.steps auto is not an integer"),
        (("tune", "base", "own.jsonl", "--training.epochs", "auto"), "auto is what crius tune chooses"),
        (("tune", "base", "a.txt"), "crius train --checkpoint.init_from base --data.path a.txt\n"),
    ],
)
def test_what_cannot_be_counted_or_tuned_on_is_refused(words, said, place):
    (place / "a.txt").write_text("text")
    done = crius(*words, cwd=place)
    assert done.returncode == 2 and said in done.stderr, done.stderr


WORDS = ("tune", "base", "own.jsonl", "--optimizer.lr", "2e-3", "--training.device", "cpu")


@pytest.fixture(scope="module")
def tuned(place):
    """The finished command ``WORDS``."""
    return crius(*WORDS, cwd=place)


def test_a_model_and_a_file_become_a_tuned_model_that_opens_elsewhere(place, tuned, tmp_path):
    """Also after the run folder was moved."""
    run = place / "runs/base-own"
    assert_learned(tuned, run)
    assert tomllib.loads((run / "run.toml").read_text())["optimizer"]["lr"] == 2e-3
    assert [tuned.stdout.count(f"\n{word:<8}  ") for word in ("question", "before", "after", "data")] == [3, 3, 3, 3]

    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    merged = transformers.AutoModelForCausalLM.from_pretrained(moved / "merged").state_dict()
    base = transformers.AutoModelForCausalLM.from_pretrained(moved / "base").state_dict()
    changed = {name.split(".")[-2] for name, weight in merged.items() if not torch.equal(weight, base[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert json.loads((moved / "adapters/adapter_config.json").read_text())["base_model_name_or_path"] == "base"


@pytest.mark.long
def test_adapters_that_were_moved_with_their_base_answer_as_the_merged_model(place, tuned, tmp_path):
    shutil.copytree(place / "runs/base-own", tmp_path / "moved")
    shutil.move(place / "runs/base-own", place / "aside")
    adapted = crius("generate", str(tmp_path / "moved/adapters"), "--chat", "--prompt", "7+1?", cwd=place)
    merged = crius("generate", str(tmp_path / "moved/merged"), "--chat", "--prompt", "7+1?", cwd=place)
    shutil.move(place / "aside", place / "runs/base-own")
    assert adapted.returncode == 0 and adapted.stdout == merged.stdout


@pytest.mark.long
def test_the_same_command_goes_on_and_another_one_is_refused(place, tuned):
    again = crius(*WORDS, cwd=place)
    assert again.returncode == 0 and again.stdout.startswith("runs/base-own goes on")
    assert again.stdout.splitlines()[1:] == tuned.stdout.splitlines()[-len(again.stdout.splitlines()) + 1 :]
    text = (place / "own.jsonl").read_text()
    (place / "own.jsonl").write_text(text.replace("It is 7.", "It was 7."))
    changed = crius(*WORDS, cwd=place)
    assert changed.returncode == 2 and "the conversations differ from those that runs/base-own was" in changed.stderr
    (place / "own.jsonl").write_text(text)
    shown = crius(*WORDS, "--dry", cwd=place)
    assert shown.returncode == 0 and "crius train --recipe tune " in shown.stdout
    wrong = crius("tune", "base", "own.jsonl", "--optimizer.lrr", "1", cwd=place)
    assert wrong.returncode == 2 and "did you mean --optimizer.lr?" in wrong.stderr
    other = crius("tune", "base", "own.jsonl", cwd=place)
    assert other.returncode == 2 and "belongs to another tune: crius tune base own.jsonl --optimizer.lr" in other.stderr
    dry = crius("tune", "base", "own.jsonl", "--dry", cwd=place)
    assert dry.returncode == 0 and "--job.run_dir runs/base-own-2" in dry.stdout


def assert_learned(done, run):
    """The run has enough steps, and held-out answers are more likely than before, by two paired standard errors."""
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "summary.json").read_text())["steps"] >= LEAST_STEPS
    mean, error = map(float, re.search(r"\((-[\d.]+) \+- ([\d.]+), paired\)", done.stdout).groups())
    assert mean < -2 * error


def test_a_gguf_file_of_the_same_name_is_imported_anew(monkeypatch, tmp_path):
    def stand_in(source, target):
        Path(target).mkdir(parents=True)
        (Path(target) / "source").write_text(source)
        return SimpleNamespace(lines=lambda: [])

    monkeypatch.setattr("crius.tools.tune.model.import_model", stand_in)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.gguf").touch()
        place = opened(str(tmp_path / name / "own.gguf"), tmp_path / "run", lambda text: None)
        assert (Path(place) / "source").read_text() == str(tmp_path / name / "own.gguf")


@pytest.mark.full
def test_one_conversation_is_too_few(place):
    first = (place / "own.jsonl").read_text().splitlines()[0]
    (place / "one.jsonl").write_text(first)
    done = crius("tune", "base", "one.jsonl", "--dry", cwd=place)
    assert done.returncode == 1 and done.stderr.endswith("fix    more conversations\n")


@pytest.mark.full
def test_columns_of_unknown_names_are_asked_for(place):
    done = crius("tune", "base", "own.csv", "--dry", cwd=place)
    fix = "--data.columns 'my frage' --data.columns antwort"
    assert done.returncode == 1 and done.stderr.endswith(f"or {fix}\n")
    assert crius("tune", "base", "own.csv", "--dry", *shlex.split(fix), cwd=place).returncode == 0


def alpaca(number):
    return {"instruction": f"Add one to {number}.", "input": "", "output": f"It is {number + 1}."}


def share_gpt(number):
    turns = [("system", "Short."), ("human", f"{number}+1?"), ("gpt", f"It is {number + 1}.")]
    return {"conversations": [{"from": who, "value": text} for who, text in turns]}


def odd_keys(number):
    turns = [("customer", f"{number}+1?"), ("clerk", f"It is {number + 1}.")]
    return {"dialogue": [{"speaker": who, "utterance": text} for who, text in turns]}


def german(number):
    return {"prompt": f"Wie groß ist {number}+1?", "completion": f"Größer als {number}: {number + 1}."}


def chinese(number):
    turns = [("user", f"{number}加一?"), ("assistant", f"等于{number + 1}。")]
    return {"messages": [{"role": who, "content": text} for who, text in turns]}


ODD_KEYS = "dialogue=messages speaker=role utterance=content customer=user clerk=assistant"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "is_array", "columns"),
    [
        (share_gpt, False, ""),
        (alpaca, True, ""),
        (odd_keys, False, ODD_KEYS),
        (german, False, ""),
        (chinese, False, ""),
    ],
)
def test_conversations_of_any_shape_and_language_are_learned(row, is_array, columns, place, tmp_path):
    rows = [row(number) for number in range(60)]
    text = json.dumps(rows) if is_array else "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in rows)
    (tmp_path / "own.json").write_text(text)
    more = [word for name in columns.split() for word in ("--data.columns", name)]
    more += ["--optimizer.lr", "2e-3", "--training.device", "cpu", "--job.run_dir", "run"]
    done = crius("tune", str(place / "base"), "own.json", *more, cwd=tmp_path)
    assert_learned(done, tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("own.jsonl", "base"), "fix    crius tune base own.jsonl"),
        (("nope", "own.jsonl"), "there is no nope"),
        (("bsae", "own.jsonl"), "fix    base"),
        (("base/model.safetensors", "own.jsonl"), "fix    crius tune base own.jsonl"),
        (("base", "own.jsonl", "--data.format", "documents"), "fix    crius train, which takes"),
        (("own.gguf", "nope.jsonl"), "nope.jsonl does not exist"),  # before it is imported
        (("base", "own.jsonl", "--validation.interval", "0"), "leave out --validation.interval 0"),
        (("base", "own.jsonl", "--dry_run"), "fix    --dry"),
    ],
)
def test_what_is_wrong_is_one_error(words, said, place):
    done = crius("tune", *words, "--job.run_dir", "runs/wrong", cwd=place)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not (place / "runs/wrong").exists()

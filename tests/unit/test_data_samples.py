"""Conversations as sequences: whole samples, packed by their lengths alone, and what is said of them."""

import json
import shlex

import numpy as np
import pytest
from sft_samples import samples_folder, tokenizer_folder, write_conversations
from test_data_loader import samples as source

from crius import cli
from crius.config.data import DataConfig, TokenizerConfig, ValidationConfig
from crius.data import cache
from crius.data.corpus import open_corpus
from crius.data.loader import BatchLoader
from crius.data.meta import META
from crius.data.prepare import prepare
from crius.data.samples import pack
from crius.data.show import CLOSE, OPEN, documents_of, lines_of, read_shown
from crius.data.source import NO_LABEL, mix, permute
from crius.data.tokens import TARGETS, TokenFile
from crius.errors import DataError
from crius.tokens.tokenizer import ByteTokenizer

LENGTHS = [9, 4, 17, 1, 30, 8, 16, 5, 12, 3]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Sample i has the ids 10 i, 10 i + 1, ...; its first three tokens are only read."""
    pairs = [(np.arange(10 * i, 10 * i + n) % 257, np.arange(n) >= 3) for i, n in enumerate(LENGTHS)]
    return samples_folder(tmp_path_factory.mktemp("samples") / "s", pairs)


def first_fit(lengths, capacity, order):
    """One sample after the other into the first sequence with room."""
    left, found = [], [[] for _ in lengths]
    for sample in order:
        place = next((place for place, room in enumerate(left) if room >= lengths[sample]), len(left))
        left += [capacity] * (place == len(left))
        left[place] -= lengths[sample]
        found[place].append(sample)
    return found[: len(left)]


@pytest.mark.parametrize("seed", range(40))
def test_packing_is_first_fit_of_the_longest_first(seed):
    rng = np.random.default_rng(seed)
    capacity, count = int(rng.integers(1, 60)), int(rng.integers(0, 200))
    lengths = rng.integers(1, capacity + 1, count)
    if seed % 2:  # many short ones
        lengths = np.minimum(capacity, np.maximum(1, rng.lognormal(2, 1, count).astype(np.int64)))
    order = np.lexsort((permute(np.arange(count, dtype=np.uint64), max(1, count), mix(seed)), -lengths))
    bins = pack(lengths, capacity, seed)
    found = [bins.samples[a:b].tolist() for a, b in zip(bins.firsts, bins.firsts[1:], strict=False)]
    assert found == first_fit(lengths.tolist(), capacity, order.tolist())
    assert sorted(sum(found, [])) == list(range(count)), "each sample once"
    assert all(0 < sum(lengths[one]) <= capacity for one in found)
    again = pack(lengths, capacity, seed)
    assert all(np.array_equal(one, other) for one, other in zip(bins, again, strict=True))


def test_packing_leaves_little_padding_and_another_seed_draws_among_equals():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 0.8, 20_000).astype(np.int64), 5, 2048)
    one, other = pack(lengths, 2048, 0), pack(lengths, 2048, 1)
    sequences = len(one.firsts) - 1
    assert lengths.sum() / (sequences * 2048) > 0.99
    assert len(other.firsts) - 1 == sequences and not np.array_equal(one.samples, other.samples)


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_has_each_sample_once_and_whole(file, packing):
    data = source(file, seq_len=32, packing=packing)
    for epoch in range(3):
        ids = range(epoch * data.num_samples, (epoch + 1) * data.num_samples)
        held = sum((data.conversations(sample) for sample in ids), [])
        assert sorted(held) == [0, 1, 2, 4, 5, 6, 7, 8], "samples 3 and 9 have nothing to predict"
        rows = data.read(ids)
        for row, sample in enumerate(ids):
            at = 0
            for number in data.conversations(sample):
                end = at + LENGTHS[number]
                tokens = (np.arange(10 * number, 10 * number + LENGTHS[number]) % 257).tolist()
                assert rows.tokens[row, at:end].tolist() == tokens
                assert rows.labels[row, at:end].tolist() == [NO_LABEL, NO_LABEL, *tokens[3:], NO_LABEL]
                assert rows.positions[row, at:end].tolist() == list(range(LENGTHS[number]))
                at = end
            assert (rows.labels[row, at:] == NO_LABEL).all() and not rows.tokens[row, at:].any()
            assert rows.positions[row, at:].tolist() == list(range(32 - at)), "all padding is one document"
    assert (data.num_long, data.num_empty, data.num_used) == (0, 2, 8)
    assert data.num_tokens == sum(LENGTHS) - 1 - 3 and data.num_targets == sum(LENGTHS) - 4 - 3 * 8
    assert data.num_samples == (4 if packing else 8)
    assert data.padding == pytest.approx(1 - data.num_tokens / (data.num_samples * 32))


@pytest.mark.parametrize(
    ("too_long", "used", "tokens", "targets", "empty"),
    [("truncate", 8, 4 + 5 + 6 * 8, 1 + 2 + 6 * 5, 2), ("drop", 3, 4 + 5 + 8, 1 + 2 + 5, 2)],
)
def test_what_is_too_long_is_cut_or_left_out_and_counted(file, too_long, used, tokens, targets, empty):
    data = source(file, seq_len=8, too_long=too_long)
    assert (data.num_long, data.longest, data.num_used) == (5, 30, used)
    assert (data.num_tokens, data.num_targets, data.num_empty) == (tokens, targets, empty)
    rows = data.read(range(data.num_samples))
    assert (rows.labels != NO_LABEL).sum() == targets


def test_a_sample_that_is_cut_before_its_first_answer_is_left_out(file):
    data = source(file, seq_len=3)
    assert (data.num_samples, data.num_long, data.num_empty, data.padding) == (0, 8, 10, 0.0)


def test_the_identity_names_all_that_decides_what_a_sample_is(file, tmp_path):
    other_mask = samples_folder(
        tmp_path / "o", [(np.arange(10 * i, 10 * i + n) % 257, np.arange(n) >= 2) for i, n in enumerate(LENGTHS)]
    )
    assert other_mask.meta.sha256["tokens.bin"] == file.meta.sha256["tokens.bin"]
    options = [{}, {"packing": False}, {"too_long": "drop"}, {"seq_len": 20}, {"seed": 1}, {"shuffle": False}]
    found = [source(file, **one).identity for one in options] + [source(other_mask).identity]
    assert len({*found}) == len(found)
    assert source(file).identity == found[0]
    assert found[0].endswith(" samples [0, 10) packed 1, too long: truncate by 16 shuffled 0")


def test_the_ends_of_documents_count_the_padding_once(file):
    loader = BatchLoader(
        source(file, seq_len=32), global_batch_size=4, rank=0, num_ranks=1, prefetch=0, most_documents=32
    )
    batch = next(loader)
    for row, sample in enumerate(batch.sample_ids):
        lengths = [LENGTHS[number] for number in loader.source.conversations(sample)]
        ends = np.cumsum(lengths).tolist() + [32]
        assert sorted({*batch.ends_BM[row].tolist()}) == sorted({*ends})
    loader.close()


def test_a_damaged_mask_is_refused(file, tmp_path):
    folder = samples_folder(tmp_path / "d", [(np.arange(20), np.arange(20) > 3)]).folder
    content = bytearray((folder / TARGETS).read_bytes())
    content[7] ^= 1
    (folder / TARGETS).write_bytes(content)
    with pytest.raises(DataError, match=r"targets.bin is damaged: bytes 0 to 19"):
        TokenFile(folder)


def test_an_id_without_a_row_of_the_model_is_refused(file):
    with pytest.raises(DataError, match="tokens.bin has id 91, the model has 91 ids"):
        source(file, seq_len=32, vocab_size=91).read(range(4))
    source(file, seq_len=32, vocab_size=92).read(range(4))


def test_what_is_trained_on_is_marked_and_nothing_acts_on_the_terminal(tmp_path):
    text = b"ask \x1b[2J answer"
    ids = np.array([*text, 256])
    folder = samples_folder(tmp_path / "m", [(ids, np.arange(len(ids)) >= 8), (ids[:4], np.arange(4) == 3)])
    shown = read_shown(source(folder, seq_len=32, shuffle=False), [0], ByteTokenizer())
    lines = lines_of(shown, in_colour=False)
    assert lines[0] == "=== sample 0: 32 tokens, 9 trained on, 2 conversations, 12 of padding"
    assert lines[1:3] == ["--- conversation 0: tokens 0 to 15, 8 trained on", f"ask \\x1b[2J{OPEN} answer<eos>{CLOSE}"]
    assert lines[3:] == ["--- conversation 1: tokens 16 to 19, 1 trained on", f"ask{OPEN} {CLOSE}", lines[-1]]
    assert lines[-1] == "--- padding: tokens 20 to 31"
    assert lines_of(shown, in_colour=True)[2] == "ask \\x1b[2J\x1b[32m answer<eos>\x1b[0m"


def test_a_character_of_several_tokens_is_shown_whole_or_as_bytes(tmp_path):
    ids = np.array([*"aé".encode()])
    folder = samples_folder(
        tmp_path / "c", [(ids, np.array([False, True, True])), (ids, np.array([False, False, True]))]
    )
    shown = source(folder, seq_len=3, packing=False, shuffle=False)
    rows = shown.read([0, 1])
    texts = [documents_of(rows, row, ByteTokenizer())[0].parts for row in (0, 1)]
    assert texts[0] == [("a", False), ("é", True)] and [text for text, _ in texts[1]] == ["a\ufffd", "\ufffd"]


# from here on with the chat template of a tokenizer


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    write_conversations(folder / "chat.jsonl", 60)
    tokenizer_folder(folder / "tok")
    return folder


def chat_data(folder, **options):
    paths = {"path": (str(folder / "chat.jsonl"),), "cache_dir": str(folder / "cache")}
    return DataConfig(**{"source": "jsonl", "format": "chat"} | paths | options)


def corpus(folder, data=None, validation=None, **sizes):
    sizes = {"seq_len": 256, "global_batch_size": 4, "vocab_size": 259, "seed": 0} | sizes
    config = TokenizerConfig(path=str(folder / "tok"))
    validation = validation or ValidationConfig(fraction=0.1)
    return open_corpus(data or chat_data(folder), config, validation, **sizes)


def test_whole_conversations_are_held_out_and_only_answers_are_trained_on(chat):
    opened = corpus(chat)
    trained, held = (
        [
            one
            for documents in read_shown(source, range(source.num_samples), opened.tokenizer).values()
            for one in documents
        ]
        for source in (opened.train, opened.held_out[""])
    )
    numbers = [sorted(one.conversation for one in part if not one.is_padding) for part in (trained, held)]
    assert numbers == [list(range(54)), list(range(54, 60))], "the last tenth"
    for one in (*trained, *held):
        said = "".join(text for text, is_trained in one.parts if is_trained)
        read = "".join(text for text, is_trained in one.parts if not is_trained)
        assert "Question" not in said and "Answer" not in read
        assert one.is_padding or said.startswith(f"Answer {one.conversation}.0")
    lines = opened.description
    assert "60 conversations" in lines[0] and "54 conversations" in lines[1] and "6 conversations" in lines[-1]
    assert f"(packed, {opened.train.padding:.1%} padding)" in lines[1]
    assert " in order" in opened.held_out[""].identity
    for fraction, number in ((0.001, 1), (0.999, 59)):  # never none, and never all
        opened = corpus(chat, validation=ValidationConfig(fraction=fraction), global_batch_size=1)
        assert opened.held_out[""].num_used == number


def test_conversations_are_tokenised_once_for_each_template_and_setting(chat, monkeypatch):
    corpus(chat)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "write", lambda *args, **options: pytest.fail("tokenised again"))
        first = corpus(chat, seq_len=64, data=chat_data(chat, packing=False))
    folders = {first.train.file.folder}
    folders.add(corpus(chat, chat_data(chat, train_on="last")).train.file.folder)
    folders.add(corpus(chat, chat_data(chat, train_on_end_of_turn=False)).train.file.folder)
    template = chat / "tok" / "chat_template.jinja"
    text = template.read_text()
    template.write_text(text.replace("<|im_end|>\n", "<|im_end|>\n\n"))
    folders.add(corpus(chat).train.file.folder)
    template.write_text(text)
    assert len(folders) == 4


@pytest.mark.parametrize("workers", [1, 2])
def test_a_prepared_folder_of_conversations_is_the_same_data(chat, tmp_path, workers):
    meta = prepare(chat_data(chat), TokenizerConfig(path=str(chat / "tok")), tmp_path / "out", workers)
    assert meta.is_chat and meta.num_documents == 60
    prepared = DataConfig(source="tokens", format="chat", path=(str(tmp_path / "out"),))
    assert corpus(chat, prepared).train.identity == corpus(chat).train.identity
    with pytest.raises(DataError, match=r"has conversations, .* documents(?s:.)*--data.format chat"):
        corpus(chat, DataConfig(source="tokens", path=prepared.path))


def test_a_prepared_folder_whose_mask_ignores_marks_is_refused(chat, tmp_path):
    prepare(chat_data(chat), TokenizerConfig(path=str(chat / "tok")), tmp_path / "out")
    meta = tmp_path / "out" / META
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"version": 2}))
    with pytest.raises(DataError, match="has format version 2; this Crius reads versions 1 and 3") as caught:
        corpus(chat, DataConfig(source="tokens", format="chat", path=(str(tmp_path / "out"),)))
    assert "crius data prepare" in caught.value.fix


def test_validation_on_other_files_packs_them_alike(chat, tmp_path):
    other = write_conversations(tmp_path / "other.jsonl", 9)
    opened = corpus(chat, validation=ValidationConfig(path=(str(other),)))
    assert opened.train.num_used == 60 and opened.held_out[""].num_used == 9
    assert any("held out of jsonl" in line for line in opened.description)


@pytest.mark.parametrize(
    ("options", "sizes", "says", "fix"),
    [
        ({}, {"global_batch_size": 64}, "one step needs 64 sequences", "--training.global_batch_size 32"),
        ({"too_long": "drop"}, {"seq_len": 8}, "0 of 54 conversations are left to train on", "--training.seq_len 512"),
    ],
)
def test_too_few_conversations_say_what_would_do(chat, options, sizes, says, fix):
    with pytest.raises(DataError) as caught:
        corpus(chat, chat_data(chat, **options), **sizes)
    assert says in caught.value.what and fix in caught.value.fix
    flag, value = fix.split()
    corpus(chat, chat_data(chat, **options), **sizes | {flag.removeprefix("--training."): int(value)})


def test_a_corpus_of_one_conversation_has_none_to_hold_out(chat, tmp_path):
    one = write_conversations(tmp_path / "one.jsonl", 1)
    data = chat_data(chat, path=(str(one),))
    with pytest.raises(DataError, match=r"held out for validation(?s:.)*--validation.interval 0"):
        corpus(chat, data, global_batch_size=1)
    assert corpus(chat, data, ValidationConfig(interval=0), global_batch_size=1).train.num_used == 1


def test_only_files_with_rows_have_conversations_to_prepare(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="source text has no conversations"):
        prepare(DataConfig(source="text", format="chat", path=(str(tmp_path),)), TokenizerConfig(), tmp_path / "o")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": []}) + "\n")
    with pytest.raises(DataError, match="byte has no chat template"):
        prepare(DataConfig(source="jsonl", format="chat", path=(str(tmp_path),)), TokenizerConfig(), tmp_path / "o")


def test_the_command_that_trains_on_a_prepared_folder_is_whole(chat, tmp_path, capsys):
    flags = ["--data.source", "jsonl", "--data.format", "chat", "--data.path", str(chat / "chat.jsonl")]
    flags += ["--tokenizer.path", str(chat / "tok"), "--data.train_on", "last", "--num_workers", "1"]
    assert cli.main(["data", "prepare", str(tmp_path / "out"), *flags]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "of 60 conversations in" in printed[0]
    words = shlex.split(printed[1].partition("train ")[2].partition("train ")[2])
    assert cli.main(["data", "show", *words, "--sample", "0"]) == 0, printed[1]
    assert "conversation" in capsys.readouterr().out
    assert words[:4] == ["--data.source", "tokens", "--data.path", str(tmp_path / "out")]
    assert {"--data.format", "--model.attention_mask"} < {*words} and "--data.train_on" not in words

"""Document boundaries: inputs ``start t1 .. tn``, labels ``t1 .. tn end``; no label belongs to another document."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from crius.config.changes import changes, check_changes
from crius.config.data import DataConfig, TokenizerConfig, ValidationConfig
from crius.config.run import RunConfig
from crius.config.toml_file import flatten
from crius.data.corpus import boundary_of, open_corpus
from crius.data.huggingface import open_huggingface
from crius.data.loader import IGNORE_INDEX
from crius.data.prepare import prepare
from crius.data.source import NO_LABEL, Boundary
from crius.data.stream import ShardReader
from crius.errors import ConfigError, DataError
from crius.host import Machine
from crius.tokens.tokenizer import ByteTokenizer, build_tokenizer
from crius.train import inputs

TEXTS = [f"<{number}> " + "the cat and the dog " * (number * 7 % 5) for number in range(400)]
T = 16
# folder written by ``tokenizer_in``, whether a document then starts with BOS
TOKENIZERS = {
    "byte": ({}, False),
    "llama3": ({"template": "<s> $A"}, True),
    "deepseek": ({"config": {"bos_token": {"content": "<s>"}, "add_bos_token": True}}, False),
    "smollm2": ({"config": {"bos_token": "<s>"}}, False),
    "qwen": ({"config": {"add_bos_token": False}}, False),
    "t5": ({"template": "$A </s>"}, False),
}


def tokenizer_in(folder, template="", config=None, vocabulary=0) -> TokenizerConfig:
    """A tokenizer with the special tokens <s> 0 and </s> 1, filled up to so many ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tok.train_from_iterator(["the cat and the dog "], trainer)
    if template:
        tok.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    tok.add_tokens([f"filler {number}" for number in range(vocabulary - tok.get_vocab_size())])
    folder.mkdir(exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return TokenizerConfig(path=str(folder))


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request, tmp_path):
    options, adds_bos = TOKENIZERS[request.param]
    config = TokenizerConfig() if request.param == "byte" else tokenizer_in(tmp_path / "tok", **options)
    return config, adds_bos


def corpus_of(tmp_path, config, source, **data):
    (tmp_path / "in").mkdir(exist_ok=True)
    (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    local = DataConfig(source="jsonl", path=(str(tmp_path / "in" / "a.jsonl"),), cache_dir=str(tmp_path / "cache"))
    if source == "tokens":
        prepare(local, config, tmp_path / "prepared")
    path = {"jsonl": local.path[0], "huggingface": str(tmp_path / "in"), "tokens": str(tmp_path / "prepared")}[source]
    chosen = DataConfig(source=source, path=(path,), cache_dir=local.cache_dir, shuffle=False, virtual_shards=1, **data)
    validation = ValidationConfig(fraction=0.25)
    return open_corpus(chosen, config, validation, seq_len=T, global_batch_size=4, vocab_size=512, seed=0)


def expected(texts, tok, start, end):
    """Inputs, labels and positions in the document of all places of a stream, by the rule, one document at a time."""
    places = []
    for text in texts:
        ids = tok.encode(text).tolist()
        places += zip([start, *ids], [*ids, end], range(len(ids) + 1), strict=True)
    return np.array(places).T


def wrong(rows, places):
    """How many labels, inputs and positions of ``rows`` are not those that the rule gives."""
    size = rows.tokens.size
    tokens, labels, positions = (part[:size] for part in places)
    # a row that begins inside a document counts from its own start
    in_row = np.arange(size) % T
    return (
        int((rows.labels.ravel() != labels).sum()),
        int((rows.tokens.ravel() != tokens).sum()),
        int((rows.positions.ravel() != np.minimum(positions, in_row)).sum()),
    )


@pytest.mark.parametrize("source", ["jsonl", "tokens", "huggingface"])
def test_no_label_of_100_rows_is_wrong(tmp_path, tokenizer, source):
    config, adds_bos = tokenizer
    corpus = corpus_of(tmp_path, config, source)
    tok = corpus.tokenizer
    assert tok.adds_bos == adds_bos
    start = tok.bos_id if adds_bos else tok.eos_id
    if source == "huggingface":
        held = lambda number: number % 4 == 3  # noqa: E731
    else:
        documents = corpus.train.file.documents
        cut = int(np.searchsorted(documents, corpus.held_out[""].first_token))
        assert documents[cut] == corpus.held_out[""].first_token
        held = lambda number: number >= cut  # noqa: E731
    for part, of_part, count in ((corpus.train, False, 100), (corpus.held_out[""], True, 30)):
        texts = [text for number, text in enumerate(TEXTS) if held(number) == of_part]
        places = expected(texts, tok, start, tok.eos_id)
        if not adds_bos:  # where the EOS is the start, a stream begins with its text, as it always did
            places = places[:, 1:]
        assert wrong(part.read(range(count)), places) == (0, 0, 0)


def test_bos_is_never_a_label_and_eos_never_an_input_in_any_epoch_and_order(tmp_path):
    config = tokenizer_in(tmp_path / "tok", template="<s> $A")
    corpus = corpus_of(tmp_path, config, "jsonl")
    source, tok = corpus.train, corpus.tokenizer
    source.shuffle = True
    epoch = source.read(range(source.num_samples, 2 * source.num_samples))
    assert tok.bos_id not in epoch.labels and tok.eos_id not in epoch.tokens
    starts = int((epoch.tokens == tok.bos_id).sum())
    assert starts >= 299 and abs(int((epoch.labels == tok.eos_id).sum()) - starts) <= 1
    np.testing.assert_array_equal(epoch.positions == 0, (epoch.tokens == tok.bos_id) | (np.arange(T) == 0))


@pytest.mark.parametrize("source", ["jsonl", "huggingface"])
def test_the_two_settings_choose_start_and_end(tmp_path, source):
    config = tokenizer_in(tmp_path / "tok", template="<s> $A")
    for number, (add_bos, add_eos) in enumerate([(True, False), (False, True), (False, False), (None, True)]):
        corpus = corpus_of(tmp_path, config, source, add_bos=add_bos, add_eos=add_eos)
        start, end = 1 if add_bos is False else 0, 1 if add_eos else NO_LABEL
        texts = [text for i, text in enumerate(TEXTS) if i % 4 != 3] if source == "huggingface" else TEXTS
        places = expected(texts, corpus.tokenizer, start, end)[:, 1 if start == 1 else 0 :]
        assert wrong(corpus.train.read(range(100)), places) == (0, 0, 0), number
        assert ("their end is not predicted" in corpus.description[0]) == (not add_eos)
    assert NO_LABEL == IGNORE_INDEX


def test_the_end_of_the_last_document_of_a_file_is_not_predicted_either(tmp_path):
    (tmp_path / "a.txt").write_text("x" * T)  # with its end one whole row
    data = DataConfig(source="text", path=(str(tmp_path / "a.txt"),), cache_dir=str(tmp_path), add_eos=False)
    off = ValidationConfig(interval=0, fraction=0)
    sizes = {"seq_len": T, "global_batch_size": 1, "vocab_size": 257, "seed": 0}
    (labels,) = open_corpus(data, TokenizerConfig(), off, **sizes).train.read([0]).labels.tolist()
    assert labels == [ord("x")] * (T - 1) + [NO_LABEL]


def test_a_row_that_the_first_bos_makes_whole_is_read(tmp_path):
    config = tokenizer_in(tmp_path / "tok", template="<s> $A")
    (tmp_path / "a.txt").write_text("x" * (T - 1))  # with BOS one row: the file holds T tokens
    data = DataConfig(source="text", path=(str(tmp_path / "a.txt"),), cache_dir=str(tmp_path))
    off = ValidationConfig(interval=0, fraction=0)
    corpus = open_corpus(data, config, off, seq_len=T, global_batch_size=1, vocab_size=512, seed=0)
    tokens, labels, positions = (part.tolist() for part in corpus.train.read([0]))
    assert tokens[0][0] == 0 and labels[0][-1] == 1 and positions == [list(range(T))]


def test_a_stream_with_bos_resumes_after_every_row_also_of_one_token():
    boundary = Boundary(eos_id=256, start_id=300, end_label=256)

    def reader(seq_len):
        rows = lambda document: iter([{"text": text} for text in ("abc", "", "d", "efghij")[document:]])  # noqa: E731
        keep = lambda document: True  # noqa: E731
        return ShardReader(
            rows, "shard", ByteTokenizer(), boundary=boundary, seq_len=seq_len, text_field="text", keep=keep
        )

    for seq_len in (1, 3):
        whole = reader(seq_len)
        want, cursors = [], []
        for _ in range(40):
            cursors.append(whole.cursor)
            want.append(whole.next_window())
        assert len(set(cursors)) == 40
        for at in range(40):
            resumed = reader(seq_len)
            resumed.restore(cursors[at])
            np.testing.assert_array_equal([resumed.next_window() for _ in range(40 - at)], want[at:])


def test_the_identity_tells_rules_apart_and_stays_where_the_stream_stays(tmp_path):
    llama = tokenizer_in(tmp_path / "tok", template="<s> $A")
    found = {
        (source, add_bos, add_eos): corpus_of(tmp_path, llama, source, add_bos=add_bos, add_eos=add_eos).train.identity
        for source in ("jsonl", "huggingface")
        for add_bos, add_eos in ((True, True), (True, False), (False, True), (False, False))
    }
    assert len(set(found.values())) == 8
    for (_, add_bos, add_eos), identity in found.items():
        assert ("boundaries 2: start" in identity) != (not add_bos and add_eos)


OLD = {"data.source": "text", "model.attention_mask": "causal"}
"""Settings of a checkpoint that was written before documents had two settings."""


@pytest.mark.parametrize("resumed, want", [(None, True), (OLD, False), (OLD | {"data.add_bos": True}, True)])
def test_a_run_resumes_with_the_rule_that_it_began_with(tmp_path, monkeypatch, resumed, want):
    tokenizer = tokenizer_in(tmp_path / "tok", template="<s> $A")
    manifest = SimpleNamespace(config=resumed)
    found = resumed and inputs._Resumed(None, manifest, is_import=False, is_own=True, initial={})
    monkeypatch.setattr(inputs, "_resumed", lambda config, run_dir: found)
    config = RunConfig(tokenizer=tokenizer)
    saved = inputs.saved_settings(config, tmp_path)
    decided = inputs.resolve(config, Machine(device="cpu"), saved=saved)
    assert decided.config.data == dataclasses.replace(config.data, add_bos=want)
    assert decided.reasons["data.add_bos"] == ("as in the checkpoint" if resumed else "as the tokenizer does")
    asked = dataclasses.replace(config, data=DataConfig(add_bos=False))
    assert inputs.resolve(asked, Machine(device="cpu"), saved=saved).config.data == asked.data


def test_another_rule_than_that_of_the_checkpoint_is_refused_with_the_flag_that_allows_it():
    def refusal(old, *allowed, **now):
        new = OLD | {"model.attention_mask": old["model.attention_mask"], "data.add_bos": False, "data.add_eos": True}
        found = changes(old, new | {f"data.{name}": value for name, value in now.items()})
        try:
            check_changes(found, allowed, "here")
        except ConfigError as error:
            return error.fix
        return ""

    assert refusal(OLD) == refusal(OLD, "data", add_bos=True) == ""
    assert refusal(OLD, add_bos=True).startswith("--data.no_add_bos, or")
    assert refusal(OLD, add_eos=False).endswith("--checkpoint.allow_changes data")
    document = OLD | {"model.attention_mask": "document"}  # positions restarted elsewhere
    assert refusal(document).endswith("--checkpoint.allow_changes data") and refusal(document).startswith("--job")
    assert refusal(document | {"data.add_bos": False, "data.add_eos": True}) == ""


def test_a_fix_can_be_pasted_and_offers_no_other_weights():
    old = {
        "model.attention_mask": "document",
        "lora.rank": 4,
        "lora.targets": ["attention.wq", "feed_forward.*"],
        "lora.alpha": 8.0,
        "model.rope_theta": 1e4,
    }

    def refusal(**new):
        with pytest.raises(ConfigError) as caught:
            check_changes(changes(old, old | new), ("optimizer.*",), "here")
        return caught.value.fix

    assert refusal(**{"lora.targets": ["a"]}) == (
        "--lora.targets attention.wq --lora.targets 'feed_forward.*', or --job.run_dir NEW for a new run"
    )
    assert "allow_changes" not in refusal(**{"lora.rank": 8})
    assert refusal(**{"lora.alpha": 2.0, "model.rope_theta": 1e5}).endswith(
        "--checkpoint.allow_changes 'optimizer.*' --checkpoint.allow_changes lora.alpha "
        "--checkpoint.allow_changes model.rope_theta"
    )


def test_steps_that_epochs_come_to_are_no_change():
    old = {"model.attention_mask": "document", "training.epochs": 1, "training.steps": 10}
    assert changes(old, old | {"training.steps": 7}) == []
    assert len(changes(old, old | {"training.epochs": -1, "training.steps": 7})) == 2


def test_a_setting_that_is_left_open_is_a_change_unless_a_resume_takes_it_over():
    old = {"lr_scheduler.decay_ratio": 0.5, "data.add_bos": True, "data.add_eos": True}
    (found,) = changes(old, old | {"lr_scheduler.decay_ratio": None, "data.add_bos": None})
    assert str(found) == "lr_scheduler.decay_ratio: 0.5 -> (not set) (warn)"


def test_settings_that_an_older_checkpoint_lacks_had_their_defaults_there():
    new = flatten(RunConfig())
    old = {name: value for name, value in new.items() if name not in ("model.dim", "model.tied_embeddings")}
    assert changes(old, new) == []
    (found,) = changes(old, new | {"model.dim": 64})
    assert str(found) == "model.dim: -1 -> 64 (refuse)"


def test_a_bos_that_a_tokenizer_lacks_is_refused_with_the_flag(tmp_path):
    with pytest.raises(DataError, match=r"byte has no token that begins(?s:.)*--data.no_add_bos"):
        boundary_of(DataConfig(add_bos=True), ByteTokenizer())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json cannot be read"):
        build_tokenizer(tokenizer_in(tmp_path))


def test_held_out_documents_of_a_stream_start_with_their_bos_too(tmp_path):
    config = tokenizer_in(tmp_path / "tok", template="<s> $A")
    tok = build_tokenizer(config)
    corpus_of(tmp_path, config, "huggingface")
    data = DataConfig(source="huggingface", path=(str(tmp_path / "in"),), virtual_shards=2)
    validation = ValidationConfig(fraction=0.25, num_samples=20)
    _, sets, _ = open_huggingface(data, tok, boundary_of(data, tok), validation, seq_len=T)
    [held] = sets.values()
    assert held.read([0]).tokens[0, 0] == tok.bos_id

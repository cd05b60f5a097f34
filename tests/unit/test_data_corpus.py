"""The corpus of a run: what is held out is never trained on, and what is too small says what would fit."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from crius.config.data import DataConfig, TokenizerConfig, ValidationConfig
from crius.data.corpus import _cut, open_corpus
from crius.data.prepare import prepare
from crius.errors import DataError

BYTE = TokenizerConfig()


def corpus(data, validation=None, *, tokenizer=BYTE, seq_len=16, global_batch_size=4, vocab_size=257, seed=0):
    validation = validation or ValidationConfig(fraction=0.1)
    sizes = {"seq_len": seq_len, "global_batch_size": global_batch_size, "vocab_size": vocab_size, "seed": seed}
    return open_corpus(data, tokenizer, validation, **sizes)


def jsonl(folder, texts, name="a.jsonl"):
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return DataConfig(source="jsonl", path=(str(folder / name),), cache_dir=str(folder / "cache"))


def documents(count, length=30):
    return [f"{number:05}".ljust(length, "x") for number in range(count)]


def test_held_out_tokens_are_never_trained_on(tmp_path):
    opened = corpus(jsonl(tmp_path, documents(200)))
    n = opened.train.num_samples
    trained = opened.train.read(range(3 * n))[0]
    held = opened.held_out[""].read(range(opened.held_out[""].num_samples))[0]

    def numbers(tokens):
        rows = ("".join(chr(token) if token < 256 else "|" for token in row) for row in tokens)
        return {number for row in rows for number in re.findall(r"\d{5}", row)}

    assert len(numbers(trained)) > 100 and len(numbers(held)) > 10
    assert not numbers(trained) & numbers(held)
    total = opened.train.file.meta.num_tokens
    assert opened.train.last_token == opened.held_out[""].first_token
    assert opened.held_out[""].last_token == total
    assert abs((total - opened.held_out[""].first_token) / total - 0.1) < 31 / total  # one document


def test_the_cut_is_at_a_document_unless_the_last_one_is_too_long(tmp_path):
    opened = corpus(jsonl(tmp_path, documents(200)))
    assert opened.held_out[""].first_token in opened.train.file.documents
    whole = corpus(jsonl(tmp_path, ["x" * 5000], "one.jsonl"))
    assert whole.held_out[""].first_token == round(5001 * 0.9)


@pytest.mark.parametrize(
    ("start", "seq_len", "cut"), [(90, 8, 90), (90, 9, 90), (90, 10, 80), (91, 5, 80), (85, 30, 80), (79, 8, 80)]
)
def test_the_last_documents_are_held_out_if_they_have_half_of_what_is_wanted_and_a_sequence(start, seq_len, cut):
    starts = np.array([0, start])
    between = lambda begins, ends: np.searchsorted(starts, (begins, ends))  # noqa: E731
    file = SimpleNamespace(meta=SimpleNamespace(num_tokens=100), documents=starts, documents_between=between)
    assert _cut(file, 0.2, seq_len) == cut


def test_validation_on_or_off_trains_on_the_same_tokens(tmp_path):
    data = jsonl(tmp_path, documents(50))
    off, on = (corpus(data, ValidationConfig(interval=interval)) for interval in (0, 1))
    assert off.held_out == {} and list(on.held_out) == [""]
    assert off.train.last_token == on.train.last_token < on.train.file.meta.num_tokens


def test_fraction_0_trains_on_everything(tmp_path):
    opened = corpus(jsonl(tmp_path, documents(50)), ValidationConfig(interval=0, fraction=0))
    assert opened.train.last_token == opened.train.file.meta.num_tokens


def test_validation_on_other_files_holds_nothing_out(tmp_path):
    data = jsonl(tmp_path, documents(50))
    other = jsonl(tmp_path, ["y" * 100], "b.jsonl").path
    opened = corpus(data, ValidationConfig(path=other))
    assert opened.train.last_token == opened.train.file.meta.num_tokens
    held = opened.held_out[""]
    assert set(held.read(range(6))[0].ravel().tolist()) <= {ord("y"), 256}
    assert held.first_token == 0 and " in order" in held.identity
    assert "held out of jsonl" in opened.description[-1]
    with pytest.raises(DataError, match=r"missing.jsonl does not exist(?s:.)*--validation.path"):
        corpus(data, ValidationConfig(path=("missing.jsonl",)))


def test_named_sets_are_held_out_each_on_its_own(tmp_path):
    data = jsonl(tmp_path, documents(50))
    paths = [
        f"{name}={jsonl(tmp_path, [name * 60], f'{name}{number}.jsonl').path[0]}" for name in "xy" for number in "12"
    ]
    opened = corpus(data, ValidationConfig(path=tuple(paths)))
    assert list(opened.held_out) == ["x", "y"]
    for name, part in opened.held_out.items():
        assert set(part.read(range(7))[0].ravel().tolist()) == {ord(name), 256} and part.num_samples == 7
    assert [line.split(":")[0] for line in opened.description] == ["corpus", "train", "validation x", "validation y"]
    with pytest.raises(DataError, match=r"held out for validation short, but one sequence needs 17"):
        corpus(data, ValidationConfig(path=(f"short={jsonl(tmp_path, ['z'], 'z.jsonl').path[0]}",)))


@pytest.mark.parametrize(
    ("paths", "sets"),
    [
        ((), {"": ()}),
        (("a", "b/*.txt"), {"": ("a", "b/*.txt")}),
        (("books=a", "code-2=b", "books=c"), {"books": ("a", "c"), "code-2": ("b",)}),
        (("./year=1/a", "/x=1"), {"": ("./year=1/a", "/x=1")}),
        (("a=", "b=c=d"), {"a": ("",), "b": ("c=d",)}),
    ],
)
def test_a_name_before_the_path_makes_a_set(paths, sets):
    assert ValidationConfig(path=paths).sets == sets


def test_opening_again_gives_the_same(tmp_path):
    data = jsonl(tmp_path, documents(50))
    one, two = corpus(data), corpus(data)
    np.testing.assert_array_equal(one.train.read(range(9))[0], two.train.read(range(9))[0])
    assert one.train.identity == two.train.identity and one.description == two.description
    assert len(one.description) == 3 and "50 documents, 1,550 tokens" in one.description[0]
    assert one.description[-1].endswith(" sequences held out")


def test_a_prepared_folder_is_the_same_corpus(tmp_path):
    data = jsonl(tmp_path, documents(50))
    prepare(data, BYTE, tmp_path / "out", num_workers=1)
    prepared = DataConfig(source="tokens", path=(str(tmp_path / "out"),))
    one, two = corpus(data), corpus(prepared)
    assert one.train.identity == two.train.identity
    with pytest.raises(DataError, match="one folder, but got 0"):
        corpus(DataConfig(source="tokens"))


def test_a_prepared_folder_of_another_tokenizer_is_refused(tmp_path):
    prepare(jsonl(tmp_path, documents(50)), BYTE, tmp_path / "out")
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    meta |= {"tokenizer_name": "llama", "tokenizer_fingerprint": "other"}
    (tmp_path / "out" / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DataError, match=r"tokenizer llama, but the run has byte(?s:.)*--tokenizer.path llama"):
        corpus(DataConfig(source="tokens", path=(str(tmp_path / "out"),)))


def test_token_bytes_have_a_row_for_every_id_of_the_model(tmp_path):
    opened = corpus(jsonl(tmp_path, documents(50)), vocab_size=320)
    assert opened.token_bytes.tolist() == [1] * 256 + [0] * 64


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"257 ids, but the model has rows for 256(?s:.)*--model.vocab_size 257"):
        corpus(jsonl(tmp_path, documents(50)), vocab_size=256)


FLAGS = {"--training.seq_len": "seq_len", "--training.global_batch_size": "global_batch_size"}


@pytest.mark.parametrize(
    "count, seq_len, global_batch_size, fraction",
    [
        (50, 256, 8, 0.1),
        (50, 16, 500, 0.1),
        (3, 2048, 16, 0.02),
        (50, 2048, 16, 0.02),
        (400, 64, 8, 0.001),
        (9, 32, 8, 0.3),
    ],
)
def test_what_is_too_small_names_settings_that_work(tmp_path, count, seq_len, global_batch_size, fraction):
    """Each fix is tried alone: it has to open the corpus."""
    data = jsonl(tmp_path, documents(count))
    sizes = {"seq_len": seq_len, "global_batch_size": global_batch_size}
    with pytest.raises(DataError) as caught:
        corpus(data, ValidationConfig(fraction=fraction), **sizes)
    fixes = [fix.split() for fix in caught.value.fix.split(", or ") if fix.startswith("--")]
    assert fixes or count == 3
    for flag, value, *_ in fixes:
        changed = sizes | ({FLAGS[flag]: int(value)} if flag in FLAGS else {})
        validation = ValidationConfig(
            fraction=float(value) if flag == "--validation.fraction" else fraction,
            interval=0 if flag == "--validation.interval" else 500,
        )
        corpus(data, validation, **changed)


def test_a_corpus_smaller_than_a_batch_says_the_counts(tmp_path):
    with pytest.raises(DataError, match=r"1,395 tokens to train on = 5 sequences of 256; one step needs 8 sequences"):
        corpus(
            jsonl(tmp_path, documents(50)), seq_len=256, global_batch_size=8, validation=ValidationConfig(fraction=0.1)
        )


def test_a_fraction_outside_0_and_1_is_refused(tmp_path):
    for fraction in (0, 1, -0.1):
        with pytest.raises(DataError, match="--validation.fraction"):
            corpus(jsonl(tmp_path, documents(50)), ValidationConfig(fraction=fraction, interval=1))


def test_a_stream_is_a_corpus(tmp_path):
    jsonl(tmp_path, documents(50))
    data = DataConfig(source="huggingface", path=(str(tmp_path),), virtual_shards=2)
    opened = corpus(data)
    assert opened.train.num_shards == 2 and opened.held_out[""].num_samples > 0
    assert opened.train.num_samples == 0 and len(opened.description) == 2
    assert "2 times the download" in opened.description[0]

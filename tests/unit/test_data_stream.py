"""Streams: retried, resumed without a token lost or repeated, and never trained on what is held out."""

import json
import logging
import re

import numpy as np
import pytest

from crius.config.data import DataConfig, ValidationConfig
from crius.data.corpus import boundary_of
from crius.data.huggingface import load, open_huggingface
from crius.data.stream import ShardReader, StreamSource
from crius.errors import DataError
from crius.tokens.tokenizer import ByteTokenizer

BOUNDARY = boundary_of(DataConfig(), ByteTokenizer())
TEXTS = [f"<{number}>" + "x" * (number * 7 % 23) for number in range(40)]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


class Flaky:
    """A shard of a dataset whose connection breaks after some rows, a given number of times."""

    def __init__(self, texts, break_after=(), fail_always=False):
        self.texts, self.breaks, self.fail_always = texts, list(break_after), fail_always
        self.opened = []
        self.slept = []

    def rows(self, document):
        self.opened.append(document)
        for text in self.texts[document:]:
            if self.fail_always or (self.breaks and self.breaks[0] == text):
                self.breaks = self.breaks[1:]
                raise ConnectionError("reset by peer")
            yield {"text": text}

    def reader(self, keep=lambda document: True, seq_len=8, repeat=True):
        return ShardReader(
            self.rows,
            "some/data train, shard 0 of 1",
            ByteTokenizer(),
            boundary=BOUNDARY,
            seq_len=seq_len,
            text_field="text",
            keep=keep,
            repeat=repeat,
            sleep=self.slept.append,
        )


def windows(reader, count):
    return [reader.next_window() for _ in range(count)]


def stream_of(texts):
    return np.concatenate([np.append(list(text.encode()), 256) for text in texts])


def joined(found):
    return np.concatenate([rows.tokens[0] for rows in found])


def test_windows_are_the_documents_one_after_the_other_over_epochs(caplog):
    caplog.set_level(logging.INFO, "crius.data")
    reader = Flaky(TEXTS[:5]).reader()
    found = windows(reader, 40)
    assert reader.cursor[0] == 320 // len(stream_of(TEXTS[:5]))
    stream = np.tile(stream_of(TEXTS[:5]), 20)
    np.testing.assert_array_equal(joined(found), stream[:320])
    np.testing.assert_array_equal(np.concatenate([rows.labels[0] for rows in found]), stream[1:321])
    for rows in found:
        restarts = np.append(0, np.flatnonzero(rows.tokens == 256))
        np.testing.assert_array_equal(np.flatnonzero(rows.positions == 0), np.unique(restarts))
    assert "shard 0 of 1: epoch 1 begins" in caplog.text


def test_it_resumes_at_every_boundary_with_nothing_lost_or_repeated():
    """Also twice in a row, and at the ends of documents, of epochs and inside long documents."""
    texts = ["a" * 30, "b", "", "c" * 7, "dd", "e" * 8]
    want = windows(Flaky(texts).reader(), 30)
    for at in range(30):
        reader = Flaky(texts).reader()
        windows(reader, at)
        cursor = json.loads(json.dumps(reader.cursor))
        for _ in range(2):
            resumed = Flaky(texts).reader()
            resumed.restore(cursor)
            assert list(resumed.cursor) == cursor
        np.testing.assert_array_equal(windows(resumed, 30 - at), want[at:])


def test_a_broken_connection_is_opened_again_where_it_broke():
    flaky = Flaky(TEXTS, break_after=[TEXTS[2], TEXTS[2], TEXTS[7]])
    np.testing.assert_array_equal(joined(windows(flaky.reader(), 30)), stream_of(TEXTS)[:240])
    assert flaky.opened == [0, 2, 2, 7]
    assert flaky.slept == [1, 2, 1]


def test_a_connection_that_stays_broken_is_one_error_after_six_attempts():
    flaky = Flaky(TEXTS, fail_always=True)
    with pytest.raises(DataError) as caught:
        flaky.reader().next_window()
    assert flaky.slept == [1, 2, 4, 8, 16] and len(flaky.opened) == 6
    for want in ("some/data train, shard 0", "document 0", "6 times", "ConnectionError: reset by peer"):
        assert want in str(caught.value)


def test_a_bad_row_is_not_tried_again():
    flaky = Flaky(["ok", 7])
    with pytest.raises(DataError, match=r"a number \(7\)(?s:.)*some/data train, shard 0 of 1, document 1"):
        windows(flaky.reader(), 5)
    assert flaky.slept == []


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_a_shard_without_text_is_an_error_not_a_loop(texts):
    with pytest.raises(DataError, match=r"no document with text(?s:.)*--data.virtual_shards"):
        Flaky(texts).reader().next_window()


def test_a_document_that_shrank_since_the_checkpoint_is_named():
    reader = Flaky(["abc", "d"]).reader()
    reader.restore((0, 0, 4))
    with pytest.raises(DataError, match=r"4 tokens, but the checkpoint was at token 4(?s:.)*document 0"):
        reader.next_window()


def test_a_dataset_that_lost_its_end_goes_on_with_the_next_epoch():
    reader = Flaky(["abc", "defghi"]).reader()
    reader.restore((0, 5, 2))
    np.testing.assert_array_equal(reader.next_window().tokens[0], stream_of(["abc", "defghi"])[:8])


def test_documents_that_are_left_out_are_not_in_the_sequences():
    found = windows(Flaky(TEXTS).reader(keep=lambda document: document % 4 != 3), 20)
    np.testing.assert_array_equal(joined(found), stream_of([t for i, t in enumerate(TEXTS) if i % 4 != 3])[:160])


def folder_of(tmp_path, num_files, texts=TEXTS, suffix="jsonl"):
    for number in range(num_files):
        rows = [
            {"text": text} for text in texts[number * len(texts) // num_files : (number + 1) * len(texts) // num_files]
        ]
        if suffix == "parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"part-{number:02}.parquet")
        else:
            (tmp_path / f"part-{number:02}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(source="huggingface", path=(str(tmp_path),), virtual_shards=4)


def documents_in(tokens):
    """Texts of whole documents in a stream of tokens."""
    ends = np.flatnonzero(tokens == 256)
    return [bytes(part.tolist()).decode() for part in np.split(tokens, ends + 1) for part in [part[:-1]] if len(part)][
        :-1
    ]


def numbers_in(rows):
    """Which of TEXTS begin in these rows of tokens."""
    return {number for row in rows for number in re.findall(r"<(\d+)>", "".join(map(chr, row)))}


def shard_stream(source, shard, count):
    ids = range(shard, shard + count * source.num_shards, source.num_shards)
    return source.read(ids).tokens.ravel()


@pytest.mark.parametrize("num_files, suffix", [(1, "jsonl"), (4, "parquet"), (6, "jsonl")])
def test_the_shards_of_a_local_folder_have_every_document_once(tmp_path, num_files, suffix):
    data = folder_of(tmp_path, num_files, suffix=suffix)
    source, _, lines = open_huggingface(data, ByteTokenizer(), BOUNDARY, ValidationConfig(interval=0), seq_len=8)
    assert (f"{4} times the download" in lines[0]) == (num_files < 4)
    found = []
    for shard in range(4):
        texts = documents_in(shard_stream(source, shard, 60))
        end = texts.index(texts[0], 1) if texts[0] in texts[1:] else len(texts)
        found += texts[:end]
    assert sorted(found) == sorted(TEXTS)


@pytest.mark.parametrize("num_files", [1, 4])
def test_held_out_documents_are_validated_on_and_never_trained_on(tmp_path, num_files):
    data = folder_of(tmp_path, num_files)
    validation = ValidationConfig(fraction=0.2, num_samples=6)
    source, sets, _ = open_huggingface(data, ByteTokenizer(), BOUNDARY, validation, seq_len=8)
    [held] = sets.values()
    trained = numbers_in([shard_stream(source, shard, 100) for shard in range(4)])
    rows = held.read(range(held.num_samples))
    assert held.num_samples == 6 and {part.shape for part in rows} == {(6, 8)}
    scored = numbers_in(rows.tokens)
    assert len(scored) >= 3 and len(trained) == 32
    assert not scored & trained


def test_a_split_for_validation_is_used_whole(tmp_path):
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name} {n}"}) + "\n" for n in range(9)))
    data = DataConfig(source="huggingface", path=(str(tmp_path),), virtual_shards=2)
    validation = ValidationConfig(path=("validation",), num_samples=99)
    source, sets, _ = open_huggingface(data, ByteTokenizer(), BOUNDARY, validation, seq_len=8)
    [held] = sets.values()
    tokens = held.read(range(held.num_samples)).tokens
    stream = stream_of([f"validation {n}" for n in range(9)])
    np.testing.assert_array_equal(tokens.ravel(), stream[: held.num_samples * 8])
    assert held.num_samples == (len(stream) - 1) // 8
    assert documents_in(shard_stream(source, 0, 5))[0] == "train 0"


@pytest.mark.parametrize(("fraction", "hold_out"), [(0.9, 2), (0.5, 2), (0.3, 3), (0.1, 10), (0.0, 0)])
def test_one_of_so_many_documents_is_held_out_as_the_fraction_says_but_never_all(tmp_path, fraction, hold_out):
    data = folder_of(tmp_path, 4)
    validation = ValidationConfig(interval=0, fraction=fraction)
    source, _, _ = open_huggingface(data, ByteTokenizer(), BOUNDARY, validation, seq_len=8)
    assert f"without 1 of {hold_out}, " in source.identity


def test_each_set_of_a_stream_is_a_split(tmp_path):
    for name in ("train", "validation", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name} {n}"}) + "\n" for n in range(9)))
    data = DataConfig(source="huggingface", path=(str(tmp_path),), virtual_shards=2)
    validation = ValidationConfig(path=("easy=validation", "hard=test"), num_samples=3)
    _, held, lines = open_huggingface(data, ByteTokenizer(), BOUNDARY, validation, seq_len=8)
    for name, split in (("easy", "validation"), ("hard", "test")):
        tokens = held[name].read(range(held[name].num_samples)).tokens
        np.testing.assert_array_equal(tokens.ravel(), stream_of([f"{split} {n}" for n in range(9)])[: tokens.size])
        assert any(line.startswith(f"validation {name}: first 3 sequences") for line in lines)


def test_a_local_folder_resumes_in_the_middle_of_a_file(tmp_path):
    data = folder_of(tmp_path, 4)
    new = lambda: open_huggingface(data, ByteTokenizer(), BOUNDARY, ValidationConfig(interval=0), seq_len=8)[0]  # noqa: E731
    source = new()
    source.read(range(20))
    cursors = source.cursors(range(4))
    want = source.read(range(20, 60))
    resumed = new()
    resumed.restore(cursors)
    for got, expected in zip(resumed.read(range(20, 60)), want, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_samples_of_a_shard_cannot_be_read_out_of_order():
    source = StreamSource(lambda shard: Flaky(TEXTS).reader(), num_shards=1, seq_len=8, identity="")
    source.read([0, 1])
    with pytest.raises(AssertionError, match="in order"):
        source.read([5])


def test_what_cannot_be_opened_is_one_error(tmp_path):
    open_ = lambda data, **v: open_huggingface(  # noqa: E731
        data, ByteTokenizer(), BOUNDARY, ValidationConfig(**v), seq_len=8, sleep=lambda seconds: None
    )
    data = folder_of(tmp_path, 1)
    with pytest.raises(DataError, match="takes one dataset, but got 0"):
        open_(DataConfig(source="huggingface"))
    with pytest.raises(DataError, match=r"no-such-folder(?s:.)*--data.path"):
        open_(DataConfig(source="huggingface", path=(str(tmp_path / "no-such-folder"),)))
    with pytest.raises(DataError, match="no split 'test'"):
        open_(data, path=("test",))
    with pytest.raises(DataError, match=r"no key 'body'(?s:.)*document 0(?s:.)*--data.text_field text"):
        open_(DataConfig(source="huggingface", path=data.path, text_field="body"))
    with pytest.raises(DataError, match=r"shard 63 of 64 has no document"):
        open_(DataConfig(source="huggingface", path=data.path, virtual_shards=64))
    with pytest.raises(DataError, match=r"less than one sequence(?s:.)*--validation.fraction"):
        open_(data, fraction=0.01)  # before anything is trained


def test_a_stream_is_of_the_revision_in_its_name(monkeypatch):
    asked = {}
    monkeypatch.setattr("datasets.load_dataset", lambda *names, **options: asked.update(options, names=names))
    load(DataConfig(source="huggingface", path=("some/chats@v1",), name="en"), "train")
    assert asked == {"names": ("some/chats", "en"), "split": "train", "revision": "v1", "streaming": True}

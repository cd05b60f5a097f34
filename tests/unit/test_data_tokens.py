"""Token folders and the sequences in them: no token is the label of two, no sequence is read twice in an epoch."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import xxhash

from crius.config.data import DataConfig, TokenizerConfig
from crius.data import tokens
from crius.data.checked import BlockHasher
from crius.data.corpus import boundary_of
from crius.data.documents import Piece
from crius.data.prepare import write
from crius.data.source import ORDER_BLOCK, mix, permute, positions_of
from crius.data.tokens import IndexedSource, TokenFile
from crius.data.work import document_work
from crius.errors import DataError
from crius.tokens.tokenizer import ByteTokenizer


@pytest.fixture
def folder(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    pieces = [Piece("".join(map(chr, rng.integers(32, 127, rng.integers(1, 40)))), True) for _ in range(60)]
    write(tmp_path / "t", document_work(pieces, ByteTokenizer(), TokenizerConfig()), ByteTokenizer(), source="test")
    return tmp_path / "t"


def source(folder, first=0, last=None, *, seq_len=16, vocab_size=257, seed=0, shuffle=True):
    file = TokenFile(folder)
    last = file.meta.num_tokens if last is None else last
    boundary = boundary_of(DataConfig(), ByteTokenizer())
    sizes = {"boundary": boundary, "seq_len": seq_len, "vocab_size": vocab_size}
    return IndexedSource(file, first, last, **sizes, seed=seed, shuffle=shuffle)


def without_block_hashes(folder):
    """Make ``folder`` one of before there were hashes of blocks, whose sha256 are right."""
    meta = json.loads((folder / "meta.json").read_text())
    del meta["block_bytes"], meta["hashes_xxh3"]
    meta["sha256"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in meta["sha256"]}
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "hashes.bin").unlink(missing_ok=True)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_the_permutation_is_one(size):
    for key in range(20):
        image = permute(np.arange(size, dtype=np.uint64), size, mix(key))
        assert sorted(image.tolist()) == list(range(size))


def test_the_permutation_of_a_huge_range_stays_in_it_and_takes_no_memory():
    size = 10**15
    image = permute(np.arange(10_000, dtype=np.uint64), size, 3)
    assert image.max() < size and len(np.unique(image)) == 10_000
    assert image.max() > 0.99 * size and image.min() < 0.01 * size


def test_orders_are_those_of_runs_that_resume():
    """The first two numbers of SplitMix64 from 0 (its authors' splitmix64.c), and orders of Crius when it was new."""
    assert [mix(0), mix(0x9E3779B97F4A7C15)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    orders = {
        2: [0, 1],
        5: [1, 3, 0, 2, 4],
        10: [1, 5, 9, 2, 4, 3],
        16: [1, 5, 9, 11, 4, 3],
        300: [230, 41, 132, 124, 45, 112],
        1000: [230, 669, 903, 736, 438, 477],
        10**12: [450284904282, 523824098291, 325443701917, 528878611069, 358349553227, 168870055232],
    }
    for size, want in orders.items():
        assert permute(np.arange(len(want), dtype=np.uint64), size, mix(7)).tolist() == want


def test_every_place_is_as_likely_as_every_other():
    """Chi-squared of where index 0 of 10 goes under 4,000 keys; 27.9 is exceeded by chance once in a thousand."""
    indices = np.array([0, 7], dtype=np.uint64)
    for places in np.array([permute(indices, 10, mix(key)) for key in range(4000)], dtype=np.int64).T:
        counts = np.bincount(places, minlength=10)
        assert ((counts - 400) ** 2 / 400).sum() < 27.9


def test_positions_restart_at_each_document():
    starts = [(0, 0), (0, 3), (0, 4), (2, 1)]  # row and column; the second row has none
    rows, columns = np.array(starts, dtype=np.int64).T
    assert positions_of(rows, columns, (3, 6)).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("seq_len", [1, 7, 16])
def test_windows_cover_the_stream_and_share_no_label(folder, first, seq_len):
    data = source(folder, first, seq_len=seq_len, shuffle=False)
    tokens, labels, positions = data.read(range(data.num_samples))
    stream = data.file.tokens[first:].astype(np.int64)
    used = data.num_samples * seq_len
    np.testing.assert_array_equal(labels.ravel(), stream[1 : used + 1])
    np.testing.assert_array_equal(tokens.ravel(), stream[:used])
    assert len(stream) - 1 - used < seq_len
    starts = tokens[:, 1:] == 256  # the end of a document, as an input, is the start of the next
    assert (positions[:, 0] == 0).all()
    np.testing.assert_array_equal(positions[:, 1:] == 0, starts)
    np.testing.assert_array_equal(positions[:, 1:][~starts], (positions[:, :-1] + 1)[~starts])


def test_an_epoch_has_each_sequence_once_and_the_next_another_order(folder):
    data = source(folder)
    n = data.num_samples
    epochs = [data.windows(range(e * n, (e + 1) * n)).tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and epochs[0] != list(range(n))
    across = data.windows(range(n - 2, n + 2)).tolist()
    assert across == epochs[0][-2:] + epochs[1][:2]


def test_a_sample_is_the_same_window_whatever_is_asked_for_with_it(folder):
    data = source(folder, seed=5)
    n, edge = data.num_samples, ORDER_BLOCK

    def window(sample_id):
        epoch, index = divmod(sample_id, n)
        return int(permute(np.array([index], dtype=np.uint64), n, mix(mix(5) ^ epoch))[0])

    for ids in (range(edge - 3, edge + 3), [3 * edge, 0, edge, 2], range(edge - 1), [10**12]):
        assert data.windows(ids).tolist() == list(map(window, ids))


def test_the_seed_chooses_the_order_and_no_shuffle_keeps_it(folder):
    ids = range(20)
    one, two, again = (source(folder, seed=seed).windows(ids).tolist() for seed in (1, 2, 1))
    assert one == again != two
    assert source(folder, shuffle=False).windows(ids).tolist() == list(ids)
    assert source(folder, seed=1).identity != source(folder, seed=2).identity


def test_no_sample_where_there_is_no_room_for_one(folder):
    assert source(folder, 0, 16, seq_len=16).num_samples == 0
    assert source(folder, 0, 17, seq_len=16).num_samples == 1
    assert [source(folder, 0, 0, seq_len=length).num_samples for length in (1, 16)] == [0, 0]


def test_an_id_that_was_edited_in_is_named_with_file_sample_and_position(folder):
    data = source(folder, shuffle=False)
    content = np.fromfile(folder / "tokens.bin", "<u2")
    content[16 * 3 + 5] = 9999
    content.tofile(folder / "tokens.bin")
    without_block_hashes(folder)
    data = source(folder, shuffle=False)
    data.read([0, 1, 2])
    with pytest.raises(DataError) as caught:
        data.read([2, 3])
    for want in ("tokens.bin", "token 53 ", "9999", "257 ids", "sample 3, position 5"):
        assert want in str(caught.value)


def test_the_first_id_of_a_folder_is_checked_too(folder):
    content = np.fromfile(folder / "tokens.bin", "<u2")
    content[0] = 257
    content.tofile(folder / "tokens.bin")
    without_block_hashes(folder)
    with pytest.raises(DataError, match="sample 0, position 0"):
        source(folder, shuffle=False).read([1, 0])


def test_a_folder_with_ids_the_model_lacks_is_refused_by_its_meta(folder):
    TokenFile(folder).check_vocab(257)
    with pytest.raises(DataError, match=r"token id 256, but the model has 256(?s:.)*--model.vocab_size 257"):
        TokenFile(folder).check_vocab(256)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "token_bytes.bin", "meta.json"])
def test_a_cut_or_missing_file_is_named(folder, name):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=name):
        TokenFile(folder)
    (folder / name).unlink()
    with pytest.raises(DataError, match=name):
        TokenFile(folder)


def test_meta_of_another_version_or_shape_is_refused(folder):
    meta = json.loads((folder / "meta.json").read_text())
    for change, want in {
        ("version", 4): "format version 4; this Crius reads versions 1 and 3",
        ("version", 3): "targets.bin is missing",
        ("num_tokens", "7"): "'7' as num_tokens",
        ("num_tokens", 0): "no tokens",
        ("num_tokens", meta["num_tokens"] + 1): r"tokens.bin has [\d,]+ bytes instead of",
        ("dtype", "float32"): "'float32' as dtype",
        ("sha256", None): "None as sha256",
        ("num_tokens", True): "True as num_tokens",
        ("num_tokens", -1): "-1 as num_tokens",
        ("vocab_size", 10**30): r"10{30} as vocab_size",
        ("vocab_size", 0): "256 as eos_id",
        ("eos_id", 257): "257 as eos_id",
        ("block_bytes", 10**30): r"10{30} as block_bytes",
        ("source", 10**200): r"10{99}\.\.\. as source",
    }.items():
        (folder / "meta.json").write_text(json.dumps(meta | dict([change])))
        with pytest.raises(DataError, match=want):
            TokenFile(folder)
    for digest in ([], "", "g" * 64, None):
        (folder / "meta.json").write_text(json.dumps(meta | {"block_bytes": 0, "sha256": {"tokens.bin": digest}}))
        with pytest.raises(DataError, match=r"as the sha256 of 'tokens.bin'"):
            TokenFile(folder)
    for content, want in {
        "[]": "not JSON: it is not an object",
        "[" * 100_000: "not JSON: it is nested too deeply",
        '{"version": NaN}': "not JSON: NaN",
        json.dumps({"version": "\x1b[2J" * 10**5}): r"format version '\\x1b.*\.\.\.",
    }.items():
        (folder / "meta.json").write_text(content)
        with pytest.raises(DataError, match=want):
            TokenFile(folder)


@pytest.mark.parametrize("whole_bytes", [1 << 30, 0])  # below it all is looked at at once, above it what is read
def test_documents_in_disorder_with_right_hashes_are_refused(folder, whole_bytes, monkeypatch):
    monkeypatch.setattr(tokens, "WHOLE_BYTES", whole_bytes)
    starts = np.fromfile(folder / "documents.bin", "<i8")
    swapped, twice, late = (starts.copy() for _ in range(3))
    swapped[10:12] = starts[11:9:-1]
    twice[10] = starts[11]
    late[-1] = len(np.fromfile(folder / "tokens.bin", "<u2"))
    # of two that are swapped within a sequence the order makes no difference
    whole = (swapped, twice, late) if whole_bytes else ()
    for changed in (starts[::-1], np.random.default_rng(0).permutation(starts), *whole):
        changed.tofile(folder / "documents.bin")
        meta = json.loads((folder / "meta.json").read_text())
        hashes = [BlockHasher(meta["block_bytes"]) for _ in range(3)]
        for one, name in zip(hashes, ("tokens.bin", "documents.bin", "token_bytes.bin"), strict=True):
            one.update((folder / name).read_bytes())
        table = np.concatenate([one.hashes() for one in hashes]).tobytes()
        (folder / "hashes.bin").write_bytes(table)
        meta["hashes_xxh3"] = xxhash.xxh3_128_hexdigest(table)
        (folder / "meta.json").write_text(json.dumps(meta))
        with pytest.raises(DataError, match=r"documents.bin does not have ascending starts of documents"):
            data = source(folder)
            data.read(range(data.num_samples))


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"does not exist(?s:.)*crius data prepare"):
        TokenFile(tmp_path / "none")
    with pytest.raises(DataError, match=r"has no meta.json"):
        TokenFile(tmp_path)

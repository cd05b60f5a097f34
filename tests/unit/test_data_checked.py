"""Token folders are held against their hashes: small files when they are opened, large ones where they are read."""

import os
import time

import numpy as np
import pytest
import xxhash
from test_data_tokens import folder, source, without_block_hashes  # noqa: F401  a fixture

from crius.config.data import DataConfig, TokenizerConfig, ValidationConfig
from crius.data import checked, prepare, tokens
from crius.data.cache import open_cached
from crius.data.checked import BlockHasher
from crius.data.corpus import open_corpus
from crius.data.documents import Piece
from crius.data.tokens import TokenFile
from crius.data.work import document_work
from crius.errors import DataError
from crius.tokens.tokenizer import ByteTokenizer

NAMES = ["tokens.bin", "documents.bin", "token_bytes.bin", "hashes.bin"]


def flip(path, byte, bit=0):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture
def large(monkeypatch, tmp_path):
    """A folder of many small blocks, whose files count as too large for a check when they are opened."""
    monkeypatch.setattr(prepare, "BLOCK_BYTES", 64)
    for module in (checked, tokens):
        monkeypatch.setattr(module, "WHOLE_BYTES", 0)
    pieces = [Piece(f"<{number}> some text ", True) for number in range(300)]
    out = tmp_path / "large"
    prepare.write(out, document_work(pieces, ByteTokenizer(), TokenizerConfig()), ByteTokenizer(), source="test")
    return out


@pytest.mark.parametrize("is_old", [False, True])
def test_a_flipped_bit_of_any_file_is_found_when_the_folder_is_opened(folder, is_old):  # noqa: F811
    if is_old:
        without_block_hashes(folder)
    for name in NAMES[: 3 if is_old else 4]:
        path = folder / name
        size = path.stat().st_size
        for byte in (0, size // 2, size - 1):
            flip(path, byte, byte % 8)
            with pytest.raises(DataError, match=rf"{name} is damaged(?s:.)*fix +crius data prepare"):
                TokenFile(folder)
            flip(path, byte, byte % 8)
            TokenFile(folder)


def test_a_cache_with_other_tokens_is_tokenised_again(tmp_path, caplog):
    """A new run and one that resumes have the right tokens, whatever became of the cache."""
    (tmp_path / "a.txt").write_text("some text " * 500)
    data = DataConfig(source="text", path=(str(tmp_path / "a.txt"),), cache_dir=str(tmp_path / "cache"))
    file = open_cached(data, TokenizerConfig(), ByteTokenizer())
    want = file.tokens.tolist()
    path = file.folder / "tokens.bin"
    (np.fromfile(path, "<u2") ^ 1).tofile(path)
    assert open_cached(data, TokenizerConfig(), ByteTokenizer()).tokens.tolist() == want
    assert "tokens.bin is damaged" in caplog.text and "tokenised again" in caplog.text


def test_a_prepared_folder_with_other_tokens_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 500)
    text = DataConfig(source="text", path=(str(tmp_path / "a.txt"),))
    prepare.prepare(text, TokenizerConfig(), tmp_path / "out")
    path = tmp_path / "out" / "tokens.bin"
    (np.fromfile(path, "<u2") ^ 1).tofile(path)
    data = DataConfig(source="tokens", path=(str(tmp_path / "out"),))
    sizes = {"seq_len": 16, "global_batch_size": 2, "vocab_size": 257, "seed": 0}
    with pytest.raises(DataError, match=r"tokens.bin is damaged: bytes 0 to"):
        open_corpus(data, TokenizerConfig(), ValidationConfig(), **sizes)


def test_a_large_file_is_checked_where_it_is_read_and_nowhere_else(large):
    good = source(large, shuffle=False)
    want = good.read(range(good.num_samples))
    flip(large / "tokens.bin", 64 * 20 + 7)  # a block of 32 tokens, so of two sequences
    data = source(large, shuffle=False)
    for sample in range(good.num_samples):
        if sample in (39, 40, 41):  # 39 and 41 share a token with the block, or end in it
            with pytest.raises(DataError, match=r"tokens.bin is damaged: bytes 1,280 to 1,343"):
                data.read([sample])
        else:
            np.testing.assert_array_equal(data.read([sample]), [part[sample : sample + 1] for part in want])


@pytest.mark.parametrize("seed", range(20))
def test_damaged_document_starts_are_found_or_make_no_difference(large, seed):
    """A search looks at many places; what it found is right where the documents next to it are."""
    good = source(large, shuffle=False)
    want = good.read(range(good.num_samples))
    size = (large / "documents.bin").stat().st_size
    flip(large / "documents.bin", int(np.random.default_rng(seed).integers(size // 8) * 8), seed % 8)
    found = 0
    data = source(large, shuffle=False)
    for sample in range(good.num_samples):
        try:
            np.testing.assert_array_equal(data.read([sample]), [part[sample : sample + 1] for part in want])
        except DataError as error:
            assert "documents.bin is damaged" in str(error)
            found += 1
    assert 0 < found < good.num_samples


def test_each_block_of_a_large_file_is_hashed_once(large, monkeypatch):
    hashed = []
    real = xxhash.xxh3_64_intdigest
    monkeypatch.setattr(checked.xxhash, "xxh3_64_intdigest", lambda part: hashed.append(len(part)) or real(part))
    data = source(large, shuffle=False)
    opened = len(hashed)
    for _ in range(3):
        data.read(range(data.num_samples))
    blocks = -(-(large / "tokens.bin").stat().st_size // 64) + -(-(large / "documents.bin").stat().st_size // 64)
    assert opened < 20 and len(hashed) <= blocks


def test_a_large_folder_without_hashes_of_blocks_says_that_it_is_not_checked(large, monkeypatch, caplog):
    without_block_hashes(large)
    monkeypatch.setattr(tokens, "WHOLE_BYTES", 1000)
    TokenFile(large)
    assert "tokens.bin is not checked for damage" in caplog.text and "token_bytes.bin is not" in caplog.text


def test_a_file_that_did_not_change_is_hashed_once_a_process_and_in_no_fork_of_it(folder, monkeypatch):  # noqa: F811
    """Local ranks are forked from the process that opened the corpus."""
    monkeypatch.setattr(checked, "_whole", set())
    past = time.time_ns() - 10 * checked.SETTLED_NS
    os.utime(folder / "tokens.bin", ns=(past, past))
    assert checked._key(folder / "tokens.bin", "") is None  # its other time is of now
    monkeypatch.setattr(checked.time, "time_ns", lambda: past + 20 * checked.SETTLED_NS)
    hashed = []
    real = xxhash.xxh3_64_intdigest
    monkeypatch.setattr(checked.xxhash, "xxh3_64_intdigest", lambda part: hashed.append(1) or real(part))
    for count in (3, 3):
        TokenFile(folder)
        assert len(hashed) == count
    flip(folder / "tokens.bin", 3)
    os.utime(folder / "tokens.bin", ns=(past, past))
    with pytest.raises(DataError, match="tokens.bin is damaged"):
        TokenFile(folder)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 640, 700])
def test_the_hashes_of_blocks_do_not_depend_on_how_a_file_is_written(size):
    content = np.random.default_rng(size).bytes(size)
    want = [xxhash.xxh3_64_intdigest(content[begin : begin + 64]) for begin in range(0, size, 64)]
    for step in (1, 7, 64, 1000):
        hasher = BlockHasher(64)
        for begin in range(0, size, step):
            hasher.update(content[begin : begin + step])
        assert hasher.hashes().tolist() == want

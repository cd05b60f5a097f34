"""Tokenizers that people use, from the packages of ``make setup-real``."""

import sys
from pathlib import Path

import numpy as np
import pytest
from harness import TEXT

from crius.config.data import DataConfig, TokenizerConfig, ValidationConfig
from crius.data.corpus import open_corpus
from crius.data.tokenizer import build_tokenizer

pytestmark = pytest.mark.real

PACKAGES = Path(sys.prefix) / "real"
# ids, BOS, whether a text gets it, EOS; the packages leave the post-processor out that gives Llama 3 its BOS
TOKENIZERS = {
    "llama3": (128_256, "<|begin_of_text|>", False, "<|end_of_text|>"),
    "qwen3": (151_669, None, False, "<|endoftext|>"),
    "deepseek_v3": (128_815, "<｜begin▁of▁sentence｜>", True, "<｜end▁of▁sentence｜>"),
    "gptoss": (200_019, "<|startoftext|>", False, "<|endoftext|>"),
}
TEXTS = [TEXT.read_text()[start : start + 900] for start in range(0, 45_000, 900)]


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    folder = PACKAGES / request.param
    if not folder.exists():
        pytest.skip("make setup-real installs it")
    return TokenizerConfig(path=str(folder)), TOKENIZERS[request.param]


def test_special_tokens_are_found_and_text_comes_back(tokenizer):
    config, (vocab_size, bos, adds_bos, eos) = tokenizer
    built = build_tokenizer(config)
    ids = {token: None if token is None else built._model.token_to_id(token) for token in (bos, eos)}
    assert (built.vocab_size, built.bos_id, built.adds_bos, built.eos_id) == (vocab_size, ids[bos], adds_bos, ids[eos])
    text = TEXT.read_text() + "¿Où? 東京 🙂\n"
    assert built.decode(built.encode(text).tolist()) == text


def test_no_label_crosses_a_document(tokenizer, tmp_path):
    config, (_, _, adds_bos, _) = tokenizer
    (tmp_path / "in").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "in" / f"{number:03}.txt").write_text(text)
    data = DataConfig(source="text", path=(str(tmp_path / "in"),), cache_dir=str(tmp_path / "cache"), shuffle=False)
    options = {"seq_len": 64, "global_batch_size": 4, "vocab_size": 1 << 18, "seed": 0}
    corpus = open_corpus(data, config, ValidationConfig(interval=0), **options)
    built, rows = corpus.tokenizer, corpus.train.read(range(100))
    start = built.bos_id if adds_bos else built.eos_id
    want = [(start, built.encode(text).tolist()) for text in TEXTS]
    tokens = np.array([token for first, ids in want for token in (first, *ids)])
    labels = np.array([token for _, ids in want for token in (*ids, built.eos_id)])
    first = 0 if adds_bos else 1  # where the EOS is the start, a stream begins with its text
    size = rows.tokens.size
    np.testing.assert_array_equal(rows.tokens.ravel(), tokens[first : first + size])
    np.testing.assert_array_equal(rows.labels.ravel(), labels[first : first + size])

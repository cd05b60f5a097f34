"""Tokenizers that people use, from the packages of ``make setup-real``."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import TEXT

from crius.config.data import DataConfig, TokenizerConfig, ValidationConfig
from crius.data.corpus import open_corpus
from crius.errors import ConfigError
from crius.tokens.conversion import TEXTS as SHORT
from crius.tokens.tokenizer import build_tokenizer
from crius.tools.generate.stream import TextStream

pytestmark = pytest.mark.real

PACKAGES = Path(sys.prefix) / "real"
# ids, BOS, whether a text gets it (the packages leave Llama 3's post-processor out), EOS
TOKENIZERS = {
    "llama3": (128_256, "<|begin_of_text|>", False, "<|end_of_text|>"),
    "qwen3": (151_669, None, False, "<|endoftext|>"),
    "deepseek_v3": (128_815, "<｜begin▁of▁sentence｜>", False, "<｜end▁of▁sentence｜>"),
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


@pytest.fixture
def mistral(request):
    """A file of the package mistral-common."""
    package = importlib.util.find_spec("mistral_common")
    if not package:
        pytest.skip("make setup-real installs it")
    return Path(package.origin).parent / "data" / request.param


def check_same_ids(built, encode, decode, num_ids, ahead):
    """Compare with the file's own library, which puts ``ahead`` bytes before a text; BOS is 1, EOS is 2."""
    assert (built.vocab_size, built.bos_id, built.adds_bos, built.eos_id) == (num_ids, 1, True, 2)
    counts = built.token_bytes()
    texts = [*SHORT, *TEXTS, TEXT.read_text(), "¿Où? 東京 🙂\n", "<s></s><|endoftext|><|im_end|>[INST]<|eot_id|>"]
    for text, ids in zip(texts, map(np.ndarray.tolist, built.encode_batch(texts)), strict=True):
        assert ids == encode(text)
        assert built.eos_id not in ids and built.bos_id not in ids
        if decode(ids) == text:
            assert built.decode(ids) == text
            assert counts[ids].sum() == len(text.encode()) + (ahead if text else 0)
        if len(text) < 1000:
            stream = TextStream(built, [])
            assert "".join(map(stream.push, ids)) + stream.finish() == built.decode(ids)


@pytest.mark.parametrize("mistral", ["tekken_240718.json", "tekken_240911.json"], indirect=True)
def test_a_tekken_file_has_the_ids_and_the_special_tokens_of_mistral_common(mistral, tmp_path, monkeypatch):
    library = pytest.importorskip("mistral_common.tokens.tokenizers.tekken", exc_type=ImportError)
    model = library.Tekkenizer.from_file(mistral)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = build_tokenizer(TokenizerConfig(path=str(mistral)))
    check_same_ids(built, lambda text: model.encode(text, bos=False, eos=False), model.decode, 131_072, 0)
    for name in ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<pad>"):
        assert built.special_ids([name]) == {model.get_special_token(name)}


@pytest.mark.parametrize(
    ("mistral", "num_ids"),
    [
        ("tokenizer.model.v1", 32_000),
        ("mistral_instruct_tokenizer_240323.model.v3", 32_768),
        ("mistral_instruct_tokenizer_241114.model.v7", 32_768),
    ],
    indirect=["mistral"],
)
def test_the_line_for_a_sentencepiece_file_makes_a_tokenizer_with_its_ids(mistral, num_ids, tmp_path, monkeypatch):
    model = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(mistral))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is a sentencepiece model") as raised:
        build_tokenizer(TokenizerConfig(path=str(mistral)))
    line, then = raised.value.fix.splitlines()
    subprocess.run(line, shell=True, check=True)
    built = build_tokenizer(TokenizerConfig(path=then.split()[-1]))
    check_same_ids(built, model.encode, model.decode, num_ids, 1)

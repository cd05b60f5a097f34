"""Tokenizers: ids, end of document, and the bytes that each id stands for."""

import json
import os
import sys

import numpy as np
import pytest

from crius.config.data import TokenizerConfig
from crius.errors import DataError, EnvironmentError
from crius.tokens.files import read_tokenizer_files
from crius.tokens.tokenizer import ByteTokenizer, build_tokenizer

TEXT = "Naïve café — 北京 🙂 tab\tand  spaces\n\n  def f(x):\r\n return x"


def byte_level(special=("<|endoftext|>",), **train):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet)
    tok.train_from_iterator([TEXT, "the cat and the dog and the café " * 20], trainer)
    return tok


def saved(tok, folder):
    tok.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_bytes_round_trip_and_count_one_each():
    tok = ByteTokenizer()
    ids = tok.encode(TEXT)
    assert tok.decode(ids.tolist()) == TEXT
    counts = tok.token_bytes()
    assert counts[ids].sum() == len(TEXT.encode()) and counts[tok.eos_id] == 0 and len(counts) == tok.vocab_size == 257


def test_byte_level_bpe_counts_the_bytes_of_any_text_exactly(tmp_path):
    tok = build_tokenizer(TokenizerConfig(path=saved(byte_level(), tmp_path)))
    rng = np.random.default_rng(0)
    noise = "".join(map(chr, rng.integers(1, 0xD7FF, 500)))
    for text in (TEXT, noise, ""):
        ids = tok.encode(text)
        assert tok.token_bytes()[ids].sum() == len(text.encode())
        assert tok.decode(ids.tolist()) == text
    assert tok.token_bytes()[tok.eos_id] == 0
    assert len(tok.encode(TEXT)) < len(TEXT.encode())


def test_a_file_and_its_folder_are_the_same_tokenizer(tmp_path):
    folder = saved(byte_level(), tmp_path)
    one, two = (build_tokenizer(TokenizerConfig(path=path)) for path in (folder, f"{folder}/tokenizer.json"))
    assert one.fingerprint == two.fingerprint
    np.testing.assert_array_equal(one.encode_batch([TEXT, "a"])[0], two.encode(TEXT))


def test_text_cannot_forge_the_end_of_a_document(tmp_path):
    tok = build_tokenizer(TokenizerConfig(path=saved(byte_level(), tmp_path)))
    text = "a<|endoftext|>b"
    ids = tok.encode(text)
    assert tok.eos_id not in ids
    assert tok.token_bytes()[ids].sum() == len(text)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    model = byte_level()
    model.enable_truncation(3)
    model.enable_padding(length=64)
    tok = build_tokenizer(TokenizerConfig(path=saved(model, tmp_path)))
    assert tok.decode(tok.encode(TEXT).tolist()) == TEXT


def test_sentencepiece_style_counts_marks_as_spaces_and_byte_tokens_as_one(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("é", -2.0), ("<0xE2>", -9.0)]
    model = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.add_special_tokens(["<unk>", "</s>"])
    tok = build_tokenizer(TokenizerConfig(path=saved(model, tmp_path)))
    assert tok.token_bytes().tolist() == [0, 0, 4, 1, 2, 1]
    assert tok.eos_id == 1


def test_the_end_of_document_is_found_or_named(tmp_path):
    folder = saved(byte_level(special=("<pad>", "</s>", "<eos>")), tmp_path)
    assert build_tokenizer(TokenizerConfig(path=folder)).eos_id == 1
    other = build_tokenizer(TokenizerConfig(path=folder, eos_token="<eos>"))
    assert other.eos_id == 2
    assert other.fingerprint != build_tokenizer(TokenizerConfig(path=folder)).fingerprint
    with pytest.raises(DataError, match=r"no token '<eoss>'(?s:.)*--tokenizer.eos_token '<eos>'"):
        build_tokenizer(TokenizerConfig(path=folder, eos_token="<eoss>"))


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"none of the usual tokens(?s:.)*--tokenizer.eos_token '<stop>'"):
        build_tokenizer(TokenizerConfig(path=saved(byte_level(special=("<stop>",)), tmp_path)))


def test_files_that_are_no_tokenizer_are_refused_with_a_fix(tmp_path):
    with pytest.raises(DataError, match=r"does not exist(?s:.)*--tokenizer.path byte"):
        build_tokenizer(TokenizerConfig(path=str(tmp_path / "none")))
    with pytest.raises(DataError, match="without a tokenizer.json"):
        build_tokenizer(TokenizerConfig(path=str(tmp_path)))
    for content in (b"{", b"{}", b"version https://git-lfs", b"\xff\xfe"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(DataError, match="is not a tokenizer.json"):
            build_tokenizer(TokenizerConfig(path=str(tmp_path)))
    with pytest.raises(DataError, match="id 256"):
        build_tokenizer(TokenizerConfig(eos_token="</s>"))


def test_a_missing_package_is_an_error_with_the_line_to_type(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(EnvironmentError, match="pip install .*tokenizers>=0.20"):
        build_tokenizer(TokenizerConfig(path=str(tmp_path)))


def test_a_tokenizer_with_a_huge_id_is_refused(tmp_path):
    """Its arrays have an entry for every id: a file of 2 kB took 17 GB."""
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "a": 2**32 - 1}, "unk_token": "</s>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(DataError, match="a token with id 4,294,967,295; ids above 16,777,215 are refused"):
        build_tokenizer(TokenizerConfig(path=str(tmp_path)))


def changed(folder, **parts):
    spec = json.loads(byte_level().to_str()) | parts
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return TokenizerConfig(path=str(folder))


def sequence(kind, number, **step):
    return {"type": "Sequence", "normalizers": [{"type": kind, **step}] * number}


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


STRANGE = {
    "link": lambda file: file.symlink_to("/etc/passwd"),
    "fifo": os.mkfifo,
    "sparse": lambda file: file.touch() or os.truncate(file, 1 << 40),
}


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("tokenizer.json", "link", "it is a link"),
        ("tokenizer.json", "fifo", "a folder without"),
        ("tokenizer.json", "sparse", "are not holes"),
        ("tokenizer_config.json", "link", "it is a link"),
        ("tokenizer_config.json", "fifo", "not a regular file"),
        ("tokenizer_config.json", "sparse", "are not holes"),
        ("special_tokens_map.json", "link", "it is a link"),
        ("special_tokens_map.json", "sparse", "are not holes"),
    ],
)
def test_only_regular_files_of_a_tokenizer_are_read_and_kept(name, kind, why, tmp_path):
    saved(byte_level(), tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    STRANGE[kind](tmp_path / name)
    with pytest.raises(DataError, match=why):
        build_tokenizer(TokenizerConfig(path=str(tmp_path)))
        read_tokenizer_files(str(tmp_path))


RUNAWAYS = {
    "7_replaces": {"normalizer": sequence("Replace", 7, pattern={"String": "e"}, content="e" * 8000)},
    "50_prepends": {"normalizer": sequence("Prepend", 50, prepend="a" * 1000)},
    "regex": {"pre_tokenizer": split("(a+)+$")},
    "long_and_short": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 8000},
                {"type": "Replace", "pattern": {"Regex": "e+"}, "content": "e"},
            ],
        }
    },
}
REASONS = {
    "7_replaces": r"makes 56,006 characters of 13 characters(?s:.)*begins 'e e e",
    "50_prepends": r"makes 5,050 characters of 50 characters(?s:.)*begins \"Hello",
    "long_and_short": r"makes 8,000 characters of 1 characters",
    "regex": r"retry-limit(?s:.)*begins 'aaa(?s:.)*\"\(a\+\)\+\$\"",
}


@pytest.mark.parametrize("name", RUNAWAYS)
def test_a_tokenizer_that_crashes_or_takes_too_much_is_tried_elsewhere_first(name, tmp_path, capfd):
    with pytest.raises(DataError, match=REASONS[name]):
        build_tokenizer(changed(tmp_path, **RUNAWAYS[name]))
    assert capfd.readouterr().err == ""


LATE = {
    "panic": (
        {"pre_tokenizer": split("(Ω+)+$")},
        "Ω" * 99 + "b",
        r"retry-limit(?s:.)*begins '\\u03a9(?s:.)*\+\)\+\$\"",
    ),
    "too_many": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "Ω"}, "content": "x" * 9000}},
        "Ω" * 9,
        r"makes 81,000 tokens of 9 characters",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_a_text_on_which_a_tokenizer_fails_later_is_named(name, tmp_path):
    parts, text, reason = LATE[name]
    tok = build_tokenizer(changed(tmp_path, **parts))
    for encode in (tok.encode_batch, tok.encode_marked_texts):
        with pytest.raises(DataError, match=reason):
            encode(["a", text, "b"])


def test_a_tokenizer_is_tried_once_and_the_bytes_never(tmp_path, monkeypatch):
    config = changed(tmp_path, added_tokens=json.loads(byte_level(["</s>"]).to_str())["added_tokens"])
    build_tokenizer(config)
    monkeypatch.delattr("subprocess.run")
    assert build_tokenizer(config) and build_tokenizer(TokenizerConfig())


@pytest.mark.parametrize(("template", "adds_bos"), [("<s> $A </s>", True), ("$A <s>", False), ("", False)])
def test_bos_is_found_where_the_tokenizer_knows_no_such_text_or_makes_no_token_of_it(tmp_path, template, adds_bos):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = {"<s>": 0, "</s>": 1, "alpha": 2, "beta": 3}
    for number, normalizer in enumerate((None, normalizers.Replace("a", ""))):
        tok = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        tok.add_special_tokens(["<s>", "</s>"])
        tok.pre_tokenizer = pre_tokenizers.Whitespace()
        if normalizer:
            tok.normalizer = normalizer
        if template:
            special = [("<s>", 0), ("</s>", 1)]
            tok.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
        tok.save(str(tmp_path / f"{number}.json"))
        built = build_tokenizer(TokenizerConfig(path=str(tmp_path / f"{number}.json")))
        assert (built.bos_id, built.adds_bos) == (0, adds_bos)
    built = build_tokenizer(TokenizerConfig(path=str(tmp_path / "0.json")))
    assert built.encode("alpha beta").tolist() == [2, 3]
    for encode in (built.encode, lambda text: built.encode_batch([text])):
        with pytest.raises(DataError, match=r"cannot encode a text: .*UNK"):
            encode("gamma")

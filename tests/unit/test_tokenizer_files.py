"""Files of sentencepiece, tiktoken and tekken: the ids of their own library, converted once, or one clear error."""

import base64
import hashlib
import io
import json
import shutil
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import TEXT
from pretrained_samples import save

from crius.config.data import TokenizerConfig
from crius.data import tokenizer_files, tokenizer_originals
from crius.data.tokenizer import build_tokenizer
from crius.data.tokenizer_conversion import TEXTS, convert, probes
from crius.data.tokenizer_files import tokenizer_file
from crius.errors import CheckpointError, CriusError, DataError, EnvironmentError
from crius.interop.weights import open_weights
from crius.tools.convert.importing import import_model
from crius.tools.convert.tokenizer_out import write_tokenizer
from crius.tools.generate.stream import TextStream

sentencepiece = pytest.importorskip("sentencepiece")
tiktoken = pytest.importorskip("tiktoken")
pytest.importorskip("transformers")
pytest.importorskip("google.protobuf")

AS_LLAMA = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
SAMPLES = {
    "bpe": {"model_type": "bpe", **AS_LLAMA},
    "symbols": {
        **{"model_type": "bpe", **AS_LLAMA, "add_dummy_prefix": False, "user_defined_symbols": ["\n\n", "<sep>"]},
        **{"bos_piece": "<bos>", "eos_piece": "<eos>"},
    },
    "unigram": {"model_type": "unigram"},
    "suffix": {"model_type": "unigram", "treat_whitespace_as_suffix": True},
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    for name, options in SAMPLES.items():
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([*TEXT.read_text().splitlines()[:400], *["<a> </b>"] * 9]),
            **{
                "model_writer": written,
                "vocab_size": 500,
                "hard_vocab_limit": False,
                "minloglevel": 2,
                "num_threads": 1,
            },
            **options,
        )
        (folder / f"{name}.model").write_bytes(written.getvalue())
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "crius" / "tokenizers"


@pytest.fixture
def here(monkeypatch):
    """Converts in this process, which has imported transformers."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    monkeypatch.setattr(tokenizer_files, "_in_a_process", convert)


def built(path, **options):
    return build_tokenizer(TokenizerConfig(path=str(path), **options))


def entries(cache):
    return [file for file in cache.glob("*") if file.suffix != ".lock"] if cache.exists() else []


def test_a_file_is_converted_once_in_a_process_of_its_own_and_told_in_one_line(samples, cache, caplog, monkeypatch):
    folder = samples / "folder"
    folder.mkdir()
    shutil.copy(samples / "bpe.model", folder / "tokenizer.model")
    threads = [threading.Thread(target=built, args=(folder,)) for _ in range(2)]  # as ranks of one machine do
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and said[0].startswith(
        f"tokenizer: {folder}/tokenizer.model (sentencepiece, BPE with bytes, "
    )
    assert "was converted by transformers" in said[0] and f"to {cache}/" in said[0]
    assert "texts have the same ids as in sentencepiece" in said[0]
    monkeypatch.setattr(tokenizer_files, "_in_a_process", lambda *_: pytest.fail("converted again"))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)  # and nothing else is needed any more
    first, second = built(folder), built(samples / "bpe.model")
    assert first.fingerprint == second.fingerprint
    assert len(entries(cache)) == 1
    assert {file.name for file in entries(cache)[0].iterdir()} == {
        *("tokenizer.json", "tokenizer_config.json", "conversion.json")
    }


@pytest.mark.parametrize(
    ("name", "bos", "eos"), [("bpe", "<s>", "</s>"), ("symbols", "<bos>", "<eos>"), ("unigram", "<s>", "</s>")]
)
def test_ids_text_and_special_tokens_are_those_of_sentencepiece(name, bos, eos, samples, here):
    model = sentencepiece.SentencePieceProcessor(model_file=str(samples / f"{name}.model"))
    ours = built(samples / f"{name}.model")
    assert (ours.bos_id, ours.eos_id) == (model.bos_id(), model.eos_id())
    assert ours.adds_bos and ours.vocab_size == len(model)
    marked = ours.encode_marked(f"{bos}a{eos}").tolist()
    assert marked == [model.bos_id(), *model.encode("a"), model.eos_id()]
    counts = ours.token_bytes()
    assert counts[ours.eos_id] == counts[model.unk_id()] == 0
    prefix = int(name == "bpe")
    for text in (*TEXTS, f"{bos} {eos}", TEXT.read_text()[:2000]):
        ids = ours.encode(text).tolist()
        assert ids == model.encode(text)
        assert ours.eos_id not in ids  # a text cannot forge it
        if name != "unigram" and "▁" not in text:  # that one changes text, and does not know all characters
            assert ours.decode(ids) == model.decode(ids) == text
            assert counts[ids].sum() == len(text.encode()) + (prefix if text else 0)
        stream = TextStream(ours, ours.encode("x").tolist() if ids[:1] != model.encode("x")[:1] else [])
        assert "".join(map(stream.push, ids)) + stream.finish() == stream.text


def test_a_text_comes_back_piece_by_piece_where_characters_are_several_byte_tokens(samples, here):
    ours = built(samples / "bpe.model")
    text = "٣٤٥٦ ①② Ⅷ ½ 🙂🇫🇷 東京\n é"
    for before in ("", "٣٤٥٦ ①②"):
        ids, prompt = ours.encode(before + text).tolist(), ours.encode(before).tolist()
        stream = TextStream(ours, prompt)
        given = "".join(map(stream.push, ids[len(prompt) :])) + stream.finish()
        assert before + given == text if not before else given == text


def test_what_lies_beside_the_file_counts_and_no_code_is_followed(samples, tmp_path, here, cache):
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(samples / "bpe.model", folder / "tokenizer.model")
    plain = built(folder)
    first = plain.vocab_size
    config = {
        **{"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": False, "chat_template": "{{ x }}"},
        **{
            "bos_token": {"content": "<s>"},
            "eos_token": "<|im_end|>",
            "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
        },
        "added_tokens_decoder": {
            **{str(number): {"content": name, "special": True} for number, name in enumerate(("<unk>", "<s>", "</s>"))},
            str(first): {"content": "<|im_start|>", "special": True},
        },
    }
    (folder / "evil.py").write_text("raise SystemExit('executed')")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": first + 1}))
    chat = built(folder)
    assert (chat.vocab_size, chat.adds_bos, chat.bos_id) == (first + 2, False, 1)
    assert chat.encode_marked("<|im_start|>a").tolist() == [first, *plain.encode("a")]
    assert chat.encode("<|im_start|>a").tolist() == plain.encode("<|im_start|>a").tolist()
    written = json.loads((tokenizer_file(str(folder)).parent / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast" and written["eos_token"] == "<|im_end|>"
    assert written["chat_template"] == "{{ x }}" and not {"auto_map", "added_tokens_decoder", "legacy"} & {*written}
    assert len(entries(cache)) == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"tokenizer_class": "XLMRobertaTokenizerFast"},
            "has class XLMRobertaTokenizer, which may give its pieces other ids",
        ),
        ({"added_tokens_decoder": {"-4": {"content": "a"}}}, "has the id -4 and no usable name"),
        ({"added_tokens_decoder": {"9" * 30: {"content": "a"}}}, "no usable name"),
        ({"added_tokens_decoder": {"700": {"content": ["a"]}}}, "no usable name"),
        ({"added_tokens_decoder": {"9": {"content": "other"}}}, "renames the id 9 to 'other'"),
        ({"added_tokens_decoder": {"700": {"content": "</s>"}}}, "is also a token of text"),
    ],
)
def test_what_beside_the_file_would_change_ids_is_refused(changes, why, samples, tmp_path, here, cache):
    shutil.copy(samples / "bpe.model", tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(changes))
    with pytest.raises(DataError, match=why):
        built(tmp_path)
    assert entries(cache) == []


def ranks(count=256):
    return b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(count))


def tekken(**changes):
    tokens = [*([byte] for byte in range(256)), b"th", b"the", b" a"]
    rows = [
        {"rank": number, "token_bytes": base64.b64encode(bytes(token)).decode(), "token_str": None}
        for number, token in enumerate(tokens)
    ]
    names = [
        {"rank": number, "token_str": name, "is_control": True} for number, name in enumerate(("<unk>", "<s>", "</s>"))
    ]
    config = {
        **{
            "pattern": r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
            "default_vocab_size": 269,
            "default_num_special_tokens": 10,
        },
        **{"version": "v3", "num_vocab_tokens": 259},
    }
    whole = {"config": config | changes.pop("config", {}), "vocab": rows, "special_tokens": names, **changes}
    return json.dumps(whole).encode()


HOSTILE = {
    "empty.model": (b"", "neither a sentencepiece model nor a tiktoken file"),
    "pointer.model": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "noise.model": (b"\n\xff\xff\xff\x07" + bytes(range(256)) * 9, "sentencepiece cannot read it"),
    "huge.tiktoken": (b"IQ== 0\n" * (1 << 24), "has more than 67,108,864 bytes"),
    "letters.tiktoken": (b"IQ== 0\nI!! 1\n", "tiktoken cannot read it"),
    "unknown.tiktoken": (ranks(), "its hash is not one of Llama 3, Qwen or OpenAI"),
    "tekken_cut.json": (tekken()[:900], "it is not a tekken file"),
    "tekken_deep.json": (b"[" * 100_000, "nested too deeply"),
    "tekken_size.json": (tekken(config={"default_vocab_size": 10**12}), "their number is wrong"),
    "tekken_special.json": (tekken(config={"default_num_special_tokens": -1}), "their number is wrong"),
    "tekken_twice.json": (tekken(vocab=[{"rank": 0, "token_bytes": "QQ=="}] * 259), "not numbered from 0"),
    "tekken_long.json": (
        tekken(vocab=[{"rank": 0, "token_bytes": "QUFB" * 400}], config={"default_vocab_size": 11}),
        "a token has 1,200 bytes",
    ),
    "tekken_bytes.json": (tekken(config={"default_vocab_size": 30}), "no token for the byte 20"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_or_hostile_file_is_one_error_and_nothing_stays(name, tmp_path, here, cache):
    content, why = HOSTILE[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=why) as raised:
        built(tmp_path / name)
    assert raised.value.fix and name in raised.value.what
    assert entries(cache) == []


def test_a_model_of_which_the_half_is_missing_is_refused(samples, tmp_path, here, cache):
    whole = (samples / "unigram.model").read_bytes()
    (tmp_path / "half.model").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="sentencepiece cannot read it"):
        built(tmp_path / "half.model")
    assert entries(cache) == []


def test_a_kind_whose_ids_would_differ_is_refused_with_the_text(samples, cache):
    """transformers puts the space in front of a word, this model behind it. In a process of its own, as it is used."""
    with pytest.raises(DataError, match=r"'a' would become the ids \[.*\], not \[.*\], as in sentencepiece"):
        built(samples / "suffix.model")
    assert entries(cache) == []


def test_a_conversion_that_crashes_or_takes_too_long_is_refused(samples, cache, monkeypatch):
    monkeypatch.setattr(tokenizer_files, "_MOST_SECONDS", 0.02)
    with pytest.raises(DataError, match=r"took more than 0\.02 s"):
        built(samples / "bpe.model")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    killer = "import os, signal; os.kill(os.getpid(), signal.SIGXCPU)"
    real = tokenizer_files.subprocess.run
    monkeypatch.setattr(
        tokenizer_files.subprocess, "run", lambda command, **options: real([command[0], "-c", killer], **options)
    )
    with pytest.raises(DataError, match="SIGXCPU ended it"):
        built(samples / "bpe.model")
    assert entries(cache) == []


@pytest.mark.parametrize("module", ["sentencepiece", "transformers", "google.protobuf"])
def test_a_missing_package_is_named_with_the_line_that_installs_it(module, samples, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    package = module.rpartition(".")[2]
    with pytest.raises(EnvironmentError, match=rf"needs {package}\.(?s:.)*install '?{package}>="):
        built(samples / "bpe.model")


def test_a_damaged_conversion_is_made_again(samples, cache, here):
    want = built(samples / "bpe.model").encode("Hello").tolist()
    file = entries(cache)[0] / "tokenizer.json"
    file.write_text(file.read_text()[:1000])
    (cache / f"{file.parent.name}.partial").mkdir()  # of a process that was killed
    assert built(samples / "bpe.model").encode("Hello").tolist() == want
    assert len(entries(cache)) == 1


def test_a_cache_that_cannot_be_written_is_named(samples, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot be written: (?s:.)*XDG_CACHE_HOME=DIR"):
        built(samples / "bpe.model")


def test_several_files_of_tiktoken_in_a_folder_are_not_guessed_among(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.tiktoken").write_bytes(ranks())
    with pytest.raises(DataError, match=r"2 .tiktoken files(?s:.)*a\.tiktoken"):
        built(tmp_path)


@pytest.mark.parametrize("pattern", [r"'(?i:[st])|\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"])
def test_ranks_of_tiktoken_become_the_same_ids_with_a_pattern_that_means_something_else_to_tokenizers(
    pattern, tmp_path, here, monkeypatch
):
    """There ``{1,3}+`` repeats and ``$`` is the end of any line; ids of special tokens have a gap, as OpenAI's have."""
    merges = [b"12", b"123", b"ab", b"th", b"the", b"  ", b" \n"]
    content = ranks() + b"".join(base64.b64encode(token) + b" %d\n" % (257 + at) for at, token in enumerate(merges))
    found = {"name": "own", "pat_str": pattern, "special_tokens": {"<|endoftext|>": 256, "<|fim|>": 300}}
    (tmp_path / "own.tiktoken").write_bytes(content)
    monkeypatch.setattr(tokenizer_originals, "_of_openai", lambda digest, ranks: found)
    ours = built(tmp_path / "own.tiktoken")
    own = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in content.splitlines()}
    theirs = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=own, special_tokens=found["special_tokens"])
    for text in (*TEXTS, "12312 1234567  \n  x \n"):
        ids = ours.encode(text).tolist()
        assert ids == theirs.encode_ordinary(text)
        assert ours.decode(ids) == text and ours.token_bytes()[ids].sum() == len(text.encode())
    assert (ours.eos_id, ours.bos_id, ours.adds_bos, ours.vocab_size) == (256, None, False, 301)
    assert ours.special_ids(["<|fim|>"]) == {300}


def test_ranks_whose_hash_is_known_have_the_special_tokens_and_the_bos_that_it_stands_for(tmp_path, here, monkeypatch):
    known = next(iter(tokenizer_originals._KNOWN.values()))
    monkeypatch.setitem(tokenizer_originals._KNOWN, hashlib.sha256(ranks()).hexdigest(), known)
    (tmp_path / "tokenizer.model").write_bytes(ranks())
    ours = built(tmp_path)
    assert (ours.bos_id, ours.adds_bos, ours.eos_id, ours.vocab_size) == (256, True, 257, 512)
    assert ours.special_ids(["<|eot_id|>", "<|python_tag|>"]) == {265, 266}


def test_a_tekken_file_has_its_special_tokens_first_and_its_own_ids(tmp_path, here):
    if find_spec("mistral_common"):  # which is no must, but transformers imports it where it is
        pytest.importorskip("mistral_common.tokens.tokenizers.tekken", exc_type=ImportError)
    (tmp_path / "tekken.json").write_bytes(tekken())
    ours = built(tmp_path)
    assert (ours.bos_id, ours.adds_bos, ours.eos_id, ours.vocab_size) == (1, True, 2, 269)
    assert ours.encode("the").tolist() == [10 + 257]
    assert ours.encode_marked("<s>the").tolist() == [1, 10 + 257]
    # where the pattern takes the name of a special token whole, a text would become that token
    (tmp_path / "tekken.json").write_bytes(tekken(config={"pattern": r"\S+|\s+"}))
    with pytest.raises(DataError, match="'<s>' would become the ids"):
        built(tmp_path)


def test_modules_in_the_current_folder_are_not_run(samples, tmp_path, here, monkeypatch):
    (tmp_path / "cwd").mkdir()
    shutil.copy(samples / "bpe.model", tmp_path / "cwd" / "tokenizer.model")
    for name in ("random", "transformers", "sentencepiece"):
        (tmp_path / "cwd" / f"{name}.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    monkeypatch.chdir(tmp_path / "cwd")
    built(Path("."))
    assert not Path("ran").exists()


def test_a_model_comes_in_and_goes_out_with_its_converted_tokenizer(samples, tmp_path, here, caplog):
    source = tmp_path / "hub"
    save("llama", source, vocab_size=512)
    shutil.copy(samples / "bpe.model", source / "tokenizer.model")
    done = import_model(str(source), str(tmp_path / "run"))
    assert done.tokenizer.endswith("(converted from tokenizer.model)")
    want = built(source)
    caplog.clear()
    for weights, folder in ((open_weights(str(tmp_path / "run")), "a"), (open_weights(str(source)), "b")):
        (tmp_path / folder).mkdir()
        write_tokenizer(tmp_path / folder, weights, 2048)
        assert built(tmp_path / folder).fingerprint == built(weights.tokenizer).fingerprint == want.fingerprint
        assert built(tmp_path / folder).adds_bos
    assert caplog.records == []  # nobody converts twice
    (source / "tokenizer.model").unlink()
    (source / "tokenizer.model").symlink_to(samples / "bpe.model")
    with pytest.raises(CheckpointError, match="it is a link"):
        import_model(str(source), str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_the_texts_that_are_compared_have_the_names_of_all_special_tokens_and_the_whole_vocabulary(samples, tmp_path):
    file = Path(shutil.copy(samples / "bpe.model", tmp_path / "tokenizer.model"))
    original, _ = tokenizer_originals.read_original(file, "sentencepiece", file)
    texts = list(probes(original))
    assert {*TEXTS, *original.special, "<0x41>"} <= {*texts}
    used = {number for text in texts for number in original.encode(text)}
    ordinary = {number for number in range(original.size) if number > 2 + 256}  # special tokens, then bytes
    assert len(used & ordinary) > 0.9 * len(ordinary)


def test_an_error_of_a_conversion_is_of_the_family_that_it_was(samples, tmp_path, monkeypatch):
    problem = {"class": "EnvironmentError", "what": "w", "where": "x", "why": "y", "fix": "z"}
    done = tokenizer_files.subprocess.CompletedProcess([], 0, json.dumps({"problem": problem}), "")
    monkeypatch.setattr(tokenizer_files.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(CriusError) as raised:
        built(samples / "bpe.model")
    assert isinstance(raised.value, EnvironmentError) and (raised.value.what, raised.value.fix) == ("w", "z")

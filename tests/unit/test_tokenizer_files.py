"""A tekken.json has the ids of its own library; files of sentencepiece and tiktoken are one error with the way out."""

import base64
import io
import json
import os
import shlex
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import ROOT, TEXT, crius
from pretrained_samples import save

from crius.config.data import TokenizerConfig
from crius.errors import CheckpointError, ConfigError, CriusError, DataError, EnvironmentError
from crius.interop.weights import open_weights
from crius.tokens import files as tokenizer_files
from crius.tokens.conversion import TEXTS, convert, probes, read_tekken
from crius.tokens.files import read_tokenizer_files, tokenizer_file
from crius.tokens.tokenizer import build_tokenizer
from crius.tools.convert.importing import import_model
from crius.tools.convert.tokenizer_out import write_tokenizer
from crius.tools.generate.stream import TextStream

tiktoken = pytest.importorskip("tiktoken")
pytest.importorskip("transformers")
if find_spec("mistral_common"):  # transformers imports it where it is installed
    pytest.importorskip("mistral_common.tokens.tokenizers.tekken", exc_type=ImportError)

PATTERN = r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
MERGES = (b"th", b"the", b" a", b"12", b"123", b"ab", b"  ", b" \n")


def tekken(**changes):
    tokens = [*(bytes([byte]) for byte in range(256)), *MERGES]
    rows = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(tokens)]
    names = [{"rank": rank, "token_str": name} for rank, name in enumerate(("<unk>", "<s>", "</s>", "[INST]"))]
    config = {
        "pattern": PATTERN,
        "default_vocab_size": 10 + len(tokens),
        "default_num_special_tokens": 10,
        "version": "v3",
        "num_vocab_tokens": len(tokens),
    }
    whole = {"config": config | changes.pop("config", {}), "vocab": rows, "special_tokens": names, **changes}
    return json.dumps(whole).encode()


@pytest.fixture
def sample(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tekken.json").write_bytes(tekken())
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "crius" / "tokenizers"


@pytest.fixture
def here(monkeypatch):
    """Converts in this process, which has imported transformers."""
    monkeypatch.setattr(tokenizer_files, "_in_a_process", convert)


def built(path, **options):
    return build_tokenizer(TokenizerConfig(path=str(path), **options))


def entries(cache):
    return [file for file in cache.glob("*") if file.suffix != ".lock"] if cache.exists() else []


def test_a_file_is_converted_once_in_a_process_of_its_own_and_told_in_one_line(sample, cache, caplog, monkeypatch):
    threads = [threading.Thread(target=built, args=(sample,)) for _ in range(2)]  # as ranks of one machine do
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    said = [line for line in said if not line.startswith("cache: waiting")]  # on a busy machine
    assert len(said) == 1 and said[0].startswith(f"tokenizer: {sample}/tekken.json (tekken, v3, 274 ids) was converted")
    assert f"to {cache}/" in said[0] and "texts have the same ids as in tiktoken" in said[0]
    monkeypatch.setattr(tokenizer_files, "_in_a_process", lambda *_: pytest.fail("converted again"))
    monkeypatch.setitem(sys.modules, "tiktoken", None)  # and nothing else is needed any more
    first = built(sample)
    assert first.fingerprint == built(sample / "tekken.json").fingerprint
    assert len(entries(cache)) == 1
    names = {file.name for file in entries(cache)[0].iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "conversion.json"}


def test_special_tokens_come_first_and_a_text_cannot_forge_them(sample, here):
    ours = built(sample)
    assert (ours.bos_id, ours.adds_bos, ours.eos_id, ours.vocab_size) == (1, True, 2, 274)
    assert ours.encode("the").tolist() == [10 + 257]
    assert ours.encode_marked("<s>the").tolist() == [1, 10 + 257]
    assert not {1, 2} & {*ours.encode("<s>the</s>").tolist()}
    # where the pattern takes the name of a special token whole, a text would become that token
    (sample / "tekken.json").write_bytes(tekken(config={"pattern": r"\S+|\s+"}))
    with pytest.raises(DataError, match=r"'<s>' would become the ids \[.*\], not \[.*\], as in tiktoken"):
        built(sample)


def test_ids_are_those_of_tiktoken_with_a_pattern_that_means_something_else_to_tokenizers(sample, here):
    """There ``{1,3}+`` repeats and ``$`` is the end of any line."""
    pattern = r"'(?i:[st])|\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    (sample / "tekken.json").write_bytes(tekken(config={"pattern": pattern}))
    ours = built(sample)
    ranks = {bytes([byte]): byte for byte in range(256)} | {token: 256 + at for at, token in enumerate(MERGES)}
    theirs = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in (*TEXTS, "12312 1234567  \n  x \n", TEXT.read_text()[:2000]):
        ids = ours.encode(text).tolist()
        assert [number - 10 for number in ids] == theirs.encode_ordinary(text)
        assert ours.decode(ids) == text and ours.token_bytes()[ids].sum() == len(text.encode())
        stream = TextStream(ours, [])
        assert "".join(map(stream.push, ids)) + stream.finish() == text


def test_what_lies_beside_the_file_counts_and_no_code_is_followed(sample, here, cache):
    plain = built(sample)
    config = {
        "add_bos_token": False,
        "chat_template": "{{ x }}",
        "eos_token": {"content": "[INST]"},
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
        "added_tokens_decoder": {"3": {"content": "[INST]", "special": True}},
    }
    (sample / "evil.py").write_text("raise SystemExit('executed')")
    (sample / "tokenizer_config.json").write_text(json.dumps(config))
    chat = built(sample)
    assert (plain.adds_bos, chat.adds_bos, chat.bos_id) == (True, False, 1)
    written = json.loads((tokenizer_file(str(sample)).parent / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast" and written["eos_token"] == "[INST]"
    assert written["chat_template"] == "{{ x }}" and not {"auto_map", "added_tokens_decoder"} & {*written}
    assert len(entries(cache)) == 2


@pytest.mark.parametrize(
    ("name", "added"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"300": {"content": "<|im_end|>"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": {"content": "<bos>"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": {"content": ["<s>"]}}}),
        ("added_tokens.json", {"<|im_end|>": 300}),
    ],
)
def test_tokens_that_are_added_beside_the_file_are_refused(name, added, sample, here, cache):
    (sample / name).write_text(json.dumps(added))
    with pytest.raises(DataError, match="which is added next to it, is not its own"):
        built(sample)
    assert entries(cache) == []


SENTENCEPIECE = b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02"
RANKS = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
HOSTILE = {
    "empty.model": (b"", "neither a sentencepiece model nor a tiktoken file"),
    "pointer.model": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "tekken_huge.json": (b" " * ((1 << 26) + 1), "at most 67,108,864 are allowed"),
    "tekken_cut.json": (tekken()[:900], "it is not a tekken file"),
    "tekken_deep.json": (b"[" * 100_000, "nested too deeply"),
    "tekken_size.json": (tekken(config={"default_vocab_size": 10**12}), "their number is wrong"),
    "tekken_special.json": (tekken(config={"default_num_special_tokens": -1}), "their number is wrong"),
    "tekken_few.json": (
        tekken(config={"default_num_special_tokens": 2, "default_vocab_size": 266}),
        "it has 4 special tokens, not 2",
    ),
    "tekken_twice.json": (tekken(vocab=[{"rank": 0, "token_bytes": "QQ=="}] * 264), "not numbered from 0"),
    "tekken_long.json": (
        tekken(vocab=[*json.loads(tekken())["vocab"][:-1], {"rank": 263, "token_bytes": "QUFB" * 400}]),
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


def test_a_conversion_that_crashes_or_takes_too_long_is_refused(sample, cache, monkeypatch):
    monkeypatch.setattr(tokenizer_files, "_MOST_SECONDS", 0.02)
    with pytest.raises(DataError, match=r"took more than 0\.02 s"):
        built(sample)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    killer = "import os, signal; os.kill(os.getpid(), signal.SIGXCPU)"
    real = tokenizer_files.subprocess.run
    monkeypatch.setattr(
        tokenizer_files.subprocess, "run", lambda command, **options: real([command[0], "-c", killer], **options)
    )
    with pytest.raises(DataError, match="SIGXCPU ended it"):
        built(sample)
    assert entries(cache) == []


@pytest.mark.parametrize("package", ["tiktoken", "transformers"])
def test_a_missing_package_is_named_with_the_line_that_installs_it(package, sample, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EnvironmentError, match=rf"needs {package}\.(?s:.)*install .*'?{package}>="):
        built(sample)


def test_a_file_of_2024_needs_the_package_with_its_special_tokens(sample, here, monkeypatch):
    whole = json.loads(tekken())
    del whole["special_tokens"]
    (sample / "tekken.json").write_text(json.dumps(whole))
    monkeypatch.setitem(sys.modules, "mistral_common", None)
    with pytest.raises(EnvironmentError, match=r"needs mistral-common\.(?s:.)*install .*'?mistral-common>="):
        built(sample)


def test_a_damaged_conversion_is_made_again(sample, cache, here):
    want = built(sample).encode("Hello").tolist()
    file = entries(cache)[0] / "tokenizer.json"
    file.write_text(file.read_text()[:1000])
    (cache / f"{file.parent.name}.partial").mkdir()  # of a process that was killed
    assert built(sample).encode("Hello").tolist() == want
    [entry] = entries(cache)
    files = {name: (entry / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    assert read_tokenizer_files(str(sample)) == files and read_tokenizer_files("byte") == {}


def test_a_cache_that_cannot_be_written_is_named(sample, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot be written: (?s:.)*XDG_CACHE_HOME=DIR"):
        built(sample)


def test_modules_in_the_current_folder_are_not_run(sample, monkeypatch):
    """In a process of its own, as it is used."""
    for name in ("random", "transformers", "tiktoken"):
        (sample / f"{name}.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    monkeypatch.chdir(sample)
    built(Path("."))
    assert not Path("ran").exists()


def test_a_model_comes_in_and_goes_out_with_its_converted_tokenizer(sample, tmp_path, here, caplog):
    save("llama", sample, vocab_size=512)
    done = import_model(str(sample), str(tmp_path / "run"))
    assert done.tokenizer.endswith("(converted from tekken.json)")
    want = built(sample)
    caplog.clear()
    for weights, folder in ((open_weights(str(tmp_path / "run")), "a"), (open_weights(str(sample)), "b")):
        (tmp_path / folder).mkdir()
        write_tokenizer(tmp_path / folder, weights)
        assert built(tmp_path / folder).fingerprint == built(weights.tokenizer).fingerprint == want.fingerprint
        assert built(tmp_path / folder).adds_bos
    assert caplog.records == []  # nobody converts twice
    (sample / "tekken.json").rename(tmp_path / "tekken.json")
    (sample / "tekken.json").symlink_to(tmp_path / "tekken.json")
    with pytest.raises(CheckpointError, match="it is a link"):
        import_model(str(sample), str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_the_texts_that_are_compared_have_the_names_of_all_special_tokens_and_the_whole_vocabulary(sample):
    file = sample / "tekken.json"
    original, _ = read_tekken(file, file)
    texts = list(probes(original))
    assert {*TEXTS, *original.special} <= {*texts}
    used = {number for text in texts for number in original.encode(text)}
    reachable = (b"th", b"the", b"ab", b"  ", b" \n")  # the pattern cuts the others
    assert {10 + 256 + MERGES.index(token) for token in reachable} <= used


def test_an_error_of_a_conversion_is_of_the_family_that_it_was(sample, monkeypatch):
    problem = {"class": "EnvironmentError", "what": "w", "where": "x", "why": "y", "fix": "z"}
    done = tokenizer_files.subprocess.CompletedProcess([], 0, json.dumps({"problem": problem}), "")
    monkeypatch.setattr(tokenizer_files.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(CriusError) as raised:
        built(sample)
    assert isinstance(raised.value, EnvironmentError) and (raised.value.what, raised.value.fix) == ("w", "z")


def trained(file, **options):
    """Write a sentencepiece model without changes of the text, as Llama's; returns it as its own library reads it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXT.read_text().splitlines()[:400], *["<a> </b>"] * 9]),
        model_writer=written,
        model_type="bpe",
        vocab_size=500,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    file.write_bytes(written.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def refusal(path):
    with pytest.raises(ConfigError) as raised:
        built(path)
    return raised.value


def paste(fix, folder):
    """Run the first line of a fix in a shell."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run(fix.splitlines()[0], shell=True, cwd=folder, env=environ, check=True, capture_output=True)


def check_same_ids(ours, model, bos, eos):
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (model.bos_id(), model.eos_id(), len(model))
    assert ours.adds_bos
    first, *_, last = ours.encode_marked(f"{bos}a{eos}").tolist()
    assert (first, last) == (model.bos_id(), model.eos_id())
    for text in (*TEXTS, "▁", "▁a", " ▁a", "<0x41>", f"{bos} {eos}", TEXT.read_text()[:2000]):
        ids = ours.encode(text).tolist()
        assert ids == model.encode(text), text
        assert ours.eos_id not in ids  # a text cannot forge it
        stream = TextStream(ours, [])
        assert "".join(map(stream.push, ids)) + stream.finish() == stream.text


def test_the_pasted_line_makes_a_model_with_a_sentencepiece_file_one_that_can_be_imported(tmp_path, monkeypatch):
    """Texts that begin with a space keep their ids, which ``LlamaTokenizer`` would change."""
    source = tmp_path / "it's a hub"
    save("llama", source, vocab_size=512)
    model = trained(source / "tokenizer.model")
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": False}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        import_model(source.name, "run")
    assert not Path("run").exists()
    assert raised.value.fix.endswith("\n         then run the same command again")
    paste(raised.value.fix, tmp_path)
    import_model(source.name, "run")
    for place in (source, tmp_path / "run" / "tokenizer"):
        check_same_ids(built(place), model, "<s>", "</s>")
    assert built(source).encode(" a").tolist() != built(source).encode("a").tolist()


def test_the_pasted_line_converts_a_file_of_any_name(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    model = trained(folder / "my own.model.v3", add_dummy_prefix=False, bos_piece="<bos>", eos_piece="<eos>")
    monkeypatch.chdir(tmp_path)
    error = refusal("mine/my own.model.v3")
    assert error.what == "tokenizer mine/my own.model.v3 is a sentencepiece model, and Crius reads tokenizer.json."
    assert "sentencepiece and protobuf" in error.why
    paste(error.fix, tmp_path)
    flag, path = error.fix.split("then ")[1].split()
    assert flag == "--tokenizer.path"
    check_same_ids(built(path), model, "<bos>", "<eos>")


def test_the_line_installs_what_it_needs_and_keeps_what_the_folder_says_about_bos(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(SENTENCEPIECE)
    assert shlex.split(refusal(tmp_path).fix)[0] == sys.executable
    assert "add_bos_token=True" in refusal(tmp_path).fix
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert "add_bos_token" not in refusal(tmp_path).fix
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    first, second = refusal(tmp_path).fix.splitlines()[0].split(" && ")
    assert " 'sentencepiece>=0.2' 'protobuf>=5.26'" in first and second.endswith(f"tokenizer-{tmp_path.name}")


def test_a_class_that_numbers_pieces_otherwise_gets_no_line_but_the_published_file(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(SENTENCEPIECE)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "XLMRobertaTokenizerFast"}')
    assert refusal(tmp_path).fix.startswith(f"hf download REPO tokenizer.json --local-dir {tmp_path}")


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken"])
def test_a_tiktoken_file_is_known_by_its_content_and_has_no_line_since_it_lacks_special_tokens(name, tmp_path):
    from transformers import PreTrainedTokenizerFast

    (tmp_path / name).write_bytes(RANKS)
    for path in (tmp_path, tmp_path / name):
        error = refusal(path)
        assert error.what == f"tokenizer {tmp_path / name} is a tiktoken file, and Crius reads tokenizer.json."
        assert "neither how a text is split nor which special tokens" in error.why
        assert error.fix.startswith(f"hf download REPO tokenizer.json --local-dir {tmp_path}, where REPO is")
    if name == "tokenizer.model":
        PreTrainedTokenizerFast.from_pretrained(tmp_path).save_pretrained(tmp_path / "out")
        with pytest.raises(DataError, match="none of the usual tokens that end a document"):
            built(tmp_path / "out")


def test_a_tokenizer_json_beside_the_file_is_named_and_a_folder_with_both_is_read(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(SENTENCEPIECE)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert refusal(tmp_path / "tokenizer.model").fix == f"--tokenizer.path {tmp_path}, which has a tokenizer.json"
    assert tokenizer_file(str(tmp_path)) == tmp_path / "tokenizer.json"


@pytest.mark.parametrize(
    "words",
    [
        "train --training.steps 1 --tokenizer.path hub",
        "train --training.steps 1 --checkpoint.init_from hub",
        "data prepare tokens --data.source stdlib --tokenizer.path hub",
        "import hub run",
        "export hub out",
        "generate hub --prompt hi",
        "evaluate hub --tasks questions.jsonl",
    ],
)
def test_every_command_ends_with_exit_code_2_before_it_does_anything(words, tmp_path):
    save("llama", tmp_path / "hub", vocab_size=512)
    (tmp_path / "hub" / "tokenizer.model").write_bytes(SENTENCEPIECE)
    (tmp_path / "questions.jsonl").write_text('{"context": "a", "choices": ["b", "c"], "gold": 0}\n')
    done = crius(*words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("ConfigError: tokenizer hub/tokenizer.model is a sentencepiece model")
    assert {file.name for file in tmp_path.iterdir()} <= {"hub", "questions.jsonl", "cache", "runs"}
    assert not list(tmp_path.glob("runs/*"))

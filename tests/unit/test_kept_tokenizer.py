"""A run keeps its tokenizer and what its source said: wherever it goes, and whatever becomes of its source."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from harness import TEXT, crius
from pretrained_samples import save, save_tokenizer

from crius import cli
from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import read_manifest
from crius.checkpoint.kept import keep, kept_damages, kept_folder
from crius.checkpoint.manifest import MANIFEST, Manifest
from crius.checkpoint.names import step_name
from crius.cli.settings import config_of
from crius.config.data import TokenizerConfig
from crius.errors import ConfigError
from crius.interop.kept import Origin, files_to_keep
from crius.interop.weights import open_weights
from crius.kernels import choice
from crius.tokens import files as tokenizer_files
from crius.tokens.tokenizer import ByteTokenizer, build_tokenizer
from crius.tools.convert import exporting
from crius.train.inputs import check_resume

pytestmark = pytest.mark.full  # a run, and one that resumes

GONE = "hf that is gone"
SAID = {"max_position_embeddings": 16384, "bos_token_id": 5, "eos_token_id": [256, 7], "pad_token_id": 9}
TRAINED = [
    *("--checkpoint.interval", "1", "--validation.interval", "0", "--training.seq_len", "32", "--batch", "2"),
    *("--data.source", "text", "--data.path", str(TEXT)),
]


def of_source(place):
    return ["train", "--checkpoint.init_from", str(place / "hf"), *TRAINED, "--job.run_dir", "mine"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of two steps from a model, which is gone."""
    place = tmp_path_factory.mktemp("runs")
    save("llama_tied", place / "hf", num_hidden_layers=1, **SAID)
    save_tokenizer(place / "hf")
    done = crius(*of_source(place), "--steps", "2", cwd=place)
    assert done.returncode == 0, done.stderr
    (place / "hf").rename(place / GONE)
    return place


@pytest.fixture
def moved(runs, tmp_path):
    shutil.copytree(runs / "mine", tmp_path / "mine")
    return tmp_path / "mine"


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Logits are not compared, and the kernels of a run in this process stay its own."""
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    with choice.applied(choice.current()):
        yield


def tokenizers(checkpoints):
    return sorted(checkpoints.glob("tokenizer-*"))


def json_of(*parts):
    return json.loads(Path(*parts).read_text())


VERBS = {
    "generate": ["generate", "mine", "--prompt", "a", "--max_new_tokens", "1"],
    "evaluate": ["evaluate", "mine", "--tasks", "text.txt"],
    "export": ["export", "mine", "out"],
    "show": ["data", "show", "mine", "--step", "1"],
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.long
def test_a_moved_run_whose_source_is_gone_is_read(verb, moved, monkeypatch, capsys):
    monkeypatch.chdir(moved.parent)
    Path("text.txt").write_text("Hello world")
    assert cli.main(VERBS[verb]) == 0, capsys.readouterr().err


@pytest.mark.long
def test_a_moved_run_whose_source_is_gone_resumes_and_keeps_its_tokenizer_once(moved, runs):
    before = tokenizers(moved / "checkpoints")
    done = crius(*of_source(runs), "--steps", "3", cwd=moved.parent)
    assert done.returncode == 0, done.stderr
    assert "resume: step 2" in done.stdout
    assert tokenizers(moved / "checkpoints") == before and len(before) == 1
    manifests = [json_of(file) for file in sorted((moved / "checkpoints").glob(f"step-*/{MANIFEST}"))]
    assert len({json.dumps(manifest["tokenizer"]) for manifest in manifests}) == 1
    assert (moved / "checkpoints" / step_name(3)).is_dir()


def test_a_run_of_another_length_exports_what_its_source_said(runs, tmp_path):
    assert cli.main(["export", str(runs / "mine"), str(tmp_path / "out")]) == 0
    for file in ("config.json", "generation_config.json"):
        assert json_of(tmp_path, "out", file) == json_of(runs / GONE, file)


def test_a_run_with_the_byte_tokenizer_from_random_weights_keeps_nothing(tmp_path):
    assert files_to_keep("byte", ByteTokenizer(), Origin()) == {}
    assert keep(open_disk(str(tmp_path)), {}) == {} and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ends", "want"), [([256, 7], [256, 7]), (256, 256), (7, 256), (None, 256)])
def test_an_eos_of_the_source_stays_unless_it_ends_no_text_for_the_tokenizer_of_the_run(ends, want):
    origin = Origin("", {"config.json": {**SAID, "eos_token_id": ends}})
    kept = files_to_keep("byte", ByteTokenizer(), origin)
    assert json.loads(kept["config.json"]) == {**SAID, "eos_token_id": want}
    unchanged = files_to_keep("byte", ByteTokenizer(), origin._replace(tokenizer="byte"))
    assert json.loads(unchanged["config.json"])["eos_token_id"] == ends


def test_a_tokenizer_is_kept_under_its_usual_name_and_with_the_files_beside_it(tmp_path):
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "my.json")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7, "max_length": 4, "temperature": 0.6}')
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 9}')  # of another model, maybe
    path = str(tmp_path / "my.json")
    kept = files_to_keep(path, build_tokenizer(TokenizerConfig(path=path)), Origin())
    assert kept.keys() == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert kept["tokenizer.json"] == (tmp_path / "my.json").read_bytes()
    assert json.loads(kept["generation_config.json"]) == {"eos_token_id": 7}, "the rest is about its model"


def test_a_converted_tokenizer_is_kept_as_it_was_converted(tmp_path, monkeypatch):
    """Else a machine without the packages of the conversion, or with others, could not read the run."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tekken.json").write_text("{}")
    (tmp_path / "cache").mkdir()
    save_tokenizer(tmp_path / "cache")
    monkeypatch.setattr(tokenizer_files, "_converted", lambda file: tmp_path / "cache")
    path = str(tmp_path / "model")
    kept = files_to_keep(path, build_tokenizer(TokenizerConfig(path=path)), Origin())
    assert kept == {name: (tmp_path / "cache" / name).read_bytes() for name in sorted(kept)}
    assert kept.keys() == {"tokenizer.json", "tokenizer_config.json"}


def changed(folder):
    """The folder's tokenizer with another token."""
    content = json_of(folder, "tokenizer.json")
    content["added_tokens"].append({**content["added_tokens"][0], "id": 257, "content": "<new>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))


def test_another_tokenizer_at_the_same_place_is_refused_by_name(moved, runs):
    shutil.copytree(runs / GONE, runs / "hf")
    try:
        changed(runs / "hf")
        done = crius(*of_source(runs), "--steps", "3", cwd=moved.parent)
    finally:
        shutil.rmtree(runs / "hf")
    (kept,) = tokenizers(moved / "checkpoints")
    assert done.returncode == 2
    assert f"tokenizer.path: mine/checkpoints/{kept.name} -> {runs / 'hf'}" in done.stderr
    assert f"fix    --tokenizer.path mine/checkpoints/{kept.name}, or" in done.stderr


def test_a_tokenizer_at_another_place_counts_by_its_content(moved, runs):
    shutil.copytree(runs / GONE, moved.parent / "tok")
    config = config_of(str(moved))
    named = replace(config, tokenizer=TokenizerConfig(path=str(moved.parent / "tok")))
    check_resume(named, moved)
    changed(moved.parent / "tok")
    with pytest.raises(ConfigError, match=f"tokenizer.path: {runs / 'hf'} -> {moved.parent / 'tok'}"):
        check_resume(named, moved)


def rewrite(checkpoints, change):
    """Write the manifests again as ``change`` returns them."""
    for file in checkpoints.glob(f"step-*/{MANIFEST}"):
        file.write_bytes(change(Manifest.decode(file.read_bytes(), "")).encode())


def test_the_eos_that_the_run_was_told_ends_a_text_later_too(moved):
    told = {"tokenizer.eos_token": "z"}
    rewrite(moved / "checkpoints", lambda manifest: replace(manifest, config=manifest.config | told))
    weights = open_weights(str(moved))
    tokenizer = build_tokenizer(TokenizerConfig(path=weights.tokenizer, eos_token=weights.eos_token))
    assert tokenizer.decode([tokenizer.eos_id]) == "z"


def test_a_run_of_an_older_version_is_read_where_its_tokenizer_is(moved, runs, capsys):
    for folder in tokenizers(moved / "checkpoints"):
        shutil.rmtree(folder)
    rewrite(moved / "checkpoints", lambda manifest: replace(manifest, tokenizer={}))
    command = ["export", str(moved), str(moved.parent / "out")]
    assert cli.main(command) == 1
    assert f"the tokenizer {runs / 'hf'} of step 2 of" in capsys.readouterr().err
    shutil.copytree(runs / GONE, runs / "hf")
    try:
        assert cli.main(command) == 0
    finally:
        shutil.rmtree(runs / "hf")
    assert json_of(moved.parent, "out", "config.json").items() >= SAID.items()


def test_a_damaged_tokenizer_is_named_and_written_again(moved, runs, capsys, caplog):
    (kept,) = tokenizers(moved / "checkpoints")
    (kept / "tokenizer.json").write_bytes(b"{" + (kept / "tokenizer.json").read_bytes()[1:-1] + b" ")
    assert cli.main(["checkpoint", "verify", str(moved)]) == 1
    assert "tokenizer.json: has hash" in capsys.readouterr().out
    with caplog.at_level(logging.WARNING, "crius"):
        assert open_weights(str(moved)).tokenizer == ""
    assert "tokenizer.json: has hash" in caplog.text
    shutil.copytree(runs / GONE, runs / "hf")
    try:
        assert open_weights(str(moved)).tokenizer == str(runs / "hf")
        changed(runs / "hf")
        assert open_weights(str(moved)).tokenizer == ""
    finally:
        shutil.rmtree(runs / "hf")
    disk = open_disk(str(moved / "checkpoints"))
    entries = read_manifest(disk, step_name(2)).tokenizer
    files = {name: (kept / name).read_bytes() for name in entries}
    files["tokenizer.json"] = (runs / GONE / "tokenizer.json").read_bytes()
    assert keep(disk, files) == entries and kept_damages(disk, entries) == []


def test_a_run_behind_a_url_is_read_with_its_tokenizer(moved, user_cache, capsys):
    url = f"file://{moved}/checkpoints"
    assert cli.main(["generate", url, "--prompt", "a", "--max_new_tokens", "1"]) == 0, capsys.readouterr().err
    kept = read_manifest(open_disk(url), step_name(2)).tokenizer
    place = user_cache / "crius" / "tokenizers" / kept_folder(kept)
    assert open_weights(url).tokenizer == str(place)
    (place / "tokenizer.json").unlink()
    assert open_weights(f"{url}/{step_name(1)}").chat_template == "{{ messages }}"


def test_an_export_without_a_tokenizer_must_be_asked_for(runs, tmp_path, capsys):
    """Also of an import, which then still says what its source said."""
    shutil.copytree(runs / GONE, tmp_path / "bare")
    for file in tmp_path.glob("bare/*token*"):
        file.unlink()
    assert cli.main(["import", str(tmp_path / "bare"), str(tmp_path / "run")]) == 0
    for source in ("bare", "run"):
        command = ["export", str(tmp_path / source), str(tmp_path / f"{source}-out")]
        assert cli.main(command) == 1
        said = capsys.readouterr().err
        assert "has no tokenizer" in said and "--no_tokenizer" in said and not (tmp_path / f"{source}-out").exists()
        assert cli.main([*command, "--no_tokenizer"]) == 0
        assert not list(tmp_path.glob(f"{source}-out/*token*"))
        for file in ("config.json", "generation_config.json"):
            assert json_of(tmp_path, f"{source}-out", file) == json_of(tmp_path, "bare", file)


def test_a_dcp_export_has_no_tokenizer_to_leave_out(runs, tmp_path, capsys):
    command = ["export", str(runs / "mine"), str(tmp_path / "out"), "--format", "dcp", "--no_tokenizer"]
    assert cli.main(command) == 2 and "no_tokenizer has no effect" in capsys.readouterr().err

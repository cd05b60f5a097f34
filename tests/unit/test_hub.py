"""Names of the hub where a path is taken: asked once, resumed, recorded as a commit; paths never go to the network."""

from contextlib import nullcontext
from types import SimpleNamespace

import harness
import pytest
from hub_stand_in import Repository, StandIn, repository
from tiny_source import runner, save_source

from crius.cli import main
from crius.cli.settings import run_of
from crius.config.toml_file import toml_table
from crius.data.documents import find_files
from crius.errors import ConfigError, EnvironmentError
from crius.hub import hub_name, snapshot_of
from crius.interop.hub import located, located_data

pytest.importorskip("huggingface_hub")

MODEL = "some/small-0.1"
CODE = {"modeling.py": b"raise SystemExit", "pytorch_model.bin": b"pickle", "onnx/model.json": b"{}"}
CHATS = {"data/en/train-0.jsonl": b'{"text": "a"}\n', "data/test-0.jsonl": b'{"text": "b"}\n', "load.py": b"raise"}
CHATS["data/empty.jsonl"] = b""
TYPOS = [
    "./some/small",
    "a/b/c",
    "some/small.jsonl",
    "model.safetensors",
    "runs/tunde",
    "rnus/tuned",
    "/some/small",
    "some",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    save_source(place)
    return place


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with StandIn().running() as hub:
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": False,
            "DOWNLOAD_CHUNK_SIZE": 512,
        }.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        files = repository(folder)
        hub.repositories[MODEL] = Repository({**files.commits[files.main], **CODE})
        hub.repositories["some/chats"] = Repository(CHATS)
        yield hub


def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_verbs_take_a_name_and_fetch_only_data(hub, capsys, tmp_path):
    (tmp_path / "text.txt").write_text("A text of some words.")
    for verb, *more in (
        ("generate", "--prompt", "a", "--max_new_tokens", "1"),
        ("evaluate", "--tasks", "text.txt"),
        ("export", "out", "--format", "dcp"),
        ("import", "run"),
    ):
        code, _, error = runner(verb, capsys, MODEL)(*more)
        assert code == 0, error
    assert sorted(hub.fetched()) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    commit = hub.repositories[MODEL].main
    assert commit in (tmp_path / "run" / "run.toml").read_text()
    assert main(["plan", "--model.from_hf", MODEL, "--gpus", "1", "--seq_len", "64"]) == 0


def test_settings_take_a_name_and_keep_its_commit(hub, caplog):
    run = run_of(
        *("--checkpoint.init_from", MODEL, "--data.source", "jsonl", "--data.path", "some/chats"),
        *("--tokenizer.path", f"{MODEL}@main"),
    )
    commit = hub.repositories[MODEL].main
    assert snapshot_of(run.checkpoint.init_from) == snapshot_of(run.tokenizer.path) == (MODEL, commit)
    assert run.model.dim == 32
    assert [file.name for file in find_files(run.data)] == ["train-0.jsonl"]
    flags = ["--data.source", "jsonl", "--data.path", "some/chats", "--num_workers", "1"]
    assert main(["data", "prepare", "tokens", *flags]) == 0
    assert "load.py" not in hub.fetched() and "modeling.py" not in hub.fetched()
    assert f"hub: {MODEL}@{commit}, 4 files, 0.00 GiB, in " in caplog.text


@pytest.mark.full
def test_a_run_keeps_its_commit_and_a_changed_revision_is_told(hub, caplog, tmp_path, monkeypatch):
    home = tmp_path / "home"
    before = hub.repositories[MODEL].main
    flags = ["--checkpoint.init_from", MODEL, "--job.run_dir", str(tmp_path / "run")]
    small = [*("--training.steps", "1", "--training.seq_len", "16", "--training.global_batch_size", "2")]
    small += ["--data.source", "text", "--data.path", str(harness.TEXT), "--validation.interval", "0"]
    environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    done = harness.crius("train", *flags, *small, cwd=tmp_path, **environ)
    assert done.returncode == 0 and f"hub: {MODEL}@{before}" in done.stderr, done.stderr
    assert snapshot_of(toml_table(tmp_path / "run" / "run.toml")["checkpoint"]["init_from"]) == (MODEL, before)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    files = hub.repositories[MODEL].commits[before]
    hub.repositories[MODEL] = Repository(files, {**files, "generation_config.json": b"{}"})
    hub.asked.clear()
    assert snapshot_of(run_of(*flags).checkpoint.init_from) == (MODEL, before) and not hub.asked
    newest = hub.repositories[MODEL].main
    assert snapshot_of(run_of("--checkpoint.init_from", MODEL).checkpoint.init_from) == (MODEL, newest)
    assert f"another commit than before: {newest} in place of {before}, " in caplog.text
    assert located(f"{MODEL}@{before}").endswith(before)


def test_a_cut_download_goes_on_where_it_was_cut(hub, folder):
    hub.cut.add("model.safetensors")
    weights = (folder / "model.safetensors").read_bytes()
    place = located(MODEL)
    assert open(f"{place}/model.safetensors", "rb").read() == weights
    again = next(span for _, path, span, _ in hub.asked if "safetensors" in path and span)
    assert 0 < int(again.removeprefix("bytes=").removesuffix("-")) <= len(weights) // 2


def test_after_a_failure_only_the_missing_files_are_fetched(hub):
    hub.broken.add("model.safetensors")
    with pytest.raises(EnvironmentError) as caught:
        located(MODEL)
    assert "the same command again" in caught.value.fix
    hub.broken.clear()
    hub.asked.clear()
    located(MODEL)
    assert "model.safetensors" in hub.fetched() and len(hub.fetched()) < 4


@pytest.mark.parametrize(("free", "fits"), [(28, True), (27, False)])
def test_what_the_disk_has_no_room_for_is_not_fetched(free, fits, hub, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=free))
    with nullcontext() if fits else pytest.raises(EnvironmentError, match="some/chats has .* are free in"):
        located_data("some/chats", "jsonl")
    assert len(hub.fetched()) == 2 * fits  # an empty file is not asked for


@pytest.mark.parametrize("path", TYPOS)
def test_a_mistyped_path_is_no_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/tuned").mkdir(parents=True)
    assert hub_name(path) is None and hub_name("owner/tuned") and hub_name("rnus/other")


@pytest.mark.parametrize("before", ["https://huggingface.co/", "hf.co/", "https://huggingface.co/datasets/"])
def test_the_page_of_a_repository_is_its_name(before):
    assert hub_name(f"{before}some/small-0.1@main") == ("some/small-0.1", "main")


def test_a_mistyped_path_is_not_asked_of_the_hub(hub, capsys):
    for verb, *more in (("generate", "--prompt", "a"), ("import", "run"), ("export", "out")):
        assert runner(verb, capsys, "./some/small")(*more)[0] == 2
    for setting in ("--model.from_hf", "--checkpoint.init_from"):
        with pytest.raises(ConfigError):
            run_of(setting, "./some/small")
    run = run_of("--tokenizer.path", "./a/b", "--data.source", "jsonl", "--data.path", "./c/d")
    assert (run.tokenizer.path, run.data.path) == ("./a/b", ("./c/d",))
    assert not hub.asked


def test_an_existing_path_wins_over_a_name(hub, tmp_path):
    (tmp_path / MODEL).mkdir(parents=True)
    assert located(MODEL) == MODEL and hub_name(f"{MODEL}@main") is not None and not hub.asked


def test_offline_the_cache_is_read_and_what_it_lacks_is_one_error(hub, monkeypatch):
    place = located(MODEL)
    offline(monkeypatch)
    hub.asked.clear()
    assert located(MODEL) == place and not hub.asked
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids a download") as caught:
        located("some/other")
    assert "HF_HUB_OFFLINE=0" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "kind", "said", "fix"),
    [
        ("some/gated", EnvironmentError, "some/gated is gated", "ask for access on http"),
        ("some/none", ConfigError, "no such name on the hub", "hf auth login if some/none is private"),
        (f"{MODEL}@v9", ConfigError, f"{MODEL} has no revision v9", "a branch, tag or commit"),
    ],
)
def test_what_the_hub_refuses_is_one_error_without_the_token(name, kind, said, fix, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecretsecret")
    hub.repositories["some/gated"] = Repository({"config.json": b"{}"}, is_gated=True)
    with pytest.raises(kind) as caught:
        located(name)
    assert said in caught.value.what and fix in caught.value.fix
    assert "hf_secret" not in str(caught.value)


def test_an_export_is_uploaded_after_a_yes(hub, folder, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecretsecret")
    export = ["export", str(folder), "--format", "dcp", "--push_to", "someone/mine"]
    assert main([*export, "one"]) == 2  # nobody is at the terminal
    monkeypatch.setattr("sys.stdin", Answer("n"))
    assert main([*export, "two"]) == 0
    assert "not uploaded" in capsys.readouterr().err and not hub.pushed
    assert main([*export, "three", "--yes"]) == 0
    error = capsys.readouterr().err
    place = tmp_path / "three"
    there = {str(file.relative_to(place)) for file in place.rglob("*") if file.is_file()}
    assert hub.pushed["someone/mine"].keys() == there
    assert hub.pushed["created"]["visibility"] == "private"
    assert all(name in error for name in hub.pushed["someone/mine"]) and "hf_secret" not in error


class Answer:
    """A terminal at which somebody answers."""

    def __init__(self, text: str) -> None:
        self._text = text

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return f"{self._text}\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--push_to", "mine", "--yes"], "is not a name on the hub"),
        (["--push_to", "a/b@main", "--yes"], "is not a name on the hub"),
        (["--yes"], "--yes has no effect without --push_to"),
    ],
)
def test_a_wrong_upload_is_refused_before_the_export(flags, said, folder, capsys, tmp_path):
    assert main(["export", str(folder), str(tmp_path / "out"), *flags]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()

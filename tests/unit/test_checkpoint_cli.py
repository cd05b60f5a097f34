"""``crius checkpoint ls|verify|prune``."""

import hashlib
import json
import os

import pytest
from checkpoint_samples import local, save, write
from fsspec.implementations.memory import MemoryFileSystem

from crius.checkpoint.disk import open_disk
from crius.checkpoint.manifest import Manifest, digest_of
from crius.cli import main


@pytest.fixture
def run(tmp_path):
    """A run folder with checkpoints of steps 10 to 40."""
    local(tmp_path / "checkpoints", 10, 20, 30, 40)
    return tmp_path


@pytest.fixture
def crius(capsys):
    """Run a command: its exit code and what it printed, both streams."""

    def command(*arguments):
        capsys.readouterr()
        code = main(["checkpoint", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out + err

    return command


def test_ls_shows_every_checkpoint_and_what_is_left_of_others(run, crius):
    folder = run / "checkpoints"
    disk = open_disk(str(folder))
    kept = disk.set_aside("step-00000040")
    write(disk, 50, "dead")
    (folder / "step-00000010" / "manifest.json").unlink()
    manifest = folder / "step-00000020" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"fsdp2", b"fsdp4"))
    code, text = crius("ls", run, "--json")
    assert code == 0
    rows = {row["name"]: row for row in json.loads(text)}
    assert {name: row["state"].split(" (")[0] for name, row in rows.items()} == {
        "step-00000010": "damaged",
        "step-00000020": "damaged manifest",
        "step-00000030": "ok",
        kept: "aside",
        "step-00000050.tmp-dead": "leftover",
    }
    good = rows["step-00000030"]
    assert (good["step"], good["tokens"], good["num_ranks"], good["layout"]) == (30, 30 * 512, 2, "fsdp2")
    assert good["bytes"] == sum(f.stat().st_size for f in (folder / good["name"]).iterdir() if f.stem != "manifest")
    assert 0 <= good["age_seconds"] < 60
    code, text = crius("ls", folder)
    assert f"ok  {good['manifest']}" in text
    assert "15,360" in text


def test_ls_notices_a_file_that_is_missing(run, crius):
    (run / "checkpoints" / "step-00000030" / "rank-00001.safetensors").unlink()
    assert "damaged (rank-00001.safetensors is missing)" in crius("ls", run)[1]


def test_verify_reads_every_byte_and_names_file_and_tensor(run, crius):
    assert crius("verify", run)[0] == 0
    file = run / "checkpoints" / "step-00000030" / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    code, text = crius("verify", run)
    assert code == 1
    assert "rank-00001.safetensors, model.norm.weight: bytes " in text
    assert "1 of 4 damaged" in text
    code, text = crius("verify", run, "--json")
    assert code == 1
    report = json.loads(text)
    assert [len(checkpoint["damages"]) for checkpoint in report["checkpoints"]] == [0, 0, 1, 0]
    assert report["checkpoints"][2]["damages"][0]["tensor"] == "model.norm.weight"
    assert crius("verify", run / "checkpoints" / "step-00000020")[0] == 0


def test_a_place_can_be_named_in_every_way(run, crius, monkeypatch):
    settings = '[checkpoint]\nfolder = "elsewhere"\n'
    places = [run, run / "checkpoints", run / "checkpoints" / "step-00000010", f"file://{run}/checkpoints", f"{run}/"]
    counts = [len(json.loads(crius("ls", place, "--json")[1])) for place in places]
    assert counts == [4, 4, 1, 4, 4]
    monkeypatch.chdir(run / "checkpoints" / "step-00000020")
    assert [row["step"] for row in json.loads(crius("ls", ".", "--json")[1])] == [20]
    (run / "run.toml").write_text(settings)
    assert crius("ls", run) == (0, f"no checkpoints in {run}/elsewhere\n")
    save(open_disk("memory://cli/run"), 10)
    assert crius("verify", "memory://cli/run/step-00000010")[0] == 0
    MemoryFileSystem.store.clear()


@pytest.mark.parametrize("lost", ["manifest", "link"])
def test_verify_and_ls_report_a_checkpoint_that_lost_its_manifest_or_became_a_link(lost, run, crius):
    place = run / "checkpoints" / "step-00000030"
    if lost == "manifest":
        (place / "manifest.json").unlink()
    else:
        place.rename(run / "elsewhere")
        place.symlink_to(run / "elsewhere")
    code, text = crius("verify", run)
    assert code == 1 and "step-00000030: DAMAGED" in text and "1 of 4 damaged" in text
    assert ("the manifest was lost" if lost == "manifest" else "symbolic links") in text
    code, text = crius("ls", run)
    assert code == 0 and text.count("damaged") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("verify", "{run}/nowhere"), 2, "is not a folder"),
        (("verify", "{run}/checkpoint"), 2, "checkpoints is one"),
        (("verify", "{run}/model.bin"), 2, "pickles, not read"),
        (("verify", "{run}/empty/model.safetensors"), 2, "empty is one"),
        (("verify", "{run}/empty"), 1, "no checkpoints"),
        (("ls", "foo://x"), 2, "does not know the URL scheme foo://"),
        (("prune", "{run}", "--keep_last", "1"), 2, "--keep_last 2"),
        (("prune", "{run}", "--keep-every", "-1"), 2, "--keep_every 0"),
        (("prune", "{run}/checkpoints/step-00000010"), 2, "one checkpoint"),
        (("verify", "{run}", "--expect_manifest", "sha256:" + "0" * 64), 2, "for one checkpoint"),
        (("verify", "{run}/checkpoints/step-00000010", "--expect_manifest", "md5:0"), 2, "not a hash"),
    ],
)
def test_what_cannot_be_done_says_why(arguments, code, words, run, crius):
    (run / "empty").mkdir()
    for name in ("model.bin", "empty/model.safetensors", "empty/config.json"):
        (run / name).touch()
    found = crius(*(argument.format(run=run) for argument in arguments))
    assert found[0] == code
    assert words in found[1]


@pytest.mark.parametrize("algorithm", ["xxh3-128", "sha256"])
def test_a_checkpoint_that_was_changed_and_hashed_anew_is_not_the_expected_one(algorithm, run, crius):
    place = run / "checkpoints" / "step-00000030"
    manifest = place / "manifest.json"
    code, text = crius("verify", place, "--json")
    report = json.loads(text)["checkpoints"][0]
    expected = report["manifest" if algorithm == "xxh3-128" else "manifest_sha256"]
    assert expected.startswith(algorithm)
    assert report["manifest_sha256"] == "sha256:" + hashlib.sha256(manifest.read_bytes()).hexdigest()
    assert crius("verify", place, "--expect_manifest", expected)[0] == 0
    file = place / "rank-00001.safetensors"
    old, new = file.read_bytes(), file.read_bytes()[:-1] + b"\xff"
    file.write_bytes(new)
    found = Manifest.decode(manifest.read_bytes(), "m")
    text = manifest.read_bytes().replace(digest_of(old).encode(), digest_of(new).encode())
    for entry in found.tensors.values():
        for chunk in entry.chunks:
            if chunk.file == file.name:
                was, now = (digest_of(data[chunk.begin : chunk.end]).encode() for data in (old, new))
                text = text.replace(was, now)
    zeroed = text.replace(found.digest.encode(), b"0" * 32)
    manifest.write_bytes(zeroed.replace(b"0" * 32, digest_of(zeroed).encode(), 1))
    assert crius("verify", place)[0] == 0  # nobody can tell, without knowing what to expect
    code, text = crius("verify", place, "--expect_manifest", expected)
    assert code == 1
    assert "manifest.json: is not the expected manifest" in text


def test_prune_removes_what_it_said_it_would(run, crius):
    folder = run / "checkpoints"
    (folder / "step-00000030" / "state.json").unlink()
    code, text = crius("prune", run, "--keep_last", "2", "--dry_run")
    assert (code, len(os.listdir(folder))) == (0, 4)
    assert "would remove step-00000010" in text
    assert "kept step-00000030, which does not count: state.json is missing" in text
    assert crius("prune", run, "--keep_last", "2", "--keep_every", "10")[0] == 0
    assert len(os.listdir(folder)) == 4
    code, text = crius("prune", run, "--keep_last", "2", "--json")
    assert json.loads(text) == {
        "removed": [10],
        "kept": [20, 30, 40],
        "damaged": {"30": "state.json is missing"},
        "dry_run": False,
    }
    assert sorted(os.listdir(folder)) == ["step-00000020", "step-00000030", "step-00000040"]


def test_prune_leaves_a_run_that_is_going_on_alone(run, crius):
    from crius.launch.lock import run_lock

    with run_lock(run, "train"):
        code, text = crius("prune", run, "--keep_last", "2")
    assert code == 2
    assert "another run writes to" in text
    assert len(os.listdir(run / "checkpoints")) == 4

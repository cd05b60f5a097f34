"""The newest checkpoint that a run or a reader finds: what is taken, refused, and recorded of it."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from checkpoint_samples import local
from test_foreign_weights import tensors_of, write_model

from crius.checkpoint.folder import CheckpointFolder, read_manifest
from crius.checkpoint.names import step_name
from crius.errors import ConfigError
from crius.interop.weights import open_weights, record_of, saved_model, settled
from crius.tools.convert.importing import import_model
from crius.train.saving import NEWEST, check_newest, remember

AGAIN = {"digest": "0" * 32}
RETURNED = {"config": {"checkpoint.load_step": 2}}
DAMAGED = b"{}"
# steps in the folder; seed of its run; changes of the record of step 4; what else; a part of the line, or of the error
CASES = {
    "as remembered": ((2, 4), {}, "", ""),
    "newer: killed between commit and record": ((2, 4, 6), {}, "", ""),
    "newest one damaged": ((2, 4), {}, "damaged", ""),
    "newest one set aside": ((2, 4), {}, "aside", "continues from step 2, because step-00000004"),
    "newest one damaged and set aside": ((2, 4), {}, "damaged aside", "continues from step 2, because step-00000004"),
    "another one set aside before": ((2, 4), AGAIN, "aside", "REFUSED step 2 at most"),
    "a later one set aside before": ((2, 6), {}, "aside", "REFUSED step 2 at most"),
    "newest one being replaced": ((2, 4), {}, "replaced", "because step-00000004.replaced-ab"),
    "asked for by load_step": ((2,), {}, "load_step", ""),
    "lost after the return that load_step asked for": ((2,), RETURNED, "load_step", "REFUSED step 2 at most"),
    "such a loss, allowed": ((2,), RETURNED, "load_step restart", "the run continues from step 2, because"),
    "empty": ((), {}, "", "REFUSED step 4, is missing"),
    "older": ((2,), {}, "", "REFUSED step 2 at most"),
    "older, allowed": ((2,), {}, "restart", "the run continues from step 2, because --checkpoint.restart allows it"),
    "empty, allowed": ((), {}, "restart", "the run begins again, because --checkpoint.restart allows it"),
    "of another run": ((4,), {"run_id": "b"}, "", "REFUSED step 4 in"),
    "newer, of another run": ((9,), {"run_id": "b"}, "", "REFUSED step 9 in"),
    "another one of the step": ((4,), AGAIN, "", "REFUSED is of another run, or was saved again"),
    "another one, allowed": ((4,), AGAIN, "restart", "the run continues from step 4, because"),
    "nothing remembered": ((2,), None, "", "is missing or damaged: the run continues from step 2"),
    "nothing remembered or saved": ((), None, "", ""),
    "record damaged": ((2,), DAMAGED, "", "is missing or damaged: the run continues from step 2"),
    "record cut off, empty": ((), DAMAGED, "", "REFUSED is missing"),
}


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("case", CASES)
def test_what_a_run_takes_in_place_of_its_newest_checkpoint(case, scheme, tmp_path):
    steps, record, what, said = CASES[case]
    folder = CheckpointFolder(local(tmp_path / "checkpoints", *steps, scheme=scheme))
    if isinstance(record, dict):
        disk = folder.disk if 4 in steps else local(tmp_path / "lost", 4)
        remember(tmp_path, folder, dataclasses.replace(read_manifest(disk, step_name(4)), **record))
    elif record:
        (tmp_path / NEWEST).write_bytes(record)
    if "damaged" in what:
        (tmp_path / "checkpoints" / step_name(4) / "manifest.json").write_bytes(b"")
    if what == "replaced":
        (tmp_path / "checkpoints" / step_name(4)).rename(tmp_path / "checkpoints" / f"{step_name(4)}.replaced-ab")
    if "aside" in what:
        folder.disk.set_aside(step_name(max(steps)))
    load_step = 2 if "load_step" in what else -1
    if said.startswith("REFUSED"):
        with pytest.raises(ConfigError, match=said.removeprefix("REFUSED ")) as caught:
            check_newest(tmp_path, folder, load_step, accepts=False)
        assert caught.value.exit_code == 2 and str(folder.disk.where) in caught.value.what
        assert "--checkpoint.restart" in caught.value.fix
        assert check_newest(tmp_path, folder, load_step, accepts=True)
        return
    line = check_newest(tmp_path, folder, load_step, accepts="restart" in what)
    assert said in line and bool(line) == bool(said)


def test_a_run_that_begins_again_remembers_that_it_saved_nothing(tmp_path):
    folder = CheckpointFolder(local(tmp_path / "checkpoints", 4))
    manifest = read_manifest(folder.disk, step_name(4))
    place = {"folder": folder.disk.where, "load_step": -1}
    remember(tmp_path, folder, manifest)
    saved = {"run_id": manifest.run_id, "step": 4, "digest": manifest.digest}
    assert json.loads((tmp_path / NEWEST).read_text()) == saved | place
    remember(tmp_path, folder, None)
    assert json.loads((tmp_path / NEWEST).read_text()) == {"run_id": "", "step": -1, "digest": "none"} | place
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')  # of a kill before the first save
    for there in (CheckpointFolder(local(tmp_path / "empty")), folder):  # or between that save and its record
        assert check_newest(tmp_path, there, -1, accepts=False) == ""


@pytest.mark.parametrize("record", [None, DAMAGED])
@pytest.mark.parametrize(
    ("settings", "metrics", "is_refused"),
    [
        ("", '{"step": 4, "loss": 1.0}\n{"st', True),
        ("[checkpoint]\ninterval = 2\n", '{"step": 3}\n{"step": 4}\n', True),
        ("checkpoint = 1", '7\n{"step": 4}\n{"step": "5"}\n', True),
        ("[checkpoint]\nenable = false\n", '{"step": 4}\n', False),
        ("", "", False),
    ],
)
def test_a_run_whose_record_and_checkpoints_vanished_is_refused_if_it_may_have_saved(
    settings, metrics, is_refused, record, tmp_path
):
    (tmp_path / "run.toml").write_text(settings)
    (tmp_path / "metrics.jsonl").write_text(metrics)
    if record:
        (tmp_path / NEWEST).write_bytes(record)
    folder = CheckpointFolder(local(tmp_path / "checkpoints"))
    if is_refused or record:
        with pytest.raises(ConfigError, match=f"about step {4 if is_refused else 0}, is missing: .* has no checkpoint"):
            check_newest(tmp_path, folder, -1, accepts=False)
    line = check_newest(tmp_path, folder, -1, accepts=True)
    assert ("the run begins again, because --checkpoint.restart allows it" in line) == bool(is_refused or record)


def test_a_run_records_the_weights_that_it_starts_from(tmp_path, monkeypatch):
    """A folder by its whole path, a run by its checkpoint, and a URL as it is."""
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "model", tensors_of())
    import_model("model", "run")
    place = f"{tmp_path}/run/checkpoints"
    weights = open_weights("model")
    kind = "Hugging Face"
    first = {"origin": f"{kind} folder model", "kind": kind, "path": str(model), "digest": weights.digest}
    assert record_of(weights, "model") == first
    assert record_of(weights, "memory://a") == first | {"path": "memory://a"}
    saved = open_weights("run")
    kind = "Crius checkpoint"
    second = {
        "origin": "step 0 of run/checkpoints",
        "kind": kind,
        "path": f"{place}/step-00000000",
        "digest": saved.digest,
    }
    assert record_of(saved, "run") == second


@pytest.mark.parametrize(
    ("damaged", "taken", "is_said"), [((), 6, False), ((2,), 6, False), ((6,), 4, True), ((2, 6), 4, True)]
)
def test_the_newest_checkpoint_that_can_be_read_is_taken(damaged, taken, is_said, tmp_path, lines):
    """And those after it are named; these are of no model."""
    local(tmp_path, 2, 4, 6)
    for step in damaged:
        (tmp_path / step_name(step) / "manifest.json").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"{step_name(taken)} is an import without settings"):
        open_weights(str(tmp_path))
    assert any(f"step {taken} is used, because newer checkpoints are damaged" in line for line in lines()) == is_said


def test_sizes_that_a_checkpoint_leaves_open_are_those_of_the_flavor():
    known = {"name": "llama3", "flavor": "debug"}
    config = {"name": "llama3", "flavor": "debug", "num_layers": 2, "dim": -1, "ffn_dim": None, "rope_scaling": ""}
    manifest = SimpleNamespace(config={f"model.{name}": value for name, value in config.items()})
    assert saved_model(manifest, "here") == settled({**known, "num_layers": 2}) != settled(known)

"""``crius verify resume``: killed runs that go on are the run that was let be, and what is not restored is found."""

import json

import pytest
from harness import TEXT, layout_flags, parse

from crius.cli.app import facts_of
from crius.data.loader import BatchLoader
from crius.errors import ConfigError
from crius.tools.faults import planted
from crius.tools.verify.options import Resumed
from crius.tools.verify.resume import INTERVALS, resume
from crius.train import checkpoints

TINY = [
    *("--recipe", "verify", "--model.num_layers", "2", "--training.seq_len", "16", "--training.global_batch_size", "8"),
    *("--model.vocab_size", "257", "--data.source", "text", "--validation.interval", "0"),
]


def verify(folder, capsys, flags=(), data=TEXT, **options):
    """Exit code, and what the verb found."""
    capsys.readouterr()
    facts = facts_of(parse([*TINY, "--data.path", str(data), *flags]), 0, None)
    code = resume(facts, folder, Resumed(timeout=100, **options), as_json=True)
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def short_text(tmp_path):
    """Fewer samples than a run needs: it crosses an epoch."""
    path = tmp_path / "short.txt"
    path.write_text(TEXT.read_text()[:1500])
    return path


@pytest.mark.slow
def test_a_killed_run_with_dropout_over_an_epoch_is_the_undisturbed_run(short_text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CRIUS_FAULT", "dropout:p=0.1")
    code, found = verify(tmp_path / "run", capsys, layout_flags("fsdp2", 8), short_text, steps=14, kill_at="12,6")
    assert code == 0 and found["identical"] and not found["problems"], found
    assert found["same_steps"] == 14 and found["hash"] == found["hash_killed"]
    kills = [(kill["step"], kill["phase"], kill["rank"]) for kill in found["kills"]]
    assert kills == [(6, "data", 0), (12, "forward", 1)]
    assert all(kill["steps_again"] > 0 and 0 < kill["recovery_seconds"] < 60 for kill in found["kills"])
    assert found["steps_again"] >= 2 and 0 < found["goodput"] < 1


@pytest.mark.long
def test_a_killed_pipeline_is_the_undisturbed_one(tmp_path, capsys):
    flags = ["--parallelism.pipeline_parallel_degree", "2", "--checkpoint.interval", "2"]
    flags += ["--checkpoint.mode", "sync"]
    code, found = verify(tmp_path, capsys, flags, steps=5, kill_at="4")
    assert code == 0 and found["identical"], found
    assert [kill["steps_again"] for kill in found["kills"]] == [1]


@pytest.mark.long
def test_a_run_that_goes_on_with_other_degrees_of_experts_has_the_same_losses(tmp_path, capsys):
    """Saved on fsdp2_ep2 and gone on with on fsdp4_ep4, from there on tp2_ep2, from there on one device."""
    model = ["--model.name", "qwen3_moe", "--model.flavor", "debug"]
    layouts = "fsdp2_ep2,fsdp4_ep4,tp2_ep2,1"
    code, found = verify(tmp_path, capsys, model, steps=8, kill_at="3,5,7", layouts=layouts)
    assert code == 0 and found["identical"] and not found["problems"], found
    assert found["same_steps"] == 8 and [kill["layout"] for kill in found["kills"]] == layouts.split(",")[:3]
    assert found["tolerance"] == 1e-5 and 0 < found["apart"]["loss"] < 1e-6 and 0 < found["apart"]["parameters"] < 1e-5


LOAD = BatchLoader.load_state_dict
NOT_RESTORED = {
    "random": (checkpoints, "restore_streams", lambda streams, device: None),
    "data": (BatchLoader, "load_state_dict", lambda self, state: LOAD(self, {**state, "next_sample": 0, "since": []})),
}


@pytest.mark.matrix
@pytest.mark.parametrize("mistake", NOT_RESTORED)
def test_what_is_not_restored_is_found(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(*NOT_RESTORED[mistake])
    monkeypatch.setenv("CRIUS_FAULT", "dropout:p=0.1")
    flags = ["--checkpoint.interval", "2", "--checkpoint.mode", "sync"]
    code, found = verify(tmp_path, capsys, flags, steps=4, kill_at="4")
    assert code == 1 and not found["identical"], found
    assert found["same_steps"] == 2 and found["first_difference"].startswith("step 3 is the first that differs: loss ")
    assert any(tensor.startswith("model.") for tensor in found["tensors"])
    assert any("repeated" in problem for problem in found["problems"]) == (mistake == "data")


@pytest.mark.long
def test_experts_that_get_the_moments_of_others_are_found_over_a_change_of_their_degree(tmp_path, monkeypatch, capsys):
    load_tensors = checkpoints.load_tensors

    def load(sources, wanted):
        load_tensors(sources, wanted)
        for name, target in wanted.items():
            if ".experts." in name and "exp_avg" in name:
                target.copy_(target.roll(1, dims=0))

    monkeypatch.setattr(checkpoints, "load_tensors", load)
    flags = ["--model.name", "qwen3_moe", "--checkpoint.interval", "2", "--checkpoint.mode", "sync"]
    code, found = verify(tmp_path, capsys, flags, steps=6, kill_at="4", layouts="fsdp2_ep2,1")
    assert code == 1 and not found["identical"] and not found["problems"], found
    assert found["first_difference"].startswith("step 4 is the first that differs: loss "), found


def test_what_is_not_restored_is_found_over_a_change_of_layout(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(*NOT_RESTORED["data"])
    flags = ["--checkpoint.interval", "2", "--checkpoint.mode", "sync"]
    code, found = verify(tmp_path, capsys, flags, steps=4, kill_at="4", layouts="1,fsdp2")
    assert code == 1 and not found["identical"] and found["same_steps"] == 2, found
    assert found["first_difference"].startswith("step 3 is the first that differs: loss ")
    assert found["apart"]["loss"] > found["tolerance"] == 1e-5 and any("repeated" in one for one in found["problems"])


def test_a_kill_that_does_not_come_is_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planted, "_happen", lambda fault: None)
    code, found = verify(tmp_path, capsys, steps=2, kill_at="2")
    assert code == 1 and found["same_steps"] == 2 and not found["identical"]
    assert found["problems"] == ["the kill at step 2 did not happen"]


def test_a_run_that_fails_otherwise_is_told_with_its_last_words(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CRIUS_FAULT", "nan:step=2")
    code, found = verify(tmp_path, capsys, ["--stability.nonfinite", "stop"], steps=3, kill_at="3")
    assert code == 1 and not found["identical"]
    assert found["problems"][0] == "the undisturbed run failed" and "NonFiniteError" in found["problems"][1]
    assert str(tmp_path / "undisturbed" / "logs") in found["problems"][1]


def test_without_an_interval_every_kill_costs_steps(tmp_path, capsys):
    assert [next(n for n in INTERVALS if all((k - 1) % n for k in kills)) for kills in ([7, 13], [6], [6, 9])] == [
        5,
        4,
        3,
    ]


@pytest.mark.parametrize(
    ("options", "faults", "said"),
    [
        ({"kill_at": "7,21"}, "", "'7,21' is not a list of steps of this run"),
        ({"kill_at": ""}, "", "'' is not a list of steps"),
        ({"kill_at": "4", "layouts": "fsdp2,tp2,1"}, "", "3 --layouts for 2 starts"),
        ({}, "kill:step=3", "CRIUS_FAULT has the fault: kill in forward of step 3 on rank 0"),
    ],
)
def test_a_wrong_call_is_refused(options, faults, said, tmp_path, monkeypatch, capsys):
    if faults:
        monkeypatch.setenv("CRIUS_FAULT", faults)
    with pytest.raises(ConfigError, match=said):
        verify(tmp_path, capsys, **options)


def test_a_folder_that_has_runs_is_refused(tmp_path, capsys):
    (tmp_path / "killed").mkdir()
    with pytest.raises(ConfigError, match="already exists"):
        verify(tmp_path, capsys)

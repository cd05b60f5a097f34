"""Runs on a mixture: one curve of each source on every layout, over kills, and the proof of its shares."""

import json

import pytest
from harness import layout_flags, read_metrics, run, steps_of, train
from mixture_samples import BATCH, STEPS, mixture_flags

from crius import cli

SAVED = ["--checkpoint.enable", "--checkpoint.mode", "sync"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return mixture_flags(tmp_path_factory.mktemp("mixture") / "data")


@pytest.fixture(scope="module")
def one_device(flags, tmp_path_factory):
    return train([*flags, "--data.prefetch", "0", "--checkpoint.enable"], tmp_path_factory.mktemp("one"))


def columns(records):
    names = sorted({name for record in steps_of(records) for name in record if name.startswith("loss")})
    return {name: [record.get(name) for record in steps_of(records)] for name in names}


def assert_same(records, expected):
    found = columns(records)
    wanted = columns(expected)
    assert found.keys() == wanted.keys() == {"loss", "loss/words", "loss/sums", "loss/chat"}
    for name, values in wanted.items():
        assert [value is None for value in found[name]] == [value is None for value in values]
        there = [[value for value in one if value is not None] for one in (found[name], values)]
        assert there[0] == pytest.approx(there[1], rel=2e-5), name  # only the order of sums differs
    for name in ("words", "sums", "chat"):
        for of in ("share", "epochs"):
            key = f"{of}/{name}"
            assert [one[key] for one in steps_of(records)] == [one[key] for one in steps_of(expected)]


def audited(run_dir, capsys):
    capsys.readouterr()
    code = cli.main(["data", "audit", str(run_dir)])
    return code, capsys.readouterr().out


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "pp2", "cp2", "fsdp3_accum2"])
def test_a_mixture_has_one_curve_of_each_source_on_every_layout(layout, flags, one_device, tmp_path, capsys):
    assert_same(train([*flags, *SAVED, *layout_flags(layout, BATCH)], tmp_path), one_device)
    code, said = audited(tmp_path, capsys)
    assert code == 0 and f"samples  {STEPS * BATCH} (0 to {STEPS * BATCH - 1})" in said


@pytest.mark.long
def test_a_mixture_survives_three_kills_and_another_layout_and_is_proved(
    flags, one_device, tmp_path, monkeypatch, capsys
):
    for end, kill, layout in ((10, "kill:step=6", "fsdp2"), (22, "kill:step=19", "1"), (34, "kill:step=31", "fsdp3")):
        monkeypatch.setenv("CRIUS_FAULT", f"{kill},rank=0")
        stop = ["--training.steps", str(end)] if end < 34 else []
        often = ["--checkpoint.interval", "4"]
        assert run([*flags, *SAVED, *often, *stop, *layout_flags(layout, BATCH)], tmp_path, True) == 0
        monkeypatch.delenv("CRIUS_FAULT")
    code, said = audited(tmp_path, capsys)
    assert code == 0 and "0 repeated, 0 skipped" in said
    assert said.count("mixture ") == 3, "before the stage, after it, and after the end of a source"


@pytest.mark.quick
def test_one_planted_sequence_is_found_and_other_weights_are_refused(flags, tmp_path, capsys):
    few = [*flags, *SAVED, "--training.steps", "3", "--validation.interval", "0", "--model.num_layers", "1"]
    train(few, tmp_path)
    assert_same(train([*few, *layout_flags("fsdp2", BATCH)], tmp_path / "two"), read_metrics(tmp_path))
    first = steps_of(read_metrics(tmp_path))[0]
    assert {name for name in first if "/" in name} == {
        f"{of}/{name}" for of in ("loss", "share", "epochs") for name in ("words", "sums", "chat")
    }
    losses = [first[f"loss/{name}"] for name in ("words", "sums", "chat")]
    assert min(losses) < first["loss"] < max(losses)
    code, said = audited(tmp_path, capsys)
    assert code == 0 and "share 0.5000  had 9 of 18 = 0.5000" in said

    mixture = tmp_path / "data" / "mixture.jsonl"
    log = tmp_path / "data" / "samples-rank-0.jsonl"
    for file, edit, problem in (
        (mixture, ('"words","sums"', '"sums","words"'), "mixture.jsonl has other names in attempt 0 than run.toml"),
        (log, ('{"attempt":0,"step":3', '{"att'), "the run ended after step 3 (summary.json), and its logs end with"),
    ):
        text = file.read_text()
        file.write_text(text.replace(*edit))
        code, said = audited(tmp_path, capsys)
        assert code == 1 and f"problem  {problem}" in said
        file.write_text(text)
    lines = log.read_text().splitlines()
    step = json.loads(lines[-1])
    step["mix"]["0"] -= 1
    step["mix"]["1"] += 1
    log.write_text("\n".join([*lines[:-1], json.dumps(step)]) + "\n")
    code, said = audited(tmp_path, capsys)
    assert code == 1 and "problem  step 3 of attempt 0 on rank 0 has" in said

    entries = ["--data.stage", '{"from": 2, "weights": {"words": 1, "chat": 3}}']
    longer = [*few, "--training.steps", "4", *entries]
    assert cli.main(["train", *longer, "--job.run_dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "data.stage: " in said and "--checkpoint.allow_changes data" in said
    assert run([*longer, "--checkpoint.allow_changes", "data"], tmp_path) == 0
    assert "other weights from sample 18 on" in (tmp_path / "logs" / "rank-0.log").read_text()


@pytest.mark.long
def test_a_larger_batch_at_a_resume_does_not_train_past_the_steps(tmp_path):
    flags = ["--recipe", "llama3_debug", "--model.num_layers", "1", "--training.seq_len", "32"]
    flags += ["--validation.interval", "0", "--validation.fraction", "0", "--data.cache_dir", str(tmp_path / "cache")]
    for name, size, weight, on_end in (("a", 9000, 5, "repeat"), ("b", 460, 2, "stop")):
        (tmp_path / f"{name}.txt").write_text("x" * size)
        entry = {"name": name, "path": str(tmp_path / f"{name}.txt"), "weight": weight, "on_end": on_end}
        flags += ["--data.mix", json.dumps(entry)]
    for batch, steps in ((4, 4), (8, 7)):  # the source would end in step 8, with 8 sequences per step from step 5 on
        found = train(
            [*flags, *SAVED, "--training.steps", str(steps), "--training.global_batch_size", str(batch)], tmp_path
        )
        assert steps_of(found)[-1]["step"] == steps

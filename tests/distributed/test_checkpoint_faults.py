"""What a run does about a disk that fails, a checkpoint that is damaged, settings and data that changed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from checkpoint_runs import flags
from harness import ROOT, TEXT, crius, parse, read_metrics, run, steps_of, train

from crius.checkpoint.names import step_name
from crius.errors import ConfigError
from crius.launch.lock import run_lock
from crius.train import loop
from crius.train.inputs import check_resume
from crius.train.saving import NEWEST


def log_of(run_dir):
    return (run_dir / "logs" / "rank-0.log").read_text()


def steps_there(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of one step with its checkpoint."""
    run_dir = tmp_path_factory.mktemp("begun")
    train(flags("1", "--checkpoint.enable", steps=1), run_dir)
    return run_dir


@pytest.fixture
def run_dir(begun, tmp_path):
    """A copy of the run, to go on with."""
    return shutil.copytree(begun, tmp_path / "run")


@pytest.mark.parametrize(("mode", "error"), [("sync", "enospc"), ("async", "erofs")])
def test_a_disk_that_fails_costs_a_checkpoint_and_not_the_run(mode, error, tmp_path, monkeypatch):
    monkeypatch.setenv("CRIUS_FAULT", f"disk:save=2,error={error},rank=1")
    records = train(flags("fsdp2", "--checkpoint.interval", "2", "--checkpoint.mode", mode, steps=7), tmp_path)
    assert [record["step"] for record in steps_of(records)] == list(range(1, 8))
    assert steps_there(tmp_path) == [step_name(2), step_name(6), step_name(7)]
    warning = re.search(
        r"checkpoint: step 4 could not be saved \((.*)\); consecutive failure 1 of at most 3", log_of(tmp_path)
    )
    assert "rank 1" in warning[1]
    # said before the step after the next one is done, not at the next save
    assert log_of(tmp_path).index("could not be saved") < log_of(tmp_path).index("step 6/7")


def test_a_disk_that_goes_on_failing_ends_the_run_with_the_last_good_checkpoint_named(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("CRIUS_FAULT", "disk:save=2-9,error=enospc")
    assert run(flags("1", "--checkpoint.interval", "1", "--checkpoint.max_failures", "2", steps=9), tmp_path) == 1
    shown = capfd.readouterr().err
    assert "the last 2 saves failed" in shown and "the newest good checkpoint is of step 1" in shown
    assert steps_there(tmp_path) == [step_name(1)]
    monkeypatch.delenv("CRIUS_FAULT")
    assert len(steps_of(train(flags("1", "--checkpoint.interval", "1", steps=4), tmp_path))) == 4


@pytest.mark.slow  # the save of a rank has about 60 writes
# a hang is tried again: launch.max_failures_at_step times at the same step
@pytest.mark.parametrize(
    ("seconds", "code", "hangs"), [("0.15", 0, []), ("60", 1, ["rank 1"] * 2)], ids=["slow", "stuck"]
)
def test_a_slow_save_of_one_rank_is_no_hang_and_a_stuck_one_is_named(
    seconds, code, hangs, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("CRIUS_FAULT", f"disk:save=1,error=slow,seconds={seconds},rank=1")
    watchdog = ("--watchdog.startup_seconds", "6", "--checkpoint.interval", "2")
    assert run(flags("fsdp2", *watchdog, steps=4), tmp_path, is_supervised=True) == code
    assert re.findall("HangError: (.*) makes no progress", capfd.readouterr().err) == hangs


@pytest.mark.long
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(tmp_path):
    save = ("--checkpoint.interval", "2")
    whole = train(flags("fsdp2", *save, steps=6), tmp_path)
    shard = tmp_path / "checkpoints" / step_name(6) / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1000] ^= 4
    shard.write_bytes(data)
    parts = train(flags("fsdp2", *save, steps=6), tmp_path)
    log = log_of(tmp_path)
    assert re.search(r"step 6 IS DAMAGED: rank-00001.safetensors, (model|optim|rng)\.\S+: bytes .* have hash", log)
    assert "FALLING BACK to step 4" in log and "step 6, after the step that the run resumes from, was set aside" in log
    assert [record["loss"] for record in steps_of(parts)] == [record["loss"] for record in steps_of(whole)]
    assert step_name(6) in steps_there(tmp_path)  # saved again, beside the damaged one
    assert any(name.startswith(f"{step_name(6)}.aside") for name in steps_there(tmp_path))


@pytest.mark.parametrize("lost", ["rank-00000.safetensors", "manifest.json"])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew_in_silence(lost, run_dir, capfd):
    (run_dir / "checkpoints" / step_name(1) / lost).unlink()
    assert run(flags("1", "--checkpoint.enable", steps=2), run_dir) == 1
    assert "no checkpoint in" in capfd.readouterr().err


def test_a_run_whose_checkpoints_vanished_is_refused_until_it_may_begin_again(run_dir, capfd):
    shutil.rmtree(run_dir / "checkpoints")
    done = crius("train", *flags("1", "--checkpoint.enable", "--job.run_dir", str(run_dir), steps=2))
    assert done.returncode == 2 and "model:" not in done.stdout  # before anything is started
    assert f"step 1, is missing: {run_dir}/checkpoints has no checkpoint" in done.stderr
    assert run(flags("fsdp2", "--checkpoint.enable", steps=2), run_dir) == 2  # each rank, where they vanish later
    assert "step 1, is missing" in capfd.readouterr().err
    again = train(flags("1", "--checkpoint.enable", "--checkpoint.restart", steps=2), run_dir)
    assert [record["step"] for record in steps_of(again)] == [1, 2]
    assert "restart = true" not in (run_dir / "run.toml").read_text()
    (run_dir / NEWEST).unlink()
    assert [record["step"] for record in steps_of(train(flags("1", "--checkpoint.enable"), run_dir))] == [1, 2, 3]
    assert "is missing or damaged: the run continues from step 2" in log_of(run_dir)


def test_a_resume_leaves_no_more_checkpoints_than_are_to_be_kept(tmp_path):
    save = ("--checkpoint.interval", "1", "--checkpoint.keep_last")
    train(flags("1", *save, "3", steps=3), tmp_path)  # stands for a kill between a commit and what follows it
    train(flags("1", *save, "2", steps=3), tmp_path)
    assert steps_there(tmp_path) == [step_name(2), step_name(3)]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_checkpoint_to_start_from_with_as_many_steps_as_the_run_is_refused(steps, begun, tmp_path, capfd):
    mine = flags("1", "--checkpoint.enable", "--checkpoint.load_path", str(begun / "checkpoints"), steps=steps)
    if steps == 2:
        check_resume(parse(mine), tmp_path)
        return
    with pytest.raises(ConfigError, match="training.steps 1 leaves nothing to train: the checkpoint .* has 1 steps"):
        check_resume(parse(mine), tmp_path)
    assert run(mine, tmp_path) == 2
    assert "--training.steps 2 trains 1 steps more" in capfd.readouterr().err


@pytest.mark.parametrize("enable", ["--checkpoint.enable", "--job.name=x"])
def test_weights_that_the_last_update_broke_are_not_saved_as_good(enable, tmp_path, capfd):
    broken = ("--optimizer.lr", "1e38", "--lr_scheduler.warmup_steps", "0", "--training.max_norm", "0")
    assert run(flags("1", enable, *broken, "--optimizer.weight_decay", "100", steps=1), tmp_path) == 1
    assert "are not finite" in capfd.readouterr().err
    assert not list(tmp_path.glob("checkpoints/step-*"))


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        (("--training.seq_len", "16"), "training.seq_len: 32 -> 16"),
        (("--model.num_layers", "3"), "model.num_layers: 2 -> 3"),
        (("--debug.seed", "7"), "debug.seed: 42 -> 7"),
    ],
    ids=lambda value: value[0][2:] if isinstance(value, tuple) else "",
)
def test_settings_that_change_the_run_are_refused_old_and_new(changed, shown, run_dir, capfd):
    assert run(flags("1", "--checkpoint.enable", *changed, steps=2), run_dir) == 2
    assert shown in capfd.readouterr().err


def test_settings_that_change_the_curve_are_said_and_taken(tmp_path):
    train(flags("fsdp2", "--checkpoint.enable", steps=2), tmp_path)
    records = train(flags("1", "--checkpoint.enable", "--optimizer.lr", "1e-3", steps=3), tmp_path)
    log = log_of(tmp_path)
    assert "changed since the checkpoint: optimizer.lr: 0.005 -> 0.001 (warn)" in log
    assert "changed since the checkpoint: parallelism.data_parallel_shard_degree: 2 -> 1 (free)" in log
    assert "changed since the checkpoint: training.steps: 2 -> 3 (warn)" in log
    before, now = [f"{record['lr']:.4g}" for record in steps_of(records)[1:]]
    assert f"learning rate {before} in step 2 -> {now} in step 3" in log
    assert before != now


def test_a_schedule_that_changes_after_the_next_step_is_said_with_the_first_step_that_it_changes(tmp_path):
    mine = ("--checkpoint.interval", "2", "--lr_scheduler.warmup_steps", "1", "--lr_scheduler.decay_ratio", "0.5")
    train(flags("1", *mine, steps=4), tmp_path)
    train(flags("1", *mine, "--checkpoint.load_step", "2", steps=8), tmp_path)
    assert "resume: learning rate of step 4: 0.00275 -> 0.005\n" in log_of(tmp_path)


def test_other_data_is_refused(tmp_path, capfd):
    text = tmp_path / "text.txt"
    shutil.copy(TEXT, text)
    mine = ("--checkpoint.enable", "--data.path", str(text))
    train(flags("1", *mine, steps=1), tmp_path / "run")
    text.write_text(text.read_text()[:-500] + "x" * 500)
    assert run(flags("1", *mine, steps=2), tmp_path / "run") == 2
    assert "the data differs from the checkpoint's" in capfd.readouterr().err
    assert run(flags("1", *mine, "--checkpoint.allow_changes", "data", steps=2), tmp_path / "run") == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_on_all_ranks_and_ends_with_75(number, tmp_path):
    def send():
        while not (tmp_path / "metrics.jsonl").exists() or len(read_metrics(tmp_path)) < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    assert run(flags("fsdp2", "--checkpoint.enable", steps=500), tmp_path, is_supervised=True) == 75
    done = steps_of(read_metrics(tmp_path))[-1]["step"]
    assert steps_there(tmp_path) == [step_name(done)]


@pytest.mark.long
def test_the_ranks_of_a_run_agree_by_time_and_not_in_each_step(tmp_path, monkeypatch):
    """Each time is a collective over all ranks. Step times jump on a busy machine: two times a second are allowed."""
    greatest = loop._greatest

    def noted(words, num_ranks):
        with (tmp_path / f"agreed-{dist.get_rank()}").open("a") as file:
            file.write(f"{time.monotonic()}\n")
        return greatest(words, num_ranks)

    monkeypatch.setattr(loop, "_greatest", noted)
    train(flags("fsdp2", "--checkpoint.enable", steps=100), tmp_path)
    times = [[float(line) for line in (tmp_path / f"agreed-{rank}").read_text().split()] for rank in range(2)]
    assert len(times[0]) == len(times[1])
    assert len(times[0]) < 4 + 2 * (times[0][-1] - times[0][0])


@pytest.mark.long
def test_the_ledger_covers_a_run_that_was_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("CRIUS_FAULT", "kill:step=6,rank=1")
    assert run(flags("fsdp2", "--checkpoint.interval", "2", steps=30), tmp_path, is_supervised=True) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    seconds = summary["seconds"]
    assert sum(seconds.values()) == pytest.approx(summary["wall_seconds"], rel=1e-3)
    assert min(seconds["lost"], seconds["compute"], seconds["load"]) > 0 and seconds["down"] > 0
    assert 0 <= seconds["other"] < 0.02 * summary["wall_seconds"]  # 0.005 on a quiet machine
    assert "recovered: step 6 done" in log_of(tmp_path)


def test_a_folder_of_checkpoints_belongs_to_one_run_at_a_time(tmp_path):
    (tmp_path / "shared").mkdir()
    with run_lock(tmp_path / "shared", "train"):
        mine = ("--checkpoint.folder", str(tmp_path / "shared"), "--job.run_dir", str(tmp_path / "run"))
        done = crius("train", *flags("1", "--checkpoint.enable", *mine))
        pruned = crius("checkpoint", "prune", str(tmp_path / "shared"))
    assert (done.returncode, pruned.returncode) == (2, 2)
    assert f"process {os.getpid()}" in done.stderr and "shared" in done.stderr


def test_a_folder_that_cannot_be_written_is_found_before_anything_starts(tmp_path):
    (tmp_path / "file").touch()
    done = crius(
        "train", *flags("1", "--checkpoint.enable", "--checkpoint.folder", str(tmp_path / "file")), cwd=tmp_path
    )
    assert done.returncode == 1 and "--checkpoint.folder" in done.stderr and "model:" not in done.stdout


def test_a_signal_that_is_handed_on_is_named_as_it_was_sent(tmp_path):
    def send():
        while not (tmp_path / "metrics.jsonl").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()
    assert run(flags("1", "--checkpoint.enable", steps=500), tmp_path, is_supervised=True) == 130
    assert "stopped by SIGINT after" in log_of(tmp_path)
    assert "stopped by SIGTERM" not in log_of(tmp_path)


def test_asked_to_stop_before_there_is_anything_to_save_it_leaves_with_75(tmp_path):
    command = [sys.executable, "-m", "crius", "train", *flags("1", "--checkpoint.enable"), "--job.run_dir", "run"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        while not (tmp_path / "run" / "run.lock").exists():
            time.sleep(0.01)
        process.terminate()
        assert process.wait(60) == 75

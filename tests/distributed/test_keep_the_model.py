"""What a run without any flag about checkpoints keeps: its last step, and the step at which it is asked to stop."""

import dataclasses
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest
from checkpoint_runs import contents, flags
from harness import ROOT, SMALL, crius, num_ranks, parse, read_metrics, run_job, steps_of

from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import CheckpointFolder
from crius.config.operation import CheckpointConfig
from crius.errors import DataError
from crius.launch.local import run_workers
from crius.train import loop
from crius.train.inputs import describe_model
from crius.train.saving import checkpoint_bytes

DEFAULT = CheckpointConfig()
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}


def short(layout="1", *more, steps):
    """A small run, without a flag about checkpoints."""
    given = flags(layout, *more, steps=steps)
    start = given.index("--checkpoint.mode")
    return given[:start] + given[start + 2 :]


def run(given, run_dir, checkpoint=DEFAULT):
    config = dataclasses.replace(parse(given), checkpoint=checkpoint)
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_workers(functools.partial(run_job, config, run_dir, time.monotonic()), num_ranks(config), run_dir)


def saved_steps(run_dir):
    return CheckpointFolder(open_disk(str(run_dir / "checkpoints"))).steps()


def log_of(run_dir):
    return (run_dir / "logs" / "rank-0.log").read_text()


def summary_of(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("layout", ["1", "fsdp2"])
def test_the_last_step_is_saved_and_a_second_run_goes_on_from_it(layout, tmp_path):
    steady = ("--lr_scheduler.warmup_steps", "0", "--lr_scheduler.decay_ratio", "0.0")  # the same for any length
    assert run(short(layout, *steady, steps=2), tmp_path) == 0
    assert saved_steps(tmp_path) == [2]
    line = re.search(
        r"^checkpoints: the last step, .* go to (\S+), about ([\d.]+) MiB; .* free$", log_of(tmp_path), re.M
    )
    assert line[1] == str(tmp_path / "checkpoints")
    size = sum(file.stat().st_size for file in (tmp_path / "checkpoints").rglob("*") if file.is_file()) / 2**20
    assert float(line[2]) == pytest.approx(size, abs=0.1)
    assert run(short(layout, *steady, steps=4), tmp_path) == 0
    assert [record["step"] for record in steps_of(read_metrics(tmp_path))] == [1, 2, 3, 4]
    assert run(short(layout, *steady, steps=4), tmp_path / "whole") == 0
    assert contents(tmp_path, 4) == contents(tmp_path / "whole", 4)


def test_told_to_save_nothing_it_says_so_and_saves_nothing(tmp_path):
    assert run(short(steps=1), tmp_path, CheckpointConfig(enable=False)) == 0
    assert "checkpoints: nothing will be saved, because checkpoint.enable is off\n" in log_of(tmp_path)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("more", [("--optimizer.name", "muon"), ("--optimizer.state_dtype", "bfloat16")], ids=str)
def test_the_size_that_is_announced_is_that_of_the_checkpoint(more, tmp_path):
    given = short("1", *more, steps=1)
    assert run(given, tmp_path) == 0
    size = sum(file.stat().st_size for file in (tmp_path / "checkpoints").rglob("*") if file.is_file())
    assert checkpoint_bytes(parse(given), describe_model(parse(given))) == pytest.approx(size, rel=0.02)


@pytest.mark.matrix
@pytest.mark.parametrize(("enable", "code", "said"), [(None, 75, "saved in"), (False, 143, "lost: checkpoint.enable")])
@pytest.mark.parametrize("layout", ["1", "fsdp2"])
def test_a_signal_ends_it_and_the_summary_says_where(layout, enable, code, said, tmp_path):
    def send():
        while not (tmp_path / "metrics.jsonl").exists() or len(read_metrics(tmp_path)) < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    assert run(short(layout, steps=5000), tmp_path, CheckpointConfig(enable=enable)) == code
    done = steps_of(read_metrics(tmp_path))[-1]["step"]
    assert f" after {done} of 5000 steps, all of them {said}" in log_of(tmp_path)
    found = summary_of(tmp_path)
    assert (found["steps"], found["stopped_by"]) == (done, "SIGTERM")
    if enable is None:
        assert saved_steps(tmp_path) == [done]


def stopped_by_ctrl_c(folder, *more):
    """The exit code and the output of ``crius train``, in this one process, that gets Ctrl-C after its second step."""
    command = [sys.executable, "-m", "crius", "train", *short(steps=5000), *more]
    with subprocess.Popen(command, cwd=folder, env=ENVIRON, stdout=subprocess.PIPE, text=True) as process:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("step    2/"):
                process.send_signal(signal.SIGINT)
        return process.wait(60), "".join(said)


@pytest.mark.long
def test_ctrl_c_prints_the_command_that_goes_on_and_it_does(tmp_path):
    folder = tmp_path / "it's a folder"  # which a shell would take apart
    folder.mkdir()
    code, said = stopped_by_ctrl_c(folder)
    assert code == 130
    done = int(re.search(r"^stopped by SIGINT after (\d+) of 5000 steps, all of them saved in runs/", said, re.M)[1])
    command = re.search(r"^continue from there: (.*)$", said, re.M)[1]
    assert shlex.split(command)[-2:] == ["--job.run_dir", re.search(r"^run folder: (.*) \(", said, re.M)[1]]
    again = subprocess.run(
        f"{command} --training.steps {done + 2}", shell=True, cwd=folder, env=ENVIRON, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    [run_dir] = (folder / "runs").iterdir()
    assert [record["step"] for record in steps_of(read_metrics(run_dir))] == list(range(1, done + 3))
    assert saved_steps(run_dir)[-1] == done + 2


@pytest.mark.long
def test_ctrl_c_says_what_is_lost_where_nothing_is_saved(tmp_path):
    code, said = stopped_by_ctrl_c(tmp_path, "--checkpoint.no_enable", "--job.run_dir", "run")
    assert code == 130 and "continue from there" not in said and "\nsaved: nothing\n" in said
    done = summary_of(tmp_path / "run")["steps"]
    assert f"stopped by SIGINT after {done} of 5000 steps, all of them lost: checkpoint.enable is off\n" in said
    assert '"stopped_by":"SIGINT"' in (tmp_path / "run" / "report.html").read_text()


def test_a_last_validation_that_fails_loses_no_model_and_is_made_up_for(tmp_path, monkeypatch, capfd):
    given = [*short(steps=2), "--validation.interval", "50", "--validation.num_samples", "4"]

    def fail(*arguments):
        raise DataError("there is too little text.")

    monkeypatch.setattr(loop, "evaluate", fail)
    assert run(given, tmp_path) == 1
    assert saved_steps(tmp_path) == [2] and not (tmp_path / "summary.json").exists()
    monkeypatch.undo()
    assert run(given, tmp_path) == 0
    assert summary_of(tmp_path)["val_loss"] == read_metrics(tmp_path)[-1]["val_loss"]
    assert run(given, tmp_path) == 0  # all is done, and is not done again
    assert sum("val_loss" in record for record in read_metrics(tmp_path)) == 1


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "enable", "code", "fate"),
    [("1", None, 75, "saved in"), ("fsdp2", None, 75, "saved in"), ("1", False, 143, "lost: checkpoint.enable is off")],
)
def test_a_signal_in_the_last_validation_is_told_and_the_validation_made_up_for(
    layout, enable, code, fate, tmp_path, monkeypatch
):
    given = [*short(layout, steps=2), "--validation.interval", "50", "--validation.num_samples", "4"]

    def stop(*arguments):
        os.kill(os.getppid(), signal.SIGTERM)
        while not arguments[-1]():  # is asked between two batches
            time.sleep(0.05)

    monkeypatch.setattr(loop, "evaluate", stop)
    assert run(given, tmp_path, CheckpointConfig(enable=enable)) == code
    assert re.search(
        f"stopped by SIGTERM after 2 of 2 steps, all of them {fate}.* the last validation", log_of(tmp_path)
    )
    found = summary_of(tmp_path)
    assert (found["steps"], found["stopped_by"], found["val_loss"]) == (2, "SIGTERM", None)
    if enable is None:
        monkeypatch.undo()
        assert run(given, tmp_path) == 0
        assert "nothing to train: 2 of 2 steps are done; the last validation is done now" in log_of(tmp_path)
        found = summary_of(tmp_path)
        assert found["stopped_by"] is None and found["val_loss"] == read_metrics(tmp_path)[-1]["val_loss"]


@pytest.mark.slow  # three trainings, one of them in four processes
def test_the_commands_that_a_run_ends_with_work_as_printed(tmp_path):
    done = crius("train", *SMALL, "--training.steps", "2", "--validation.interval", "0", cwd=tmp_path)
    commands = re.findall(r"^  \S.*?   (\S*crius .*)$", done.stdout, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        ran = subprocess.run(command, shell=True, cwd=tmp_path, env=ENVIRON, capture_output=True, text=True)
        assert ran.returncode == 0, command + ran.stderr
    folders = sorted((tmp_path / "runs").iterdir())
    assert [saved_steps(folder) for folder in folders] == [[2, 4], [2]]
    first, second = (steps_of(read_metrics(folder)) for folder in folders)
    for one, other in zip(first, second, strict=False):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)

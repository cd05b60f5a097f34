"""``crius sweep``: which runs it makes of its flags, what it refuses, and what it says of how they ended."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT

from crius import cli
from crius.cli.app import train_verb
from crius.config.command_line import last_of_each
from crius.errors import ConfigError
from crius.launch.lock import run_lock
from crius.tools.report import sweep

# stands for crius train: the loss of a run is its learning rate, and a run with the rate 9 fails
TRAINER = """
import json, pathlib, sys
values = dict(word[2:].split("=", 1) for word in sys.argv[2:] if "=" in word)
folder = pathlib.Path(values["job.run_dir"])
folder.mkdir(parents=True, exist_ok=True)
with (folder / "calls").open("a") as file:
    file.write("call\\n")
rate = float(values.get("optimizer.lr", 2))
samples = values.get("validation.num_samples", 1)
(folder / "run.toml").write_text(
    f"[training]\\nsteps = 4\\n[optimizer]\\nlr = {rate}\\n[validation]\\nnum_samples = {samples}\\n"
)
print("trains", rate, flush=True)
(folder / "metrics.jsonl").write_text(json.dumps({"step": 4, "loss": 10 - rate, "tokens_per_second": 7}) + "\\n")
if rate == 9:
    sys.exit("OddError: no more\\n  fix  less")
with (folder / "metrics.jsonl").open("a") as file:
    file.write(json.dumps({"step": 4, "val_loss": rate}) + "\\n")
(folder / "summary.json").write_text(json.dumps({"steps": 4, "stopped_by": None}))
"""


def trials(*flags):
    return sweep.plan_trials(last_of_each(flags, train_verb().arguments()))


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Run ``crius sweep`` here, with the stand-in for ``crius train``."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    monkeypatch.setattr(sweep, "PROGRAM", [sys.executable, "-IS", str(tmp_path / "trainer.py")])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_combination_is_a_run_in_a_folder_of_its_own():
    folder, found = trials("--lr", "1e-3,3e-3", "--layout", "1,fsdp2", "--steps", "4", "--job.run_dir", "s")
    assert folder == Path("s")
    assert [str(trial.folder) for trial in found] == [
        *("s/lr_1e-3_layout_1", "s/lr_1e-3_layout_fsdp2", "s/lr_3e-3_layout_1", "s/lr_3e-3_layout_fsdp2")
    ]
    assert found[1].words == [
        *("--training.steps", "4", "--optimizer.lr=1e-3", "--layout=fsdp2"),
        "--job.run_dir=s/lr_1e-3_layout_fsdp2",
    ]
    assert found[1].label == "optimizer.lr=1e-3 layout=fsdp2"


@pytest.mark.parametrize(
    ("flag", "text", "values"),
    [
        ("optimizer.lr", "1,2", ["1", "2"]),
        ("optimizer.lr", "-1, 2", ["-1", "2"]),
        ("compile.enable", "true,false", ["true", "false"]),
        ("tokenizer.path", 'a,"b,c"', ["a", "b,c"]),
        ("recipe", "llama3_debug,verify", ["llama3_debug", "verify"]),
        ("nproc", "1,2", ["1", "2"]),
        ("data.path", "a,b", None),  # a list takes its values as they are
        ("tokenizer.path", '"b,c"', None),
        ("model.rope_scaling", '{"rope_type": "llama3", "factor": 8.0}', None),
        ("job.name", "a,b", None),
    ],
)
def test_commas_separate_the_values_of_a_scalar(flag, text, values):
    found = trials("--debug.seed", "1,2", f"--{flag}", text)[1]
    assert len(found) == 2 * len(values or [0])
    if values:
        assert [trial.values[flag] for trial in found[: len(values)]] == values
        assert f"--{flag}={values[0]}" in found[0].words
    else:
        words = found[0].words
        given = words[words.index(f"--{flag}") + 1] if f"--{flag}" in words else words[0].partition("=")[2]
        assert given == text.strip('"')


def test_a_space_may_follow_a_comma():
    assert [trial.values for trial in trials("--lr", "1,", "2", "--steps", "3")[1]] == [
        {"optimizer.lr": "1"},
        {"optimizer.lr": "2"},
    ]


def test_the_folder_of_a_sweep_follows_from_its_flags():
    name = trials("--lr", "1,2", "--steps", "4")[0]
    assert name == trials("--lr", "1,2", "--training.steps", "4")[0] != trials("--lr", "1,3", "--steps", "4")[0]
    assert str(name).startswith("runs/sweep-lr-")
    assert name == trials("--steps", "4", "--lr", "1,2")[0]
    assert trials("--lr", "1,2", "--job.name", "mine")[0] == Path("runs/mine")


def test_runs_that_would_share_a_name_do_not():
    _, found = trials("--tokenizer.path", "a/b,a:b", "--job.run_dir", "s")
    assert len({trial.folder for trial in found}) == 2
    _, found = trials("--quantize.dense.float8.enable", "true,false", "--compile.enable", "true,false")
    assert found[0].folder.name == "quantize.dense.float8.enable_true_compile.enable_true"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--lr", "1"], "no setting has several values"),
        (["--lr", "1", "--lr", "2"], "given twice counts once"),
        (["--lr", "1,"], "--optimizer.lr 1, has an empty value.*--optimizer.lr 1,ANOTHER"),
        (["--lr", "1e-3,0.001,2"], "a value twice.*--optimizer.lr 1e-3,2"),
        (["--lr", "1,2,1"], "--optimizer.lr 1,2"),
    ],
)
def test_what_is_no_sweep_is_refused(flags, told):
    with pytest.raises(ConfigError) as caught:
        trials(*flags)
    assert re.search(told, str(caught.value), re.DOTALL)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--lr", "1,x"], "optimizer.lr=x: optimizer.lr x is not a number."),
        (["--lr", "1,2", "--stesp", "3"], "unknown flag --stesp, did you mean --steps?"),
        (["--optimizer.lrr", "1,2"], "unknown flag --optimizer.lrr, did you mean --optimizer.lr?"),
        (["--layout", "fsdp2,tp3"], "layout=tp3: tensor_parallel_degree 3 does not divide"),
        (["--lr", "1,x", "--layout", "fsdp2,tp3"], "2 problems"),
        (["--lr", "1,2", "--dry_run"], "a sweep trains"),
        (["--lr", "1,2", "--job.run_dir", "trainer.py"], "trainer.py of the sweep cannot be written"),
    ],
)
def test_nothing_starts_where_a_run_is_impossible(flags, told, trainer, capsys):
    before = sorted(trainer.iterdir())
    assert cli.main(["sweep", *flags]) == 2
    assert told in capsys.readouterr().err
    assert sorted(trainer.iterdir()) == before


def test_a_sweep_prints_one_line_per_run_and_marks_the_best_so_far(trainer, capfd):
    command = ["sweep", "--lr", "3,9,2,4", "--job.run_dir", "s"]
    assert cli.main(command) == 1  # the run with 9 failed
    out, err = capfd.readouterr()
    assert "\x1b" not in out and "\r" not in out and err == ""
    head, *lines = out.splitlines()
    assert head.split() == ["lr", "loss", "val", "loss", "seconds", "state", "run"]
    rows = [line.split() for line in lines if line[0] != " "]
    assert all(re.fullmatch(r"\d+\.\d", row.pop(3)) for row in rows[:4])
    assert rows == [
        ["3", "7.0000", "*3.0000", "finished", "s/lr_3"],
        ["9", "1.0000", "-", "failed", "s/lr_9"],
        ["2", "8.0000", "*2.0000", "finished", "s/lr_2"],
        ["4", "6.0000", "4.0000", "finished", "s/lr_4"],
        ["*", "lowest", "validation", "loss"],
        ["report:", "s/report.html"],
    ]
    assert lines[2:5] == ["  OddError: no more", "    fix  less", "  all of its output: s/logs/lr_9.log"]
    assert (trainer / "s/logs/lr_9.log").read_text().startswith("trains 9.0\n")
    assert (trainer / "s/logs/lr_2.log").read_text() == "trains 2.0\n"
    assert (trainer / "s/report.html").stat().st_size > 50_000

    assert cli.main([*command, "--json"]) == 1
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert [run["settings"] for run in found["runs"]] == [{"optimizer.lr": rate} for rate in "2349"]
    assert (found["best"], found["not_compared"]) == ("lr_2", "")
    assert err.splitlines()[1].split()[3] == "-"  # it was finished before
    calls = {path.parent.name: len(path.read_text().split()) for path in trainer.glob("s/*/calls")}
    assert calls == {"lr_2": 1, "lr_3": 1, "lr_4": 1, "lr_9": 2}


def test_a_sweep_of_validation_data_has_no_best_run(trainer, capfd):
    assert cli.main(["sweep", "--validation.num_samples", "8,9", "--lr", "2", "--job.run_dir", "s"]) == 0
    out = capfd.readouterr().out
    assert "no run is best: the validation data differ (validation.num_samples)" in out and out.count("*") == 1


def test_a_run_that_fails_before_it_has_a_folder_has_failed(trainer, capfd):
    (trainer / "trainer.py").write_text("import sys\nsys.exit(1)\n")
    assert cli.main(["sweep", "--lr", "1,2", "--job.run_dir", "s", "--json"]) == 1
    assert [run["state"] for run in json.loads(capfd.readouterr().out)["runs"]] == ["failed", "failed"]


@pytest.mark.parametrize(
    ("at", "content", "told"),
    [
        ("s/lr_2/run.toml", "", "s/lr_2 is a run that this sweep did not start"),
        ("s/run.toml", "", "s is a run that this sweep did not start"),
        (
            "s/.sweep.json",
            '{"lr_2": ["--optimizer.lr=3"]}',
            "s has a sweep with other flags: lr_2 had --optimizer.lr=3",
        ),
    ],
)
def test_runs_of_others_are_left_alone(at, content, told, trainer, capsys):
    (trainer / at).parent.mkdir(parents=True)
    (trainer / at).write_text(content)
    before = sorted(trainer.rglob("*"))
    assert cli.main(["sweep", "--lr", "1,2", "--job.run_dir", "s"]) == 2
    assert told in capsys.readouterr().err and sorted(trainer.rglob("*")) == before


@pytest.mark.parametrize("content", ["{cut", '{"lr_2": 5}', '{"lr_2": [5]}', "[]"])
def test_a_damaged_file_of_a_sweep_makes_its_runs_those_of_others(content, trainer, capsys):
    command = ["sweep", "--lr", "1,2", "--job.run_dir", "s"]
    assert cli.main(command) == 0
    (trainer / "s" / ".sweep.json").write_text(content)
    assert cli.main(command) == 2 and "that this sweep did not start" in capsys.readouterr().err


def test_values_that_change_places_are_other_settings(trainer, capsys):
    first, other = (["--lr", "1,2", "--debug.seed", a, "--steps", b] for a, b in ("34", "43"))
    assert trials(*first)[0] != trials(*other)[0]
    assert cli.main(["sweep", *first, "--job.run_dir", "s"]) == 0
    assert cli.main(["sweep", *other, "--job.run_dir", "s"]) == 2
    assert "s has a sweep with other flags" in capsys.readouterr().err


def test_a_run_that_another_process_trains_is_waited_for_by_the_user(trainer, capsys):
    command = ["sweep", "--lr", "1,2", "--job.run_dir", "s"]
    assert cli.main(command) == 0
    with run_lock(trainer / "s" / "lr_2", "train"):
        assert cli.main(command) == 2 and "another process trains s/lr_2" in capsys.readouterr().err


SAVES = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path("saved").touch(), sys.exit(75)))
pathlib.Path("began").touch()
time.sleep(60)
"""
KILLED = f"""
import sys
from crius.tools.report import sweep
sweep.PROGRAM = [sys.executable, "-c", {SAVES!r}]
sweep.train_all(sweep.plan_trials(["--optimizer.lr", "1,2"])[1], [], is_quiet=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only its kernel tells of the end of a parent")
def test_the_run_of_a_killed_sweep_saves_and_ends(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    for name in ("began", "saved"):
        until = time.monotonic() + 30
        while not (tmp_path / name).exists():
            assert time.monotonic() < until, name
            time.sleep(0.02)
        process.kill()
    process.wait()


def test_a_sweep_takes_more_values_and_no_other_settings(trainer, capfd):
    assert cli.main(["sweep", "--lr", "1,2", "--job.run_dir", "s"]) == 0
    assert cli.main(["sweep", "--job.run_dir", "./s", "--lr", "2,4"]) == 0
    assert cli.main(["sweep", "--lr", "2,4", "--steps", "9", "--job.run_dir", "s"]) == 2
    assert "s has a sweep with other flags: lr_2 had --optimizer.lr=2." in capfd.readouterr().err
    assert sorted(path.parent.name for path in trainer.glob("s/*/calls")) == ["lr_1", "lr_2", "lr_4"]

"""What a run will save is known before step 1, and what it prints at its end can be pasted into a shell."""

import contextlib
import dataclasses
import json
import math
import shlex
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from harness import parse

from crius import cli
from crius.checkpoint.disk import LocalDisk
from crius.checkpoint.names import step_name
from crius.cli import next_steps
from crius.cli.app import _base_name
from crius.cli.settings import run_of
from crius.config.run import RunConfig
from crius.errors import CheckpointError, EnvironmentError
from crius.launch.environment import Placement
from crius.train import checkpoints, loop, reports
from crius.train.inputs import describe_model
from crius.train.loop import NOTHING, Agreement, Decision
from crius.train.saving import check_space, checkpoint_bytes, save_plan, size

MIB = 2**20


# --- what is saved


@pytest.mark.parametrize(
    ("flags", "saves", "is_supervised"),
    [
        ([], True, False),
        (["--checkpoint.enable"], True, True),
        (["--checkpoint.interval", "5"], True, True),
        (["--checkpoint.interval_minutes", "5"], True, True),
        (["--checkpoint.no_enable"], False, False),
        (["--checkpoint.no_enable", "--checkpoint.interval", "5"], False, False),
    ],
)
def test_a_run_saves_unless_told_not_to_and_is_restarted_only_where_that_is_asked_for(flags, saves, is_supervised):
    config = run_of(*flags).checkpoint
    assert (config.is_enabled, config.is_supervised) == (saves, is_supervised)


def planned(tmp_path, monkeypatch, *flags, free=100 * MIB):
    monkeypatch.setattr(LocalDisk, "free_bytes", lambda self: free)
    return save_plan(
        dataclasses.replace(parse(["--model.num_layers", "2", "--checkpoint.keep_last=3", *flags])), tmp_path
    )


def test_one_line_says_where_how_often_and_how_big(tmp_path, monkeypatch):
    plan = planned(tmp_path, monkeypatch)
    assert plan.line() == (
        f"the last step, and the step of a Ctrl-C or SIGTERM, go to {tmp_path}/checkpoints, about 6.0 MiB; "
        "100.0 MiB free"
    )
    plan = planned(tmp_path, monkeypatch, "--checkpoint.interval", "10", "--checkpoint.keep_every", "50")
    assert plan.line().startswith("every 10 steps, the last step, and") and "each, up to 6 of them" in plan.line()
    assert plan.missing_bytes == 0


def test_a_disk_that_fills_up_later_is_warned_of_and_what_lies_there_counts(tmp_path, monkeypatch):
    often = ("--checkpoint.interval", "10")
    plan = planned(tmp_path, monkeypatch, *often, free=13 * MIB)  # 4 of 6.0 MiB are there at the same time
    assert plan.missing_bytes == 4 * plan.num_bytes - 13 * MIB
    assert plan.line().endswith("free, 11.0 MiB too little: later saves will fail")
    for step in (1, 2):
        (tmp_path / "checkpoints" / step_name(step)).mkdir(parents=True)
        (tmp_path / "checkpoints" / step_name(step) / "manifest.json").touch()
    assert planned(tmp_path, monkeypatch, *often, free=13 * MIB).missing_bytes == 0


def test_a_run_that_is_too_large_for_the_disk_ends_before_step_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(LocalDisk, "free_bytes", lambda self: MIB)
    run = ["train", "--training.steps", "3", "--model.num_layers", "2", "--job.run_dir", str(tmp_path / "run")]
    assert cli.main(run) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("EnvironmentError: a checkpoint of this run takes about 6.0 MiB, ")
    assert "has 1.0 MiB free" in err and "or --checkpoint.no_enable to save nothing" in err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_that_is_done_and_saved_needs_no_room(tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / step_name(8)).mkdir(parents=True)
    (tmp_path / "checkpoints" / step_name(8) / "manifest.json").touch()
    for flags, is_refused in (("8", False), ("9", True), ("8 --checkpoint.load_step 4", True)):
        given = ["--training.steps", *flags.split()]
        assert ("too little" in planned(tmp_path, monkeypatch, *given, free=MIB).line()) == is_refused
        with pytest.raises(EnvironmentError) if is_refused else contextlib.nullcontext():
            check_space(parse(["--model.num_layers", "2", "--checkpoint.keep_last=3", *given]), tmp_path)


def test_muon_saves_one_moment_of_a_matrix_of_a_layer_and_two_of_all_else():
    config = parse(["--optimizer.name", "muon", "--model.num_layers", "2"])
    facts = describe_model(config)
    sizes = {name: math.prod(shape) for name, shape in facts.parameter_shapes.items()}
    matrices = sum(sizes[name] for name, shape in facts.parameter_shapes.items() if "layers." in name and shape[1:])
    assert checkpoint_bytes(config, facts) == 4 * (3 * sum(sizes.values()) - matrices)


def test_sizes_are_in_units_that_can_be_read():
    sizes = {1023: "1023.0 B", 1024: "1.0 KiB", 6 * MIB: "6.0 MiB", 1536 * MIB: "1.5 GiB", 2000 * MIB**2: "2000.0 TiB"}
    assert {number: size(number) for number in sizes} == sizes


@pytest.mark.parametrize(
    "steps", ['{"steps": 8, "stopped_by": null}', '{"steps": 8, "stopped_by": "SIGINT"}', "{", "[]"]
)
def test_a_run_is_complete_after_its_last_validation_alone(steps, tmp_path):
    assert not reports.is_complete(tmp_path, 8, 8)
    (tmp_path / reports.SUMMARY).write_text(steps)
    assert reports.is_complete(tmp_path, 8, 8) == ("null" in steps)
    assert not reports.is_complete(tmp_path, 8, 10) and not reports.is_complete(tmp_path, 9, 9)


FIRST = {"val_loss": 1.0, "val_bits_per_byte": 2.0}
SECOND = {"val_loss": 2.0, "val_bits_per_byte": 3.0}


@pytest.mark.parametrize(
    ("scores", "want"),
    [
        ({}, {"val_loss": None, "val_bits_per_byte": None}),
        ({"": FIRST}, FIRST),
        ({"": FIRST, "b": SECOND}, FIRST | {"validation_sets": {"": FIRST, "b": SECOND}}),
    ],
)
def test_a_summary_has_the_numbers_of_its_run(scores, want, tmp_path):
    counted = {"tokens": 70, "skipped_steps": 1, "rolled_back_steps": 2}
    used = {"wall_seconds": 5.0, "seconds": {"compute": 4.0}, "goodput": 0.8}
    state = SimpleNamespace(step=7, **counted)
    ledger = SimpleNamespace(summary=str, wall=lambda: 5.0, parts=lambda: {"compute": 4.0}, goodput=lambda: 0.8)
    validations = [SimpleNamespace(val_set=name, **score) for name, score in scores.items()]
    for stopped_by in (None, "SIGTERM"):
        number = signal.SIGTERM if stopped_by else None
        reports.write_summary(tmp_path, ledger, state, validations, None, number)
        found = json.loads((tmp_path / reports.SUMMARY).read_text())
        assert found == {"steps": 7, "stopped_by": stopped_by, "plan": None, **counted, **used, **want}


@pytest.mark.parametrize(
    ("minutes", "rank", "seconds", "failures", "want"),
    [
        (0.0, 0, 999.0, 2, (False, False)),
        (2.0, 0, 119.9, 3, (False, True)),
        (2.0, 0, 120.0, 4, (True, True)),
        (2.0, 1, 120.0, 0, (False, False)),
    ],
)
def test_a_checkpoint_is_due_by_the_clock_of_rank_0(minutes, rank, seconds, failures, want, monkeypatch):
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: 1000.0 + seconds)
    config = SimpleNamespace(checkpoint=SimpleNamespace(interval_minutes=minutes, max_failures=3))
    saver = SimpleNamespace(poll=lambda: None, failures=failures)
    run = SimpleNamespace(saver=saver, _config=config, _ranks=SimpleNamespace(rank=rank), _last_time=1000.0)
    assert checkpoints.Checkpoints.poll(run) == want


# --- when ranks ask each other


def test_a_process_alone_decides_after_each_step_and_asks_nobody(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", None)
    alone = Agreement(1)
    assert alone.ask(None, False, False) == NOTHING
    assert alone.ask(15, True, False) == Decision(15, True, False)


@pytest.mark.parametrize("num_ranks", [2, 512])
@pytest.mark.parametrize(("seconds", "asked"), [(0.01, [0, 1, 101]), (0.25, [0, 1, 5, 9]), (7.0, range(200))])
def test_several_ranks_ask_each_other_about_once_a_second(seconds, asked, num_ranks, monkeypatch):
    now, times = [0.0], []
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(dist, "all_reduce", lambda words, op: times.append(round(now[0] / seconds)))
    ranks = Agreement(num_ranks)
    for _ in range(200):
        ranks.ask(None, False, False)
        now[0] += seconds
    assert times[: len(asked)] == list(asked)


# --- what can be pasted


def started(monkeypatch, script, *command):
    monkeypatch.setattr(sys, "argv", [script, *command])
    monkeypatch.setattr(next_steps, "COMMAND", list(command))


@pytest.mark.parametrize(
    ("script", "found", "program"),
    [
        (".venv/bin/crius", None, [".venv/bin/crius", "train"]),
        ("/usr/bin/crius", "/usr/bin/crius", ["crius", "train"]),
        ("/my/crius/__main__.py", None, [sys.executable, "-m", "crius", "train"]),
        ("train.py", None, [sys.executable, "train.py"]),
    ],
)
def test_the_command_that_goes_on_starts_as_this_one_did(script, found, program, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: found)
    started(monkeypatch, script, "train", "--training.steps", "9", "--data.path", "my text's $(x).txt")
    line = next_steps.continued(RunConfig(), "runs/a b", None)
    flags = ["--training.steps", "9", "--data.path", "my text's $(x).txt", "--job.run_dir", "runs/a b"]
    assert shlex.split(line) == [*program, *flags]


def test_a_run_with_a_folder_of_its_own_goes_on_with_the_same_command(monkeypatch):
    started(monkeypatch, "/usr/bin/crius", "train", "--checkpoint.restart", "--job.name", "mine")  # allowed once
    config = RunConfig(job=dataclasses.replace(RunConfig().job, name="mine"))
    assert next_steps.continued(config, "runs/mine", None).endswith("crius train --job.name mine")
    longer = next_steps.continued(config, "runs/mine", None, "--training.steps", "9")
    assert longer.endswith("crius train --job.name mine --training.steps 9")


def test_twice_as_long_is_longer_than_what_is_done(monkeypatch, tmp_path):
    (tmp_path / "checkpoints" / "step-00000006").mkdir(parents=True)
    monkeypatch.setattr(next_steps, "_workers", lambda facts: (0, []))
    started(monkeypatch, "/usr/bin/crius", "train", "--training.steps", "2")
    monkeypatch.setattr(next_steps, "_prompt", lambda facts, folder: "words")
    run = RunConfig(training=dataclasses.replace(RunConfig().training, steps=2))
    [longer] = [
        line for what, line in next_steps._next_commands(SimpleNamespace(config=run), tmp_path) if "twice" in what
    ]
    assert "--training.steps 12" in longer


@pytest.mark.parametrize(
    ("local", "want"), [(2, "torchrun --standalone --nproc_per_node 2 -m crius train"), (1, "the ")]
)
def test_under_a_launcher_the_command_is_the_launchers(local, want, monkeypatch):
    started(monkeypatch, "/my/crius/__main__.py", "train")
    line = next_steps.continued(RunConfig(), "runs/x", Placement(0, 0, 2, local, "torchrun"))
    assert line.startswith(want) and line.endswith("--job.run_dir runs/x")


@pytest.mark.parametrize(
    ("more", "is_offered"),
    [
        ([], True),
        (["--checkpoint.folder", "deep/saves"], True),
        (["--checkpoint.folder", "/tmp/saves"], False),  # the same one in any run folder, so that it would be resumed
        (["--checkpoint.folder", "../saves"], False),
        (["--checkpoint.folder", "s3://bucket/saves"], False),
        (["--checkpoint.folder", "/tmp/saves", "--checkpoint.no_enable"], True),
    ],
)
def test_the_same_curve_on_more_workers_is_offered_where_it_starts_anew(more, is_offered, monkeypatch, tmp_path):
    config = run_of(*more)
    monkeypatch.setattr(next_steps, "_workers", lambda facts: (4, ["--layout", "fsdp4"]))
    monkeypatch.setattr(next_steps, "_prompt", lambda facts, folder: "words")
    started(monkeypatch, "/usr/bin/crius", "train", *more)
    rows = dict(next_steps._next_commands(SimpleNamespace(config=config), tmp_path))
    assert any("the same curve" in what for what in rows) == is_offered and len(rows) >= 2


@pytest.mark.parametrize(
    ("source", "format", "asks"),
    [
        ("jsonl", "chat", "crius chat "),
        ("text", "documents", "--prompt 'Mann und das Meer' "),
        ("huggingface", "documents", "--prompt 'def ' "),
    ],
)
def test_the_last_command_asks_a_model_in_its_own_words(source, format, asks, monkeypatch, tmp_path):
    monkeypatch.setattr(next_steps, "_workers", lambda facts: (0, []))
    started(monkeypatch, "/usr/bin/crius", "train")
    (tmp_path / "own.txt").write_text("Der Mann und das Meer " * 90)
    path = ["--data.path", str(tmp_path / "own.txt")] if source == "text" else []
    sizes = ["--training.seq_len", "22", "--training.global_batch_size", "8", "--validation.fraction", "0.3"]
    config = run_of("--data.source", source, "--data.format", format, *path, *sizes)
    facts = SimpleNamespace(config=config, data_parallel_ranks=1)
    [*_, (what, command)] = next_steps._next_commands(facts, tmp_path)
    assert asks in command and what == ("talk to it" if format == "chat" else "text from it")


def test_the_last_lines_name_what_is_there_and_never_end_a_good_run_as_failed(monkeypatch, tmp_path, capsys):
    started(monkeypatch, "/usr/bin/crius", "train")
    run = RunConfig(model=dataclasses.replace(RunConfig().model, flavor="8b"))
    place = f"{tmp_path}/checkpoints"

    def said():
        next_steps.say_next(SimpleNamespace(config=run), tmp_path, None, 0)
        return capsys.readouterr().out.splitlines()

    assert said() == [f"run folder: {tmp_path}", "saved: nothing"]
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "logs").mkdir()
    (tmp_path / "checkpoints" / step_name(8)).mkdir(parents=True)
    (tmp_path / "checkpoints" / step_name(8) / "manifest.json").touch()
    assert said() == [f"run folder: {tmp_path} (metrics.jsonl, logs/)", f"saved: step 8 in {place}/{step_name(8)}"]

    def gone(self):
        raise CheckpointError("the store does not answer.")

    monkeypatch.setattr(LocalDisk, "committed", gone)
    assert said()[1] == f"saved: in {place}, which cannot be listed now: the store does not answer."


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ([], "llama3_debug"),
        (["--training.steps", "3"], "llama3_debug"),
        (["--model.flavor", "debug"], "llama3_debug"),
        (["--model.flavor", "1b"], "llama3_1b"),
        (["--model.num_layers", "2", "--model.vocab_size", "600"], "llama3_debug_vocab_size_600_num_layers_2"),
        (["--recipe", "precision"], "precision"),
        (["--recipe", "precision", "--model.flavor", "8b"], "llama3_8b"),
    ],
)
def test_a_run_folder_is_named_by_the_model_that_is_trained(flags, name):
    config = run_of(*flags)
    if name == "llama3_8b":  # the recipe has sizes of its own
        config = dataclasses.replace(config, model=dataclasses.replace(RunConfig().model, flavor="8b"))
    assert _base_name(config) == name

"""``crius runs`` and ``crius compare``: how runs stand, and where their curves part."""

import json
import math
import multiprocessing
import os
import re
import time

import harness
import pytest

from crius import cli
from crius.config.run import RunConfig, replace_fields
from crius.config.toml_file import to_toml
from crius.launch.lock import holder_of, run_lock
from crius.metrics.record import StepMetrics, ValidationMetrics
from crius.metrics.sinks import JsonlSink
from crius.tools.report.history import read_run
from crius.tools.report.runs import find_runs, history_state, run_lines, run_row

NUMBERS = {"grad_norm": 1.0, "lr": 0.1, "tokens": 8, "tokens_per_second_per_rank": 1.0, "mfu": None, "tflops": 0.0}
NUMBERS |= {"step_seconds": 0.1, "data_seconds": 0.0, "goodput": 0.5}


def write_run(folder, losses=(), vals=None, summary=None, start=None, **settings):
    """A run folder by the writers of a run; ``losses`` are those of the steps from 1, or by step."""
    folder.mkdir(parents=True, exist_ok=True)
    config = replace_fields(RunConfig(), {name.replace("__", "."): value for name, value in settings.items()})
    (folder / "run.toml").write_text(to_toml(config))
    start = {"time": time.time() - 60, "step": 0, "torch": "2.13.0", "layout": "1"} | (start or {})
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    sink = JsonlSink(folder)
    losses = losses if isinstance(losses, dict) else dict(enumerate(losses, start=1))
    for step, loss in losses.items():
        sink.write(StepMetrics(step=step, loss=loss, tokens_per_second=100.0 * step, memory_gib=step / 10, **NUMBERS))
    for step, loss in (vals or {}).items():
        sink.write(
            ValidationMetrics(
                step=step, val_loss=loss, val_perplexity=1.0, val_bits_per_byte=1.0, val_samples=8, val_seconds=0.1
            )
        )
    sink.close()
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps({"steps": len(losses), "stopped_by": None} | summary))
    return folder


def hold(folder):
    with run_lock(folder, "train"):
        (folder / "held").touch()
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    """A process that trains in ``tmp_path / "mine"``, as far as its lock tells."""
    write_run(tmp_path / "mine", [3.0])
    process = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path / "mine",))
    process.start()
    while not (tmp_path / "mine" / "held").exists():
        time.sleep(0.01)
    yield process
    process.kill()
    process.join()


def test_a_run_is_running_while_its_process_lives(tmp_path, holder):
    assert holder_of(tmp_path / "mine")["pid"] == holder.pid
    assert str(run_row(tmp_path / "mine").state) == str(history_state(read_run(tmp_path / "mine"))) == "running"
    holder.kill()
    holder.join()
    assert str(run_row(tmp_path / "mine").state) == "failed"


def test_nobody_holds_a_folder_that_was_released(tmp_path):
    with run_lock(tmp_path, "train"):
        pass
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / "run.lock")
    assert holder_of(tmp_path) is None
    assert holder_of(tmp_path / "missing") is None
    assert holder_of(tmp_path / "fifo") is None


@pytest.mark.parametrize(
    ("summary", "settings", "state"),
    [
        ({}, {}, "finished"),
        ({"stopped_by": "SIGINT"}, {}, "stopped (SIGINT)"),
        ({"stopped_by": "SIGTERM"}, {}, "preempted (SIGTERM)"),
        ({"stopped_by": "SIGTERM"}, {"checkpoint__enable": False}, "stopped (SIGTERM)"),
        ({"steps": 1}, {}, "failed"),  # of before the run was continued
        ({"steps": "2"}, {}, "failed"),
        (None, {}, "failed"),
    ],
)
def test_the_summary_says_how_a_run_ended(summary, settings, state, tmp_path):
    write_run(tmp_path / "run", [3.0, 2.0], summary=summary, **settings)
    assert str(run_row(tmp_path / "run").state) == state == str(history_state(read_run(tmp_path / "run")))


def test_a_finished_run_that_was_started_again_and_died_has_failed(tmp_path):
    write_run(tmp_path / "run", [3.0, 2.0], summary={}, start={"time": time.time() + 60})
    assert str(run_row(tmp_path / "run").state) == "failed"


def test_a_finished_run_that_could_not_be_continued_has_failed(tmp_path):
    logs = write_run(tmp_path / "run", [3.0, 2.0], summary={}) / "logs"
    logs.mkdir()
    (logs / "rank-0.error.json").write_text(json.dumps({"exception": "CheckpointError"}))
    os.utime(logs / "rank-0.error.json", (time.time() + 9, time.time() + 9))
    assert str(run_row(tmp_path / "run").state) == "failed (CheckpointError)"


def test_a_copy_of_a_finished_run_is_finished_though_it_failed_before(tmp_path):
    logs = write_run(tmp_path / "run", [3.0, 2.0], summary={}) / "logs"
    logs.mkdir()
    (logs / "rank-0.error.json").write_text(json.dumps({"exception": "OSError", "wall": time.time() - 99}))
    os.utime(logs / "rank-0.error.json", (time.time() + 9, time.time() + 9))  # the copy's
    assert str(run_row(tmp_path / "run").state) == "finished"


def test_a_failed_run_names_the_error_that_came_first(tmp_path):
    logs = write_run(tmp_path / "run", [3.0]) / "logs"
    logs.mkdir()
    for rank, name, wall, peer_loss in ((0, "RuntimeError", 1.0, True), (1, "NonFiniteError", 2.0, False)):
        report = {"exception": name, "wall": wall, "peer_loss": peer_loss}
        (logs / f"rank-{rank}.error.json").write_text(json.dumps(report))
    assert str(run_row(tmp_path / "run").state) == "failed (NonFiniteError)"


def test_runs_are_listed_newest_first_with_those_of_a_sweep(tmp_path, capsys):
    write_run(tmp_path / "old", [3.0, 2.5], vals={2: 2.75}, summary={}, training__steps=2)
    os.utime(tmp_path / "old" / "metrics.jsonl", (time.time() - 7200,) * 2)
    write_run(tmp_path / "sweep" / "lr_1", [math.nan], training__steps=1000)
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").touch()
    assert cli.main(["runs", str(tmp_path)]) == 0
    head, first, second, legend = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["run", "state", "step", "loss"] and head.endswith("steps")
    assert first.split() == ["sweep/lr_1", "failed", "1/1,000", "nan", "-", "100", "50.0%", "0", "s", "ago", "1000"]
    assert second.split() == ["old", "finished", "2/2", "2.5000", "*2.7500", "200", "50.0%", "2", "h", "ago", "2"]
    assert legend == "* lowest validation loss"
    assert cli.main(["runs", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [(row["name"], row["state"], row["loss"]) for row in rows] == [
        ("sweep/lr_1", "failed", None),
        ("old", "finished", 2.5),
    ]


def test_a_run_in_the_folder_of_a_sweep_hides_no_other_and_its_folder_stands_for_them(tmp_path, capsys):
    for name in ("", "lr_2", "lr_1"):
        write_run(tmp_path / "lr" / name, [3.0], summary={})
    assert {row.name for row in find_runs(tmp_path)} == {"lr", "lr/lr_1", "lr/lr_2"}
    (tmp_path / "lr" / "run.toml").unlink()
    (tmp_path / "lr" / "metrics.jsonl").unlink()
    code, out, _ = compared(capsys, tmp_path / "lr")
    assert code == 0 and "curves against lr_1" in out and "lr_2: loss" in out


def test_a_finished_run_has_no_more_steps_than_it_was_to_have(tmp_path):
    run = write_run(tmp_path / "run", [3.0, 2.0], summary={}, training__steps=1)
    assert (run_row(run).step, run_row(run).steps) == (2, 2)


def test_a_validation_far_from_the_end_is_found(tmp_path):
    write_run(tmp_path / "run", vals={5: 2.5}, validation__interval=5)
    sink = JsonlSink(tmp_path / "run", resumed_step=5)
    for step in range(6, 400):
        sink.write(StepMetrics(step=step, loss=1.0, tokens_per_second=1.0, memory_gib=1.0, **NUMBERS))
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size > 2**17
    assert (run_row(tmp_path / "run").step, run_row(tmp_path / "run").val_loss) == (399, 2.5)


def test_of_several_validation_sets_the_first_is_listed_as_in_the_summary(tmp_path):
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        for step, name, loss in ((1, "web", 5.0), (1, "code", 6.0), (3, "web", 2.0), (3, "code", 4.0)):
            file.write(json.dumps({"step": step, "val_loss": loss, "val_set": name}) + "\n")
    assert run_row(run).val_loss == 2.0


def test_hostile_runs_are_listed(tmp_path):
    for name, content in (
        ("cut", '{"step": 1, "loss": 3.0}\n{"step": 2, "lo'),
        ("deep", '{"step": 1, "loss": 3.0}\n' + '{"loss": ' * 5000),
        ("text", '{"step": "x", "loss": "y"}\n'),
        ("nan", '{"step": 2, "loss": NaN, "tokens_per_second": Infinity, "goodput": true}\n'),
        ("empty", ""),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(content)
        (folder / "run.toml").write_text("[training]\nsteps = 'x'\n[checkpoint]\nfolder = = 4\n")
        (folder / "summary.json").write_text('{"steps": "x"}' if name == "nan" else "[]")
        (folder / "starts.jsonl").write_text('{"time": "x"}\n')
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "run.lock").touch()
    rows = {row.name: row for row in find_runs(tmp_path)}
    assert len(run_lines([*rows.values()])) == 7
    json.dumps([row.as_dict() for row in rows.values()], allow_nan=False)
    assert {name: (str(row.state), row.step, row.loss) for name, row in rows.items()} == {
        "cut": ("failed", 1, 3.0),
        "deep": ("failed", 1, 3.0),
        "text": ("failed", None, None),
        "nan": ("failed", 2, None),
        "empty": ("failed", None, None),
        "locked": ("failed", None, None),
    }


def test_names_of_runs_keep_the_columns_of_a_terminal(tmp_path):
    for name in ("日本語", "cafe\u0301", "two\nlines", "plain"):
        write_run(tmp_path / name, [3.0], summary={})
    lines = run_lines(find_runs(tmp_path))
    named = {line.split()[0]: line.partition("finished")[0] for line in lines[1:]}
    assert len(lines) == 5 and "two\\nlines" in named
    assert {len(named[name]) for name in ("plain", "two\\nlines")} == {len("two\\nlines") + 2}
    assert (len(named["日本語"]), len(named["cafe\u0301"])) == (len("two\\nlines") - 1, len("two\\nlines") + 3)


def test_a_folder_without_runs_is_no_error_and_one_that_is_missing_is(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["runs"]) == 0
    assert cli.main(["runs", "."]) == 0
    assert capsys.readouterr().out.count("crius train starts a run") == 2
    assert cli.main(["runs", "nowhere"]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err


def test_five_hundred_runs_are_listed_in_a_second(tmp_path):
    write_run(tmp_path / "run0", [3.0] * 100, vals={100: 2.0}, summary={})
    files = {path.name: path.read_bytes() for path in (tmp_path / "run0").iterdir()}
    for number in range(1, 500):
        (tmp_path / f"run{number}").mkdir()
        for name, content in files.items():
            (tmp_path / f"run{number}" / name).write_bytes(content)
    before = time.process_time()
    assert len(find_runs(tmp_path)) == 500
    assert time.process_time() - before < 1.0


def compared(capsys, *argv):
    code = cli.main(["compare", *map(str, argv)])
    return code, *capsys.readouterr()


@pytest.fixture
def pair(tmp_path):
    """Runs whose losses part at step 2 by 1e-3, and most at step 4, which is 0.1 away."""
    a = write_run(tmp_path / "a", [4.0, 3.0, 2.0, 1.0], vals={4: 1.5}, summary={}, optimizer__lr=0.1)
    losses, start = {1: 4.0, 2: 3.003, 3: 2.0, 4: 0.9, 5: 0.8}, {"torch": "2.14.0", "layout": "fsdp2"}
    b = write_run(tmp_path / "b", losses, vals={4: 1.2}, start=start, optimizer__lr=0.2)
    return a, b


def test_a_comparison_says_what_differs_and_where_the_curves_part(pair, capsys):
    code, out, _ = compared(capsys, *pair)
    assert code == 1
    lines = [line.split() for line in out.splitlines()]
    assert ["optimizer.lr", "0.1", "0.2"] in lines
    assert ["torch", "2.13.0", "2.14.0"] in lines and ["layout", "1", "fsdp2"] in lines
    told = {line.partition(":")[2].split("  ")[0].strip(): re.split("  +", line.strip()) for line in out.splitlines()}
    assert told["loss"][1:] == ["4 steps, 1 to 4", "step 2", "3 and 3.003", "1.0e-03", "1.0e-01", "step 4"]
    assert told["validation"][1:] == ["step 4", "step 4", "1.5 and 1.2", "2.0e-01", "2.0e-01", "step 4"]
    assert "no record of them: 0 steps of a and 1 of b" in out
    assert ["state", "finished", "failed"] in lines and ["loss", "1.000000", "0.800000"] in lines
    assert ["tokens/s,", "median", "300", "350"] in lines and ["memory,", "GiB", "0.40", "0.50"] in lines


def test_a_comparison_is_json_for_scripts(pair, capsys):
    code, out, _ = compared(capsys, *pair, "--json", "--tolerance", "0.01")
    found = json.loads(out)
    assert code == 1 and found["equal"] is False
    assert found["losses"][0]["parts"]["step"] == found["losses"][0]["largest"]["step"] == 4
    assert found["settings"] == {"optimizer.lr": [0.1, 0.2]}


@pytest.mark.parametrize(("tolerance", "code"), [("0.11", 0), ("0.1", 0), ("0.099", 1), ("0", 1)])
def test_the_tolerance_decides_the_exit_code(pair, tolerance, code, capsys):
    assert compared(capsys, *pair, "--tolerance", tolerance)[0] == code


def test_a_run_is_equal_to_itself_at_tolerance_0(pair, capsys):
    code, out, _ = compared(capsys, pair[0], pair[0], "--tolerance", "0")
    assert code == 0
    assert re.search("a: loss +4 steps, 1 to 4 +never +- +- +0 +step 1", out)
    assert "settings: no difference" in out


@pytest.mark.parametrize(("mine", "other"), [(math.nan, math.nan), (math.nan, 1.0), (1.0, math.inf)])
def test_a_loss_that_is_not_finite_is_equal_to_none(mine, other, tmp_path, capsys):
    folders = [write_run(tmp_path / name, [2.0, loss]) for name, loss in (("a", mine), ("b", other))]
    code, out, _ = compared(capsys, *folders, "--tolerance", "1e9")
    assert code == 1 and re.search("step 2 .* and .* +not finite +not finite +step 2", out)
    found = json.loads(compared(capsys, *folders, "--json")[1])
    assert found["losses"][0]["largest"]["relative"] is None


def test_a_damaged_record_is_reported_and_not_taken_as_equal(tmp_path, capsys):
    a, b = (write_run(tmp_path / name, [2.0, 1.0]) for name in "ab")
    lines = (b / "metrics.jsonl").read_text().splitlines()
    (b / "metrics.jsonl").write_text(f"{lines[0]}\n{lines[1][:9]}\n")
    code, out, _ = compared(capsys, a, b)
    assert code == 0
    assert re.search("loss +step 1 +never", out) and "1 steps of a and 0 of b" in out
    assert any(line.split() == ["damaged", "lines", "0", "1"] for line in out.splitlines())


def test_a_run_with_several_starts_shows_all_their_layouts(tmp_path, capsys):
    a, b = (write_run(tmp_path / name, [2.0]) for name in "ab")
    with (b / "starts.jsonl").open("a") as file:
        file.write('{"time": 1.0, "step": 1, "torch": "2.13.0", "layout": "fsdp2"}\n')
    assert ["layout", "1", "1,", "then", "fsdp2"] in [line.split() for line in compared(capsys, a, b)[1].splitlines()]


def test_a_run_without_a_step_is_left_out_of_a_comparison_and_counts_as_not_equal(tmp_path, capsys):
    for name in "bcd":
        write_run(tmp_path / "all" / name, [3.0, 2.0], summary={})
    (tmp_path / "all" / "a").mkdir()
    (tmp_path / "all" / "a" / "run.lock").touch()  # it was killed before it wrote anything else
    write_run(tmp_path / "all" / "d", {7: 3.0})
    code, out, err = compared(capsys, tmp_path / "all")
    assert code == 1 and f"{tmp_path / 'all' / 'a'} is left out: no step has been reported yet" in err
    assert re.search("c: loss +2 steps, 1 to 2 +never", out) and re.search("d: loss +no common step", out)
    assert cli.main(["report", str(tmp_path / "all"), "--out", str(tmp_path / "all.html")]) == 0


def test_a_terminal_without_unicode_gets_escapes(tmp_path):
    write_run(tmp_path / "ä語", [3.0], summary={})
    done = harness.crius_process("runs", str(tmp_path), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "") and "\\xe4\\u8a9e" in done.stdout


def test_what_cannot_be_compared_is_exit_code_2(tmp_path, capsys):
    a = write_run(tmp_path / "a", {1: 3.0, 10: 2.0})
    b = write_run(tmp_path / "b", {5: 2.5})
    for argv, told in (
        ([], "0 runs cannot be compared"),
        ([a], "1 run cannot be compared"),
        ([a, tmp_path / "none"], "none does not exist"),
        ([a, b], f"{a} has 2 of 1 to 10; {b} has 1 of 5 to 5"),
        ([a, a, "--tolerance", "-1"], "--tolerance -1.0 is out of range"),
        ([a, a, "--tolerance", "nan"], "--tolerance nan is out of range"),
    ):
        code, out, err = compared(capsys, *argv)
        assert (code, out) == (2, ""), argv
        assert told in err

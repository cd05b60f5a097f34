"""``python -m benchmarks.gpu`` without a GPU: its results are whole, its programs end, and one step spoils no other."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile

import pytest
from harness import ROOT

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import check, host, runs, verbs
from benchmarks.gpu.record import Record, error_in
from benchmarks.gpu.round import Done, Round, Step, run_steps
from benchmarks.turns import Contestant, take_turns


def record_of(folder, name="check"):
    return Record(name, folder, {"commit": "abc", "command": "check", "device": None, "modules": {}})


def round_of(folder, device="cpu", seconds=100.0):
    record = record_of(folder / "out")
    return Round(record, sys.executable, device, folder / "work", dict(os.environ), time.monotonic() + seconds, 2)


def rows_in(folder, name="check"):
    _, *rows = map(json.loads, (folder / "out" / f"{name}.jsonl").read_text().splitlines())
    return [(row["step"], row["check"], row["ok"]) for row in rows]


def call(*arguments, timeout=280, **environ):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "CRIUS_WHEELS": "nowhere", **environ},
        check=False,
    )


@pytest.mark.long
def test_a_dry_run_of_one_step_writes_rows_and_a_table_and_prints_the_table_last(tmp_path):
    done = call("check", "--dry", "--only", "machine", OUT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_in(tmp_path)
    assert ("machine", "torch", True) in rows and ("machine", "crius doctor", True) in rows
    assert ("machine", "nvidia-smi", None) in rows
    table = (tmp_path / "out" / "check.txt").read_text()
    assert done.stdout.split("\n\n")[-1].splitlines()[:-1] == [*table.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", ["check", "bench", "ranks"])
def test_a_dry_run_is_right_in_every_step(name, tmp_path):
    done = call(name, "--dry", timeout=3000, OUT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    steps = {step for step, _, _ in rows_in(tmp_path, name)}
    assert steps >= set(command.COMMANDS[name][0]) - {"tests"}


def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("CRIUS_WHEELS", "nowhere")
    monkeypatch.setattr(host, "ask", lambda *_: {"torch": "2.11.0", "device": None})
    assert command.main(["check", "--only", "machine"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "can use no GPU" in said.err and "DRY=1" in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"), [(["chek"], "invalid choice"), (["check", "--only", "machine,speed"], "no such step: speed")]
)
def test_a_wrong_call_exits_with_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_steps_of_a_command_are_listed(capsys):
    assert command.main(["ranks", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(command.COMMANDS["ranks"][0])


@pytest.mark.long
def test_a_killed_command_leaves_whole_files_and_no_program(tmp_path):
    environ = {**os.environ, "OUT": str(tmp_path / "out"), "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    arguments = [sys.executable, "-m", "benchmarks.gpu", "check", "--dry", "--only", "runs"]
    with subprocess.Popen(arguments, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("=== runs"):
                break
        time.sleep(2.0)  # some runs have started
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(30) != 0
    assert "results in" in rest and rows_in(tmp_path) == []
    assert [path for path in tmp_path.iterdir() if path.name.startswith("crius-gpu-")] == []
    running = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert running.stdout == ""


def test_the_files_are_whole_after_each_row(tmp_path):
    record = record_of(tmp_path / "out")
    for number in range(3):
        record.row("step", f"check {number}", number != 1, "line\nbreak", 1.0, {"x": number})
        assert rows_in(tmp_path)[-1] == ("step", f"check {number}", number != 1)
        table = (tmp_path / "out" / "check.txt").read_text().splitlines()
        assert len(table) == number + 2
    assert table[0].startswith("1 failed, 2 ok, 0 n/a")
    assert table[1].startswith("FAIL step: check 1")  # failures first
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_a_second_call_keeps_the_results_of_the_first(tmp_path):
    for _ in range(2):
        record_of(tmp_path / "out").log("a", "b", 1)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("check-2.jsonl", "check-2.log", "check-2.txt", "check.jsonl", "check.log", "check.txt")
    ]


def test_the_log_has_a_limit_and_the_table_too(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.record.MOST_LOG_BYTES", 300)
    record = record_of(tmp_path / "out")
    for number in range(9):
        record.log(f"title {number}", "x" * 50, 1)
        record.row("s", f"check {number}", True, "y" * 100)
    assert (tmp_path / "out" / "check.log").stat().st_size <= 300
    assert len(record.table(400)) <= 400


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("a\nRuntimeError: bad\nmore\n", "RuntimeError: bad | more"),
        ("[rank0]: torch.OutOfMemoryError: CUDA\n", "[rank0]: torch.OutOfMemoryError: CUDA"),
        ("only this\n", "only this"),
        ("", "it said nothing"),
    ],
)
def test_a_failed_program_is_told_by_its_error(output, said):
    assert error_in(output) == said


def test_a_step_that_fails_or_has_no_time_ends_itself_alone(tmp_path):
    def bad(this):
        """Fails."""
        raise ValueError("no")

    def good(this):
        """Works."""
        this.row("it runs", True)

    steps = {"bad": Step(bad, 1.0), "long": Step(good, 1e6), "good": Step(good, 1.0)}
    this = round_of(tmp_path, "cuda")
    assert run_steps(this, steps, list(steps)) == ["long"]
    assert rows_in(tmp_path) == [
        ("bad", "ended early", False),
        ("long", "not begun", False),  # on a GPU what could not run has failed
        ("good", "it runs", True),
    ]


@pytest.mark.parametrize(("device", "ok"), [("cuda", False), ("cpu", None)])
def test_a_missing_peer_has_failed_on_a_gpu_alone(device, ok, tmp_path):
    round_of(tmp_path, device).cannot("titan", "torchtitan is missing")
    assert rows_in(tmp_path) == [("", "titan", ok)]


@pytest.mark.parametrize("handler", ["ends at SIGINT", "ignores SIGINT"])
def test_a_program_out_of_time_is_ended_with_its_children(handler, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.round.END_SECONDS", 1.0)
    monkeypatch.setattr("benchmarks.gpu.round.LEAST_SECONDS", 0.1)
    ignored = "signal.signal(signal.SIGINT, signal.SIG_IGN)" if handler == "ignores SIGINT" else "pass"
    child = "subprocess.Popen(['sleep', '98.7'])"
    code = f"import signal, subprocess, time; {ignored}; {child}; print('up', flush=True); time.sleep(60)"
    begin = time.monotonic()
    done = round_of(tmp_path).call("slow", ["-c", code], 2.0)
    assert done.code is None and "up" in done.output and time.monotonic() - begin < 20
    assert subprocess.run(["pgrep", "-f", "sleep 98.7"], capture_output=True, check=False).stdout == b""


def test_two_rounds_share_no_scratch_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_run", lambda options, steps, seconds, work: seen.append(work) or 0)
    seen = []
    command.main(["check", "--dry"])
    command.main(["check", "--dry"])
    assert seen[0] != seen[1]
    environ = host.environment_of(tmp_path / "work", tmp_path / "site", is_dry=False)
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert environ[name].startswith(str(tmp_path / "work"))


def test_only_what_is_missing_is_taken_from_the_wheels(tmp_path):
    wheels = {"gone_module": "gone_module/__init__.py", "pytest": "pytest/__init__.py", "one-file": "only_one.py"}
    for name, file in wheels.items():
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(file, "")
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", "")
    assert host.unpack_wheels(tmp_path, tmp_path / "site") == ["gone_module", "one"]
    names = sorted(path.name for path in (tmp_path / "site").iterdir() if not path.name.endswith(".dist-info"))
    assert names == ["gone_module", "only_one.py"]


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("rich_rst-2.2.0-py3-none-any.whl", True),
        ("six-1.17.0-py2.py3-none-any.whl", True),
        ("multiprocess-0.70.18-py3{minor}-none-any.whl", True),
        ("multiprocess-0.70.18-py38-none-any.whl", False),
        ("torchao-0.18.0-cp310-abi3-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl", True),
        ("torchao-0.18.0-cp399-abi3-manylinux_2_28_x86_64.whl", False),
        ("matplotlib-3.11.2-cp3{minor}-cp3{minor}-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("matplotlib-3.11.2-cp39-cp39-manylinux2014_x86_64.whl", False),
        ("matplotlib-3.11.2-cp3{minor}-cp3{minor}-manylinux2014_aarch64.whl", False),
        ("matplotlib-3.11.2-cp3{minor}-cp3{minor}-macosx_11_0_x86_64.whl", False),
    ],
)
def test_only_wheels_for_this_python_and_machine_are_taken(name, fits, tmp_path, monkeypatch):
    monkeypatch.setattr(host.platform, "machine", lambda: "x86_64")
    assert host.is_usable(tmp_path / name.replace("{minor}", str(sys.version_info.minor))) == fits


def test_a_copy_without_git_has_the_carried_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "ROOT", tmp_path)
    assert host.commit() == "unknown"
    (tmp_path / host.CARRIED).mkdir()
    (tmp_path / host.CARRIED / "COMMIT").write_text("0123abc\n")
    assert host.commit() == "0123abc"


@pytest.mark.parametrize(("device", "name"), [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GH200 480GB", "gh200")])
def test_results_are_named_by_the_card(device, name, monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    folder = host.results_folder(device, is_dry=False)
    assert folder.parent == ROOT / "benchmarks/results" and folder.name.endswith(f"-{name}")
    assert host.results_folder(None, is_dry=True) == ROOT / "build/gpu-dry"


def trained(losses, code=0, output=""):
    records = [{"step": n, "loss": x, "memory_gib": 1.0, "step_seconds": 0.1} for n, x in enumerate(losses, start=1)]
    return runs.Trained(Done(code, output, 1.0), records)


@pytest.mark.parametrize(
    ("losses", "output", "prints", "ok"),
    [
        ([5.0] * 12, "", "", True),
        ([5.04] * 12, "", "", True),
        ([5.06] * 12, "", "", False),  # more than 1 % away
        ([5.0] * 11 + [float("nan")], "", "", False),
        ([5.0] * 11, "", "", False),  # a step is missing
        ([5.0] * 12, "compile: 2 graphs", runs.GRAPHS, True),
        ([5.0] * 12, "compile: 0 graphs", runs.GRAPHS, False),
    ],
)
def test_a_run_has_to_follow_the_cpu_and_to_print_what_it_must(losses, output, prints, ok, tmp_path):
    run = runs.Run("a", (), prints=prints)
    runs.judge(round_of(tmp_path, "cuda"), run, trained(losses, output=output), trained([5.0] * 12))
    assert rows_in(tmp_path) == [("", "a", ok)]


def test_a_run_without_its_reference_has_failed(tmp_path):
    runs.judge(round_of(tmp_path, "cuda"), runs.Run("a", ()), trained([5.0] * 12), trained([], code=1))
    assert rows_in(tmp_path) == [("", "a", False)]


@pytest.mark.parametrize(
    ("again", "output", "ok"),
    [
        ([5.0] * 12, "resume: step 8 of x", True),
        ([5.0] * 11 + [5.1], "resume: step 8 of x", False),
        ([5.0] * 12, "", False),  # all of it was trained again
    ],
)
def test_a_resumed_run_has_the_same_bits_and_has_resumed(again, output, ok, tmp_path, monkeypatch):
    this = round_of(tmp_path, "cuda")

    def train(this, name, flags, *, folder):
        (folder / "checkpoints" / "step-12").mkdir(parents=True, exist_ok=True)
        return trained([5.0] * 12) if name.endswith("whole") else trained(again, output=output)

    monkeypatch.setattr(runs, "train", train)
    monkeypatch.setattr(runs, "RESUMED", {"eager": ()})
    runs.resume(this)
    assert rows_in(tmp_path) == [("", "eager", ok)]


@pytest.mark.slow
def test_one_run_beside_a_cpu_is_right_in_a_dry_run(tmp_path, monkeypatch):
    """The cheapest of the 33, which all run in the slow test."""
    monkeypatch.setattr(runs, "RUNS", [run for run in runs.RUNS if run.name == "bfloat16"])
    monkeypatch.setattr(runs, "REFERENCES", {"cpu": runs.REFERENCES["cpu"]})
    this = round_of(tmp_path, seconds=250.0)
    runs.runs(this)
    assert rows_in(tmp_path) == [("", "cpu", True), ("", "bfloat16", True)]


def test_the_corpus_of_the_runs_has_many_documents(tmp_path):
    assert len(list(runs.documents(tmp_path).iterdir())) > 300


def test_only_files_with_gpu_tests_are_collected():
    files = check.files_with_gpu_tests()
    assert files[0].startswith("tests/gpu/") and "tests/distributed/test_nonfinite.py" in files
    assert len(files) < 14


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_a" name="good" time="1.5"/>
<testcase classname="tests.gpu.test_a" name="bad" time="2"><failure message="assert 1 == 2&#10;more"/></testcase>
<testcase classname="tests.gpu.test_a" name="left" time="0"><skipped message="no"/></testcase>
</testsuite></testsuites>"""


def test_results_of_pytest_are_read(tmp_path):
    (tmp_path / "junit.xml").write_text(JUNIT)
    assert check.read_junit(tmp_path / "junit.xml") == [
        ("test_a::good", True, 1.5, ""),
        ("test_a::bad", False, 2.0, "assert 1 == 2"),
        ("test_a::left", None, 0.0, "no"),
    ]


def test_tests_that_did_not_run_are_no_success(tmp_path, monkeypatch):
    this = round_of(tmp_path, "cuda")
    monkeypatch.setattr(Round, "call", lambda *_: Done(5, "no tests ran", 1.0))
    check.gpu_tests(this)
    assert rows_in(tmp_path) == [("", "pytest", False)]


CONTESTANT = """
import json, sys, time
time.sleep(float(sys.argv[1]))
print(json.dumps({"ready": 1}), flush=True)
for line in sys.stdin:
    time.sleep(float(sys.argv[2]))
    print(json.dumps({"steps": int(line)}), flush=True)
"""


def contestant_of(name, start, turn):
    return Contestant(name, [sys.executable, "-c", CONTESTANT, str(start), str(turn)])


def test_all_starts_share_one_deadline():
    begin = time.monotonic()
    contestants = [contestant_of("a", 0, 0), contestant_of("b", 60, 0), contestant_of("c", 60, 0)]
    ready, *late = take_turns(contestants, rounds=2, steps=1, start_seconds=3)
    assert time.monotonic() - begin < 20 and len(ready.turns) == 2
    assert all("did not answer within 3 s" in outcome.failure for outcome in late)


def test_rounds_that_would_not_end_in_time_are_not_begun():
    begin = time.monotonic()
    (outcome,) = take_turns([contestant_of("a", 0, 1.0)], rounds=100, steps=1, total_seconds=6)
    assert not outcome.failure and 0 < len(outcome.turns) < 6 and time.monotonic() - begin < 15


@pytest.mark.parametrize(
    ("speedup", "peak", "ok"),
    [(1.0, 12.0, True), (0.99, 12.0, False), (1.2, 13.0, False)],
)
def test_some_chunks_have_to_be_smaller_and_no_slower(speedup, peak, ok, tmp_path):
    rows = [
        {"loss": "whole", "speedup": 1.0, "peak_mib": 100.0},
        {"loss": "chunks of 512", "speedup": speedup, "peak_mib": peak},
    ]
    verbs.judge_chunks(round_of(tmp_path, "cuda"), rows)
    assert rows_in(tmp_path)[0][2] == ok


def test_an_answer_is_read_from_between_warnings_and_a_failure_is_a_row(tmp_path, monkeypatch):
    outputs = [Done(0, 'Warning: x\n{\n  "rows": []\n}\nbye\n', 1.0), Done(2, "ConfigError: no\n", 1.0)]
    monkeypatch.setattr(Round, "call", lambda *_: outputs.pop(0))
    this = round_of(tmp_path)
    assert verbs.answer(this, "a", [], 1.0) == {"rows": []}
    assert verbs.answer(this, "b", [], 1.0) is None
    assert rows_in(tmp_path) == [("", "b", False)]

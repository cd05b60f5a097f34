"""The GPU suite without a GPU: its rehearsal, its verdicts, and that one bad section spoils no other."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile

import pytest
from harness import ROOT
from packaging.requirements import Requirement

from crius.tools.bench.turns import Contestant, take_turns

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_kernels
import gpu_low_precision as low
import gpu_sections as sections
import gpu_suite as suite


def call_suite(*arguments, **environ):
    return subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu_suite.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "CRIUS_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **environ},
        check=False,
    )


@pytest.mark.slow
def test_a_rehearsal_of_one_section_writes_a_summary_and_its_results(tmp_path):
    done = call_suite("--rehearse", "--sections", "kernels", OUT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {name: report["status"] for name, report in results["sections"].items()} == {"kernels": "pass"}
    assert "| kernels | pass |" in (tmp_path / "out" / "summary.md").read_text()


@pytest.mark.slow
def test_a_rehearsal_writes_a_summary_and_all_results(tmp_path):
    done = call_suite("--rehearse", OUT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == ["results.json", "summary.md"]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    reports, environment = results["sections"], results["environment"]
    assert list(reports) == ["models", "sweep", "profile", "kernels"] and not results["not_run"]
    assert {report["status"] for report in reports.values()} == {"pass"}
    assert environment["rehearsal"] and environment["versions"]["torch"] and environment["commit"]
    contestants = [row["contestant"] for row in reports["models"]["rows"]]
    assert contestants == ["Crius", "titan math, SDPA", "Hugging Face", "Crius, float8"]
    topics = [row["topic"] for row in reports["sweep"]["rows"]]
    assert topics == ["base", "loss", "optimizer"]
    summary = (tmp_path / "out" / "summary.md").read_text()
    for line in (
        "# GPU suite (a rehearsal: its numbers mean nothing)",
        "| models | pass |",
        "- PASS debug, 1 layer, bfloat16: titan math, SDPA starts from Crius's loss: ",
        "- n/a debug, 1 layer, bfloat16: Crius is at least 0.97 x as fast as titan math, SDPA, like for like: ",
        "- PASS debug, 1 layer, float8: linear layers were converted: float8: ",
        "- PASS every change that was begun and has to run ran: all",
        "- PASS the trace has the steps: 3 of 3",
    ):
        assert line in summary


def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path):
    done = call_suite("--out", str(tmp_path / "out"))
    assert done.returncode == 2 and "gpu_suite: no CUDA device: torch" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--device", "cpu"], "unrecognized"), (["--sections", "speed"], "no such section: speed")]
)
def test_a_wrong_call_exits_with_2(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        suite.main(arguments)
    assert said in capsys.readouterr().err


def place_of(folder, device="cuda"):
    return sections.Place(sys.executable, device, True, folder, dict(os.environ), 139.0)


def test_a_section_that_fails_or_takes_too_long_ends_itself_alone(tmp_path, monkeypatch):
    started = tmp_path / "started"

    def slow(place, report):
        report.row(kept=1)
        sections.call(place, report, "sleep", ["-c", f"import time; open({str(started)!r}, 'w'); time.sleep(60)"])

    def broken(place, report):
        report.row(kept=1)
        raise KeyError("no such thing")

    def good(place, report):
        code, output = sections.call(place, report, "hello", ["-c", "print('hello')"])
        report.check("it runs", (code, output) == (0, "hello\n"))

    table = {"slow": (slow, 1.0), "broken": (broken, 9.0), "good": (good, 60.0)}
    monkeypatch.setattr(suite, "SECTIONS", table)
    begin = time.monotonic()
    reports = [suite.run_section(name, place_of(tmp_path), tmp_path, {}, limit) for name, (_, limit) in table.items()]
    assert [report.status for report in reports] == ["TIME LIMIT", "ERROR", "pass"]
    assert time.monotonic() - begin < 30
    for name in ("slow", "broken"):
        assert json.loads((tmp_path / f"{name}.json").read_text())["rows"] == [{"kept": 1}]
    assert "no such thing" in reports[1].error and "stopped after 1 s" in reports[0].failures[0]["why"]


def run_of(rate=1000.0, memory=10.0, loss=5.0):
    record = {"tokens_per_second": rate, "memory_gib": memory, "mfu": 0.4, "loss": loss}
    return sections.Run("", [{"step": step, **record} for step in (1, 4, 8, 12, 16, 20, 24)])


def test_summary_leaves_out_reports_that_begin_before_the_warm_step():
    run = run_of()
    for record in run.records[:3]:
        record["tokens_per_second"] = 1.0
    summary = run.summary(warm=8)  # of steps 9-12, 13-16, 17-20 and 21-24
    assert summary["samples"] == [1000.0] * 4
    assert (summary["tokens_per_second"], summary["spread_percent"], summary["mfu_percent"]) == (1000.0, 0.0, 40.0)


JUNIT = """<testsuites><testsuite><testcase classname="tests.gpu.test_a" name="one" time="1.26"/>
<testcase classname="tests.gpu.test_a" name="two" time="2">
<failure message="Error: x&#10;y">z</failure></testcase>
<testcase classname="tests.gpu.test_b" name="three" time="0"><skipped message="needs 2 GPUs"/></testcase>
<testcase classname="" name="tests.gpu.test_c" time="0"><error message="collection failure"/></testcase>
</testsuite></testsuites>"""


def test_results_of_pytest_are_read(tmp_path):
    (tmp_path / "junit.xml").write_text(JUNIT)
    rows = sections.read_junit(tmp_path / "junit.xml")
    assert [(row["test"], row["result"], row["says"]) for row in rows] == [
        ("test_a::one", "passed", ""),
        ("test_a::two", "failed", "Error: x"),
        ("test_b::three", "skipped", "needs 2 GPUs"),
        ("::tests.gpu.test_c", "failed", "collection failure"),
    ]


PROGRAM = """
import sys, time
sys.stdout.write("begun")
try:
    time.sleep(60)
except KeyboardInterrupt:
    open(sys.argv[1], "w").write(sys.argv[2])
    if sys.argv[3] == "hangs":
        time.sleep(60)
"""


@pytest.fixture
def ignored_interrupts():
    """As a process in the background of a script has them, and hands them on."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ignored_interrupts")
@pytest.mark.parametrize("after", ["ends", "hangs"])
def test_tests_that_ran_are_reported_although_time_ran_out(after, tmp_path, monkeypatch):
    call = sections.call

    def interrupted(place, report, name, arguments):
        return call(place, report, name, ["-c", PROGRAM, str(tmp_path / "junit.xml"), JUNIT, after])

    monkeypatch.setattr(sections, "call", interrupted)
    monkeypatch.setattr(sections, "LAST_SECONDS", 2.0)
    monkeypatch.setattr(suite, "SECTIONS", {"tests": (sections.tests, 6.0)})
    begin = time.monotonic()
    report = suite.run_section("tests", place_of(tmp_path), tmp_path, {}, 6.0)
    assert report.status == "TIME LIMIT" and time.monotonic() - begin < 30
    assert [row["result"] for row in report.rows] == ["passed", "failed", "skipped", "failed"]


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


def test_only_files_with_gpu_tests_are_collected():
    files = sections.files_with_gpu_tests()
    assert files[0].startswith("tests/gpu/") and "tests/distributed/test_nonfinite.py" in files
    assert len(files) < 12


@pytest.mark.parametrize(
    ("speedup", "peak", "small", "passed"),
    [
        (1.1, 1000.0, 0.5, True),
        (0.9, 1000.0, 0.5, False),
        (1.1, 9000.0, 0.5, False),
        (1.1, 9000.0, 1.05, True),  # not the fastest
    ],
)
def test_some_chunks_have_to_be_smaller_and_no_slower(speedup, peak, small, passed, tmp_path):
    rows = [
        {"loss": "whole", "milliseconds": 100.0, "peak_mib": 50_000.0, "speedup": 1.0},
        {"loss": "chunks of 512", "milliseconds": 100 / small, "peak_mib": 500.0, "speedup": small},
        {"loss": "chunks of 2048", "milliseconds": 100 / speedup, "peak_mib": peak, "speedup": speedup},
    ]
    report = sections.Report("x", tmp_path, 100, {})
    gpu_kernels.judge_loss(report, rows, is_gpu=True)
    assert [check["passed"] for check in report.checks] == [passed]


def test_only_what_is_missing_is_taken_from_the_wheels(tmp_path):
    for name in ("gone_module", "pytest"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    needed = {"gone_module": "gone-module", "nowhere": "nowhere", "pytest": "pytest"}
    site = suite.install_missing(needed, tmp_path, tmp_path / "site")
    assert [path.name for path in site.iterdir()] == ["gone_module"]
    assert suite.install_missing({"pytest": "pytest"}, tmp_path, tmp_path / "other") is None


def test_the_list_of_wheels_is_complete_and_is_the_readmes():
    listed = set(suite.NEEDED.values())
    todo = [
        "cyclopts",
        "tomli-w",
        "rich",
        "xxhash",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "torchao",
        "matplotlib",
    ]
    while todo:
        name = todo.pop()
        if name in ("numpy", "six"):  # has to be there, as torch; of python-dateutil before the one that is listed
            continue
        assert name.lower() in listed, name
        needs = [Requirement(text) for text in importlib.metadata.requires(name) or []]
        linux = {"python_version": "3.12", "sys_platform": "linux", "extra": ""}
        todo += [need.name for need in needs if need.marker is None or need.marker.evaluate(linux)]
    download = (ROOT / "benchmarks" / "README.md").read_text().partition("pip download")[2].partition("```")[0]
    assert set(re.findall(r"([a-z-]+)==", download)) == listed


def test_two_calls_of_ten_minutes_are_enough():
    """What is claimed of speed is in the first one; the last line of that names the sections of the second."""
    names = list(suite.SECTIONS)
    first, rest = names[:6], names[6:]
    assert first == ["tests", "models", "sweep", "profile", "kernels", "full_8b"]
    assert suite.TOTAL_SECONDS + 3 * sections.LAST_SECONDS <= 600
    for call in (first, rest):
        assert sum(suite.SECTIONS[name][1] for name in call) <= suite.TOTAL_SECONDS
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    assert f"--sections {','.join(rest)}" in readme


def test_tests_run_some_at_a_time(tmp_path, monkeypatch):
    """``-n`` is there whatever the machine has: pytest-xdist is among the wheels that are carried."""
    asked = []
    monkeypatch.setattr(sections, "call", lambda place, report, name, arguments: asked.append(arguments) or (5, ""))
    monkeypatch.setattr(sections.os, "cpu_count", lambda: 16)
    sections.tests(place_of(tmp_path), sections.Report("x", tmp_path, 100, {}))
    assert asked[0][asked[0].index("-n") + 1] == "5"
    assert {"pytest-xdist", "execnet"} <= set(suite.NEEDED.values())


def test_every_section_has_a_row_in_the_readme():
    rows = re.findall(r"^\| (\w+) \|", (ROOT / "benchmarks" / "README.md").read_text().partition("## Check")[0], re.M)
    assert [name for name in rows if name in suite.SECTIONS] == list(suite.SECTIONS)


def test_rows_with_other_columns_are_a_table_of_their_own():
    rows = [{"a": 1, "samples": [1]}, {"a": 2, "samples": [2]}, {"b": 0.12345}]
    assert suite.table(rows) == ["| a |", "| --- |", "| 1 |", "| 2 |", "", "| b |", "| --- |", "| 0.1235 |"]


def test_what_no_time_is_left_for_is_not_begun_and_said(tmp_path, monkeypatch):
    def slow(place, report):
        time.sleep(1.0)

    def quick(place, report):
        report.check("it runs", True)

    table = {"slow": (slow, 1.5), "long": (quick, 2.0), "short": (quick, 0.4)}
    monkeypatch.setattr(suite, "SECTIONS", table)
    monkeypatch.setattr(suite, "TOTAL_SECONDS", 1.5)
    environment = {"rehearsal": True}
    reports, dropped = suite.run_sections(list(table), place_of(tmp_path), tmp_path, environment, 1.0)
    assert ([report.name for report in reports], dropped) == (["slow", "short"], ["long"])
    assert reports[-1].limit <= 0.5
    assert "| long | not run | no time was left |" in suite.summary(reports, environment, dropped)
    results = json.loads((tmp_path / "results.json").read_text())
    assert (list(results["sections"]), results["not_run"]) == (["slow", "short"], ["long"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "summary.md"]


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("rich_rst-2.2.0-py3-none-any.whl", True),
        ("six-1.17.0-py2.py3-none-any.whl", True),
        ("torchao-0.18.0-cp310-abi3-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl", True),
        ("torchao-0.18.0-cp399-abi3-manylinux_2_28_x86_64.whl", False),
        ("matplotlib-3.11.2-cp3{minor}-cp3{minor}-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("matplotlib-3.11.2-cp39-cp39-manylinux2014_x86_64.whl", False),
        ("matplotlib-3.11.2-cp3{minor}-cp3{minor}-manylinux2014_aarch64.whl", False),
        ("matplotlib-3.11.2-cp3{minor}-cp3{minor}-macosx_11_0_x86_64.whl", False),
    ],
)
def test_only_wheels_for_this_python_and_machine_are_taken(name, fits, tmp_path, monkeypatch):
    monkeypatch.setattr(suite.platform, "machine", lambda: "x86_64")
    wheel = tmp_path / name.replace("{minor}", str(sys.version_info.minor))
    assert suite.is_usable(wheel) == fits


def test_an_answer_is_read_from_between_warnings_and_a_failure_is_kept(tmp_path, monkeypatch):
    outputs = [(0, 'Warning: x\n{\n  "rows": []\n}\nbye\n'), (2, "ConfigError: no\n")]
    monkeypatch.setattr(low, "call", lambda *arguments: outputs.pop(0))
    report = sections.Report("x", tmp_path, 100, {})
    assert low.answer(place_of(tmp_path), report, "a", []) == {"rows": []}
    assert low.answer(place_of(tmp_path), report, "b", []) is None
    assert report.failures[0]["why"] == "exit code 2"

"""The GPU suite without a GPU: its tiny mode, its verdicts, and that one bad section spoils no other."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
import zipfile

import pytest
from harness import ROOT
from packaging.requirements import Requirement

sys.path.insert(0, str(ROOT / "benchmarks"))
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


def test_tiny_mode_writes_a_file_a_section_and_a_summary(tmp_path):
    done = call_suite("--device", "cpu", "--tiny", "--sections", "precision", OUT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"precision.json", "summary.md"}
    report = json.loads((tmp_path / "out" / "precision.json").read_text())
    assert (report["status"], len(report["rows"]), len(report["rows"][0]["losses"])) == ("pass", 2, 20)
    assert report["environment"]["versions"]["torch"] and report["environment"]["commit"]
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "| precision | pass |" in summary and "- PASS bfloat16 learns: " in summary


def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path):
    done = call_suite("--out", str(tmp_path / "out"))
    assert done.returncode == 2 and "gpu_suite: no CUDA device: torch" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--device", "cpu"], "add --tiny"), (["--sections", "speed"], "no such section: speed")]
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


def run_of(rate=1000.0, memory=10.0, loss=5.0, output=""):
    record = {"tokens_per_second": rate, "memory_gib": memory, "mfu": 0.4, "loss": loss}
    return sections.Run(output, [{"step": step, **record} for step in (1, 4, 8, 12, 16, 20, 24)])


def verdicts(section, runs, folder, monkeypatch, device="cuda"):
    """Claims that do not hold, of a section whose ``crius train`` gives ``runs`` one after the other."""
    queue = list(runs)
    monkeypatch.setattr(sections, "train", lambda *arguments: queue.pop(0))
    report = sections.Report("x", folder, 100, {})
    section(place_of(folder, device), report)
    report.finish(None)
    failed = [check["claim"] for check in report.checks if check["passed"] is False]
    assert report.status == ("FAIL" if failed else "pass")
    return failed


SAYS = "compile: 1 graph, 5.1 s, cache miss\ncompile: 16 of 16 blocks, 1 graph\n"
NOTHING = "compile: 0 graphs, the model runs eager (switched off by TORCH_COMPILE_DISABLE)\n"


@pytest.mark.parametrize(
    ("compiled", "failed"),
    [
        (run_of(1200.0, output=SAYS), []),
        (run_of(900.0, output=SAYS), ["compiled is faster than eager"]),
        (run_of(1200.0, loss=5.1, output=SAYS), ["the last losses agree within 1 %"]),
        (run_of(1200.0, output=NOTHING), ["run 2 compiled something", "run 4 compiled something"]),
        (None, ["compiled is faster than eager"]),
    ],
)
def test_compile_section_fails_for_what_does_not_hold(compiled, failed, tmp_path, monkeypatch):
    runs = [run_of(), compiled, run_of(), compiled]
    assert verdicts(sections.compile_speed, runs, tmp_path, monkeypatch) == failed


@pytest.mark.parametrize(
    ("peaks", "failed"),
    [
        ((40, 30, 20, 10), []),  # none, every second, op, full
        ((40, 20, 30, 10), ["peak memory of selective op is below that of selective 2"]),
        ((40, 41, 20, 10), ["peak memory of selective 2 is below that of none"]),
        ((40, 30, 20, 20), ["peak memory of full is below that of selective op"]),
    ],
)
def test_activation_checkpoint_section_fails_for_a_wrong_order(peaks, failed, tmp_path, monkeypatch):
    def runs():
        return [run_of(rate=100.0 + peak, memory=peak) for peak in peaks]

    assert verdicts(sections.activation_checkpoint, runs(), tmp_path, monkeypatch) == failed
    # a CPU's resident set says nothing of it
    assert verdicts(sections.activation_checkpoint, runs(), tmp_path, monkeypatch, device="cpu") == []


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


def test_only_what_is_missing_is_taken_from_the_wheels(tmp_path):
    for name in ("gone_module", "pytest"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    needed = {"gone_module": "gone-module", "nowhere": "nowhere", "pytest": "pytest"}
    site = suite.install_missing(needed, tmp_path, tmp_path / "site")
    assert [path.name for path in site.iterdir()] == ["gone_module"]
    assert suite.install_missing({"pytest": "pytest"}, tmp_path, tmp_path / "other") is None


def test_the_list_of_wheels_is_complete_and_is_the_readmes():
    listed, todo = set(suite.NEEDED.values()), ["cyclopts", "tomli-w", "rich", "pytest", "pytest-timeout"]
    while todo:
        name = todo.pop()
        assert name.lower() in listed, name
        needs = [Requirement(text) for text in importlib.metadata.requires(name) or []]
        linux = {"python_version": "3.12", "sys_platform": "linux", "extra": ""}
        todo += [need.name for need in needs if need.marker is None or need.marker.evaluate(linux)]
    download = (ROOT / "benchmarks" / "README.md").read_text().partition("pip download")[2].partition("```")[0]
    assert set(re.findall(r"([a-z-]+)==", download)) == listed


def test_the_limits_of_all_sections_leave_room_in_nine_minutes():
    assert sum(limit for _, limit in sections.SECTIONS.values()) <= 520

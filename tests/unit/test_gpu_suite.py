"""The GPU suite without a GPU: its tiny mode, its verdicts, and that one bad section spoils no other."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from dataclasses import replace

import pytest
from harness import ROOT, parse
from packaging.requirements import Requirement

from crius.train.inputs import model_facts, open_run_corpus

sys.path.insert(0, str(ROOT / "benchmarks"))
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
    listed = set(suite.NEEDED.values())
    todo = ["cyclopts", "tomli-w", "rich", "xxhash", "pytest", "pytest-timeout", "torchao", "matplotlib"]
    while todo:
        name = todo.pop()
        if name == "numpy":  # has to be there, as torch
            continue
        assert name.lower() in listed, name
        needs = [Requirement(text) for text in importlib.metadata.requires(name) or []]
        linux = {"python_version": "3.12", "sys_platform": "linux", "extra": ""}
        todo += [need.name for need in needs if need.marker is None or need.marker.evaluate(linux)]
    download = (ROOT / "benchmarks" / "README.md").read_text().partition("pip download")[2].partition("```")[0]
    assert set(re.findall(r"([a-z-]+)==", download)) == listed


def test_low_precision_and_the_tests_fit_into_one_call():
    assert suite.TOTAL_SECONDS <= 520
    first = list(suite.SECTIONS)[:5]
    assert first == [*low.LOW_PRECISION, "tests"]
    assert sum(suite.SECTIONS[name][1] for name in first) <= suite.TOTAL_SECONDS


def test_what_no_time_is_left_for_is_not_begun_and_said(tmp_path, monkeypatch):
    def slow(place, report):
        time.sleep(1.0)

    def quick(place, report):
        report.check("it runs", True)

    table = {"slow": (slow, 1.5), "long": (quick, 2.0), "short": (quick, 0.4)}
    monkeypatch.setattr(suite, "SECTIONS", table)
    monkeypatch.setattr(suite, "TOTAL_SECONDS", 1.5)
    environment = {"tiny": True}
    reports, dropped = suite.run_sections(list(table), place_of(tmp_path), tmp_path, environment, 1.0)
    assert ([report.name for report in reports], dropped) == (["slow", "short"], ["long"])
    assert reports[-1].limit <= 0.5
    assert "| long | not run | no time was left |" in suite.summary(reports, environment, dropped)


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


FLOAT8 = "float8: 20 converted, 9 kept: 8 too small (wk, wv), output (sensitive) (tensorwise)\n"
EMULATED = FLOAT8.replace("(tensorwise)", "(tensorwise; emulated: this device has no float8 matmuls)")


@pytest.mark.parametrize(
    ("tensorwise", "failed"),
    [
        (run_of(1500.0, output=FLOAT8), []),
        (run_of(900.0, output=FLOAT8), ["float8 tensorwise is faster than bfloat16"]),
        (run_of(1500.0, loss=5.2, output=FLOAT8), ["the last loss of float8 tensorwise is within 2 % of bfloat16's"]),
        (run_of(1500.0, output=EMULATED), ["run 2 (float8 tensorwise) multiplies in float8"]),
        (run_of(1500.0), ["run 2 (float8 tensorwise) converted linear layers"]),
        (None, ["float8 tensorwise is faster than bfloat16"]),
    ],
)
def test_float8_section_fails_for_what_does_not_hold(tensorwise, failed, tmp_path, monkeypatch):
    good = run_of(1400.0, output=FLOAT8)
    runs = [run_of(), tensorwise, good, run_of(), good]
    monkeypatch.setattr(low, "train", lambda *arguments: runs.pop(0))
    report = sections.Report("x", tmp_path, 100, {})
    low.float8(place_of(tmp_path), report)
    assert [check["claim"] for check in report.checks if check["passed"] is False] == failed


def test_the_float8_section_has_the_shapes_of_8b_and_its_share_of_the_output_layer():
    config = parse(low.float8_flags(replace(place_of(ROOT), tiny=False)))
    small, whole = model_facts(config), model_facts(parse(["--model.flavor", "8b"]))
    shapes = [set(facts.linears().values()) - {facts.linears()["output"]} for facts in (small, whole)]
    assert shapes[0] == shapes[1]
    shares = [facts.vocab_size * facts.dim / facts.matmul_parameters() for facts in (small, whole)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-3)
    open_run_corpus(config, 1)  # there is text enough for sequences of 8192 tokens


def test_an_answer_is_read_from_between_warnings_and_a_failure_is_kept(tmp_path, monkeypatch):
    outputs = [(0, 'Warning: x\n{\n  "rows": []\n}\nbye\n'), (2, "ConfigError: no\n")]
    monkeypatch.setattr(low, "call", lambda *arguments: outputs.pop(0))
    report = sections.Report("x", tmp_path, 100, {})
    assert low.answer(place_of(tmp_path), report, "a", []) == {"rows": []}
    assert low.answer(place_of(tmp_path), report, "b", []) is None
    assert report.failures[0]["why"] == "exit code 2"


def test_tiny_mode_runs_the_low_precision_verbs(tmp_path):
    names = "bench_optimizer,bench_quantize"
    done = call_suite("--device", "cpu", "--tiny", "--sections", names, OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {name: json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in names.split(",")}
    assert (len(rows["bench_optimizer"]), len(rows["bench_quantize"])) == (6, 25)

"""The budget of a suite: what a test and its children take is counted, and too much of it fails the session."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import cpu_time
import pytest
import suites

BUDGET = {
    "noise": 1.0,
    "most_of_a_test": 15,
    "suites": {"test": 20, "both": 30},
    "stated": {"a feature": {"test": 1, "both": 2}, "another": {"both": 3}},
}

BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
PLANTED = f"""
import subprocess, sys, pytest
CHILD = [sys.executable, "-c", {BURN.format(seconds=0.6)!r}]

def test_light(): pass
def test_child_that_is_waited_for(): subprocess.run(CHILD)
@pytest.mark.slow
def test_marked(): subprocess.run(CHILD)

@pytest.fixture(scope="module")
def standing():
    worker = subprocess.Popen([sys.executable, "-c", "import sys\\nsys.stdin.readline()\\n" + CHILD[2] +
        "print(flush=True)\\nsys.stdin.readline()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield worker
    worker.communicate()

def test_first_of_a_standing_worker(standing): pass
def test_second_of_a_standing_worker(standing):
    standing.stdin.write(b"\\n"); standing.stdin.flush(); standing.stdout.readline()
"""


def test_what_exceeds_its_budget_is_named():
    quick = {"lint": 9.0, "tests/unit/test_a.py::one": 6.0, "tests/unit/test_a.py::two": 5.0}
    full = {"tests/docs/test_b.py::three": 14.0, "tests/docs/test_b.py::four": 1.0}
    assert cpu_time.over_budget({"test": quick}, BUDGET) == []
    assert cpu_time.over_budget({"full": full | {"tests/docs/test_b.py::four": 16.0}}, BUDGET) == [
        "tests/docs/test_b.py::four: 16.0 CPU seconds, a test that is not slow has 15"
    ]
    assert cpu_time.over_budget({"test": quick | {"lint": 11.0}, "full": full}, BUDGET) == [
        "suite test: 22 CPU seconds, its budget is 21",
        "suite both: 37 CPU seconds, its budget is 35",
    ]


def test_a_busy_machine_may_take_more():
    times = {"test": {"tests/unit/test_a.py::one": 20.0, "lint": 9.0}}
    assert cpu_time.over_budget(times, BUDGET | {"noise": 1.5}) == []
    assert len(cpu_time.over_budget(times, BUDGET | {"noise": 1.3})) == 2


def test_the_rest_and_sessions_without_a_suite_have_no_budget():
    assert cpu_time.over_budget({"all": {"tests/a.py::b": 99.0}, "none": {"tests/a.py::c": 99.0}}, BUDGET) == []


def test_seconds_are_shown_by_folder():
    times = {"tests/unit/a.py::x": 1.0, "lint": 2.0, "tests/docs/a.py::x": 3.0, "tests/unit/b.py::x": 4.0}
    assert cpu_time.by_folder(times) == {"docs": 3.0, "lint": 2.0, "unit": 5.0}


@pytest.fixture
def planted(tmp_path):
    """A suite with a budget of its own, and how to run it."""
    folder = tmp_path / "tests"
    (folder / "unit").mkdir(parents=True)
    for module in (cpu_time, suites):
        shutil.copy(module.__file__, folder)
    (folder / "budget.toml").write_text("noise = 1.0\nmost_of_a_test = 0.4\n[suites]\ntest = 99\nboth = 99\n")
    (folder / "unit" / "test_planted.py").write_text(PLANTED)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")

    def run(*arguments):
        command = [sys.executable, "-m", "pytest", "-p", "suites", "-p", "cpu_time", "-p", "no:cacheprovider", "tests"]
        environ = {**os.environ, "PYTHONPATH": str(folder)}
        command += ["--suite", "test", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)

    return run


TWO = ["-n", "2", "--dist", "loadfile"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [[], TWO], ids=["alone", "two at a time"])
def test_children_count_for_the_test_that_they_work_for(planted, processes):
    done = planted(*processes)
    assert done.returncode == 1, done.stdout
    over = [line for line in done.stdout.splitlines() if line.startswith("over budget")]
    assert len(over) == 2, done.stdout
    assert all("a test that is not slow has 0.4" in line for line in over)
    assert {line.split("::")[1].split(":")[0] for line in over} == {
        "test_child_that_is_waited_for",
        "test_second_of_a_standing_worker",
    }


def test_sessions_and_commands_add_up(tmp_path, monkeypatch):
    """The file has the tests of earlier sessions; the sum of all is judged."""
    (tmp_path / "budget.toml").write_text("noise = 1.0\nmost_of_a_test = 9\n[suites]\ntest = 9\nboth = 1.85\n")
    monkeypatch.setattr(cpu_time, "BUDGET", tmp_path / "budget.toml")
    file = tmp_path / "times.json"
    assert cpu_time.main(str(file), "test", "lint", sys.executable, "-c", BURN.format(seconds=0.3) + "exit(3)") == 3
    assert 0.3 <= cpu_time.read_times(file)["test"]["lint"] < 0.6
    codes = []
    for suite, seconds, keywords in (("test", 0.5, ()), ("test", 0.3, ("page",)), ("full", 0.8, ("page",))):
        session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
        plugin = cpu_time.CpuTimes(str(file), suite, reports=True)
        name = f"tests/unit/test_{seconds}.py::test_one"
        measured = [(cpu_time.PROPERTY, seconds)]
        plugin.pytest_runtest_logreport(SimpleNamespace(nodeid=name, user_properties=measured, keywords=keywords))
        plugin.pytest_sessionfinish(session)
        codes.append(session.exitstatus)
    monkeypatch.setattr(suites, "commit", lambda: "another")
    assert cpu_time.read_times(file) == {}
    assert codes == [pytest.ExitCode.OK, pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED]
    assert plugin.over == ["suite both: 2 CPU seconds, its budget is 1.85"]
    assert cpu_time.totals(plugin.times) == pytest.approx({"test": 0.8, "both": 1.9}, abs=0.3)

"""The suite's budget: what a test and its children take is counted, and too much of it fails the session."""

import os
import shutil
import subprocess
import sys

import cpu_time
import pytest

BUDGET = {"most_of_a_test": 15, "folders": {"unit": 20, "docs": 10}, "counted_as": {"golden": "docs"}}

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
    times = {"tests/unit/test_a.py::one": 16.0, "tests/unit/test_a.py::two": 5.0, "tests/docs/test_b.py::three": 1.0}
    assert cpu_time.over_budget(times, BUDGET) == [
        "tests/unit/test_a.py::one: 16.0 CPU seconds, a test that is not marked slow has 15",
        "tests/unit: 21 CPU seconds, its budget is 20",
    ]
    assert not cpu_time.over_budget(times | {"tests/unit/test_a.py::one": 14.0}, BUDGET)


def test_a_folder_may_be_counted_under_another_name_and_none_is_without_a_budget():
    times = {"tests/golden/test_a.py::one": 6.0, "tests/docs/test_b.py::two": 6.0, "tests/new/test_c.py::three": 1.0}
    assert cpu_time.over_budget(times, BUDGET) == [
        "tests/docs: 12 CPU seconds, its budget is 10",
        "tests/new has no budget in tests/budget.toml",
    ]


@pytest.fixture
def planted(tmp_path):
    """A suite with a budget of its own, and how to run it."""
    folder = tmp_path / "tests"
    (folder / "unit").mkdir(parents=True)
    shutil.copy(cpu_time.__file__, folder)
    (folder / "budget.toml").write_text("most_of_a_test = 0.5\n[folders]\nunit = 1.5\n[counted_as]\n")
    (folder / "unit" / "test_planted.py").write_text(PLANTED)

    def run(*arguments):
        command = [sys.executable, "-m", "pytest", "-p", "cpu_time", "-p", "no:cacheprovider", "tests", *arguments]
        environ = {**os.environ, "PYTHONPATH": str(folder)}
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
    assert all("a test that is not marked slow has 0.5" in line for line in over)
    assert {line.split("::")[1].split(":")[0] for line in over} == {
        "test_child_that_is_waited_for",
        "test_second_of_a_standing_worker",
    }


def test_sessions_add_up(planted, tmp_path):
    times = ["--cpu-times", str(tmp_path / "times.json")]
    first = planted(*times, "-k", "light")
    assert first.returncode == 0, first.stdout
    (tmp_path / "times.json").write_text('{"tests/unit/test_before.py::earlier": 0.4, "tests/unit/test_b.py::x": 1.2}')
    second = planted(*times, "-k", "light")
    assert second.returncode == 1
    assert "tests/unit: 2 CPU seconds, its budget is 1.5" in second.stdout

"""Which suite a test is in, and which pages count as changed."""

import os
import shutil
import subprocess
import sys

import pytest
import suites
from harness import ROOT


class Item:
    """A test as pytest collects it, as far as a suite asks."""

    def __init__(self, nodeid, *marks):
        self.nodeid = nodeid
        self.name = nodeid.split("::")[1]
        self.marks = marks

    def iter_markers(self, name):
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)


MARK = pytest.mark
PAGE = MARK.page("docs/a.md", "README.md").mark


@pytest.mark.parametrize(
    ("test", "suite"),
    [
        (Item("tests/unit/a.py::t"), "test"),
        (Item("tests/unit/a.py::t", MARK.full.mark), "full"),
        (Item("tests/unit/a.py::t", MARK.slow.mark), "all"),
        (Item("tests/docs/a.py::t"), "full"),
        (Item("tests/docs/a.py::t", MARK.quick.mark), "test"),
        (Item("tests/docs/a.py::t", MARK.quick.mark, MARK.real.mark), "all"),
        (Item("tests/docs/a.py::t", PAGE), "test"),
        (Item("tests/docs/a.py::t", MARK.page("docs/b.md").mark), "full"),
        (Item("tests/docs/a.py::t", PAGE, MARK.slow.mark), "all"),
    ],
)
def test_a_test_is_in_the_suite_of_its_marks(test, suite):
    assert suites.suites([test], "abc", {"README.md", "crius/api.py"})[test] == suite


def test_a_commit_draws_an_eighth_of_each_matrix_and_another_commit_another():
    tests = [Item(f"tests/parity/a.py::{name}[{row}]", MARK.matrix.mark) for name in "pq" for row in range(56)]
    drawn = {}
    for by in ("", "a", "b"):
        found = suites.suites(tests, by, set())
        assert set(found.values()) == {"full", "all"}
        drawn[by] = {test.nodeid for test in tests if found[test] == "full"}
        assert [sum(name in one for one in drawn[by]) for name in ("::p", "::q")] == [7, 7]
        assert found == suites.suites(tests, by, set())
    assert drawn[""] != drawn["a"] != drawn["b"]


def test_rows_of_one_name_are_drawn_together_and_a_changed_page_brings_them_all():
    marks = {row: [MARK.matrix(row=row).mark, MARK.page(f"docs/{row}.md").mark] for row in ("J1", "J2", "J3")}
    tests = [Item(f"tests/journeys/a.py::t[{row}.{n}]", *marks[row]) for row in marks for n in range(3)]
    found = suites.suites(tests, "abc", set())
    (whole,) = {tuple(test.nodeid[-5:-3] for test in tests if found[test] == "full")}
    assert len(whole) == 3 and len(set(whole)) == 1
    other = next(row for row in marks if row != whole[0])
    found = suites.suites(tests, "abc", {f"docs/{other}.md"})
    assert [test.nodeid[-5:-3] for test in tests if found[test] == "test"] == [other] * 3


def test_of_all_long_tests_an_eighth_is_drawn():
    tests = [Item(f"tests/unit/{file}.py::t{number}", MARK.long.mark) for file in "ab" for number in range(8)]
    assert sorted(suites.suites(tests, "abc", set()).values()) == ["all"] * 14 + ["full"] * 2


@pytest.fixture
def repository(tmp_path):
    """An empty repository, and how to give it commands of git."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    folder = tmp_path / "repository"
    folder.mkdir()
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]

    def git(*words):
        done = subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(name):
        (folder / name).write_text(name)
        git("add", "--all")
        git("commit", "--quiet", "-m", name)
        return git("rev-parse", "HEAD")

    git("init", "--quiet")
    return folder, git, commit


def seen(folder):
    suites.changed_files.cache_clear()
    return suites.changed_files(folder), suites.compared_with(folder)[1]


def test_changes_are_counted_from_the_merge_base_or_the_parent(repository, tmp_path):
    folder, git, commit = repository
    (folder / "new.md").write_text("the first")
    assert seen(folder) == (set(), "no commit to compare with")
    first = commit("one.md")
    (folder / "ü b.md").write_text("not added")
    assert seen(folder) == ({"ü b.md"}, "HEAD, which has no parent here")
    (folder / "ü b.md").unlink()
    commit("two.md")
    assert seen(folder) == ({"two.md"}, "the last commit")
    git("update-ref", "refs/remotes/origin/main", first)
    commit("three.md")
    (folder / "one.md").write_text("not committed")
    (folder / "new.md").write_text("not added")
    assert seen(folder) == ({"one.md", "two.md", "three.md", "new.md"}, "the merge base with origin/main")
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    git("stash", "--quiet", "--include-untracked")
    assert seen(folder) == ({"three.md"}, "the last commit")
    outside = tmp_path / "no repository"
    outside.mkdir()
    assert seen(outside) == (set(), "no commit to compare with")


@pytest.mark.long
def test_a_broken_block_in_a_changed_page_fails_make_test(repository):
    """In a copy of the repository, of which the documents alone are run; the unchanged page's blocks are not."""
    folder, git, commit = repository
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "_build", "build", "dist", "results", "runs")
    shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
    commit("first")
    commit("second")
    page = folder / "docs/reference/verbs.md"
    command = ["make", "test", "TESTS=tests/docs/test_documents.py"]
    command += [
        f"BIN={os.path.dirname(sys.executable)}",
        "TWO=-k verbs.md",
        "TEST_STAMP=",
        "TIMES=times.json",
        "PASSED=passed.json",
        "LINT=true",
    ]
    page.write_text(page.read_text() + "\n<!-- run -->\n```sh\ncrius config explain training.stesp\n```\n")
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert "FAILED tests/docs/test_documents.py::test_documented_command_runs[verbs.md" in done.stdout, done.stdout
    assert "since the last commit: docs/reference/verbs.md" in done.stdout
    assert "1 failed" in done.stdout

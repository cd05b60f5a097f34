"""A pytest plugin: ``--suite`` takes the tests of one of the three suites, which have no test in common.

``make test`` runs ``test``: what shows within minutes that a change is right. ``make test-full`` runs ``full``: the
rest of what CI runs. ``make test-all`` also runs ``all``: what is ``slow`` or ``real``, and rows that were not drawn.

What decides, in this order:

- the marks ``slow`` and ``real``: all.
- ``page(*paths)``, what a test of the docs or a step of a journey is about: test, if one of these files was changed.
- ``quick``: test. So is ``tests/unit``, except tests with the mark ``full``.
- ``matrix``: full, if the row is in the eighth that the commit's hash draws, else all. ``matrix(row=NAME)`` draws the
  rows of one name together.
- ``long``: the same, and all tests with this mark are rows of one matrix.
- everything else: full.

Without ``--suite`` a file runs all of its tests that are not slow or real.
"""

import functools
import hashlib
import math
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SUITES = ("test", "full", "all")
RECIPES = "crius/recipes/"


def git(*words, folder=ROOT):
    """What git prints, without the last line end; None where it fails or is missing."""
    try:
        # safe.directory: the checkout may belong to another user, as in a container
        command = ["git", "-c", "safe.directory=*", "-C", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None


@functools.cache
def commit():
    """The commit that is checked out; empty outside of a repository."""
    return git("rev-parse", "--short=12", "HEAD") or ""


def compared_with(folder=ROOT):
    """The commit that a change is counted from, and its name for a reader.

    It is the merge base with ``origin/main``, or the parent where that is HEAD itself or missing. Without a parent, as
    in a clone of depth 1, it is HEAD: only what is not committed counts.
    """
    head = git("rev-parse", "HEAD", folder=folder)
    base = git("merge-base", "HEAD", "origin/main", folder=folder)
    if base and base != head:
        return base, "the merge base with origin/main"
    parent = git("rev-parse", "--verify", "--quiet", "HEAD~1", folder=folder)
    if parent:
        return parent, "the last commit"
    return head, "HEAD, which has no parent here" if head else "no commit to compare with"


@functools.cache
def changed_files(folder=ROOT):
    """Paths that differ from ``compared_with``, new and uncommitted files too; relative to the root."""
    base, _ = compared_with(folder)
    if base is None:
        return frozenset()
    changed = git("diff", "--name-only", "--no-renames", "--relative", "-z", base, folder=folder) or ""
    new = git("ls-files", "--others", "--exclude-standard", "-z", folder=folder) or ""
    return frozenset(name for name in f"{changed}\0{new}".split("\0") if name)


def drawn(rows, by):
    """An eighth of ``rows``, rounded up, the same for the same ``by``."""
    order = sorted(set(rows), key=lambda row: hashlib.sha256(f"{by} {row}".encode()).digest())
    return set(order[: math.ceil(len(order) / 8)])


def row_of(item):
    """The matrix that an item is a row of and the name that its row is drawn by; None if all commits run it."""
    if item.get_closest_marker("long"):
        return "long", item.nodeid
    mark = item.get_closest_marker("matrix")
    if mark is None:
        return None
    return item.nodeid.split("[")[0], mark.kwargs.get("row", item.name)


def is_left_to_all(item):
    return any(item.get_closest_marker(mark) for mark in ("slow", "real"))


def suites(items, by, changed):
    """The suite of each item.

    Args:
        by: what the rows of a matrix are drawn by.
        changed: paths of changed files.
    """
    rows = {}
    for item in items:
        row = row_of(item)
        if row and not is_left_to_all(item):
            rows.setdefault(row[0], []).append(row[1])
    eighths = {matrix: drawn(names, f"{by} {matrix}") for matrix, names in rows.items()}
    return {item: suite_of(item, eighths, changed) for item in items}


def suite_of(item, eighths, changed):
    if is_left_to_all(item):
        return "all"
    pages = {path for mark in item.iter_markers("page") for path in mark.args}
    if pages & changed or item.get_closest_marker("quick"):
        return "test"
    row = row_of(item)
    if row:
        matrix, name = row
        return "full" if name in eighths[matrix] else "all"
    is_unit = item.nodeid.startswith("tests/unit/")
    return "test" if is_unit and not item.get_closest_marker("full") else "full"


def pytest_addoption(parser):
    parser.addoption("--suite", choices=SUITES, help="run the tests of one suite alone: see tests/suites.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("--suite")
    if chosen is None:
        return
    where = suites(items, commit(), changed_files())
    config.hook.pytest_deselected(items=[item for item in items if where[item] != chosen])
    items[:] = [item for item in items if where[item] == chosen]


def pytest_terminal_summary(terminalreporter, config):
    chosen = config.getoption("--suite")
    if chosen:
        pages = sorted(path for path in changed_files() if path.endswith(".md") or path.startswith(RECIPES))
        terminalreporter.write_line(f"suite {chosen}: rows of matrices are drawn by {commit() or 'no commit'}")
        terminalreporter.write_line(
            f"changed pages and recipes since {compared_with()[1]}: {', '.join(pages) or 'none'}"
        )

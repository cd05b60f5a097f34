"""The table of docs/gpu.md is what benchmarks/gpu_table.py makes: its columns and rows, and slowly its numbers."""

import importlib.util
import re
import sys

import pytest
from harness import ROOT, parse

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_table
from gpu_contestant import titan_math

PAGE = gpu_table.PAGE.read_text()
SHOWN = PAGE.split(gpu_table.BEGIN)[1].split(gpu_table.END)[0]
FOUND = {"forward": {"matmul": 7, "other": 6}, "backward": {"attention": 1}, "kept": 3 << 29, "reads": 0, "copies": 2}


def test_the_page_has_the_columns_and_the_rows_of_the_script():
    rows = [line.strip("| ").split(" | ") for line in SHOWN.splitlines() if line.startswith("|")]
    assert rows[0] == gpu_table.COLUMNS
    assert [line[:2] for line in rows[2:]] == [[row.name, row.whose] for row in gpu_table.ROWS]
    for line in rows[2:]:
        assert all(re.fullmatch(r"\d+ \+ \d+ \+ \d+", cell) for cell in line[2:4])
        assert all(re.fullmatch(r"[\d,]+", cell) for cell in line[4:])
    assert re.search(r"^With torch [\d.]+\S*, triton [\d.]+\.$", SHOWN, re.MULTILINE)


def test_every_row_is_a_run_or_options_of_the_peer():
    for row in gpu_table.ROWS:
        if row.flags is None:
            titan_math.Options(**row.options)
        else:
            parse(list(row.flags))


def test_a_row_says_what_was_counted():
    assert gpu_table.cells(gpu_table.ROWS[2], FOUND) == [
        "compiled", "Crius", "7 + 0 + 6", "0 + 1 + 0", "1,536", "0", "2"
    ]  # fmt: skip
    page = gpu_table.replaced(f"a\n{gpu_table.BEGIN}old\n{gpu_table.END}b\n", "new\n")
    assert page == f"a\n{gpu_table.BEGIN}new\n{gpu_table.END}b\n"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
@pytest.mark.parametrize("row", gpu_table.ROWS, ids=lambda row: f"{row.whose} {row.name}")
def test_the_numbers_of_the_page_are_those_of_today(row):
    """Of one torch; another may fuse otherwise."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "triton")]
    if f"With {', '.join(versions)}." not in SHOWN:
        pytest.skip("the page is of another torch")
    assert f"| {' | '.join(gpu_table.cells(row, gpu_table.measured(row)))} |\n" in SHOWN

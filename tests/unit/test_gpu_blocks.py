"""benchmarks/results/blocks.md is what benchmarks/gpu/blocks.py makes: columns and rows, and slowly the numbers."""

import importlib.util
import re

import pytest
from harness import parse

from benchmarks.gpu import blocks

PAGE = blocks.PAGE.read_text()
SHOWN = PAGE.split(blocks.BEGIN)[1].split(blocks.END)[0]
FOUND = {"forward": {"matmul": 7, "other": 6}, "backward": {"attention": 1}, "kept": 3 << 29, "reads": 0, "copies": 2}


def test_the_page_has_the_columns_and_the_rows_of_the_script():
    rows = [line.strip("| ").split(" | ") for line in SHOWN.splitlines() if line.startswith("|")]
    assert rows[0] == blocks.COLUMNS
    assert [line[:2] for line in rows[2:]] == [[row.name, row.whose] for row in blocks.ROWS]
    for line in rows[2:]:
        assert all(re.fullmatch(r"\d+ \+ \d+ \+ \d+", cell) for cell in line[2:4])
        assert all(re.fullmatch(r"[\d,]+", cell) for cell in line[4:])
    assert re.search(r"^With torch [\d.]+\S*, triton [\d.]+, torchtitan [\d.]+\.$", SHOWN, re.MULTILINE)


def test_every_row_of_crius_is_a_run():
    for row in blocks.ROWS:
        if row.flags is not None:
            parse(list(row.flags))


def test_a_row_says_what_was_counted():
    assert blocks.cells(blocks.ROWS[2], FOUND) == [
        "compiled", "Crius", "7 + 0 + 6", "0 + 1 + 0", "1,536", "0", "2"
    ]  # fmt: skip
    page = blocks.replaced(f"a\n{blocks.BEGIN}old\n{blocks.END}b\n", "new\n")
    assert page == f"a\n{blocks.BEGIN}new\n{blocks.END}b\n"


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in blocks.NEEDED), reason=f"needs {', '.join(blocks.NEEDED)}"
)
@pytest.mark.parametrize("row", blocks.ROWS, ids=lambda row: f"{row.whose} {row.name}")
def test_the_numbers_of_the_page_are_those_of_today(row):
    """Of one torch; another may fuse otherwise."""
    if f"With {blocks.versions_here()}." not in SHOWN:
        pytest.skip("the page is of another torch")
    assert f"| {' | '.join(blocks.cells(row, blocks.measured(row)))} |\n" in SHOWN

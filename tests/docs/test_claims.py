"""What the documents claim to have been run or measured is what was."""

import csv
import re

import pytest
from harness import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks/planner/README.md"]
OF_GPUS = ("README.md", *(f"docs/{name}.md" for name in ("compile", "float8", "kernels", "mxfp8", "planner")))
OF_GPUS += ("docs/parallelism/README.md", "docs/parallelism/tensor.md", "docs/planner_runs.md")


def test_documents_count_the_published_runs_that_the_file_has():
    with (ROOT / "benchmarks/planner/measurements.csv").open(newline="") as file:
        rows = len(list(csv.DictReader(file)))
    counts = r"(\d+) published (?:training )?runs|published measurements \((\d+) now\)"
    found = {
        str(document.relative_to(ROOT)): {int(a or b) for a, b in re.findall(counts, document.read_text())} - {0}
        for document in DOCUMENTS
    }
    assert {name for name, numbers in found.items() if numbers} >= {
        "README.md",
        "docs/planner_accuracy.md",
        "docs/tested.md",
    }
    assert all(numbers <= {rows} for numbers in found.values()), found


@pytest.mark.parametrize("name", OF_GPUS)
def test_a_page_about_gpus_leads_to_what_never_ran_on_one(name):
    assert re.search(r"\]\((docs/|\.\./)?tested\.md\)", (ROOT / name).read_text())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_output_is_shown_that_nobody_has_seen(document):
    """A collective was never fused with its matmul: that needs GPUs."""
    assert not re.search(r"async_tp: [1-9]", document.read_text())

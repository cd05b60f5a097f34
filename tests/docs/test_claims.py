"""What the documents claim to have been run or measured is what was."""

import csv
import re

import pytest
from harness import ROOT

from crius.config.names import meant
from crius.config.other_trainers import ALIASES
from crius.config.run import RunConfig
from crius.config.toml_file import flatten

pytestmark = pytest.mark.quick

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


def test_names_of_other_trainers_mean_what_the_page_says():
    text, names = (ROOT / "docs/coming_from.md").read_text(), set(flatten(RunConfig()))
    rows = re.findall(r"^\| `([a-z_0-9.]+)` \| `([a-z_0-9.]+)` \|", text, re.MULTILINE)
    assert len(rows) > 30 and {ours for _, ours in rows} <= names
    known = re.findall(r"^\| `([a-z_0-9.]+)` \| `([a-z_0-9.]+)` \|", text.split("## From nanoGPT")[0], re.MULTILINE)
    assert [row for row in known if (ALIASES.get(row[0]) or meant(row[0], names)[0].split()[0]) != row[1]] == []


def test_the_training_of_the_newcomers_page_is_the_one_that_was_tried():
    """Ten steps are run by test_documents.py, 600 are not."""
    blocks = re.findall(r"```sh\n(crius train .*?)```", (ROOT / "docs/train_your_text.md").read_text(), re.DOTALL)
    tried, trained = blocks
    assert "--steps 10 " in tried and tried.replace("--steps 10 ", "--steps 600 ") == trained

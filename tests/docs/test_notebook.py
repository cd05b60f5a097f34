"""The notebook runs from its first cell to its last, as a reader runs it."""

import importlib.util
import json
import os
import platform
import re

import pytest
from harness import ROOT

NOTEBOOK = ROOT / "docs" / "notebooks" / "first_run.ipynb"


def test_the_notebook_is_kept_with_the_results_of_a_run():
    """``python docs/run_notebook.py`` writes them."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells)
    assert not re.search(r"/(root|home|Users|work)/", NOTEBOOK.read_text())


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    kept = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises where a cell fails
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    shown = [output["data"] for output in outputs if "data" in output]
    assert "Run('runs/notebook/first', finished, 30 reported steps)" in shown[0]["text/plain"]
    assert "step 30/30  loss " in printed and re.search(r"slow: loss +\d+ steps, 1 to 30 +step 2", printed)
    losses, of_page = ([float(part.split()[0]) for part in text.split("  loss ")[1:31]] for text in (printed, kept))
    if f"stdlib of Python {platform.python_version()}," in kept:
        assert losses == pytest.approx(of_page, rel=0.02), "of another processor"
    assert losses[-1] < losses[0] - 1.0
    assert notebook.cells[-1].outputs[0]["text"].startswith("def ")
    if importlib.util.find_spec("matplotlib"):
        assert any("image/png" in data for data in shown)

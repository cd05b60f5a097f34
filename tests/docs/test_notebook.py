"""The notebook runs from its first cell to its last, as a reader runs it."""

import importlib.util
import json
import os
import re

import pytest
from harness import ROOT

NOTEBOOK = ROOT / "docs" / "notebooks" / "first_run.ipynb"


def test_the_notebook_is_kept_without_results():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(cell.get("outputs", []) == [] and cell.get("execution_count") is None for cell in cells)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises where a cell fails
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    shown = [output["data"] for output in outputs if "data" in output]
    assert "Run('runs/notebook/first', finished, 30 reported steps)" in shown[0]["text/plain"]
    assert "step 30/30  loss " in printed and re.search(r"slow: loss +\d+ steps, 1 to 30 +step 2", printed)
    losses = [float(text.split()[0]) for text in printed.split("  loss ")[1:31]]
    assert losses[-1] < losses[0] - 1.0
    assert notebook.cells[-1].outputs[0]["text"].startswith("def ")
    if importlib.util.find_spec("matplotlib"):
        assert any("image/png" in data for data in shown)

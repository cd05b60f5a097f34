"""Run docs/notebooks/first_run.ipynb anew and keep what it shows: python docs/run_notebook.py."""

import re
import tempfile
from pathlib import Path

import nbclient
import nbformat

NOTEBOOK = Path(__file__).parent / "notebooks" / "first_run.ipynb"


def main() -> None:
    """Outputs of a stream become one, as a reader sees them; the home of this user and times are left out."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        kept: list[nbformat.NotebookNode] = []
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                output.text = re.sub(re.escape(str(Path.home())), "~", output.text)
                if kept and kept[-1].get("name") == output.name:
                    kept[-1].text += output.text
                    continue
            kept.append(output)
        if "outputs" in cell:
            cell.outputs = kept
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()

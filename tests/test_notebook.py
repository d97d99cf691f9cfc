"""The notebook runs from its first cell to its last."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client")
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": path.parent}})
    client.execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [output for output in shown if "image/png" in output.get("data", {})]
    assert pictures, "the timeline is drawn"
    printed = "".join(output.get("text", "") for output in shown)
    tables = "".join(output.get("data", {}).get("text/plain", "") for output in shown)
    assert "fast[0:" in tables
    assert "slow[0:" in tables
    losses = [float(line.split()[2]) for line in printed.splitlines() if line.startswith("step ")]
    assert len(losses) == 10
    assert losses[-1] < losses[0]

"""The notebook of docs runs from its first cell to its last."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "predict.ipynb"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what Jupyter warns of itself
def test_every_cell_of_the_notebook_runs(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="pip install 'trtdet[dev]'")
    nbclient = pytest.importorskip("nbclient", reason="pip install 'trtdet[dev]'")
    pytest.importorskip("ipykernel", reason="pip install 'trtdet[dev]'")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    nbclient.NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell["outputs"] for cell in notebook.cells if cell["cell_type"] == "code"]
    shown = [output["data"] for cell in outputs for output in cell if output["output_type"] == "execute_result"]
    assert shown[0]["text/plain"].startswith("BuildResult") and len(shown[0]["text/plain"].splitlines()) <= 10
    assert shown[1]["text/html"].startswith("<figure><img alt=")
    # A slow machine gives standard output in several pieces.
    printed = "".join(output["text"] for cell in outputs for output in cell if output.get("name") == "stdout")
    assert len(printed.splitlines()) == 5 and "frame 4 at 0.40 s" in printed
    assert (tmp_path / "found" / "street.mp4").stat().st_size > 1000
    assert len((tmp_path / "found" / "detections.jsonl").read_text().splitlines()) == 24

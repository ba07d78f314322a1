"""The tutorials as they lie in the repository: valid, without outputs, asking Colab for a T4."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.name)
def notebook(request: pytest.FixtureRequest) -> nbformat.NotebookNode:
    return nbformat.read(str(request.param), as_version=nbformat.NO_CONVERT)


def test_it_is_valid(notebook: nbformat.NotebookNode) -> None:
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"


def test_it_holds_no_outputs(notebook: nbformat.NotebookNode) -> None:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.source for cell in code if cell.outputs or cell.execution_count is not None] == [], "run nbstripout"
    assert "widgets" not in notebook.metadata, "GitHub refuses to show it: run nbstripout"


def test_colab_gives_it_a_t4(notebook: nbformat.NotebookNode) -> None:
    assert notebook.metadata.accelerator == "GPU"
    assert notebook.metadata.colab.gpuType == "T4"


def test_it_begins_with_words(notebook: nbformat.NotebookNode) -> None:
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.lstrip().startswith("#")

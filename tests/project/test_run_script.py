"""notebooks/run.py: progress on the terminal, a page on disk, the last line last, a failure with its traceback."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest


@pytest.fixture
def script(root: Path, tmp_path: Path) -> Path:
    """The script in a folder of its own, so that its build/ is the test's."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    return Path(shutil.copy(root / "notebooks/run.py", folder))


def run(script: Path, *cells: str) -> subprocess.CompletedProcess[str]:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, str(script.parent / "small.ipynb"))
    command = [sys.executable, str(script), str(script.parent / "small.ipynb")]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_notebook_runs_in_its_folder_and_leaves_a_page(script: Path) -> None:
    result = run(script, "import os\nprint(os.getcwd())", "print('reward 0.4')\nprint('reward 2.0')\n")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[1] == str(script.parent)
    assert lines[2].startswith("[2/2, ") and lines[2].endswith(" s] print('reward 0.4')")
    assert lines[3:5] == ["reward 0.4", "reward 2.0"]
    assert lines[5].startswith("wrote ")
    assert lines[6:] == ["reward 2.0"]
    assert "reward 0.4" in (script.parent.parent / "build/small.html").read_text(encoding="utf-8")
    assert nbformat.read(str(script.parent / "small.ipynb"), 4).cells[0].outputs == []


def test_a_failing_cell_ends_with_its_traceback(script: Path) -> None:
    result = run(script, "print('before')", "1 / 0", "print('after')")
    assert result.returncode == 1
    assert "before" in result.stdout and "[3/3" not in result.stdout
    assert "ZeroDivisionError: division by zero" in result.stderr and "1 / 0" in result.stderr
    assert "ZeroDivisionError" in (script.parent.parent / "build/small.html").read_text(encoding="utf-8")


def test_plotly_figures_are_in_the_page_with_one_script_for_all(script: Path) -> None:
    draw = "import plotly.graph_objects as go\ngo.Figure(go.Scatter(y=[1, 2], name='a curve'))"
    result = run(script, draw, draw)
    assert result.returncode == 0, result.stderr
    page = (script.parent.parent / "build/small.html").read_text(encoding="utf-8")
    assert page.count("Plotly.newPlot(") >= 2 and page.count("a curve") >= 2
    assert page.count("plotly.js v") == 1 and "cdn.plot.ly/plotly" not in page

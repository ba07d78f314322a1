"""Run a notebook from top to bottom without a browser, and keep the result as a web page.

    python notebooks/run.py notebooks/01_quickstart.ipynb

Shows which cell is running and what the cells print, writes build/<name>.html, and repeats the notebook's last
printed line as its own last line. A cell that fails ends the run with its traceback and exit status 1; the page is
written all the same, up to that cell. The notebook itself is left untouched: outputs never enter the repository.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbconvert import HTMLExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor, Preprocessor
from nbformat import NotebookNode

BUILD = Path(__file__).resolve().parent.parent / "build"
PLOTLY = "application/vnd.plotly.v1+json"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Runner(NotebookClient):
    """Runs the cells in a kernel of this Python and shows on the terminal how far it is."""

    def __init__(self, notebook: NotebookNode, folder: Path):
        super().__init__(
            notebook,
            kernel_name="python3",
            extra_arguments=["--IPKernelApp.log_level=ERROR"],
            resources={"metadata": {"path": str(folder)}},
            store_widget_state=False,  # a live widget is dead in a page; its text/html stands in for it
            iopub_timeout=60,  # a training thread can keep a small machine busy
        )
        self.on_cell_execute = self._announce
        self.started = time.monotonic()
        self.code_cells = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
        self.last_line = ""

    def _announce(self, cell: NotebookNode, cell_index: int) -> None:
        source = cell.source.strip()
        if cell.cell_type == "code" and source:
            number = self.code_cells.index(cell_index) + 1
            seconds = time.monotonic() - self.started
            print(f"[{number}/{len(self.code_cells)}, {seconds:.0f} s] {source.splitlines()[0]}", flush=True)

    def output(
        self, outs: list[NotebookNode], msg: dict[str, Any], display_id: str | None, cell_index: int
    ) -> NotebookNode | None:
        if msg["msg_type"] == "stream":
            text, name = msg["content"]["text"], msg["content"]["name"]
            print(text, end="", flush=True, file=sys.stderr if name == "stderr" else sys.stdout)
            if name == "stdout":
                self.last_line = next((line for line in reversed(text.splitlines()) if line.strip()), self.last_line)
        return super().output(outs, msg, display_id, cell_index)


class PlotlyFigures(Preprocessor):
    """Gives each plotly figure an HTML form; the first one brings plotly's script along, so that the page fetches
    nothing."""

    def preprocess(self, notebook: NotebookNode, resources: dict[str, Any]) -> tuple[NotebookNode, dict[str, Any]]:
        found = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
        figures = [data for data in found if PLOTLY in data]
        for place, data in enumerate(figures):
            from plotly import io

            figure = {key: data[PLOTLY][key] for key in ("data", "layout")}
            data["text/html"] = io.to_html(figure, full_html=False, include_plotlyjs=place == 0, validate=False)
        return notebook, resources


def write_page(notebook: NotebookNode, name: str) -> Path:
    exporter = HTMLExporter(mathjax_url="", require_js_url="", jquery_url="", embed_images=True)
    exporter.register_preprocessor(CoalesceStreamsPreprocessor, enabled=True)  # a progress bar is one line
    exporter.register_preprocessor(PlotlyFigures, enabled=True)
    page, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": name}})
    BUILD.mkdir(exist_ok=True)
    path = BUILD / f"{name}.html"
    path.write_text(page, encoding="utf-8")
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="run a notebook, show its progress, write build/<name>.html")
    parser.add_argument("notebook", type=Path)
    path: Path = parser.parse_args(arguments).notebook
    notebook = nbformat.read(path, as_version=4)
    runner = Runner(notebook, path.resolve().parent)
    failure = ""
    try:
        runner.execute()
    except CellExecutionError as error:
        failure = str(error)
    except DeadKernelError:
        failure = "The kernel died. If the machine ran out of memory, try a smaller model or fewer generations."
    page = write_page(notebook, path.stem)
    if failure:
        print(failure if sys.stderr.isatty() else COLOURS.sub("", failure), file=sys.stderr)
        print(f"{path.name} failed; {page} shows it up to there", file=sys.stderr)
        return 1
    print(f"wrote {page} after {time.monotonic() - runner.started:.0f} s")
    print(runner.last_line)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The quickstart notebook in a real JupyterLab, with the real model: what a newcomer sees and clicks meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

QUICKSTART = Path(__file__).resolve().parents[2] / "notebooks" / "01_quickstart.ipynb"
CLICK = "() => { const now = Date.now() / 1000; document.querySelector('.gk-pause').click(); return now; }"
EVENTS = "import json; print(json.dumps([(e['kind'], e['step'], e['time']) for e in run.record.events()]))"
# As Colab does: what a thread sends to a widget is lost, and only the page's own questions are answered.
LOSE_WHAT_THREADS_SEND = """
import threading
from ipykernel.kernelbase import Kernel
session, lost = Kernel.instance().session, []
session_send = session.send
def send(stream, msg_or_type, *args, **kwargs):
    if msg_or_type == "comm_msg" and threading.current_thread().name.startswith("grpo-kit"):
        lost.append(msg_or_type)
        return None
    return session_send(stream, msg_or_type, *args, **kwargs)
session.send = send
"""
EXTRA = [EVENTS, "time.sleep(4)", "import time", LOSE_WHAT_THREADS_SEND, "print(len(lost), run.step)", "run.stop()"]


class Quickstart:
    """The open notebook with a few cells of the test's behind its own."""

    def __init__(self, notebook: Callable[..., Any], folder: Path, name: str) -> None:
        document = nbformat.read(QUICKSTART, as_version=4)
        for cell in document.cells:
            cell.source = cell.source.replace("until_step=10", "until_step=2")
        self.sources = [cell.source for cell in document.cells] + EXTRA
        document.cells += [nbformat.v4.new_code_cell(source) for source in EXTRA]
        nbformat.write(document, folder / name)
        self.nb = notebook(name, source=folder / name)
        self.page = self.nb.page

    def cell(self, words: str) -> int:
        """The one cell that says `words`."""
        found = [index for index, source in enumerate(self.sources) if words in source]
        assert len(found) >= 1, words
        return found[0]

    def run(self, words: str, wait: bool = True) -> None:
        self.nb.run(self.cell(words), wait=wait, timeout=240_000)

    def launch(self) -> None:
        """The cells up to the panel, without the questions to the untrained model."""
        for words in ("gk.load_model(", "gk.data.arithmetic(", "rewards = gk.RewardSet(", "import time"):
            self.run(words)
        self.run("run = gk.train(")

    def events(self) -> list[list[Any]]:
        self.run(EVENTS)
        return list(json.loads(self.nb.text(self.cell(EVENTS))))

    def wait_for_step(self, step: int) -> None:
        script = f"Number(document.querySelector('.gk-panel')?.dataset.step) >= {step}"
        self.page.wait_for_function(script, timeout=240_000)

    def wait_for_state(self, state: str) -> None:
        self.page.wait_for_selector(f".gk-dot[data-state='{state}']", state="attached", timeout=60_000)

    def step(self) -> int:
        return int(self.page.evaluate("Number(document.querySelector('.gk-panel').dataset.step)"))


@pytest.fixture
def quickstart(notebook: Callable[..., Any], tmp_path: Path) -> Callable[[str], Quickstart]:
    return lambda name: Quickstart(notebook, tmp_path, name)


def test_panel_pause_edited_reward_and_reload(quickstart: Callable[[str], Quickstart]) -> None:
    opened = quickstart("quickstart.ipynb")
    page = opened.page
    opened.launch()
    opened.wait_for_step(1)
    assert page.locator(".gk-plot .main-svg").count() >= 6

    for cell_running in (False, True):
        if cell_running:
            opened.run("time.sleep(4)", wait=False)
            time.sleep(0.5)
        clicked = float(page.evaluate(CLICK))
        opened.wait_for_state("paused")
        page.wait_for_function("window.cellIsDone", timeout=60_000)
        paused = [when for kind, _, when in opened.events() if kind == "paused"]
        assert paused[-1] - clicked < 1, f"the run held {paused[-1] - clicked:.2f} s after the click, {cell_running=}"
        page.evaluate(CLICK)
        opened.wait_for_state("running")

    before = opened.step()
    opened.run("number is None")  # the reward's cell, edited; its first line waits for step two
    edited = [step for kind, step, _ in opened.events() if kind == "reward edited"]
    while not edited:
        opened.wait_for_step(opened.step() + 1)
        edited = [step for kind, step, _ in opened.events() if kind == "reward edited"]
    assert before < edited[0] <= opened.step() + 1

    seen = opened.step()
    opened.nb.reload()
    opened.wait_for_step(seen)
    page.wait_for_function("document.querySelectorAll('.gk-plot .main-svg').length >= 6", timeout=60_000)
    opened.run("run.stop()")
    opened.wait_for_state("stopped")


def test_every_row_arrives_where_threads_cannot_send(quickstart: Callable[[str], Quickstart]) -> None:
    opened = quickstart("quickstart_colab.ipynb")
    opened.nb.comms_over_subshells("disabled")
    opened.nb.run(opened.cell("import threading"))
    opened.launch()
    opened.wait_for_step(2)
    drawn = "() => [...(document.querySelector('.gk-plot')?.data?.[2]?.x ?? [])]"
    opened.page.wait_for_function(f"() => ({drawn})().includes(2)", timeout=60_000)
    assert opened.page.evaluate(drawn)[:2] == [1, 2]
    lost = int(opened.nb.value(opened.cell("print(len(lost)")).split()[0])
    assert lost > 0, "the training thread sent nothing, so nothing was tested"
    opened.run("run.stop()")
    opened.wait_for_state("stopped")

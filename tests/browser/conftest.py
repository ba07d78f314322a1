"""A real JupyterLab in a real Chromium: nothing from a CDN, nothing faked in the page.

`notebook(name, cells=[...])` or `notebook(name, source=path)` opens a notebook and gives a `Notebook` to drive it.
When the test ends, it fails if the page asked anything of another machine or threw an error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
LAB_FLAGS = [
    "--no-browser",
    "--ip=127.0.0.1",
    "--allow-root",
    "--IdentityProvider.token=",
    "--ServerApp.password=",
    "--ServerApp.disable_check_xsrf=True",
    "--LabApp.news_url=None",
    "--expose-app-in-browser",
]
PATIENCE = 60_000  # milliseconds to wait for something to arrive; slow machines are not failures

KERNEL_IS_IDLE = """() => {
    const panel = window.jupyterapp?.shell.currentWidget, session = panel?.sessionContext;
    return Boolean(session?.isReady) && session.session?.kernel?.status === "idle";
}"""
RUN_CELL = """(index) => {
    const panel = window.jupyterapp.shell.currentWidget;
    panel.content.activeCellIndex = index;
    window.cellIsDone = false;
    window.jupyterapp.commands.execute("notebook:run-cell").then(() => { window.cellIsDone = true; });
}"""
CELL_TEXT = """(index) => {
    const outputs = window.jupyterapp.shell.currentWidget.content.widgets[index].model.outputs.toJSON();
    return outputs.map((o) => [].concat(o.text ?? o.data?.["text/plain"] ?? o.traceback ?? "").join("")).join("");
}"""
COMMS_OVER_SUBSHELLS = """(value) => {
    window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.commsOverSubshells = value;
}"""
THEME = "(name) => window.jupyterapp.commands.execute('apputils:change-theme', { theme: name })"


def _missing() -> str | None:
    """What of the browser tests' tools this machine lacks, None if it has all."""
    for module in ("jupyterlab", "playwright", "nbformat"):
        if importlib.util.find_spec(module) is None:
            return f"the Python package {module} is not installed"
    return None if Path(CHROMIUM).exists() else f"there is no Chromium at {CHROMIUM} (set CHROMIUM to its path)"


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab and the folder it serves."""

    url: str
    folder: Path


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    missing = _missing()
    if missing and request.config.getoption("--require-browser", default=False):
        pytest.fail(f"--require-browser was given, but {missing}")
    if missing:
        pytest.skip(missing)
    root = tmp_path_factory.mktemp("lab")
    folder = root / "notebooks"
    folder.mkdir()
    settings = root / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    # Or a question about news lies over the page.
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces"}
    own |= {"JUPYTER_CONFIG_DIR": "config", "IPYTHONDIR": "ipython", "JUPYTER_RUNTIME_DIR": "runtime"}
    env = os.environ | {name: str(root / part) for name, part in own.items()}
    # The fakes by their own name: a package somewhere that installs a top-level `tests` would hide ours.
    paths = [str(REPOSITORY), str(REPOSITORY / "tests" / "widgets"), os.environ.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "jupyterlab", *LAB_FLAGS, f"--port={port}", f"--ServerApp.root_dir={folder}"]
    with (root / "lab.log").open("w") as log:
        # Its own session, so that its kernels end with it.
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_for(f"http://127.0.0.1:{port}", process, root / "lab.log")
            yield Lab(f"http://127.0.0.1:{port}", folder)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(f"{url}/api/status", timeout=2).close()
            return
        except OSError:
            if process.poll() is not None:
                break
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()}")


@pytest.fixture(scope="session")
def browser(lab: Lab) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        yield chromium
        chromium.close()


class Notebook:
    """One open notebook: run its cells, read what they printed, reload the page. `page` is playwright's."""

    def __init__(self, page: Any, lab: Lab, name: str) -> None:
        self.page, self.lab, self.name = page, lab, name

    def open(self) -> None:
        # A workspace of its own: the default one would open every earlier notebook again.
        workspace = Path(self.name).stem
        url = f"{self.lab.url}/lab/workspaces/{workspace}/tree/{self.name}"
        self.page.goto(url, wait_until="domcontentloaded")
        self.page.wait_for_function(KERNEL_IS_IDLE, timeout=PATIENCE)

    def run(self, index: int, wait: bool = True, timeout: int = PATIENCE) -> None:
        """Run the cell at `index`; by default wait (milliseconds at most) until it is done."""
        self.page.evaluate(RUN_CELL, index)
        if wait:
            self.page.wait_for_function("window.cellIsDone", timeout=timeout)

    def text(self, index: int) -> str:
        """What the cell at `index` printed, returned or raised, as plain text."""
        return str(self.page.evaluate(CELL_TEXT, index))

    def value(self, index: int) -> str:
        """Run the cell at `index` and give its text."""
        self.run(index)
        return self.text(index)

    def comms_over_subshells(self, value: str) -> None:
        """`disabled` makes the kernel treat widget messages as an old ipykernel does: after the running cell."""
        self.page.evaluate(COMMS_OVER_SUBSHELLS, value)

    def theme(self, name: str) -> None:
        """`JupyterLab Light` or `JupyterLab Dark`."""
        self.page.evaluate(THEME, name)
        light = "false" if "Dark" in name else "true"
        self.page.wait_for_function(f"document.body.dataset.jpThemeLight === '{light}'", timeout=PATIENCE)

    def save(self) -> None:
        self.page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")

    def reload(self) -> None:
        """Save and load the page anew; the kernel goes on."""
        self.save()
        self.open()


@pytest.fixture
def notebook(lab: Lab, browser: Any) -> Iterator[Callable[..., Notebook]]:
    import nbformat

    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    outside: list[str] = []
    errors: list[str] = []
    local = (lab.url, lab.url.replace("http", "ws", 1), "data:", "blob:")

    def note_request(url: str) -> None:
        if not url.startswith(local):
            outside.append(url)

    page.on("request", lambda request: note_request(request.url))
    page.on("websocket", lambda socket: note_request(socket.url))
    page.on("pageerror", lambda error: errors.append(str(error)))

    def make(name: str, cells: list[str] | None = None, source: Path | None = None) -> Notebook:
        if source is not None:
            document = nbformat.read(source, as_version=4)
        else:
            document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells or []])
            document.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
        nbformat.write(document, lab.folder / name)
        opened = Notebook(page, lab, name)
        opened.open()
        return opened

    yield make
    context.close()
    _shut_down_kernels(lab)
    assert not outside, f"the page left the machine: {outside[:3]}"
    assert not errors, f"the page threw: {errors[:3]}"


def _shut_down_kernels(lab: Lab) -> None:
    """A run goes on when its page is closed; the next test should have the machine for itself."""
    with urllib.request.urlopen(f"{lab.url}/api/sessions", timeout=10) as answer:
        sessions = json.load(answer)
    for session in sessions:
        request = urllib.request.Request(f"{lab.url}/api/sessions/{session['id']}", method="DELETE")
        urllib.request.urlopen(request, timeout=30).close()

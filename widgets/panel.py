"""The live panel of a run: one anywidget that pushes and answers with the rows a front end lacks.

Rows travel both ways of arriving: pushed from the training thread as they are written, and in answer to
the front end's polls, which alone suffice where a host drops messages sent by threads (Colab). Without a
front end nothing is sent and nothing waited for. The panel never touches the model: its buttons only call
the run's own controls.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget

from .feed import Feed, compact
from .picture import picture
from .plotly_source import plotly_js

_STATIC = Path(__file__).parent / "static"
_log = logging.getLogger(__name__)

PUSH_INTERVAL = 0.1  # seconds between pushes at least; the front end's poll brings what was skipped
FRONT_END_GONE = 15.0  # seconds without a poll after which nobody is watching; a front end polls every 5


def _source(*names: str) -> str:
    """Static files joined to one text: an ESM that arrives through the kernel can import no siblings."""
    return "\n".join((_STATIC / name).read_text(encoding="utf-8") for name in names)


class Panel(anywidget.AnyWidget):
    """Shows and steers `run`; display it as a cell's last value. Close it to let go of the run.

    Messages from the front end: `poll` (since, events_since, completions_step, epoch), `plotly`,
    `completions` (step), `pause`, `resume`, `stop`, and `set` (field, name, value).
    Messages to it: `rows` (see `Feed.message`), `plotly` (the script as a buffer), `completions`, and in
    answer to `set` the same with `problem`, the words of a run that would not take the value.
    """

    _esm = _source("dom.js", "charts.js", "completions.js", "controls.js", "panel.js")
    _css = _source("panel.css")

    _unsubscribe: Callable[[], None] | None = None

    def __init__(self, run: Any) -> None:
        super().__init__()
        self._run = run
        self._feed = Feed(run)
        self._lock = threading.Lock()
        self._heard = -FRONT_END_GONE  # when the front end last polled, on the monotonic clock
        self._pushed: dict[str, int] = {}  # what the front end has, were every message to arrive
        self._pushed_at, self._pushed_state = 0.0, ""
        if hasattr(self.comm, "_reply_subshell_for"):
            # ipykernel 7.4 answers a comm in the shell that last wrote to it, and the training thread
            # writes as the main shell: a click would wait for the running cell.
            self.comm._reply_subshell_for = lambda data, default: default
        self.on_msg(self._receive)
        self._unsubscribe = run.subscribe(self._on_change)

    def __repr__(self) -> str:
        return f"<live panel of {self._run!r}>"

    def close(self) -> None:
        """Let go of the run and remove the panel from the page. Safe to call twice."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        super().close()

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        bundle = super()._repr_mimebundle_(**kwargs)
        # A saved notebook shows the picture. Before the first step there is none, and which of the two
        # Colab would choose is unknown.
        if bundle is not None and self._run.step and "google.colab" not in sys.modules:
            bundle[0]["text/html"] = picture(self._run)
        return bundle

    # From the training thread.

    def _on_change(self) -> None:
        self._feed.mark_changed()
        now = time.monotonic()
        if now - self._heard > FRONT_END_GONE:
            return
        if now - self._pushed_at < PUSH_INTERVAL and self._run.state == self._pushed_state:
            return
        # Never waits: whoever holds the lock is answering the front end just now.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._send_rows(self._pushed)
        except Exception as error:
            # Whatever the transport raises (a kernel shutting down, a closed comm) must not reach the run.
            _log.warning("the panel could not be updated, it now waits to be asked: %r", error)
            self._heard = -FRONT_END_GONE
        finally:
            self._lock.release()

    # From the front end; on a subshell's thread where the host has them.

    def _receive(self, _widget: Any, message: dict[str, Any], _buffers: Any) -> None:
        kind = message.get("type")
        if kind == "plotly":
            self.send({"type": "plotly"}, buffers=[plotly_js()])
        elif kind == "completions":
            rows = self._run.record.completions(int(message["step"]))
            self.send({"type": "completions", "completions": compact(rows) if rows else None})
        else:
            self._control(kind, message)
            self._answer(message)

    def _control(self, kind: str | None, message: dict[str, Any]) -> None:
        controls = {"pause": self._run.pause, "resume": self._run.resume, "stop": self._run.stop}
        if kind in controls:
            controls[kind]()
        elif kind == "set":
            field, name = message["field"], message.get("name")
            problem = self._set(field, name, message["value"])
            self.send({"type": "set", "field": field, "name": name, "problem": problem})

    def _set(self, field: str, name: str | None, text: str) -> str:
        """Hand a typed value to the run; returns why it would not take it, "" if it did."""
        try:
            value = float(text)
        except ValueError:
            return f"“{text}” is not a number"
        try:
            if field == "learning_rate":
                self._run.set_learning_rate(value)
            else:
                self._run.set_weight(name, value)
        except ValueError as error:
            return str(error)
        return ""

    def _answer(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._heard = time.monotonic()
            has = {key: int(message.get(key, 0)) for key in ("since", "events_since", "completions_step", "epoch")}
            self._send_rows(has, answer=True)

    def _send_rows(self, has: dict[str, int], answer: bool = False) -> None:
        """Holding the lock: messages are sent in the order in which they were made."""
        self._feed.refresh()
        message = self._feed.message(**has)
        self._pushed_at, self._pushed_state = time.monotonic(), message["status"]["state"]
        self._pushed = {
            "since": self._feed.last_step,
            "events_since": self._feed.last_event,
            "completions_step": self._feed.last_step,
            "epoch": self._feed.epoch,
        }
        self.send({**message, "answer": answer})

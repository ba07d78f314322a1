"""The rating panel: people judge answers with thumbs, or by choosing the better of two, while a run waits or goes on.

Like the live panel it is pushed to and polls (see panel.py), because polls alone suffice where a host drops messages
sent by threads (Colab). It only calls the methods of a `HumanReward`; what is judged, and what follows, is that one's.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import anywidget

from grpo_kit.rewards import HumanReward

from .panel import FRONT_END_GONE, PUSH_INTERVAL, _source

_log = logging.getLogger(__name__)

AHEAD = 8  # questions, and comparisons, that the front end has at hand, so that the next one is there at once


class RatingPanel(anywidget.AnyWidget):
    """Asks the person at the notebook to rate what `run_or_human` wants rated: a run with one `rewards.human()` among
    its rewards, or that reward itself. Display it as a cell's last value; close it to let go of the reward.

    Messages from the front end: `poll`, `rate` (id, up), `prefer` (better, worse) and `skip` (ids), each with the
    `version` of the questions that it has. In answer, and pushed, comes `state`: `version`, `progress`, `problem` (why
    an answer was not taken, else ""), and, if the version is another one, `questions` and `pairs`, the next few.

    Raises ValueError for a run that has no such reward, or several: then name the one that is meant.
    """

    _esm = _source("dom.js", "rating.js")
    _css = _source("panel.css", "rating.css")

    _unsubscribe: Callable[[], None] | None = None

    def __init__(self, run_or_human: Any) -> None:
        super().__init__()
        self.human = _human_of(run_or_human)
        self._lock = threading.Lock()
        self._versions = itertools.count(1)
        self._version = next(self._versions)  # of the questions
        self._heard = -FRONT_END_GONE  # when the front end last polled, on the monotonic clock
        self._pushed_at = 0.0
        if hasattr(self.comm, "_reply_subshell_for"):
            # As in panel.py: a click must not wait for the running cell.
            self.comm._reply_subshell_for = lambda data, default: default
        self.on_msg(self._receive)
        self._unsubscribe = self.human.subscribe(self._on_change)

    def __repr__(self) -> str:
        return f"<rating panel of {self.human!r}>"

    def close(self) -> None:
        """Let go of the reward and remove the panel from the page. Safe to call twice."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        super().close()

    # From whichever thread changed something, the training thread among them.

    def _on_change(self) -> None:
        self._version = next(self._versions)  # in one step, for it is called from several threads
        now = time.monotonic()
        if now - self._heard > FRONT_END_GONE or now - self._pushed_at < PUSH_INTERVAL:
            return
        # Never waits: whoever holds the lock is answering the front end just now.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._send_state(0)
        except Exception as error:
            # Whatever the transport raises (a kernel shutting down, a closed comm) must not reach the run.
            _log.warning("the rating panel could not be updated, it now waits to be asked: %r", error)
            self._heard = -FRONT_END_GONE
        finally:
            self._lock.release()

    # From the front end; on a subshell's thread where the host has them.

    def _receive(self, _widget: Any, message: dict[str, Any], _buffers: Any) -> None:
        problem = self._take(message)
        with self._lock:
            self._heard = time.monotonic()
            self._send_state(int(message.get("version", 0)), problem)

    def _take(self, message: dict[str, Any]) -> str:
        """Hand an answer to the reward; returns why it was not taken or not kept, "" if all is well."""
        try:
            match message.get("type"):
                case "rate":
                    self.human.rate(int(message["id"]), bool(message["up"]))
                case "prefer":
                    self.human.prefer(int(message["better"]), int(message["worse"]))
                case "skip":
                    for number in message["ids"]:
                        self.human.skip(int(number))
        except ValueError as error:
            return str(error)
        except Exception as error:  # whatever keeps ratings for the run; the person should know, and nobody else can
            _log.exception("a rating could not be kept")
            return f"the rating counts, but it could not be stored: {type(error).__name__}: {error}"
        return ""

    def _send_state(self, has: int, problem: str = "") -> None:
        """Holding the lock: messages are sent in the order in which they were made."""
        version, self._pushed_at = self._version, time.monotonic()
        message = {"type": "state", "version": version, "progress": asdict(self.human.progress()), "problem": problem}
        if has != version:
            questions, pairs = self.human.open()[:AHEAD], self.human.pairs()[:AHEAD]
            message["questions"] = [asdict(question) for question in questions]
            message["pairs"] = [[asdict(one), asdict(other)] for one, other in pairs]
        self.send(message)


def _human_of(run_or_human: Any) -> HumanReward:
    if isinstance(run_or_human, HumanReward):
        return run_or_human
    found = [reward for reward in run_or_human.rewards.rewards if isinstance(reward, HumanReward)]
    if not found:
        raise ValueError("none of the run's rewards asks people: add grpo_kit.rewards.human() to its rewards")
    if len(found) > 1:
        raise ValueError(
            f"several rewards ask people: {', '.join(one.name for one in found)}; give the panel one of them"
        )
    return found[0]

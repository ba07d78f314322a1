"""A run that trains nothing: a thread that writes plausible rows into a real Record. No model, no rewards called."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_kit.store import Record

REWARDS = {"right_answer": 2.0, "xml_format": 0.5, "number_close": 1.0}
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


def metrics(step: int, rng: random.Random, seconds: float = 4.8) -> dict[str, float | None]:
    """Numbers as a run that learns shows them, with noise."""
    done = 1 / (1 + math.exp(-(step - 60) / 18))

    def noisy(value: float, noise: float) -> float:
        return value + rng.gauss(0, noise)

    def share(value: float, noise: float) -> float:
        return min(1.0, max(0.0, noisy(value, noise)))

    right, form, close = share(0.1 + 0.8 * done, 0.07), share(step / 50, 0.05), share(0.3 + 0.5 * done, 0.1)
    return {
        "reward": 2 * right + 0.5 * form + close,
        "reward_std": max(0.05, noisy(0.6 - 0.3 * done, 0.05)),
        "rewards/right_answer": right,
        "rewards/right_answer/none": 0.0,
        "rewards/xml_format": form,
        "rewards/xml_format/none": 0.0,
        "rewards/number_close": close,
        "rewards/number_close/none": 0.1,
        "kl": max(0.0, noisy(0.0003 * step, 0.0015)),
        "entropy": max(0.01, noisy(0.9 - 0.6 * done, 0.03)),
        "length": max(4.0, noisy(220 - 120 * done + step / 4, 9)),
        "truncated": share(0.25 - 0.3 * done, 0.03),
        "dead_groups": share(0.45 - 0.25 * done + step / 1500, 0.06),
        "clip_ratio": 0.0,
        "grad_norm": noisy(0.4, 0.05),
        "skipped_updates": 0.0,
        "learning_rate": 5e-6,
        "sampler_gap": 4e-3,
        "sampler_gap_max": 0.13,
        "sampler_gap_share": 0.0,
        "tokens": 4096.0,
        "seconds": seconds,
        "seconds_rollout": seconds * 0.65,
        "seconds_reward": seconds * 0.02,
        "seconds_update": seconds * 0.33,
    }


def evaluation(step: int) -> tuple[str, dict[str, float]]:
    """Text and data of an "evaluation" event: from 22 % to 91 % of 46 answers."""
    accuracy = 0.22 + 0.72 / (1 + math.exp(-(step - 60) / 12)) * (step > 0)
    within = min(1.0, accuracy + 0.19 * (1 - accuracy) + 0.04)
    data = {"accuracy": accuracy, "pass_at_k": within, "k": 4, "reward": 3 * accuracy, "answers": 46}
    return f"held-out: {accuracy:.0%} right, {within:.0%} within 4 tries", {**data, "rewards/right_answer": accuracy}


def canary(step: int) -> tuple[str, dict[str, str]]:
    """Text and data of a "canary" event: hostile, and longer at first than later."""
    said = "8 + 7 is 15." if step > 60 else "Let me think about it.\n  8 plus 7, that is 8 and 2 more and 5 more. " * 6
    answer = f"<reasoning>{said}</reasoning>\n<answer>{15 if step > 30 else 14}</answer>{HOSTILE if step == 0 else ''}"
    return answer, {"prompt": f"<|user|>\nWhat is 8 + 7? {HOSTILE}\n<|assistant|>\n", "answer": answer}


def completions(rng: random.Random, groups: int = 4, answers: int = 4) -> list[dict[str, Any]]:
    """N = groups × answers rows. A group's second answer is hostile, its third cut off, a reward of its last fails."""
    rows = []
    for index in range(groups * answers):
        group, nth = divmod(index, answers)
        a, b = 3 + group, 9 - group
        right = rng.random() < 0.5
        said = a + b if right else a + b + 1
        text = f"<reasoning>{a} plus {b}\n  makes {said}.</reasoning>\n<answer>{said}</answer>"
        if nth == 1:
            text += HOSTILE
        if nth == 2:
            text = f"{a} + {b}: let me count. " + ", ".join(str(n) for n in range(a, 180)) + " and so on"
        value = 1.0 if right else 0.0
        close: list[Any] = [0.25 + 0.75 * value, "ok", ""]
        if nth == answers - 1:
            close = [None, "timeout", "no answer after 5.0 s"]
        scores = {"right_answer": [value, "ok", ""], "xml_format": [0.0 if nth == 2 else 1.0, "ok", ""]}
        rows.append(
            {
                "index": index,
                "group": group,
                "prompt": f"<|user|>\nWhat is {a} + {b}? {HOSTILE}\n<|assistant|>\n",
                "text": text,
                "scores": {**scores, "number_close": close},
                "total": 2 * value + 0.5 + (close[0] or 0),
                "advantage": 0.91 if right else -1.24,
                "tokens": len(text) // 4,
                "finish_reason": "length" if nth == 2 else "eos",
            }
        )
    return rows


class FakeRun:
    """Has all that a panel uses of a Run. `seconds` is the time between steps; `start()` starts the thread.

    `calls` collects (time, what) of every control called; `edit_step` writes a "reward edited" event there;
    `change_rows` may alter each step's metrics and completions in place. With `evaluate_every` there is an evaluation
    and a canary's answer before training and after every so many steps; `float16` overflows in steps 1 and 3.
    """

    def __init__(
        self,
        directory: Path | str,
        steps: int = 300,
        seconds: float = 0.1,
        ready: int = 0,
        edit_step: int = 57,
        change_rows: Callable[[int, dict[str, Any], list[dict[str, Any]]], None] | None = None,
        evaluate_every: int | None = None,
        float16: bool = False,
    ) -> None:
        self.name = "fake-run"
        self.directory = Path(directory)
        self.record = Record(self.directory / "run.sqlite")
        self.steps, self.seconds, self.edit_step = steps, seconds, edit_step
        self.step, self.elapsed, self.state = 0, 0.0, "starting"
        self.error: str | None = None
        self.weights, self.learning_rate = dict(REWARDS), 5e-6
        self.calls: list[tuple[float, str]] = []
        self._change_rows, self._evaluate_every, self._float16 = change_rows, evaluate_every, float16
        self._callbacks: list[Callable[[], None]] = []
        self._wake, self._paused, self._stopped = threading.Event(), False, False
        self._rng = random.Random(0)
        self._thread = threading.Thread(target=self._loop, daemon=True, name="fake training")
        if evaluate_every:
            self.write_evaluation()
        for _ in range(ready):
            self.write_step()

    def start(self) -> FakeRun:
        self._thread.start()
        return self

    def write_step(self) -> None:
        """Finish one step, in the thread that calls."""
        step = self.step + 1
        if step == self.edit_step:
            self.record.add_event("reward edited", "number_close was edited", step)
        row, answers = metrics(step, self._rng), completions(self._rng)
        if self._float16:
            row |= {"loss_scale": 65536.0 if step == 1 else 32768.0 if step < 4 else 16384.0}
            row["skipped_updates"] = float(step in (1, 3))
        if self._change_rows is not None:
            self._change_rows(step, row, answers)
        self.record.write_step(step, row, answers)
        self.step, self.elapsed = step, self.elapsed + (row["seconds"] or 0.0)
        if self._evaluate_every and step % self._evaluate_every == 0:
            self.write_evaluation()
        self.notify()

    def write_evaluation(self) -> None:
        """What a run writes when it has answered held-out prompts, with the adapter as it is."""
        for kind, (text, data) in (("evaluation", evaluation(self.step)), ("canary", canary(self.step))):
            self.record.add_event(kind, text, self.step, data)

    def set_state(self, state: str, error: str | None = None) -> None:
        self.state, self.error = state, error
        self.notify()

    def notify(self) -> None:
        for callback in list(self._callbacks):
            callback()

    def _loop(self) -> None:
        self.set_state("running")
        while self.step < self.steps and not self._stopped:
            if self._paused:
                if self.state != "paused":
                    self.set_state("paused")
                self._wake.wait(0.02)
                continue
            if self.state == "paused":
                self.set_state("running")
            self.write_step()
            time.sleep(self.seconds)
        self.set_state("stopped" if self._stopped else "finished")

    # What a panel may call.

    def pause(self) -> None:
        self.calls.append((time.time(), "pause"))
        self._paused = True

    def resume(self) -> None:
        self.calls.append((time.time(), "resume"))
        self._paused = False

    def stop(self) -> None:
        self.calls.append((time.time(), "stop"))
        self._stopped = True

    def knobs(self) -> dict[str, Any]:
        return {"learning_rate": self.learning_rate, "weights": dict(self.weights)}

    def set_learning_rate(self, value: float) -> None:
        if not 0 <= value < 1:
            raise ValueError(f"the learning rate must lie between 0 and 1, not {value:g}")
        self.learning_rate = value
        self.record.add_event("option changed", f"learning rate is now {value:g}", self.step + 1)
        self.notify()

    def set_weight(self, name: str, value: float) -> None:
        self.weights[name] = value
        self.record.add_event("option changed", f"weight of {name} is now {value:g}", self.step + 1)
        self.notify()

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def wait(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

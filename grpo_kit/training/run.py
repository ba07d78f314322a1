"""A run: the training loop in a thread of its own, and the handle by which a notebook steers it.

Everything said to the run is a field that the loop looks at between tokens and micro-batches; nothing else crosses
over.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from grpo_kit.model import Model
from grpo_kit.rewards import HumanReward, Rating, RewardSet, ScoreTable
from grpo_kit.store import Record
from grpo_kit.training.checkpoint import save_checkpoint
from grpo_kit.training.checkups import Checkups
from grpo_kit.training.derive import Setting
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.prompts import Prompts
from grpo_kit.training.recall import describe
from grpo_kit.training.run_lock import RunLock
from grpo_kit.training.runaway import runaways
from grpo_kit.training.sampler_gap import SamplerCheck
from grpo_kit.training.step import Stepper

if TYPE_CHECKING:
    import pandas

OUT_OF_MEMORY = (
    "Smaller tokens_per_micro_batch, num_generations or max_completion_length take less memory, and so do load_model's "
    'load_in_4bit=True, a smaller lora_rank, and optim="adamw_8bit"; the steps made so far are kept in '
    "the run's folder."
)
BUDGET = "tokens_per_micro_batch"
FAILED_REASONS = ("error", "timeout", "wrong shape", "not finite")


class RunFailed(RuntimeError):
    """The training thread ended with an exception; its traceback is in the message."""


class _StopAsked(Exception):
    """Raised in the training thread at the next pause point after `stop()`."""


class Run:
    """Returned by `train` while the training goes on. Every method may be called from any thread and returns at once,
    but `wait`.

    state: "starting", "running", "paused", "stopping", "stopped", "finished" or "failed".
    settings: what was derived from the options, with reasons. record, directory: where everything is kept.
    """

    def __init__(
        self,
        model: Model,
        prompts: Prompts,
        held_out: Prompts | None,
        rewards: RewardSet,
        options: TrainOptions,
        settings: list[Setting],
        record: Record,
        directory: Path,
        lock: RunLock,
    ):
        self.model, self.rewards, self.options, self.settings = model, rewards, options, settings
        self.record, self.directory, self.name = record, directory, directory.name
        self.steps, self.step, self.state = options.steps, 0, "starting"
        self.error: str | None = None
        self._lock = lock
        self._stepper = Stepper(model, prompts, rewards, options, record, self._clock)
        self._stepper.updater.tell_budget = self._keep_budget
        canary = options.canary or (held_out.messages[0] if held_out else None)
        self._checkups = Checkups(model, held_out, canary, options, record)
        self._sampler = SamplerCheck(model, options, record)
        self._elapsed_before = 0.0
        self._paused_seconds = 0.0
        self._paused_at: float | None = None
        self._started: float | None = None
        self._ended: float | None = None
        self._changed = threading.Condition()  # guards every field by which threads speak to each other
        self._pause_asked = self._stop_asked = self._checkpoint_asked = False
        self._learning_rate = options.learning_rate
        self._new_learning_rate: float | None = None
        self._new_weights: dict[str, float] = {}
        self._reported: set[tuple[str, str]] = set()
        self._running_away: set[str] = set()
        self._history: list[dict[str, Any]] = []  # the steps' metrics
        self._subscribers: list[Callable[[], None]] = []
        self._resumed = False
        self._kept_budget: int | None = None
        self._kept_engine = ""  # in words, if it is not the one that the model was loaded with
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"grpo-kit {self.name}", daemon=True)

    # ---- what a person or a panel says ----

    def pause(self) -> None:
        """Hold at the next token or micro-batch; the model can be asked meanwhile."""
        self._say("_pause_asked", True)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._say("_pause_asked", False)

    def stop(self) -> None:
        """End at the next token or micro-batch. The last finished step is kept, the one begun is dropped."""
        self._say("_stop_asked", True)
        if not self._done.is_set():  # they may be another run's by then
            for reward in self._people():
                reward.give_up()

    def checkpoint(self) -> None:
        """Write a checkpoint of the last finished step now instead of at the next round number."""
        self._say("_checkpoint_asked", True)

    def set_learning_rate(self, value: float) -> None:
        """From the next step on. Raises ValueError unless it is a number above 0."""
        if not _is_finite(value) or value <= 0:
            raise ValueError(f"the learning rate must be a number above 0, got {value!r}")
        self._say("_new_learning_rate", float(value))

    def set_weight(self, name: str, value: float) -> None:
        """The weight of a reward, from the next step on. Raises ValueError for an unknown name or a value that is
        no number."""
        if name not in self.rewards.names:
            raise ValueError(f"there is no reward named {name!r}; there are {', '.join(self.rewards.names)}")
        if not _is_finite(value):
            raise ValueError(f"a weight must be a finite number, got {value!r}")
        with self._changed:
            self._new_weights[name] = float(value)

    def wait(self, timeout: float | None = None, *, until_step: int | None = None) -> None:
        """Show a progress bar until the run ends, until step `until_step` is finished, or for `timeout` seconds.
        Interrupting only stops the waiting.

        Raises RunFailed if the run failed.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        last = math.inf if until_step is None else until_step
        with tqdm(total=self.steps, initial=self.step, unit="step", desc="training", file=sys.stdout) as bar:
            while self.alive and self.step < last and time.monotonic() < end:
                self._done.wait(0.2)
                self._show(bar)
            self._show(bar)
        if self.state == "failed":
            raise RunFailed(f"the run {self.name} failed after step {self.step}:\n{self.error}")

    def _show(self, bar: tqdm) -> None:
        """Redraw when something is new, and only then: where a line can't be drawn over, each redraw is a new line."""
        last = self.record.steps(since=self.step - 1)
        reward = last[-1]["reward"] if last else None
        words = self.state + ("" if reward is None else f", reward {reward:.2f}")
        if bar.disable:  # by TQDM_DISABLE: then it has no words
            return
        if (bar.n, bar.postfix) != (self.step, words):
            bar.n = self.step
            bar.set_postfix_str(words)

    # ---- what a person or a panel sees ----

    @property
    def alive(self) -> bool:
        """Whether the training thread is still at work."""
        # Thread.is_alive() can't be asked: up to Python 3.12 an interrupted join() leaves it False for ever.
        return self._thread.ident is not None and not self._done.is_set()

    @property
    def elapsed(self) -> float:
        """Seconds spent training, pauses excluded and earlier sittings of a resumed run included."""
        if self._started is None:
            return self._elapsed_before
        return self._elapsed_before + (self._ended or self._clock()) - self._started

    def knobs(self) -> dict[str, Any]:
        """What can be turned while the run goes on, as it stands (changes asked for included)."""
        with self._changed:
            rate = self._new_learning_rate or self._learning_rate
            return {"learning_rate": rate, "weights": {**self.rewards.weights, **self._new_weights}}

    @property
    def metrics(self) -> pandas.DataFrame:
        """One row a step."""
        return self.record.metrics_frame()

    def completions(self, step: int | None = None) -> pandas.DataFrame:
        """The answers of a step (the latest unless named), with prompt, scores, advantage and how each ended."""
        return self.record.completions_frame(step)

    @property
    def evaluations(self) -> pandas.DataFrame:
        """How the held-out prompts were answered when: step (0 is before training), accuracy of the greedy answers,
        pass_at_k with k, mean reward and each reward's mean."""
        return self._checkup_frame("evaluation", ["step", "accuracy", "answers", "reward"])

    @property
    def canary(self) -> pandas.DataFrame:
        """What the same prompt was answered when: step, prompt, answer."""
        return self._checkup_frame("canary", ["step", "prompt", "answer"])

    @property
    def ratings(self) -> pandas.DataFrame:
        """What people said of completions; see `grpo_kit.rewards.human`."""
        return self.record.ratings_frame()

    @property
    def events(self) -> pandas.DataFrame:
        """What happened when: started, rewards edited, options changed, warnings, out of memory, checkpoints."""
        return self.record.events_frame()

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback()` called from the training thread after each step, event and change of state; it must be
        quick. One that raises is not called again, and a warning says so. Returns the function that ends it."""
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback) if callback in self._subscribers else None

    def panel(self) -> Any:
        """A live panel to watch and steer the run (needs ipywidgets and anywidget)."""
        from grpo_kit.widgets import Panel

        return Panel(self)

    def rate(self) -> Any:
        """A panel to rate completions by hand, for a run with `grpo_kit.rewards.human()` (needs ipywidgets and
        anywidget). Raises ValueError for a run without."""
        from grpo_kit.widgets import RatingPanel

        return RatingPanel(self)

    def show(self) -> Any:
        """A still picture of the run, which a saved notebook keeps."""
        from grpo_kit.widgets import Picture

        return Picture(self)

    def plot(self) -> Any:
        """The run's curves as a plotly figure."""
        from grpo_kit.widgets import plot

        return plot(self)

    def _checkup_frame(self, kind: str, columns: list[str]) -> pandas.DataFrame:
        import pandas

        rows = [{"step": e["step"], **e["data"]} for e in self.record.events() if e["kind"] == kind]
        return pandas.DataFrame(rows, columns=None if rows else columns)

    def __repr__(self) -> str:
        return f"<Run {self.name}: {self.state}, step {self.step} of {self.steps}, in {self.directory}>"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Displaying a run shows its live panel."""
        return self.panel()._repr_mimebundle_(**options)

    # ---- the training thread ----

    def go_on_after(self, step: int, elapsed: float, learning_rate: float, budget: int | None) -> None:
        """Before `start`: `step` steps are made already and took `elapsed` seconds. budget: tokens of a micro-batch, if
        memory has run out."""
        self.step, self._elapsed_before, self._resumed = step, elapsed, True
        self._learning_rate, self._kept_budget = learning_rate, budget
        self._stepper.updater.set_learning_rate(learning_rate)
        if budget is not None:
            self._stepper.updater.limit_budget(budget)

    def start(self) -> None:
        """Begin. Called once, by `train` and `resume`."""
        known = [Rating(**row) for row in self.record.ratings()]
        for reward in self._people():
            reward.attach(self._keep_rating, known)
        self._history = self.record.steps()
        with self.model.lock:
            self._kept_engine = self._sampler.go_on(self._history)
        self.model.stop_run = self._stop_and_wait
        self._thread.start()

    def _people(self) -> list[HumanReward]:
        """The rewards that people give."""
        return [reward for reward in self.rewards.rewards if isinstance(reward, HumanReward)]

    def _keep_rating(self, rating: Rating) -> None:
        """Also after the run has ended and its record is closed: what is rated then is fitted later."""
        with closing(Record(self.record.path)) as record:
            record.add_rating(**asdict(rating))

    def _stop_and_wait(self) -> None:
        self.stop()
        if threading.current_thread() is not self._thread:
            self._done.wait()

    def _main(self) -> None:
        self._started = self._clock()
        try:
            todo = f"from step {self.step + 1} of {self.steps}" if self.step < self.steps else "all steps are made"
            if self._kept_budget is not None:
                todo += f"; {BUDGET} is {self._kept_budget:,} at most, since memory ran out"
            if self._kept_engine:
                todo += f"; {self._kept_engine}"
            self._event("resumed" if self._resumed else "started", todo, self.knobs())
            self._set_state("running")
            with self.model.lock:
                self._loop()
        except _StopAsked:
            self._end("stopped", f"after step {self.step}")
        except BaseException as error:
            self.error = traceback.format_exc()
            self._end("failed", f"{type(error).__name__}: {error}")
        else:
            self._end("finished", f"{self.step} steps")
        finally:
            self._done.set()

    def _loop(self) -> None:
        if not self._resumed:
            self._save_checkpoint()  # so that a run killed in its first steps starts from the same adapter again
        while True:
            try:
                self._check_up()  # of the step before, or of the model as it came
                if self.step >= self.steps:
                    return
                self._pause_point()  # before the changes, so that what is changed in a pause between steps counts
                self._take_changes()
                table = self._stepper.step(self.step + 1, self._pause_point, self._unwanted)
            except BaseException as error:
                self._keep_last_step(error)
                raise
            self.step += 1
            self._report_failures(table)
            self._report_troubles()
            if self.step % self.options.checkpoint_every == 0 or self.step == self.steps:
                self._save_checkpoint()
            self._tell()

    def _check_up(self) -> None:
        if self._checkups.due(self.step):
            self._checkups.check_up(self.step, self.rewards, self._pause_point, self._report_failures)
            self._tell()

    def _keep_last_step(self, error: BaseException) -> None:
        """A step was stopped or failed: unless it has moved the weights already, the step before it is saved."""
        self._stepper.updater.forget_gradients()
        if isinstance(error, torch.OutOfMemoryError):
            error.add_note(OUT_OF_MEMORY)
        try:
            if not self._stepper.updater.moved:
                self._save_checkpoint()
        except Exception as second:
            if isinstance(error, _StopAsked):
                raise
            error.add_note(f"The step before could not be saved either: {type(second).__name__}: {second}")

    def _pause_point(self) -> None:
        """Between tokens and micro-batches: the weights are those of the last finished step."""
        if self._pause_asked and not self._stop_asked:
            self._hold()
        if self._stop_asked:
            self._set_state("stopping")
            raise _StopAsked
        self._save_checkpoint_if_asked()
        self.model.lock.give_way()

    def _unwanted(self, first_try: bool) -> bool:
        """Whether a pass through the model should be given up in its middle: for a pause or a stop always, for a
        question once, so that many questions can't keep the run from going on."""
        return self._pause_asked or self._stop_asked or (first_try and self.model.lock.wanted)

    def _hold(self) -> None:
        with self._changed:
            self._paused_at = time.monotonic()
        self._event("paused", f"in step {self.step + 1}")
        self._set_state("paused")
        while self._pause_asked and not self._stop_asked:
            self._save_checkpoint_if_asked()
            with self.model.lock.released(), self._changed:
                self._changed.wait_for(lambda: not self._pause_asked or self._stop_asked or self._checkpoint_asked)
        with self._changed:
            self._paused_seconds += time.monotonic() - self._paused_at
            self._paused_at = None
        if not self._stop_asked:
            self._event("resumed", f"in step {self.step + 1}")
            self._set_state("running")

    def _take_changes(self) -> None:
        """Before each step: new learning rate, new weights, and rewards whose cell was rerun."""
        upcoming = self.step + 1
        with self._changed:
            rate, weights = self._new_learning_rate, self._new_weights
            self._new_learning_rate, self._new_weights = None, {}
            if rate is not None:
                self._learning_rate = rate
                self._stepper.updater.set_learning_rate(rate)
            for name, value in weights.items():
                self.rewards.set_weight(name, value)
        edited = self.rewards.refresh()
        if rate is not None or weights or edited:
            self.record.write_run({"knobs": self.knobs(), "rewards": describe(self.rewards)})
        if rate is not None:
            self._event("option changed", f"learning rate {rate:g}", {"learning_rate": rate}, upcoming)
        for name, value in weights.items():
            self._event("option changed", f"weight of {name} {value:g}", {"weight": {name: value}}, upcoming)
        for name in edited:
            self._reported = {known for known in self._reported if known[0] != name}
            source = next(reward.source for reward in self.rewards.rewards if reward.name == name)
            self._event("reward edited", f"{name} edited", {"name": name, "source": source}, upcoming)

    def _report_failures(self, table: ScoreTable) -> None:
        """The first time that a reward fails in some way is an event, and pauses the run if the user wants that."""
        for name in table.names:
            for reason in FAILED_REASONS:
                failed = [score for score in table.column(name) if score.reason == reason]
                if not failed or (name, reason) in self._reported:
                    continue
                self._reported.add((name, reason))
                self._event(
                    "warning",
                    f"{name}: {reason} in {len(failed)} of {len(table.scores)} answers. {failed[0].detail}".strip(),
                )
                if self.options.on_reward_error == "pause":
                    self.pause()

    def _keep_budget(self, before: int, after: int) -> None:
        """Memory ran out in the middle of a step, and its micro-batches became smaller."""
        self.record.write_run({BUDGET: after})
        text = f"{BUDGET} {before:,} → {after:,}, kept for the rest of the run"
        self._event("out of memory", text, {BUDGET: after}, self.step + 1)

    def _report_troubles(self) -> None:
        """Numbers that are not finite each time; what runs away, and a sampler that is not the model trained, the first
        time, and again if it had come back."""
        for trouble in self._stepper.updater.troubles:
            self._event("warning", trouble)
        self._stepper.updater.troubles.clear()
        self._history += self.record.steps(since=self.step - 1)
        mistrust = self._sampler.check(self._history[-1])
        if mistrust is not None:
            self._event("warning", *mistrust)
        found = {runaway.key: runaway.text for runaway in runaways(self._history)}
        for key in found.keys() - self._running_away:
            self._event("warning", found[key])
        self._running_away = set(found)

    def _save_checkpoint(self) -> None:
        save_checkpoint(self.directory, self.step, self.model, self._stepper.updater, {"elapsed": self.elapsed})
        self._event("checkpoint", f"after step {self.step}")

    def _save_checkpoint_if_asked(self) -> None:
        with self._changed:
            asked, self._checkpoint_asked = self._checkpoint_asked, False
        if asked:
            self._save_checkpoint()

    def _end(self, state: str, text: str) -> None:
        """Give everything back; by the time the state says that the run has ended, another one may begin."""
        self._ended = self._clock()
        try:
            self._stepper.updater.close()
        except Exception:  # a GPU that has failed: the run ends all the same
            state, self.error = "failed", self.error or traceback.format_exc()
        del self._stepper  # the optimizer's memory; the notebook may keep this object for long
        try:
            self._event(state, text)
        except Exception:  # a full disk, say: the event is lost, but not the run's end
            state, self.error = "failed", self.error or traceback.format_exc()
        if self.model.stop_run == self._stop_and_wait:
            self.model.stop_run = None
        self._lock.release()
        self._set_state(state)
        self.record.close()

    # ---- small things ----

    def _clock(self) -> float:
        """Seconds that stand still while the run is paused."""
        with self._changed:
            return (self._paused_at or time.monotonic()) - self._paused_seconds

    def _say(self, field: str, value: Any) -> None:
        with self._changed:
            setattr(self, field, value)
            self._changed.notify_all()

    def _set_state(self, state: str) -> None:
        self.state = state
        self._tell()

    def _event(self, kind: str, text: str, data: dict[str, Any] | None = None, step: int | None = None) -> None:
        self.record.add_event(kind, text, self.step if step is None else step, data)
        self._tell()

    def _tell(self) -> None:
        for callback in list(self._subscribers):
            try:
                callback()
            except Exception as error:  # a panel's trouble is no reason to lose a run
                if callback in self._subscribers:
                    self._subscribers.remove(callback)
                self._event("warning", f"a subscriber was dropped: {type(error).__name__}: {error}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)

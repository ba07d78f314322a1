"""A run as a panel needs it: its rows in memory, and messages made of what a front end lacks.

Reads the record only when something changed. Knows no widget and no transport, and touches no model.
Not thread-safe by itself: the panel holds one lock around it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from . import warnings

Row = dict[str, Any]

RECENT = 20  # steps that the time a step takes is averaged over


class Feed:
    """`run` is read through `record`, `state`, `step`, `steps`, `elapsed`, `error` and `knobs()`."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.rows: list[Row] = []
        self.events: list[Row] = []
        self.completions: list[Row] = []
        self.warnings: list[dict[str, str]] = []
        self.skipped = ""
        self.sampler = ""
        self.epoch = 0  # counts how often steps already read were rewritten, as resuming in place does
        self._changed = True
        self._seen: tuple[int, str] | None = None

    def mark_changed(self) -> None:
        """Something new is in the record. Cheap: called from the training thread after every step."""
        self._changed = True

    @property
    def last_step(self) -> int:
        """The newest step read, 0 before the first."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def last_event(self) -> int:
        """The id of the newest event read, 0 before the first."""
        return int(self.events[-1]["id"]) if self.events else 0

    def refresh(self) -> None:
        """Read what is new; return at once when nothing is."""
        seen = (self.run.step, self.run.state)
        if not self._changed and seen == self._seen:
            return
        # Noted before reading, so that what is written meanwhile is read the next time.
        self._changed, self._seen = False, seen
        before = (self.epoch, self.last_step)
        self._read_steps()
        if self.epoch != before[0]:
            self.events = []  # those of forgotten steps are gone
        self.events += self.run.record.events(since=self.last_event)
        if (self.epoch, self.last_step) != before:
            self.completions = self.run.record.completions()
        self.warnings = warnings.find(self.rows, self.completions, self.events)
        self.skipped = warnings.skipped_updates(self.rows)
        self.sampler = warnings.sampler_gap(self.rows)

    def _read_steps(self) -> None:
        if not self.rows:
            self.rows = self.run.record.steps()
            return
        last = self.rows[-1]
        fresh = self.run.record.steps(since=last["step"] - 1)
        if fresh and fresh[0]["step"] == last["step"] and fresh[0]["time"] == last["time"]:
            self.rows += fresh[1:]
        else:
            self.epoch += 1
            self.rows = self.run.record.steps()

    def message(self, since: int = 0, events_since: int = 0, completions_step: int = 0, epoch: int = 0) -> Row:
        """What a front end that has steps up to `since` of `epoch` lacks, as one JSON-ready message."""
        if epoch != self.epoch:
            since = events_since = completions_step = 0
        first = bisect_right(self.rows, since, key=lambda row: row["step"])
        first_event = bisect_right(self.events, events_since, key=lambda event: event["id"])
        message = {
            "type": "rows",
            "epoch": self.epoch,
            "since": since,
            "rows": self.rows[first:],
            "events_since": events_since,
            "events": self.events[first_event:],
            "status": self.status(),
        }
        if self.completions and self.completions[0]["step"] != completions_step:
            message["completions"] = compact(self.completions)
        return message

    def status(self) -> Row:
        """State, times in seconds, knobs and warnings; times a step are means of the last steps."""
        run, recent = self.run, self.rows[-RECENT:]
        per_step = _mean(recent, "seconds")
        left = None if per_step is None else per_step * max(0, run.steps - run.step)
        return {
            "name": run.name,
            "state": run.state,
            "step": run.step,
            "steps": run.steps,
            "elapsed": run.elapsed,
            "seconds_left": left,
            "seconds_per_step": per_step,
            "split": {part: _mean(recent, f"seconds_{part}") for part in ("rollout", "reward", "update")},
            "knobs": run.knobs(),
            "skipped": self.skipped,
            "sampler": self.sampler,
            "warnings": self.warnings,
            "error": run.error,
        }


def compact(completions: list[Row]) -> Row:
    """One step's completion rows with each prompt once: `{"step", "prompts": {group: text}, "rows"}`."""
    return {
        "step": completions[0]["step"],
        "prompts": {str(row["group"]): row["prompt"] for row in completions},
        "rows": [{key: value for key, value in row.items() if key not in ("prompt", "step")} for row in completions],
    }


def _mean(rows: list[Row], key: str) -> float | None:
    known = [row[key] for row in rows if row.get(key) is not None]
    return sum(known) / len(known) if known else None

"""What is going wrong in a run, in plain words and with what to do about it, computed from its rows.

Pure functions of the metrics rows and the last step's completions. They warn about what a look at the
numbers can tell; they do not stop or change a run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from .words import number, percent

Row = dict[str, Any]

DEAD_AFTER = 10  # steps with the same value before a reward is called dead
RECENT = 5  # steps that a share is averaged over
TRUNCATED_SHARE = 0.5
DEAD_GROUPS_SHARE = 0.5
FAILING_SHARE = 0.02
WRITTEN_STEPS = 10  # steps that a warning of the training itself stays up
WRITTEN_MOST = 3  # of those, the newest
SKIPPED_RECENT = 20  # steps looked at for whether updates are still being skipped,
SKIPPED_SHARE = 0.25  # and the skipped updates a step from which they are too many to be the usual few

# Reasons that say the reward function misbehaved; "not applicable" and "unparseable" are its answers.
_REMEDY = {
    "timeout": "Make the function faster or give it a larger time_limit.",
    "error": "Fix the function and rerun its cell: the run takes the new one from the next step.",
    "not finite": "Return a finite number, or None where the reward does not apply.",
    "wrong shape": "Return one number for each completion.",
}


@dataclass(frozen=True)
class Warn:
    """One warning: `key` names it across steps, `title` is a few words, `todo` says what to do."""

    key: str
    title: str
    text: str
    todo: str


def find(rows: list[Row], completions: list[Row], events: list[Row]) -> list[dict[str, str]]:
    """The warnings that hold after the last of `rows`, worst first, ready for JSON.

    `rows` are metrics rows in step order, `completions` the completion rows of the last step; of `events`
    the warnings that the training itself wrote in the last steps are passed on.
    """
    found = [*_failing(completions), *_dead_rewards(rows), *_truncated(rows), *_dead_groups(rows, completions)]
    return [asdict(warn) for warn in [*_written(rows, events), *found]]


def skipped_updates(rows: list[Row]) -> str:
    """How many updates moved nothing, and the loss scale, in words; "" where there is neither.

    No warning: while float16's loss scale finds its level, the first updates are expected to overflow.
    """
    skipped = sum(row.get("skipped_updates") or 0 for row in rows)
    scale = next((row["loss_scale"] for row in reversed(rows) if row.get("loss_scale") is not None), None)
    if not skipped:
        return "" if scale is None else f"no update was skipped, loss scale {scale:,.0f}"
    updates, steps = "updates were" if skipped > 1 else "update was", "steps" if len(rows) > 1 else "step"
    were = f"{skipped:.0f} {updates} skipped in {len(rows)} {steps}"
    if scale is None:
        return f"{were}: the gradient held a number that is not finite"
    recent = [row.get("skipped_updates") or 0 for row in rows[-SKIPPED_RECENT:]]
    many = len(recent) == SKIPPED_RECENT and sum(recent) > SKIPPED_SHARE * SKIPPED_RECENT
    usual = "more than the few that are normal at the start" if many else "a few at the start are normal"
    return f"{were}: float16 overflowed, loss scale now {scale:,.0f}; {usual}"


def sampler_gap(rows: list[Row]) -> str:
    """How far the model that wrote the newest step's answers was from the one that learned from them, in words; ""
    where nothing is known of it."""
    newest = rows[-1] if rows else {}
    if newest.get("sampler_gap") is None:
        return ""
    return f"sampler and trainer differ by {number(newest['sampler_gap'])} nats a token" + (
        "" if newest.get("sampler_gap_max") is None else f", {number(newest['sampler_gap_max'])} at most"
    )


def reward_names(rows: list[Row]) -> list[str]:
    """Names of the reward functions in the newest row, in the order they were recorded."""
    return [key.removeprefix("rewards/") for key in (rows[-1] if rows else {}) if _is_reward(key)]


def _is_reward(key: str) -> bool:
    return key.startswith("rewards/") and not key.endswith("/none")


def _written(rows: list[Row], events: list[Row]) -> list[Warn]:
    since = (rows[-1]["step"] if rows else 0) - WRITTEN_STEPS
    fresh = [event for event in events if event["kind"] == "warning" and (event["step"] or 0) > since]
    return [
        Warn(f"event/{event['id']}", f"Warning at step {event['step'] or 0}.", event["text"], "")
        for event in fresh[-WRITTEN_MOST:]
    ]


def _failing(completions: list[Row]) -> list[Warn]:
    reasons: dict[str, Counter[str]] = {}
    details: dict[tuple[str, str], str] = {}
    for row in completions:
        for name, (_, reason, detail) in row["scores"].items():
            if reason in _REMEDY:
                reasons.setdefault(name, Counter())[reason] += 1
                details.setdefault((name, reason), detail)
    found = []
    for name, counts in reasons.items():
        reason = counts.most_common(1)[0][0]
        share = sum(counts.values()) / len(completions)
        if share >= FAILING_SHARE:
            detail = details[name, reason].strip()
            said = f" It said “{detail.splitlines()[-1][:200]}”." if detail else ""
            text = f"{percent(share)} of the answers got no score from it in the last step, mostly “{reason}”.{said}"
            found.append(Warn(f"failing/{name}", f"{name} is failing.", text, _REMEDY[reason]))
    return found


def _dead_rewards(rows: list[Row]) -> list[Warn]:
    found = []
    for name in reward_names(rows):
        steps = _steps_unchanged(rows, f"rewards/{name}")
        if steps >= DEAD_AFTER:
            value = rows[-1][f"rewards/{name}"]
            text = f"It has given {number(value)} on average for {steps} steps, so nothing is learned from it."
            todo = (
                "No answer earns it yet: check it on answers you write by hand, or give part marks on the way there."
                if value == 0
                else "If every answer earns it by now, lower its weight or ask for more; else check it by hand."
            )
            found.append(Warn(f"dead/{name}", f"{name} never varies.", text, todo))
    return found


def _steps_unchanged(rows: list[Row], key: str) -> int:
    value = rows[-1].get(key)
    if value is None:
        return 0
    for count, row in enumerate(reversed(rows)):
        if row.get(key) != value:
            return count
    return len(rows)


def _truncated(rows: list[Row]) -> list[Warn]:
    share = _recent_mean(rows, "truncated")
    if share is None or share < TRUNCATED_SHARE:
        return []
    which = "All" if share > 0.995 else percent(share) + " of the"
    text = f"{which} answers hit the length limit before they ended, so their rewards say little."
    todo = "Raise max_completion_length, or ask for shorter answers in the prompt."
    return [Warn("truncated", "Answers are cut off.", text, todo)]


def _dead_groups(rows: list[Row], completions: list[Row]) -> list[Warn]:
    share = _recent_mean(rows, "dead_groups")
    if share is None or share < DEAD_GROUPS_SHARE:
        return []
    text = f"In {percent(share)} of the groups all answers scored alike, so there is nothing to learn from them."
    high, low = _alike_high_and_low(completions)
    if high > low:
        todo = "Most of them are at the top score: give harder tasks, or stop here and evaluate."
    elif low > high:
        todo = "Most of them are at the bottom score: give easier tasks, part marks, or more answers a prompt."
    else:
        todo = "Mix easier and harder tasks, or ask for more answers a prompt."
    return [Warn("dead_groups", "Signal is thin.", text, todo)]


def _alike_high_and_low(completions: list[Row]) -> tuple[int, int]:
    """How many groups of equal totals lie in the upper and in the lower half of the step's totals."""
    groups: dict[int, list[float]] = {}
    for row in completions:
        if row["total"] is not None:
            groups.setdefault(row["group"], []).append(row["total"])
    totals = [total for group in groups.values() for total in group]
    alike = [group[0] for group in groups.values() if max(group) == min(group)]
    middle = (max(totals) + min(totals)) / 2 if totals else 0.0
    if totals and max(totals) == min(totals):
        middle = 0.0  # one value everywhere: above nothing earned, or not
    high = sum(total > middle for total in alike)
    return high, len(alike) - high


def _recent_mean(rows: list[Row], key: str) -> float | None:
    recent = [row.get(key) for row in rows[-RECENT:]]
    known = [value for value in recent if value is not None]
    return sum(known) / len(known) if len(known) == RECENT else None

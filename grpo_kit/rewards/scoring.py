"""One reward over one batch: what its function is given, and a Score for whatever comes of it.

Nothing a reward function does gets out of here except Scores. Deliberately no weights and no totals.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Any

from grpo_kit.rewards.completion_text import CompletionText
from grpo_kit.rewards.reward import GIVEN_BATCHED, GIVEN_PER_SAMPLE, Reward
from grpo_kit.rewards.score import Score, to_score
from grpo_kit.rewards.time_limit import call_each

LONGEST_DETAIL = 300  # characters


@dataclass(frozen=True)
class Batch:
    """N completions with what they answer. prompts, completions, rows and completion_ids have length N."""

    prompts: Sequence[Any]
    completions: Sequence[str]
    rows: Sequence[dict[str, Any]]
    completion_ids: Sequence[Sequence[int]] | None = None
    step: int | None = None


def score_batch(reward: Reward, batch: Batch) -> list[Score]:
    """N scores. Never raises for what the reward's function does, and ends in bounded time."""
    count = len(batch.completions)
    if count == 0:
        return []
    if reward.batched:
        call = functools.partial(_batch_scores, reward, batch)
        return call_each([call], reward.time_limit, lambda detail: [Score(None, "timeout", detail)] * count)[0]
    calls = [functools.partial(_sample_score, reward, batch, index) for index in range(count)]
    return call_each(calls, reward.time_limit, lambda detail: Score(None, "timeout", detail))


def _sample_score(reward: Reward, batch: Batch, index: int) -> Score:
    return _guarded(reward, lambda: to_score(_called(reward, _sample_arguments(reward, batch, index))))


def _batch_scores(reward: Reward, batch: Batch) -> list[Score]:
    """One call for the N completions; a failing element spoils only itself, a failing call all of them."""
    count = len(batch.completions)
    returned: list[Any] = []

    def call() -> Score:
        result = _called(reward, _batch_arguments(reward, batch))
        elements = _elements(result)
        if elements is None:
            said = f"returned {type(result).__name__}, expected a list of {count} numbers"
            return Score(None, "wrong shape", said)
        if len(elements) != count:
            return Score(None, "wrong shape", f"returned {len(elements)} values for {count} completions")
        returned.extend(elements)
        return Score(0.0)

    outcome = _guarded(reward, call)
    if outcome.reason != "ok":
        return [outcome] * count
    return [_guarded(reward, functools.partial(to_score, element)) for element in returned]


def _elements(result: Any) -> list[Any] | None:
    """The items of a list, tuple, array, tensor or series; None for anything else (a text, a dict, a number)."""
    if isinstance(result, (list, tuple)):
        return list(result)
    as_list = result.tolist() if callable(getattr(result, "tolist", None)) else None
    return as_list if isinstance(as_list, list) else None


def _called(reward: Reward, arguments: dict[str, Any]) -> Any:
    result = reward.function(**arguments)
    # TRL takes coroutine functions too; this thread has no event loop yet.
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _sample_arguments(reward: Reward, batch: Batch, index: int) -> dict[str, Any]:
    """The keyword arguments for one completion; LookupError in words if a column it needs is not there."""
    columns = {name: value for name, value in batch.rows[index].items() if name not in GIVEN_PER_SAMPLE}
    _check_needs(reward, columns)
    arguments = columns | {
        "completion": str(batch.completions[index]),
        "prompt": batch.prompts[index],
        "completion_ids": None if batch.completion_ids is None else batch.completion_ids[index],
        "step": batch.step,
    }
    return {n: _own(value) for n, value in arguments.items() if reward.accepts_all or n in reward.accepts}


def _batch_arguments(reward: Reward, batch: Batch) -> dict[str, Any]:
    """The keyword arguments for all completions, each column a list of N; None where a row lacks it."""
    # `prompt` and `completion` as columns are TRL's own, which it does not hand on either.
    names = dict.fromkeys(name for row in batch.rows for name in row)
    columns: dict[str, Any] = {
        name: [row.get(name) for row in batch.rows]
        for name in names
        if name not in GIVEN_BATCHED and (name not in GIVEN_PER_SAMPLE or name in reward.accepts)
    }
    _check_needs(reward, columns)
    arguments = columns | {
        "completions": [CompletionText(text) for text in batch.completions],
        "prompts": list(batch.prompts),
        "completion_ids": batch.completion_ids,
    }
    wanted = {n: _own(value) for n, value in arguments.items() if reward.accepts_all or n in reward.accepts}
    # Functions that loop over **kwargs expect lists in it, so these go only to those who name them.
    others = {"step": batch.step, "trainer_state": SimpleNamespace(global_step=batch.step)}
    return wanted | {name: value for name, value in others.items() if name in reward.accepts}


def _own(value: Any) -> Any:
    """value for the function to keep: what it does to a list must not reach the data or the next completion."""
    return copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value


def _check_needs(reward: Reward, columns: dict[str, Any]) -> None:
    missing = [name for name in reward.columns if name not in columns]
    if missing:
        raise LookupError(f"the data has no column {missing[0]!r}, it has {', '.join(columns) or 'none'}")


def _guarded(reward: Reward, score: Callable[[], Score]) -> Score:
    """score(), or the "error" Score for what it raised."""
    try:
        return score()
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: raised by the function, they end nothing
        return Score(None, "error", _in_words(error, reward))


def _in_words(error: BaseException, reward: Reward) -> str:
    """One line such as: ValueError: no number (line 3 of right_answer). Lines count from the function's first."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # an exception class of the user's whose own __str__ fails
        message = "(it cannot be shown as text)"
    said = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if len(said) > LONGEST_DETAIL:
        said = said[:LONGEST_DETAIL] + "…"
    return said + _place(error.__traceback__, reward)


def _place(trace: TracebackType | None, reward: Reward) -> str:
    """The innermost line of the module that defines the reward; "" if the error is not from there."""
    module = getattr(reward.function, "__module__", None)
    frames = [(f.f_code, line) for f, line in traceback.walk_tb(trace) if f.f_globals.get("__name__") == module]
    # A comprehension has no name to go by, the function around it has.
    named = [place for place in frames if not place[0].co_name.startswith("<")] or frames
    return f" (line {named[-1][1] - named[-1][0].co_firstlineno + 1} of {named[-1][0].co_name})" if named else ""

from __future__ import annotations

from typing import Any

from grpo_kit.widgets import warnings

Row = dict[str, Any]


def find(rows: list[Row], completions: list[Row]) -> list[dict[str, str]]:
    return warnings.find(rows, completions, events=[])


def rows(count: int, **columns: Any) -> list[Row]:
    """`count` metrics rows; a column is a constant or a function of the step."""
    columns = {"rewards/a": lambda step: step / 100, "truncated": 0.0, "dead_groups": 0.0, **columns}
    return [
        {"step": step, **{key: value(step) if callable(value) else value for key, value in columns.items()}}
        for step in range(1, count + 1)
    ]


def answer(group: int = 0, total: float | None = 1.0, score: list[Any] | None = None) -> Row:
    return {"group": group, "total": total, "scores": {"a": score or [1.0, "ok", ""]}}


def keys(warnings: list[dict[str, str]]) -> list[str]:
    return [warning["key"] for warning in warnings]


def test_a_healthy_run_has_none() -> None:
    assert find(rows(30), [answer(), answer(total=0.0)]) == []


def test_an_empty_run_has_none() -> None:
    assert find([], []) == []


def test_a_reward_is_dead_after_ten_equal_steps() -> None:
    assert keys(find(rows(9, **{"rewards/a": 0.5}), [])) == []
    (warning,) = find(rows(10, **{"rewards/a": 0.5}), [])
    assert warning["key"] == "dead/a"
    assert "0.5 on average for 10 steps" in warning["text"]


def test_a_reward_that_varied_and_then_stuck_counts_from_there() -> None:
    (warning,) = find(rows(20, **{"rewards/a": lambda step: min(step, 6)}), [])
    assert "15 steps" in warning["text"]


def test_a_reward_nobody_earns_gets_other_advice_than_one_all_earn() -> None:
    (never,) = find(rows(10, **{"rewards/a": 0.0}), [])
    (always,) = find(rows(10, **{"rewards/a": 1.0}), [])
    assert "No answer earns it" in never["todo"]
    assert "lower its weight" in always["todo"]


def test_a_reward_without_values_is_not_called_dead() -> None:
    assert find(rows(20, **{"rewards/a": None}), []) == []


def test_cut_off_answers() -> None:
    (most,) = find(rows(5, truncated=0.6), [])
    (everything,) = find(rows(5, truncated=1.0), [])
    assert most["text"].startswith("60 % of the answers")
    assert everything["text"].startswith("All answers")
    assert "max_completion_length" in most["todo"]
    assert find(rows(5, truncated=0.4), []) == []


def test_failing_rewards_say_the_share_the_reason_and_the_last_line() -> None:
    failed = answer(score=[None, "error", "Traceback…\nKeyError: 'answer'"])
    (warning,) = find(rows(3), [failed, failed, answer(), answer(total=0.0)])
    assert warning["key"] == "failing/a"
    assert "50 % of the answers" in warning["text"]
    assert "KeyError: 'answer'" in warning["text"]
    assert "rerun its cell" in warning["todo"]


def test_not_finite_scores_are_failures_and_declined_ones_are_not() -> None:
    nan = answer(score=[None, "not finite", "nan"])
    declined = answer(score=[None, "not applicable", ""])
    (warning,) = find(rows(3), [nan, declined])
    assert "50 %" in warning["text"]
    assert "not finite" in warning["text"]
    assert find(rows(3), [declined, declined]) == []


def test_dead_groups_say_which_way_to_go() -> None:
    thin = rows(5, dead_groups=0.75)
    top, bottom = [answer(0, 2.0), answer(0, 2.0)], [answer(1, 0.0), answer(1, 0.0)]
    mixed = [answer(2, 0.0), answer(2, 2.0)]
    (easy,) = find(thin, top + mixed)
    (hard,) = find(thin, bottom + mixed)
    (both,) = find(thin, top + bottom)
    assert "75 % of the groups" in easy["text"]
    assert "harder tasks" in easy["todo"]
    assert "easier tasks" in hard["todo"]
    assert "Mix" in both["todo"]


def test_dead_groups_when_every_answer_scores_zero() -> None:
    (warning,) = find(rows(5, dead_groups=1.0), [answer(0, 0.0), answer(1, 0.0)])
    assert "easier tasks" in warning["todo"]


def test_warnings_of_the_training_are_passed_on_for_ten_steps() -> None:
    event = {"id": 4, "step": 3, "kind": "warning", "text": "out of memory: micro-batch halved"}
    note = {**event, "id": 5, "kind": "note"}
    (warning,) = warnings.find(rows(12), [], [event, note])
    assert (warning["key"], warning["title"]) == ("event/4", "Warning at step 3.")
    assert warning["text"] == "out of memory: micro-batch halved"
    assert warnings.find(rows(13), [], [event]) == []


def test_skipped_updates_are_said_with_the_loss_scale() -> None:
    said = warnings.skipped_updates(rows(30, skipped_updates=lambda step: float(step in (1, 3)), loss_scale=16384.0))
    assert said == (
        "2 updates were skipped in 30 steps: float16 overflowed, loss scale now 16,384; a few at the start are normal"
    )
    assert warnings.skipped_updates(rows(3, skipped_updates=0.0, loss_scale=65536.0)) == (
        "no update was skipped, loss scale 65,536"
    )


def test_skipped_updates_are_said_only_where_there_are_any() -> None:
    assert warnings.skipped_updates([]) == ""
    assert warnings.skipped_updates(rows(3)) == ""
    assert warnings.skipped_updates(rows(3, skipped_updates=0.0)) == ""
    said = warnings.skipped_updates(rows(1, skipped_updates=1.0))
    assert said == "1 update was skipped in 1 step: the gradient held a number that is not finite"


def test_the_gap_to_the_sampler_is_said_as_it_is_now() -> None:
    gap = {"sampler_gap": lambda step: step / 1000, "sampler_gap_max": 0.21}
    assert warnings.sampler_gap(rows(4, **gap)) == "sampler and trainer differ by 0.004 nats a token, 0.21 at most"
    assert warnings.sampler_gap(rows(4, sampler_gap=0.004)) == "sampler and trainer differ by 0.004 nats a token"
    assert warnings.sampler_gap([]) == warnings.sampler_gap(rows(4, sampler_gap=None)) == ""


def test_updates_that_go_on_being_skipped_are_not_called_normal() -> None:
    said = warnings.skipped_updates(rows(40, skipped_updates=lambda step: float(step % 3 == 0), loss_scale=1.0))
    assert "more than the few that are normal" in said

from __future__ import annotations

from typing import Any

from grpo_kit.widgets.heldout import accuracy_words, canary, evaluations, tries


def evaluated(step: int, accuracy: float | None, **data: Any) -> dict[str, Any]:
    return {"kind": "evaluation", "step": step, "text": "", "data": {"accuracy": accuracy, **data}}


def answered(step: int, answer: str, prompt: str = "2 + 2?") -> dict[str, Any]:
    return {"kind": "canary", "step": step, "text": answer, "data": {"prompt": prompt, "answer": answer}}


def test_evaluations_are_rows_in_step_order() -> None:
    events = [evaluated(0, 0.22, k=4, pass_at_k=0.41), {"kind": "warning", "step": 3, "data": None}, evaluated(20, 0.5)]
    assert evaluations(events) == [
        {"step": 0, "accuracy": 0.22, "k": 4, "pass_at_k": 0.41},
        {"step": 20, "accuracy": 0.5},
    ]


def test_a_step_measured_again_counts_once_and_one_without_accuracy_not_at_all() -> None:
    events = [evaluated(20, 0.5), evaluated(10, 0.3), evaluated(20, 0.6), evaluated(30, None)]
    assert [(row["step"], row["accuracy"]) for row in evaluations(events)] == [(10, 0.3), (20, 0.6)]


def test_the_accuracy_in_words() -> None:
    first, later = {"step": 0, "accuracy": 0.22}, {"step": 30, "accuracy": 0.91}
    assert accuracy_words([first, later]) == "now 91 %, before training 22 %"
    assert accuracy_words([first]) == "before training 22 %"
    assert accuracy_words([later]) == "now 91 %"
    assert accuracy_words([]) == ""


def test_tries_are_named_only_when_there_were_several() -> None:
    assert tries([{"k": 4, "pass_at_k": 0.4}, {"accuracy": 0.5}]) == "within 4 tries"
    assert tries([{"accuracy": 0.5}]) == ""


def test_the_canarys_answers_come_newest_first() -> None:
    assert canary([answered(0, "5"), evaluated(0, 0.1), answered(10, "4")]) == ("2 + 2?", [(10, "4"), (0, "5")])
    assert canary([]) == ("", [])


def test_a_changed_question_starts_anew() -> None:
    events = [answered(0, "5"), answered(10, "9", prompt="3 * 3?")]
    assert canary(events) == ("3 * 3?", [(10, "9")])

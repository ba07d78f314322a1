"""Evaluation: greedy, with or without the adapter, also while a run trains."""

from __future__ import annotations

import pytest
import torch

import grpo_kit as gk
from grpo_kit.rewards import reward
from grpo_kit.training import evaluate
from tests.training.helpers import SOON, letters


@reward(weight=2.0)
def half(completion, answer):
    return 0.5 if answer != 3 else None


def test_means_by_hand(model, data):
    found = evaluate(model, data, gk.RewardSet(half, letters), max_completion_length=5)
    assert len(found.texts) == 5
    assert found.means["half"] == 0.5  # over the four it applies to
    values = [letters(text) for text in found.texts]
    assert found.means["letters"] == pytest.approx(sum(values) / 5)
    totals = [value + (1.0 if row["answer"] != 3 else 0.0) for value, row in zip(values, data, strict=True)]
    assert found.mean == pytest.approx(sum(totals) / 5)
    assert list(found.frame.columns) == ["text", "half", "letters", "total", "reasons"]
    assert "5 answers: half 0.50, letters" in repr(found)


def test_answers_are_greedy_so_the_same_twice(model, data):
    first = evaluate(model, data, letters, max_completion_length=6)
    assert evaluate(model, data, letters, max_completion_length=6).texts == first.texts
    assert first.texts == model.generate(list(data["prompt"]), max_tokens=6, temperature=0)


def test_without_the_adapter(model, data):
    plain = evaluate(model, data, letters, max_completion_length=6)
    with torch.no_grad():
        for name, parameter in model.trainable().items():
            if ".lora_B." in name:
                parameter.fill_(0.3)
    assert evaluate(model, data, letters, max_completion_length=6).texts != plain.texts
    assert evaluate(model, data, letters, max_completion_length=6, adapter=False).texts == plain.texts


def test_more_than_a_batch(model):
    data = gk.data.from_rows([{"prompt": f"{n}?"} for n in range(35)])
    found = evaluate(model, data, letters, max_completion_length=2)
    assert len(found.texts) == len(found.table.scores) == 35


def test_while_a_run_trains(start, model, data):
    run = start(steps=1000)
    assert len(evaluate(model, data, letters, max_completion_length=4).texts) == 5
    assert run.alive
    run.stop()
    run.wait(SOON)


def test_a_reward_that_applies_to_nothing(model, data):
    found = evaluate(model, data, reward(lambda completion: None, name="shy"), max_completion_length=2)
    assert (found.means, found.mean) == ({"shy": None}, None)
    assert repr(found) == "<Evaluation of 5 answers: >"


def test_what_cannot_work_is_refused(model, data):
    with pytest.raises(ValueError, match="'answer'"):
        evaluate(model, data.remove_columns("answer"), half)
    with pytest.raises(ValueError, match="max_seq_length"):
        evaluate(model, data, letters, max_completion_length=60)
    with pytest.raises(ValueError, match="no column 'prompt'"):
        evaluate(model, data.remove_columns("prompt"), letters, max_completion_length=4)

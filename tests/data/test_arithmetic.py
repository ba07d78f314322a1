"""Sums: right answers, the same rows for the same seed, nothing shared between training and testing."""

from __future__ import annotations

import re

import pytest

from grpo_kit.data import NUMBER_ONLY, arithmetic


def questions(data):
    return [row["prompt"][-1]["content"] for row in data]


def parts(question):
    left, operation, right = re.fullmatch(r"What is (\d+) ([+*-]) (\d+)\?", question).groups()
    return int(left), operation, int(right)


def test_the_first_row_in_full():
    row = arithmetic(1)[0]
    left, operation, right = parts(row["prompt"][1]["content"])
    assert operation == "+" and row["answer"] == left + right
    assert row["prompt"][0] == {"role": "system", "content": NUMBER_ONLY} and row["prompt"][1]["role"] == "user"
    assert set(row) == {"prompt", "answer"}


@pytest.mark.parametrize("digits", [1, 2, 4])
def test_answers_are_right_and_never_negative(digits):
    data = arithmetic(300, digits=digits, operations="+-*")
    assert {parts(question)[1] for question in questions(data)} == set("+-*")
    for question, answer in zip(questions(data), data["answer"], strict=True):
        left, operation, right = parts(question)
        assert answer == {"+": left + right, "-": left - right, "*": left * right}[operation] >= 0
        assert len(str(left)) == len(str(right)) == digits


def test_the_seed_decides():
    assert questions(arithmetic(50, 3, seed=1)) == questions(arithmetic(50, 3, seed=1))
    assert questions(arithmetic(50, 3, seed=1)) != questions(arithmetic(50, 3, seed=2))


@pytest.mark.parametrize(("operation", "total"), [("+", 100), ("-", 55), ("*", 100)])
def test_the_splits_share_nothing_and_cover_everything(operation, total):
    train = set(questions(arithmetic(1000, operations=operation, seed=1)))
    test = set(questions(arithmetic(1000, operations=operation, seed=2, split="test")))
    assert not train & test and len(train | test) == total
    assert 0.1 < len(test) / total < 0.3
    mirrored = {"What is {2} {1} {0}?".format(*parts(question)) for question in test}
    assert not train & mirrored


def test_large_numbers_split_without_overlap_and_without_repeats():
    train, test = questions(arithmetic(2000, 6)), questions(arithmetic(2000, 6, "-", split="test"))
    assert len(set(train)) == len(set(test)) == 2000
    assert not set(questions(arithmetic(2000, 2))) & set(questions(arithmetic(2000, 2, split="test")))


def test_what_runs_out_repeats_in_order():
    asked = questions(arithmetic(100))
    assert len(set(asked)) == 77 and asked[77:] == asked[:23]
    assert len(set(asked[:77])) == 77


def test_the_system_prompt_can_be_changed_or_left_out():
    assert arithmetic(1, system="Be quick.")[0]["prompt"][0]["content"] == "Be quick."
    assert [message["role"] for message in arithmetic(1, system=None)[0]["prompt"]] == ["user"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n": 0}, "at least 1"),
        ({"n": 1, "digits": 0}, "at least 1"),
        ({"n": 1, "operations": "/"}, "some of"),
        ({"n": 1, "operations": ""}, "some of"),
        ({"n": 1, "operations": "++"}, "each once"),
        ({"n": 1, "split": "dev"}, "'train' or 'test'"),
    ],
)
def test_arguments_out_of_range(arguments, words):
    with pytest.raises(ValueError, match=words):
        arithmetic(**arguments)

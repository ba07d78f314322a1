"""Puzzles made on the spot: columns, seeds, and errors that help."""

from __future__ import annotations

import json
import random
import sys

import pytest

from grpo_kit.data import REASONING_FORMAT, reasoning_gym


@pytest.fixture
def package():
    return pytest.importorskip("reasoning_gym")


def test_a_row_in_full(package):
    data = reasoning_gym("chain_sum", 4, min_terms=2, max_terms=2, max_digits=1)
    assert len(data) == 4 and set(data.column_names) == {"prompt", "answer", "task", "metadata"}
    row = data[0]
    assert row["prompt"][0] == {"role": "system", "content": REASONING_FORMAT} and row["task"] == "chain_sum"
    left, operation, right = json.loads(row["metadata"])["expression"].split()
    assert row["answer"] == str(int(left) + int(right) if operation == "+" else int(left) - int(right))
    assert f"{left} {operation} {right}" in row["prompt"][1]["content"]


def test_the_stand_in_for_gsm8k_has_whole_numbers(package):
    data = reasoning_gym("gsm_symbolic", 20, system=None)
    for row in data:
        assert type(row["answer"]) is int and row["answer"] == json.loads(row["metadata"])["answer_value"]
        assert [message["role"] for message in row["prompt"]] == ["user"]


def test_the_seed_decides_and_neighbouring_seeds_share_no_rows(package):
    first = reasoning_gym("chain_sum", 30, seed=0, min_digits=4)
    assert first.to_list() == reasoning_gym("chain_sum", 30, seed=0, min_digits=4).to_list()
    other = reasoning_gym("chain_sum", 30, seed=1, min_digits=4)
    assert not {str(prompt) for prompt in first["prompt"]} & {str(prompt) for prompt in other["prompt"]}


def test_a_story_whose_answer_is_no_whole_number_is_skipped(package):
    answers = [row["answer"] for row in package.create_dataset("gsm_symbolic", size=3000, seed=5)]
    assert not all(answer.lstrip("-").isdigit() for answer in answers)  # "2677.5" and its like
    data = reasoning_gym("gsm_symbolic", 3000)
    assert len(data) == 3000 and data.features["answer"].dtype == "int64"


@pytest.mark.parametrize("task", ["list_functions", "pool_matrix"])  # these two use the global generators
def test_the_notebooks_generators_are_left_as_they_were(package, task):
    numpy = pytest.importorskip("numpy")
    random.seed(1)
    numpy.random.seed(1)
    expected = random.Random(1).random(), numpy.random.RandomState(1).random()
    first = reasoning_gym(task, 5).to_list()
    assert (random.random(), numpy.random.random()) == expected
    assert reasoning_gym(task, 5).to_list() == first


def test_an_unknown_task_brings_close_ones_or_all(package):
    with pytest.raises(ValueError, match="no task 'chainsum'; did you mean 'chain_sum' or"):
        reasoning_gym("chainsum", 1)
    with pytest.raises(ValueError, match=r"there are .*chain_sum, .*sudoku"):
        reasoning_gym("qqqqqq", 1)


def test_options_that_the_task_has_not_or_refuses(package):
    with pytest.raises(ValueError, match=r"no option \['terms'\]; it has \['min_terms', "):
        reasoning_gym("chain_sum", 1, terms=2)
    with pytest.raises(ValueError, match=r"refuses .*min_terms must be positive"):
        reasoning_gym("chain_sum", 1, min_terms=0)
    with pytest.raises(ValueError, match="n must be at least 1"):
        reasoning_gym("chain_sum", 0)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install grpo-kit\[reasoning-gym\]"):
        reasoning_gym("chain_sum", 1)

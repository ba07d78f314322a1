from __future__ import annotations

import numpy as np
import pytest
import torch

from grpo_kit.rewards import Reward, Score
from grpo_kit.rewards.scoring import Batch, score_batch

ASKED = [{"role": "user", "content": "2 + 2?"}]
BATCH = Batch(
    prompts=[ASKED, ASKED],
    completions=["four: 4", ""],
    rows=[{"answer": 4, "numbers": [2, 2]}, {"answer": 5, "numbers": [2, 3]}],
    completion_ids=[[7, 8], [9]],
    step=3,
)


def values(function, batch=BATCH):
    return [score.value for score in score_batch(Reward(function, name="some"), batch)]


def test_a_per_sample_function_gets_what_it_names():
    seen = []

    def some(completion, answer, prompt, completion_ids, step, unit="km"):
        seen.append((completion, answer, prompt, completion_ids, step, unit))
        return answer

    assert values(some) == [4.0, 5.0]
    assert seen == [("four: 4", 4, ASKED, [7, 8], 3, "km"), ("", 5, ASKED, [9], 3, "km")]


def test_a_per_sample_function_with_kwargs_gets_everything():
    seen = []

    def some(completion, **kwargs):
        seen.append(kwargs)

    values(some)
    assert seen[0] == {"answer": 4, "numbers": [2, 2], "prompt": ASKED, "completion_ids": [7, 8], "step": 3}


def test_a_batched_function_gets_lists():
    def some(prompts, completions, completion_ids, answer, **kwargs):
        assert prompts == [ASKED, ASKED]
        assert prompts[0][-1]["content"] == "2 + 2?"
        assert completion_ids == [[7, 8], [9]]
        assert kwargs == {"numbers": [[2, 2], [2, 3]]}
        return [a * 10 for a in answer]

    assert values(some) == [40.0, 50.0]


def test_a_batched_function_without_kwargs_gets_only_what_it_names():
    assert values(lambda completions: [len(c) for c in completions]) == [7.0, 0.0]
    assert values(lambda completions, step: [step, step]) == [3.0, 3.0]


def test_trl_functions_may_ask_for_the_step():
    assert values(lambda completions, trainer_state: [trainer_state.global_step] * 2) == [3.0, 3.0]
    assert Reward(lambda completions, trainer_state: [], name="some").columns == ()


def test_trl_functions_for_strings_and_for_messages_both_work():
    def for_strings(completions, **kwargs):
        return [float(len(c)) for c in completions]

    def for_messages(completions, **kwargs):
        return [float(len(c[0]["content"])) for c in completions]

    def for_both(completions, **kwargs):
        return [len(c if isinstance(c, str) else c[-1]["content"]) for c in completions]

    assert values(for_strings) == values(for_messages) == values(for_both) == [7.0, 0.0]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_a_batched_function_may_return_any_sequence_of_numbers(kind):
    assert values(lambda completions: kind([1.0, 2.5])) == [1.0, 2.5]


def test_a_coroutine_function_is_awaited():
    async def some(completions, **kwargs):
        return [1.0, None]

    assert values(some) == [1.0, None]


def test_columns_with_the_names_of_what_is_given_do_not_collide():
    batch = Batch(["p"], ["c"], [{"prompt": "column", "completion": "column", "step": 9, "answer": 1}])
    assert values(
        lambda completion, prompt, step: Score(1.0) if (completion, prompt, step) == ("c", "p", None) else 0, batch
    )

    def some(completions, **kwargs):
        assert set(kwargs) == {"prompts", "completion_ids", "answer"}
        return [1.0]

    assert values(some, batch) == [1.0]


def test_rows_with_different_columns_are_filled_with_none():
    batch = Batch(["p", "p"], ["c", "c"], [{"answer": 1}, {"level": 2}])
    assert values(
        lambda completions, answer, level: [(a or 0) + (b or 0) for a, b in zip(answer, level, strict=True)], batch
    ) == [
        1,
        2,
    ]


def test_what_a_function_does_to_its_arguments_stays_with_it():
    def some(completion, numbers, prompt):
        prompt.clear()
        return numbers.pop() + len(numbers)

    shared = {"numbers": [1, 5]}
    batch = Batch([ASKED, ASKED], ["a", "b"], [shared, shared])
    assert values(some, batch) == [6.0, 6.0]
    assert shared == {"numbers": [1, 5]}
    assert ASKED == [{"role": "user", "content": "2 + 2?"}]


def test_a_missing_column_is_an_error_in_words():
    scores = score_batch(Reward(lambda completion, gold: 1.0, name="some"), BATCH)
    assert scores == [Score(None, "error", "LookupError: the data has no column 'gold', it has answer, numbers")] * 2


def test_no_completions_no_calls():
    assert values(lambda completion: 1 / 0, Batch([], [], [])) == []

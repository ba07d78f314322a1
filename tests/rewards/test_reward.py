from __future__ import annotations

import functools

import pytest

from grpo_kit.rewards import Reward, RewardSet, reward


@reward
def right(completion, answer):
    """Is it right?"""
    return float(completion == answer)


def plain(completion):
    return 1.0


def test_a_decorated_function_is_a_reward_and_still_a_function():
    assert isinstance(right, Reward)
    assert (right.name, right.weight, right.time_limit, right.batched) == ("right", 1.0, 5.0, False)
    assert right("4", "4") == 1.0
    assert right(completion="4", answer="5") == 0.0
    assert right.__doc__ == "Is it right?"
    assert right.spec is None


def test_the_decorator_takes_options_in_both_forms():
    @reward(weight=2.0, time_limit=0.5, name="other")
    def some(completion):
        return 0.0

    assert (some.name, some.weight, some.time_limit) == ("other", 2.0, 0.5)
    assert reward(plain, weight=3).weight == 3.0


def test_its_source_is_recorded():
    assert right.source.startswith("@reward\ndef right(completion, answer):")
    namespace: dict = {}
    exec("def typed(completion): return 1.0", namespace)
    assert Reward(namespace["typed"]).source == ""


def test_columns_are_the_required_parameters_that_are_data():
    def per_sample(completion, prompt, completion_ids, step, answer, unit="km", **kwargs):
        return 0.0

    def batched(prompts, completions, completion_ids, answer, numbers, **kwargs):
        return []

    assert Reward(per_sample).columns == ("answer",)
    assert Reward(batched).columns == ("answer", "numbers")
    assert Reward(batched).batched
    assert Reward(batched).time_limit == 30.0
    assert Reward(plain, needs=["gold"]).columns == ("gold",)


def test_trl_functions_that_do_not_name_completions_are_batched():
    assert Reward(lambda completion_ids, **kwargs: [], name="some").batched
    assert Reward(lambda prompts, **kwargs: [], name="some").batched
    assert not Reward(lambda completion, completion_ids, **kwargs: 0.0, name="some").batched


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda text: 0.0, "no parameter `completion` or `completions`"),
        (lambda **kwargs: 0.0, "no parameter `completion`"),
        (lambda completion_ids: 0.0, "no parameter `completion`"),
        (lambda completion, completions: 0.0, "keep one"),
        (lambda completion, /: 0.0, "remove the /"),
    ],
)
def test_functions_that_cannot_serve_are_refused_in_words(function, words):
    with pytest.raises(TypeError, match=words):
        Reward(function, name="some")


def test_the_refusal_shows_what_to_write():
    with pytest.raises(TypeError, match=r"(?s)def right_answer\(completion, answer\).*TRL style"):

        @reward
        def some(text):
            return 0.0


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="not float"):
        Reward(1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"RewardSet\(\*rewards\)"):
        RewardSet([right])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is a Reward already"):
        Reward(right)


def test_names_are_found_or_asked_for():
    class Judge:
        def __call__(self, completion):
            return 1.0

    assert Reward(Judge()).name == "Judge"
    assert Reward(functools.partial(plain)).name == "plain"
    with pytest.raises(ValueError, match="a lambda has no name"):
        Reward(lambda completion: 1.0)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), "2", None, True])
def test_a_weight_is_a_finite_number(weight):
    with pytest.raises(ValueError, match="the weight of 'plain' must be a finite number"):
        Reward(plain, weight=weight)


@pytest.mark.parametrize("limit", [0, -1, float("nan"), "5", True])
def test_a_time_limit_is_above_zero(limit):
    with pytest.raises(ValueError, match="the time limit of 'plain' must be"):
        Reward(plain, time_limit=limit)

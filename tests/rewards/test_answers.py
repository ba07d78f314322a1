from __future__ import annotations

from fractions import Fraction

import pytest

from grpo_kit.rewards import Reward, Score, digits_with_bonus, exact_match, number_close, numeric_match


def score(reward: Reward, completion: str, gold: object) -> float | None:
    result = reward(completion=completion, answer=gold)
    return result.value if isinstance(result, Score) else result


ALL = [exact_match, numeric_match, digits_with_bonus, number_close]


@pytest.mark.parametrize("factory", ALL)
def test_names_weights_and_columns(factory):
    assert factory().name == factory.__name__
    assert factory().columns == ("answer",)
    other = factory(weight=2.0, name="mine", column="gold")
    assert (other.name, other.weight, other.columns) == ("mine", 2.0, ("gold",))
    assert other(completion="7", gold="7") > 0


@pytest.mark.parametrize("factory", ALL)
@pytest.mark.parametrize("gold", ["", " ", None])
@pytest.mark.parametrize("completion", ["", " ", "7", "<answer></answer>"])
def test_an_empty_gold_answer_is_not_applicable(factory, gold, completion):
    result = factory()(completion=completion, answer=gold)
    assert (result.value, result.reason) == (None, "not applicable")


@pytest.mark.parametrize("factory", [numeric_match, digits_with_bonus, number_close])
@pytest.mark.parametrize("gold", ["blue", "1, 2", float("inf"), float("nan"), [7]])
def test_a_gold_answer_that_is_no_number_is_not_applicable(factory, gold):
    assert factory()(completion="7", answer=gold).reason == "not applicable"


@pytest.mark.parametrize("factory", ALL)
@pytest.mark.parametrize("completion", ["", "no idea", "<answer></answer>", "<answer> </answer> it is 7", "\x00"])
def test_no_answer_is_a_zero_with_its_reason(factory, completion):
    result = factory()(completion=completion, answer="7")
    assert (result.value, result.reason) == (0.0, "unparseable")


@pytest.mark.parametrize(
    ("completion", "gold", "value"),
    [
        ("<answer>Blue.</answer>", "blue", 1.0),
        ("B", "b", 1.0),
        ("The answer is (B).", "B", 1.0),
        ("Room  5b", "room 5b", 1.0),
        (r"\boxed{x+1}", "x+1", 1.0),
        ("42", 42, 1.0),
        ("<answer>red</answer>", "blue", 0.0),
        ("<answer>blueish</answer>", "blue", 0.0),
        ("blue red green", "blue", 0.0),
        ("<answer>blue or red</answer>", "blue", 0.0),
    ],
)
def test_exact_match(completion, gold, value):
    assert score(exact_match(), completion, gold) == value


@pytest.mark.parametrize(
    ("completion", "gold", "value"),
    [
        ("The answer is 42", 42, 1.0),
        ("plain 42", "42", 1.0),
        ("#### 42", "6*7 = 42\n#### 42", 1.0),
        ("<answer>$1,000.00</answer>", 1000, 1.0),
        (r"\boxed{5} no, \boxed{42}", "42", 1.0),
        (r"\boxed{42 dollars}", "42", 1.0),
        (r"\boxed{\frac12}", "0.5", 1.0),
        ("0.5", r"so \boxed{\frac{1}{2}}", 1.0),
        ("-3", "#### -3", 1.0),
        ("3", "#### -3", 0.0),
        ("<answer>1728</answer>", 1331, 0.0),
        ("<answer>1331 and 1728</answer>", 1728, 0.0),
        ("<answer>7 or 8 or 9</answer>", 8, 0.0),
        (r"\boxed{2\pi}", 2, 0.0),
        ("<answer>50%</answer>", "50%", 1.0),
        ("<answer>50%</answer>", "0.5", 0.0),
        ("1" * 10**6, 1, 0.0),
    ],
)
def test_numeric_match(completion, gold, value):
    assert score(numeric_match(), completion, gold) == value


def test_numeric_match_with_a_tolerance():
    assert score(numeric_match(tolerance=0.01), "about 3.14", 3.14159) == 1.0
    assert score(numeric_match(), "about 3.14", 3.14159) == 0.0


def test_a_wrong_answer_is_told():
    assert numeric_match()(completion="41", answer="42") == Score(0.0, "ok", "answered 41, right is 42")


def test_digits_with_bonus():
    assert score(digits_with_bonus(), "it is 7", 7) == 4.0
    assert score(digits_with_bonus(), "it is 8", 7) == 1.0
    assert score(digits_with_bonus(), "it is", 7) == 0.0
    assert score(digits_with_bonus(number=0.5, right=2.0), "7", 7) == 2.5


@pytest.mark.parametrize(
    ("completion", "gold", "value"),
    [
        ("100", 100, 1.0),
        ("50", 100, 1 / 1.5),
        ("200", 100, 0.5),
        ("0", 100, 0.5),
        ("0", 0, 1.0),
        ("1", 0, 0.5),
        ("-3", -3, 1.0),
        ("3", -3, 1 / 3),
        ("0.5", 0.25, 0.8),  # a gold number below 1 is measured against 1
        ("1e100", 1, 1e-100),
    ],
)
def test_number_close(completion, gold, value):
    assert score(number_close(), completion, gold) == pytest.approx(value)


def test_number_close_falls_smoothly():
    values = [score(number_close(), str(n), 50) for n in range(50, 500)]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == len(values)
    assert min(values) > 0


def test_number_close_takes_a_width():
    assert score(number_close(width=0.1), "110", 100) == 0.5
    assert score(number_close(width=0.1), "7", Fraction(7)) == 1.0
    with pytest.raises(ValueError, match="width"):
        number_close(width=0)

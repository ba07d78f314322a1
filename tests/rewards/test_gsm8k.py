from __future__ import annotations

import pytest

from grpo_kit.rewards import (
    Reward,
    RewardSet,
    Score,
    gsm8k_correctness,
    gsm8k_integer,
    gsm8k_rewards,
    gsm8k_soft_format,
    gsm8k_strict_format,
    gsm8k_tag_count,
)

GOOD = "<reasoning>\n48 / 2 = 24\n48 + 24 = 72\n</reasoning>\n<answer>\n72\n</answer>\n"
LOOSE = "Sure. <reasoning>48 / 2 = 24\n48 + 24 = 72</reasoning> so <answer>72</answer>"


def value(reward: Reward, completion: str, **columns: object) -> float | None:
    if "prompt" in reward.accepts:
        columns["prompt"] = [{"role": "user", "content": "How many?"}]
    result = reward(completion=completion, **columns)
    return result.value if isinstance(result, Score) else result


def test_all_five_on_a_perfect_completion():
    table = RewardSet(*gsm8k_rewards()).score(["p"], [GOOD], [{"answer": "72"}])
    assert table.values == [[2.0, 0.5, 0.5, 0.5, 0.5]]
    assert table.totals == [4.0]
    assert table.to_frame()["reasons"].tolist() == [""]


def test_all_five_on_an_empty_completion():
    table = RewardSet(*gsm8k_rewards()).score(["p"], [""], [{"answer": "72"}])
    assert table.values == [[0.0] * 5]
    assert [score.reason for score in table.scores[0]] == ["unparseable", "unparseable", "ok", "ok", "ok"]


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        (GOOD, "72", 2.0),
        (GOOD, 72, 2.0),
        (GOOD, "48/2=24 ... 72\n#### 72", 2.0),
        (GOOD, "73", 0.0),
        ("<answer>$1,000.00</answer>", "1000", 2.0),
        ("<answer>-3</answer>", "-3", 2.0),
        ("<answer>3</answer>", "-3", 0.0),
        ("<answer>72 clips</answer>", "72", 2.0),
        ("<answer>24 and 72</answer>", "72", 0.0),
        ("<answer></answer> 72", "72", 0.0),
        ("I get 72.", "72", 2.0),
        ("<answer>Blue</answer>", "blue", 2.0),
        ("<answer>red</answer>", "blue", 0.0),
        ("<answer></answer>", "", None),
    ],
)
def test_correctness(completion, gold, expected):
    assert value(gsm8k_correctness(), completion, answer=gold) == expected


def test_correctness_with_other_names():
    assert value(gsm8k_correctness(answer="SOLUTION", column="gold"), "<SOLUTION>72</SOLUTION>", gold=72) == 2.0


@pytest.mark.parametrize("stated", ["72", "\n72\n", "-3", "1,200", "$5", "0", "72.0", "10/2"])
def test_whole_numbers(stated):
    assert value(gsm8k_integer(), f"<answer>{stated}</answer>") == 0.5


@pytest.mark.parametrize("stated", ["", "7.5", "1/2", "seventy", "72 clips", "7 2", "12:30", "9" * 5000])
def test_no_whole_numbers(stated):
    assert value(gsm8k_integer(), f"<answer>{stated}</answer>") == 0.0


def test_a_whole_number_outside_the_tag_does_not_count():
    assert gsm8k_integer()(completion="72") == Score(0.0, "unparseable", "has no <answer>")


def test_formats_read_over_lines():
    assert value(gsm8k_strict_format(), GOOD) == 0.5
    assert value(gsm8k_soft_format(), GOOD) == 0.5
    assert value(gsm8k_strict_format(), GOOD.replace("\n", "\r\n")) == 0.5


@pytest.mark.parametrize(
    ("completion", "problem"),
    [
        (LOOSE, "<reasoning> does not stand on a line of its own"),
        ("Sure.\n" + GOOD, "there is text before or after the sections"),
        (GOOD + "Done.", "there is text before or after the sections"),
        (GOOD.replace("<answer>", "so\n<answer>"), "there is text between the sections"),
        (GOOD + GOOD, "<reasoning> is there 2 times"),
        (GOOD.replace("72\n</answer>", "\n</answer>"), "nothing stands in <answer>"),
    ],
)
def test_the_strict_format_says_what_is_wrong(completion, problem):
    assert gsm8k_strict_format()(completion=completion, prompt="") == Score(0.0, "ok", problem)


def test_the_soft_format_lets_layout_pass_and_not_repetition():
    assert value(gsm8k_soft_format(), LOOSE) == 0.5
    assert value(gsm8k_soft_format(), LOOSE + LOOSE) == 0.0
    assert value(gsm8k_soft_format(), LOOSE.replace("</reasoning>", "")) == 0.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("", 0.0),
        (GOOD, 0.5),
        (GOOD.rstrip(), 0.5),
        ("<reasoning>", 0.125),
        ("<reasoning>so</reasoning>", 0.25),
        (GOOD + "x" * 100, 0.4),
        (GOOD + "x" * 10_000, 0.0),
        (GOOD + "<answer>", 0.375 - 0.008),
        (GOOD + GOOD, 0.0),
    ],
)
def test_tags_are_counted(completion, expected):
    assert value(gsm8k_tag_count(), completion) == pytest.approx(expected)


@pytest.mark.parametrize("factory", [gsm8k_strict_format, gsm8k_soft_format, gsm8k_tag_count])
def test_formats_take_other_tags_and_a_prefix(factory):
    opened = "\nso\n</think>\n<solution>\n2\n</solution>"
    tags = {"reasoning": "think", "answer": "solution"}
    assert value(factory(**tags, prefix="<think>"), opened) == 0.5
    assert value(factory(**tags), opened) < 0.5
    assert factory(**tags)(completion=opened, prompt="Q? <think>\n") == 0.5

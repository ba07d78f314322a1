from __future__ import annotations

import pytest

from grpo_kit.rewards import Reward, Score, approximate_format, xml_format

GOOD = "<reasoning>\none\ntwo\n</reasoning>\n<answer>\n2\n</answer>"


def value(reward: Reward, completion: str, prompt: object = "2 + 2?") -> float | None:
    result = reward(completion=completion, prompt=prompt)
    return result.value if isinstance(result, Score) else result


@pytest.mark.parametrize(
    "completion", [GOOD, GOOD.replace("\n", ""), f"Well, {GOOD} I hope.", GOOD.replace("\n", "\r\n")]
)
def test_xml_format_of_good_form(completion):
    assert value(xml_format(), completion) == 1.0


@pytest.mark.parametrize(
    ("completion", "problem"),
    [
        ("", "<reasoning> is missing"),
        ("<answer>2</answer>", "<reasoning> is missing"),
        (GOOD.replace("</reasoning>", ""), "</reasoning> is missing"),
        (GOOD.replace("</reasoning>", "</answer>"), "</reasoning> is missing"),
        (GOOD.removesuffix("</answer>"), "</answer> is missing"),
        (GOOD + GOOD, "<reasoning> is there 2 times"),
        (GOOD + "<answer>3</answer>", "<answer> is there 2 times"),
        (GOOD.replace("<answer>\n2\n", "<answer>\n \n"), "nothing stands in <answer>"),
        ("<reasoning></reasoning><answer>2</answer>", "nothing stands in <reasoning>"),
        ("<answer>2</answer><reasoning>so</reasoning>", "the tags are not in the order"),
        ("<reasoning>a<answer>2</reasoning></answer>", "the tags are not in the order"),
        ("</reasoning>a<reasoning><answer>2</answer>", "the tags are not in the order"),
        (GOOD.upper(), "<reasoning> is missing"),
    ],
)
def test_xml_format_of_bad_form_says_what_is_wrong(completion, problem):
    score = xml_format()(completion=completion, prompt="")
    assert score.value == 0.0
    assert score.detail.startswith(problem)


THINK = {"reasoning": "think", "answer": "solution"}
OPENED = "\nso\n</think><solution>2</solution>"


def test_a_template_that_opens_the_first_tag():
    assert value(xml_format(**THINK), OPENED) == 0.0
    assert value(xml_format(**THINK, prefix="<think>\n"), OPENED) == 1.0
    assert value(xml_format(**THINK, prefix="<think>\n"), "<think>" + OPENED) == 1.0
    assert value(xml_format(**THINK, prefix="<think>\n"), "well <think>" + OPENED) == 0.0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Q: 2 + 2? A: <think>\n", 1.0),
        ([{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>"}], 1.0),
        ([{"role": "user", "content": "use <think>"}], 0.0),
        ([{"role": "assistant", "content": None}], 0.0),
        ([], 0.0),
        (None, 0.0),
    ],
)
def test_a_prompt_that_opens_the_first_tag(prompt, expected):
    assert value(xml_format(**THINK), OPENED, prompt) == expected


@pytest.mark.parametrize("names", [("", "a"), ("a", "a"), ("<a>", "b")])
def test_xml_format_wants_two_names(names):
    with pytest.raises(ValueError, match="two different tag names"):
        xml_format(reasoning=names[0], answer=names[1])


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (GOOD, 2.0),
        ("", -2.0),
        ("<answer>2</answer>", 0.0),
        (GOOD + GOOD, -2.0),
        (GOOD + "</answer>", 1.0),
    ],
)
def test_approximate_format(completion, expected):
    assert value(approximate_format(), completion) == expected


def test_approximate_format_with_other_tags_and_amounts():
    tags = ["<start_working_out>", "<end_working_out>", "<SOLUTION>", "</SOLUTION>"]
    reward = approximate_format(tags=tags, seen=1.0, otherwise=-1.0)
    assert value(reward, "<start_working_out>a<end_working_out><SOLUTION>2</SOLUTION>") == 4.0
    assert value(reward, "<start_working_out>a<SOLUTION>2") == 0.0
    assert reward(completion="", prompt="").detail == f"not exactly once: {' '.join(tags)}"
    assert value(approximate_format(tags=tags, prefix=tags[0]), "a<end_working_out><SOLUTION>2</SOLUTION>") == 2.0


@pytest.mark.parametrize("tags", [[], "<answer>", ["<a>", ""]])
def test_approximate_format_wants_tags(tags):
    with pytest.raises(ValueError, match="list of tags"):
        approximate_format(tags=tags)


@pytest.mark.parametrize("completion", ["<reasoning>" * 10_000, "<" * 100_000, GOOD * 1_000])
def test_hostile_texts_come_to_an_end(completion):
    assert value(xml_format(), completion) == 0.0
    assert value(approximate_format(), completion) == -2.0

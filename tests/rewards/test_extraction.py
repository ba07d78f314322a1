from __future__ import annotations

import pytest

from grpo_kit.rewards.extraction import boxed, final_answer, tag_content


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<reasoning>1 + 1</reasoning><answer>\n2\n</answer>", "2"),
        ("<answer>blue</answer>", "blue"),
        ("<answer>1</answer> no: <answer>2</answer>", "2"),
        ("It goes in <answer> tags. <answer>2</answer>", "2"),
        ("<answer>2</answer> as said in <answer>", "2"),
        ("<answer>2", "2"),
        (r"<answer>2</answer> \boxed{3} #### 4", "2"),
        (r"\boxed{3} #### 4 The answer is 5", "3"),
        ("#### 4\nThe answer is 5", "4"),
        ("The answer is 5. There are 6 of them", "5"),
        ("12 and 13", "13"),
        ("The answer is B.", "B"),
        ("The answer is: **42**", "42"),
        ("**Answer:** 42 because 6 * 7 = 42", "42"),
        ("**Answer**: 42", "42"),
        ("Answer:\n\n42", "42"),
        ("The final answer is $\\frac{3}{4}$.", r"$\frac{3}{4}"),
        ("The answer is 6 * 7 = 42.", "42"),
        ("the answer was 4, no, the ANSWER IS 5", "5"),
        ("#### 42", "42"),
        ("####42", "42"),
        ("#### $42", "$42"),
        ("#### **42**", "42"),
        ("#### 42.", "42"),
        ("#### -3", "-3"),
        ("#### 1,234", "1,234"),
        ("#### 3/4", "3/4"),
        ("#### 5\n#### 42 dollars for 3 people\n" + "And more text. " * 50, "42"),
    ],
)
def test_the_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "text", ["", "no idea", "<answer></answer>", "<answer> </answer> 42", r"\boxed{} 42", "####", "12:30"]
)
def test_no_final_answer(text):
    assert final_answer(text) is None


def test_another_tag():
    assert final_answer("<SOLUTION>7</SOLUTION> <answer>8</answer>", tag="SOLUTION") == "7"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed {42}", "42"),
        (r"\boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a} then \boxed{b}", "b"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed 5", "5"),
        (r"\boxed5.", "5"),
        (r"\\boxed{5}", "5"),
        (r"{\boxed{4}} }}{ \boxed{5", "4"),
        (r"\boxed{5", None),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_boxes(text, content):
    assert boxed(text) == content


def test_the_last_complete_tag_counts():
    assert tag_content("<a>1</a><a>2</a>", "a") == "2"
    assert tag_content("<a>1", "a") == "1"
    assert tag_content("<a>1<a>2", "a") is None
    assert tag_content("1</a>", "a") is None
    assert tag_content("</a><a>1", "a") is None


@pytest.mark.parametrize(
    "text",
    [
        *(r"\boxed{" * 15_000, "{" * 100_000, "\\" * 100_001 + "boxed{5}", "<answer>" * 12_000, "answer " * 15_000),
        *("answer is " * 10_000, "answer is" + " " * 100_000, "#" * 100_000, r"\boxed " * 15_000, "}" * 100_000),
        *("answer is 1" + " 1" * 50_000, "</answer>" * 11_000),
    ],
    ids=lambda text: text[:12],
)
def test_hostile_texts_come_to_an_end(text):
    final_answer(text)

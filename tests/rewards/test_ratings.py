from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from grpo_kit.rewards import Rating
from grpo_kit.rewards.ratings import human_scores, prompt_text


def pair(better: str, worse: str, prompt: str = "p") -> Rating:
    return Rating("pair", prompt, better, 1.0, worse)


def test_a_rating_survives_json():
    for rating in (Rating("thumb", "p", "t", 0.0, step=3, time=1.5), pair("a", "b")):
        assert Rating(**json.loads(json.dumps(asdict(rating)))) == rating


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("stars", "p", "t", 1.0), "no kind of rating"),
        (("pair", "p", "t", 1.0), "a pair has two texts"),
        (("thumb", "p", "t", 1.0, "u"), "a pair has two texts"),
        (("thumb", "p", "t", 0.5), "a thumb is"),
        (("pair", "p", "t", 0.0, "u"), "a thumb is"),
    ],
)
def test_what_is_no_rating_is_refused(values, words):
    with pytest.raises(ValueError, match=words):
        Rating(*values)


def test_comparisons_give_the_share_that_was_won():
    # a won 2 of 2, b 1 of 3, c 1 of 2, d 0 of 1
    scores = human_scores([pair("a", "b"), pair("b", "d"), pair("c", "b"), pair("a", "c")])
    assert scores == {("p", "a"): 1.0, ("p", "b"): pytest.approx(1 / 3), ("p", "c"): 0.5, ("p", "d"): 0.0}


def test_a_thumb_counts_for_more_than_comparisons_and_the_last_one_counts():
    ratings = [pair("a", "b"), Rating("thumb", "p", "a", 1.0, time=5.0), Rating("thumb", "p", "a", 0.0, time=9.0)]
    assert human_scores(ratings) == human_scores(ratings[::-1]) == {("p", "a"): 0.0, ("p", "b"): 0.0}


def test_equal_answers_to_other_prompts_are_others():
    assert human_scores([pair("a", "b"), pair("b", "a", "q")])[("q", "a")] == 0.0


def test_prompts_as_a_person_reads_them():
    assert prompt_text("What is 3 + 5?") == "What is 3 + 5?"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 5?"}]
    assert prompt_text(messages) == "system: Be brief.\n\nuser: 3 + 5?"
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]
    assert prompt_text(parts) == "user: What is this?"
    assert prompt_text([{"role": "assistant", "content": None}]) == "assistant: "

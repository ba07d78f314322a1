from __future__ import annotations

import pytest

from grpo_kit.rewards import RewardSet, length_penalty, repetition_penalty, soft_overlong_punishment


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (10_000, -1.0)]
)
def test_length_in_tokens(tokens, expected):
    reward = length_penalty(80, slack=20)
    assert reward(completion="", completion_ids=[1] * tokens) == expected


def test_length_in_words_and_characters():
    assert length_penalty(4, unit="words")(completion="a b c d e", completion_ids=None) == -1.0
    assert length_penalty(8, unit="words")(completion="a " * 9, completion_ids=None) == -0.5
    assert length_penalty(8, unit="characters")(completion="a" * 9, completion_ids=None) == -0.5
    assert str(length_penalty(8, unit="words")(completion="", completion_ids=None)) == "0.0"


def test_tokens_without_ids_are_not_applicable():
    assert length_penalty(8)(completion="a" * 100, completion_ids=None).reason == "not applicable"


@pytest.mark.parametrize("options", [{"target": 0}, {"target": 5, "slack": 0}, {"target": 5, "unit": "lines"}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="at least 1"):
        length_penalty(**options)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (10_000, -1.0)]
)
def test_soft_overlong_punishment(tokens, expected):
    reward = soft_overlong_punishment(100, 20)
    assert reward(completion="", completion_ids=[1] * tokens) == pytest.approx(expected)
    assert str(reward(completion="", completion_ids=[1])) == "0.0"


@pytest.mark.parametrize(("longest", "cache"), [(100, 20), (100, 0), (7, 7), (64, 1)])
def test_soft_overlong_punishment_is_the_same_as_trls(longest, cache):
    theirs = pytest.importorskip("trl.rewards").get_soft_overlong_punishment(longest, cache)
    ids = [[1] * tokens for tokens in range(1, longest + 20)]
    ours = RewardSet(soft_overlong_punishment(longest, cache)).score(
        ["p"] * len(ids), [""] * len(ids), [{}] * len(ids), ids
    )
    assert ours.totals == pytest.approx(theirs(completion_ids=ids))


def test_soft_overlong_punishment_needs_ids_and_sound_lengths():
    assert soft_overlong_punishment(8, 2)(completion="", completion_ids=None).reason == "not applicable"
    for lengths in ((0, 0), (10, 11), (10, -1)):
        with pytest.raises(ValueError, match="between 0 and that"):
            soft_overlong_punishment(*lengths)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0.0),
        ("a b", 0.0),
        ("a b c d", 0.0),
        ("a b c a b c", -0.25),  # abc bca cab abc: one of four was there before
        ("A a a A a", -2 / 3),
    ],
)
def test_repetition(text, expected):
    assert repetition_penalty()(completion=text) == pytest.approx(expected)


def test_repetition_with_other_options():
    assert repetition_penalty(ngram=1, most=2.0)(completion="a a a a") == -1.5
    assert -1.0 < repetition_penalty()(completion="go " * 50_000) < -0.99
    with pytest.raises(ValueError, match="ngram"):
        repetition_penalty(ngram=0)
    with pytest.raises(ValueError, match="most"):
        repetition_penalty(most=0)

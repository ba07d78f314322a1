from __future__ import annotations

import pytest

from grpo_kit.rewards import RewardSet, length_penalty, repetition_penalty


@pytest.mark.parametrize(("longest", "cache"), [(100, 20), (7, 6), (64, 1)])
def test_it_is_dapos_soft_overlong_punishment_as_trl_has_it(longest, cache):
    theirs = pytest.importorskip("trl.rewards").get_soft_overlong_punishment(longest, cache)
    ids = [[1] * tokens for tokens in range(1, longest + 20)]
    ours = RewardSet(length_penalty(longest - cache, slack=cache)).score(
        ["p"] * len(ids), [""] * len(ids), [{}] * len(ids), ids
    )
    assert ours.totals == pytest.approx(theirs(completion_ids=ids))


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

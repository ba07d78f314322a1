from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from grpo_kit.rewards.score import REASONS, Score, ScoreTable, to_score


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (1, 1.0),
        (-0.5, -0.5),
        (True, 1.0),
        (False, 0.0),
        (Fraction(3, 4), 0.75),
        (Decimal("0.25"), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array([2.0]), 2.0),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([1.5], requires_grad=True), 1.5),
    ],
)
def test_numbers_of_every_kind_give_their_value(returned, value):
    score = to_score(returned)
    assert score == Score(value)
    assert type(score.value) is float


@pytest.mark.parametrize(
    "returned",
    ["1.0", "", b"1", [1.0], (1.0,), {"score": 1}, 1j, np.array([1.0, 2.0]), np.array([]), torch.ones(2), object],
)
def test_anything_else_has_the_wrong_shape(returned):
    score = to_score(returned)
    assert (score.value, score.reason) == (None, "wrong shape")
    assert "expected a number" in score.detail


@pytest.mark.parametrize(
    "returned",
    [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf), 10**400, Fraction(10**400), 1e19],
)
def test_what_cannot_be_trained_on_is_not_finite(returned):
    assert (to_score(returned).value, to_score(returned).reason) == (None, "not finite")


def test_none_is_not_applicable():
    assert to_score(None) == Score(None, "not applicable")
    assert to_score(Score(None)) == Score(None, "not applicable")


def test_a_score_keeps_its_reason_and_is_checked():
    zero = Score(0.0, "unparseable", "no answer")
    assert to_score(zero) == zero
    assert to_score(Score(np.float32(2.0))) == Score(2.0)  # type: ignore[arg-type]
    assert to_score(Score(math.nan)).reason == "not finite"
    assert to_score(Score("high")).reason == "wrong shape"  # type: ignore[arg-type]
    assert to_score(Score(None, "timeout", "x")) == Score(None, "timeout", "x")


def test_an_unknown_reason_is_refused():
    with pytest.raises(ValueError, match="use one of ok, not applicable"):
        Score(0.0, "wrong")
    assert all(Score(None, reason).reason == reason for reason in REASONS)


@pytest.fixture
def table() -> ScoreTable:
    return ScoreTable(
        names=["right", "short"],
        weights=[2.0, -0.5],
        scores=[
            [Score(1.0), Score(3.0)],
            [Score(0.0, "unparseable", "no number"), Score(None, "timeout", "took more than 5 s")],
            [Score(None, "error"), Score(None, "not applicable")],
        ],
    )


def test_totals_are_weighted_sums_over_what_is_there(table):
    assert table.values == [[1.0, 3.0], [0.0, None], [None, None]]
    assert table.totals == [0.5, 0.0, None]  # 2·1 - 0.5·3; 2·0; nothing


def test_a_column_is_one_rewards_scores(table):
    assert [score.reason for score in table.column("short")] == ["ok", "timeout", "not applicable"]
    with pytest.raises(ValueError, match="there are right, short"):
        table.column("long")


def test_the_frame_has_a_row_a_completion(table):
    frame = table.to_frame()
    assert list(frame.columns) == ["right", "short", "total", "reasons"]
    assert frame["right"].tolist()[:2] == [1.0, 0.0]
    assert math.isnan(frame["total"][2])
    assert frame["reasons"].tolist() == [
        "",
        "right: unparseable (no number); short: timeout (took more than 5 s)",
        "right: error; short: not applicable",
    ]


def test_the_frame_of_no_completions_is_empty():
    frame = ScoreTable(["right"], [1.0], []).to_frame()
    assert len(frame) == 0
    assert list(frame.columns) == ["right", "total", "reasons"]

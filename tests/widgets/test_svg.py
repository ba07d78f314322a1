from __future__ import annotations

import pytest

from grpo_kit.widgets.svg import Line, chart, smooth, ticks


def test_smooth_starts_unbiased() -> None:
    assert smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    # weights after two values: 0.15 * 0.85 for the first, 0.15 for the second
    assert smooth([1.0, 3.0])[1] == pytest.approx((0.1275 * 1 + 0.15 * 3) / 0.2775)


def test_smooth_leaves_gaps() -> None:
    assert smooth([None, 1.0, None, 1.0]) == [None, pytest.approx(1.0), None, pytest.approx(1.0)]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.5, 1.0]), (-0.11, 3.54, [0, 1, 2, 3]), (0.241, 0.927, [0.4, 0.6, 0.8]), (111, 239, [150, 200])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_an_exact_line_has_a_dot_a_value_and_nothing_smoothed() -> None:
    svg = chart("accuracy", [0, 10, 20], [Line("greedy", "blue", [0.0, None, 1.0], exact=True)], [(7, "edited")], True)
    assert svg.count("<circle") == 2
    assert svg.count("<polyline") == 1
    # the chart is 340 wide with 34 and 8 beside it, 132 high with 8 and 18 above and below
    assert 'points="34.0,114.0 332.0,8.0"' in svg


def test_marks_outside_the_chart_are_left_out() -> None:
    svg = chart("accuracy", [10, 20], [Line("greedy", "blue", [0.0, 1.0])], [(9, "early"), (20, "now"), (21, "late")])
    assert svg.count('class="mark"') == 1
    assert "<title>now</title>" in svg

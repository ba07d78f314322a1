from __future__ import annotations

import pytest

from grpo_kit.widgets.svg import smooth, ticks


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

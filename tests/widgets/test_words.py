from __future__ import annotations

import pytest

from grpo_kit.widgets.words import clock, number, percent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0.0, "0"),
        (1234.5, "1,234"),
        (163.2, "163"),
        (12.34, "12.3"),
        (2.7149, "2.71"),
        (0.0312, "0.031"),
        (5e-6, "5e-06"),
        (-0.5, "-0.5"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


def test_clock_and_percent() -> None:
    assert [clock(None), clock(41), clock(581), clock(3727)] == ["–", "0:41", "9:41", "1:02:07"]
    assert [percent(None), percent(0.414)] == ["–", "41 %"]

"""Which engine samples, and why."""

from __future__ import annotations

import pytest

from grpo_kit.rollout import choose_engine


def test_the_choice_comes_with_its_reason() -> None:
    assert choose_engine("transformers", fast_inference=False) == ("transformers", "asked for")
    name, reason = choose_engine("auto", fast_inference=False)
    assert name == "transformers" and reason


def test_an_engine_there_is_not_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"unknown engine 'vlm'; there are auto, .*transformers"):
        choose_engine("vlm", fast_inference=False)

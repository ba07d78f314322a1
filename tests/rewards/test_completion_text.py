from __future__ import annotations

import json
import re

from grpo_kit.rewards.completion_text import CompletionText


def test_it_is_the_text():
    text = CompletionText("Wien 42")
    assert isinstance(text, str)
    assert text == "Wien 42"
    assert len(text) == 7
    assert re.search(r"\d+", text)[0] == "42"
    assert text[1:4] == "ien"
    assert text[2] == "e"
    assert text[-2] == "4"
    assert "".join(text) == "Wien 42"
    assert json.dumps([text]) == '["Wien 42"]'


def test_its_ends_are_characters_and_messages():
    text = CompletionText("Wien 42")
    assert text[0] == "W"
    assert text[-1] == "2"
    for message in (text[0], text[-1]):
        assert message["content"] == "Wien 42"
        assert message["role"] == "assistant"
        assert message.get("content") == "Wien 42"
        assert message.get("tool_calls") is None
        assert message.get("name", "none") == "none"


def test_a_missing_field_is_a_key_error_as_of_a_dict():
    try:
        CompletionText("a")[0]["tool_calls"]
    except KeyError as error:
        assert error.args == ("tool_calls",)


def test_an_empty_completion_is_one_empty_message():
    text = CompletionText("")
    assert text[0]["content"] == text[-1]["content"] == ""
    assert text[0] == ""
    assert not text

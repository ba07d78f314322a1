"""What the model is shown, with a tiny chat model whose every character is a token."""

from __future__ import annotations

import pytest

from grpo_kit.data import check_lengths, from_rows, preview


class CharacterModel:
    """Renders "<role>content" per message and "<assistant>" at the end; a token is a character's code."""

    def __init__(self, max_seq_length):
        self.max_seq_length = max_seq_length

    def render(self, messages):
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"

    def encode(self, messages):
        return [ord(character) for character in self.render(messages)]


DATA = from_rows([{"prompt": "1 & 2?"}, {"prompt": "<b>?</b>"}])
TEXT = "<user>1 & 2?<assistant>"  # 6 + 6 + 11 = 23 characters


def test_the_exact_prompt():
    shown = preview(DATA, CharacterModel(100))
    assert shown.text == TEXT and shown.tokens == 23
    assert shown.token_ids == [ord(character) for character in TEXT]
    assert repr(shown) == f"Row 0: 23 tokens of the 100 that prompt and completion share\n{TEXT}"


def test_the_notebook_view_is_escaped():
    shown = preview(DATA, CharacterModel(100), row=1)._repr_html_()
    assert "&lt;user&gt;&lt;b&gt;?&lt;/b&gt;&lt;assistant&gt;" in shown
    assert "<b>" not in shown and "<user>" not in shown


@pytest.mark.parametrize("row", [2, -1])
def test_a_row_that_is_not_there(row):
    with pytest.raises(IndexError, match=f"no row {row}; the data has rows 0 to 1"):
        preview(DATA, CharacterModel(100), row=row)


def test_lengths_that_fit_give_the_token_ids():
    encoded = check_lengths(DATA, CharacterModel(35), 10)  # 23 and 25 tokens; 25 is just allowed
    assert [len(token_ids) for token_ids in encoded] == [23, 25]
    assert encoded[0] == [ord(character) for character in TEXT]


def test_one_token_too_many():
    words = r"1 of the prompts .*max_seq_length=34 leaves 24 tokens .*row 1 \(25 tokens\)\. "
    words += r"Load .*max_seq_length=35 or more, lower max_completion_length to 9,"
    with pytest.raises(ValueError, match=words):
        check_lengths(DATA, CharacterModel(34), 10)


def test_only_the_first_few_are_named():
    data = from_rows([{"prompt": "?" * length} for length in range(1, 10)])  # 18 to 26 tokens
    with pytest.raises(
        ValueError, match=r"8 of the prompts .*: row 1 \(19 .*row 5 \(23 tokens\) and 3 more\. "
    ) as caught:
        check_lengths(data, CharacterModel(20), 2)
    assert "max_seq_length=28 or more" in str(caught.value)
    assert "lower max_completion_length to" not in str(caught.value)  # no completion length would do


def test_no_room_for_any_prompt():
    with pytest.raises(ValueError, match=r"max_completion_length=64 leaves no room .*max_seq_length=64"):
        check_lengths(DATA, CharacterModel(64), 64)


def test_data_that_did_not_come_from_here():
    datasets = pytest.importorskip("datasets")
    with pytest.raises(ValueError, match=r"no column 'prompt', only \['question'\]"):
        preview(datasets.Dataset.from_list([{"question": "Why?"}]), CharacterModel(100))
    with pytest.raises(ValueError, match="strings, not messages"):
        check_lengths(datasets.Dataset.from_list([{"prompt": "Why?"}]), CharacterModel(100), 10)

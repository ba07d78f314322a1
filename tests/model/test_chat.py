"""Chat templates and ends of answers, on a real tokenizer made by hand."""

from __future__ import annotations

import pytest

from grpo_kit.model import Chat
from tests.tiny import CHATML, EOS, PAD, START, tiny_tokenizer

THINKING = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
THOUGHT = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n\n</think>\n{% endif %}"
)
ID = {token: 256 + place for place, token in enumerate((EOS, PAD, START))}


def test_the_prompt_is_the_templates_text_and_no_special_token_is_added() -> None:
    chat = Chat(tiny_tokenizer(), [])
    assert chat.render("Hi") == f"{START}user\nHi{EOS}\n{START}assistant\n"
    assert chat.render([{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]).startswith(
        f"{START}system\nBe brief{EOS}\n"
    )
    ids = chat.encode("Hi")
    assert ids.count(ID[START]) == 2 and ids.count(ID[EOS]) == 1
    assert chat.tokenizer.decode(ids) == chat.render("Hi")
    assert chat.notes == []


def test_decoding_gives_back_the_text_without_end_and_special_tokens() -> None:
    chat = Chat(tiny_tokenizer(), [])
    ids = chat.tokenizer("3 × 4 = 12, café").input_ids
    assert chat.decode([*ids, ID[EOS]]) == "3 × 4 = 12, café"
    assert chat.decode([ID[START], *ids, ID[PAD]]) == "3 × 4 = 12, café"


def test_every_named_end_counts_and_so_does_what_the_template_writes_after_a_turn() -> None:
    # The tokenizer calls <|pad|> its end, the model names id 7, and the template ends turns with <|im_end|>.
    chat = Chat(tiny_tokenizer(eos=PAD), [7])
    assert chat.eos_ids == {ID[PAD], 7, ID[EOS]}
    assert Chat(tiny_tokenizer(chat_template=None, eos=PAD), [7]).eos_ids == {ID[PAD], 7}


def test_an_ordinary_letter_after_a_turn_is_no_end() -> None:
    chat = Chat(tiny_tokenizer("{% for m in messages %}{{ m['content'] }}\n{% endfor %}"), [])
    assert chat.eos_ids == {ID[EOS]}


def test_a_template_that_drops_the_answer_is_no_error() -> None:
    chat = Chat(tiny_tokenizer("{{ messages[0]['content'] }}:"), [])
    assert chat.eos_ids == {ID[EOS]}


def test_a_missing_template_is_noted_and_prompts_are_written_plainly() -> None:
    chat = Chat(tiny_tokenizer(chat_template=None), [])
    assert chat.render("Hi") == "user: Hi\nassistant:"
    assert chat.render([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]) == (
        "system: S\nuser: U\nassistant:"
    )
    assert any("no chat template" in note for note in chat.notes)


def test_what_the_template_opens_stands_in_front_of_the_answer() -> None:
    chat = Chat(tiny_tokenizer(THINKING), [])
    assert chat.prefill == "<think>\n"
    assert chat.decode(chat.tokenizer("2+2</think>4").input_ids) == "<think>\n2+2</think>4"
    assert any("opens <think> itself" in note for note in chat.notes)


def test_a_tag_that_is_closed_again_is_not_opened() -> None:
    assert Chat(tiny_tokenizer(THOUGHT), []).prefill == ""


def test_a_tokenizer_without_any_end_is_an_error() -> None:
    tokenizer = tiny_tokenizer(chat_template=None)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"set tokenizer\.eos_token first"):
        Chat(tokenizer, [])
    assert Chat(tokenizer, [3]).eos_ids == {3}

"""From messages to token ids and back: chat template and end-of-sequence ids. Knows the tokenizer, not the model.

A pad token is never asked for: it may equal an end token or be missing, so masks alone say what is real.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Message = dict[str, str]
Prompt = str | list[Message]


class Chat:
    """A tokenizer with the care that training needs.

    eos_ids: every id that ends an answer: the model's and the generation config's, and what the chat template puts
             after the assistant's turn. notes: what had to be decided, in words.
    """

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int]):
        self.tokenizer = tokenizer
        self.notes: list[str] = []
        self.has_template = bool(tokenizer.chat_template)
        if not self.has_template:
            self.notes.append("the tokenizer has no chat template: prompts are written as `role: content` lines")
        ids = {int(i) for i in eos_ids}
        if tokenizer.eos_token_id is not None:
            ids.add(int(tokenizer.eos_token_id))
        self.eos_ids = frozenset(ids | self._turn_end_ids())
        if not self.eos_ids:
            raise ValueError(
                "neither the model nor its tokenizer names an end-of-sequence token: set tokenizer.eos_token first"
            )
        self.prefill = self._opened_tag()
        if self.prefill:
            self.notes.append(
                f"the chat template opens {self.prefill.strip()} itself: answers are shown and scored with it in front"
            )

    def render(self, prompt: Prompt) -> str:
        """The exact text that the model continues."""
        messages = as_messages(prompt)
        if self.has_template:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return "\n".join([*lines, "assistant:"])

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of `render(prompt)`. A template writes its own special tokens, so none are added to it."""
        return list(self.tokenizer(self.render(prompt), add_special_tokens=not self.has_template).input_ids)

    def decode(self, token_ids: list[int]) -> str:
        """The answer's text: without end and special tokens, with what the template had opened in front."""
        ids = [i for i in token_ids if i not in self.eos_ids]
        return self.prefill + str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _turn_end_ids(self) -> set[int]:
        """The special token that the template writes right after an assistant's answer, if it writes one."""
        if not self.has_template:
            return set()
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "zzz"}]
        text = str(self.tokenizer.apply_chat_template(turns, tokenize=False))
        after = (
            self.tokenizer(text[text.rindex("zzz") + 3 :], add_special_tokens=False).input_ids if "zzz" in text else []
        )
        special = set(self.tokenizer.added_tokens_decoder) | set(self.tokenizer.all_special_ids)
        return {after[0]} if after and after[0] in special else set()

    def _opened_tag(self) -> str:
        """What the generation prompt opens and leaves open, such as `<think>` and a newline; "" if nothing."""
        if not self.has_template:
            return ""
        text = self.render("a")
        start = text.rfind("<think>")
        return text[start:] if start >= 0 and "</think>" not in text[start:] else ""


def as_messages(prompt: Prompt) -> list[Message]:
    """A plain string is one message of the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

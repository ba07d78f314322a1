"""What the model will really be shown: the text and tokens of a prompt, and whether prompt and answer fit.

Knows no model: anything that renders and encodes messages will do.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from datasets import Dataset

NAMED_ROWS = 5  # how many of the rows that are too long an error names


class ChatModel(Protocol):
    """The part of a model that is needed here."""

    @property
    def max_seq_length(self) -> int: ...

    def render(self, messages: list[dict[str, str]]) -> str: ...

    def encode(self, messages: list[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True)
class PromptPreview:
    """One prompt as the model gets it."""

    row: int
    text: str
    token_ids: list[int]
    max_seq_length: int

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def summary(self) -> str:
        return f"Row {self.row}: {self.tokens} tokens of the {self.max_seq_length} that prompt and completion share"

    def __repr__(self) -> str:
        return f"{self.summary}\n{self.text}"

    def _repr_html_(self) -> str:
        return (
            f"<div><div>{html.escape(self.summary)}</div>"
            '<pre style="white-space: pre-wrap; border-left: 3px solid; padding-left: 8px">'
            f"{html.escape(self.text)}</pre></div>"
        )


def preview(data: Dataset, model: ChatModel, row: int = 0) -> PromptPreview:
    """The exact prompt of one row, chat template and all. Raises IndexError if there is no such row."""
    if not 0 <= row < len(data):
        raise IndexError(f"there is no row {row}; the data has rows 0 to {len(data) - 1}")
    _check_prompts(data)
    messages = data[row]["prompt"]
    return PromptPreview(row, model.render(messages), list(model.encode(messages)), model.max_seq_length)


def check_lengths(data: Dataset, model: ChatModel, max_completion_length: int) -> list[list[int]]:
    """The token ids of every prompt, once it is sure that prompt and completion fit into `model.max_seq_length`.

    Lengths are in tokens. Raises ValueError that names the rows that are too long and says what to do.
    """
    room = model.max_seq_length - max_completion_length
    if room < 1:
        raise ValueError(
            f"max_completion_length={max_completion_length} leaves no room for a prompt: the model was loaded with "
            f"max_seq_length={model.max_seq_length}, which prompt and completion share; lower one or raise the other"
        )
    encoded = [list(model.encode(messages)) for messages in _prompts(data)]
    long = [(index, len(token_ids)) for index, token_ids in enumerate(encoded) if len(token_ids) > room]
    if long:
        raise ValueError(_too_long(long, room, model.max_seq_length, max_completion_length))
    return encoded


def _too_long(long: list[tuple[int, int]], room: int, limit: int, completion: int) -> str:
    named = ", ".join(f"row {index} ({tokens} tokens)" for index, tokens in long[:NAMED_ROWS])
    more = f" and {len(long) - NAMED_ROWS} more" if len(long) > NAMED_ROWS else ""
    longest = max(tokens for _, tokens in long)
    return (
        f"{len(long)} of the prompts must be shorter: max_seq_length={limit} leaves {room} tokens beside "
        f"max_completion_length={completion}: {named}{more}. Load the model with max_seq_length={longest + completion} "
        f"or more, lower max_completion_length{f' to {limit - longest}' if limit > longest else ''}, or drop these rows"
    )


def _prompts(data: Dataset) -> Iterator[Any]:
    _check_prompts(data)
    yield from data["prompt"]


def _check_prompts(data: Dataset) -> None:
    if "prompt" not in data.column_names:
        raise ValueError(f"the data has no column 'prompt', only {data.column_names}; gk.data.from_rows makes one")
    if len(data) and isinstance(data[0]["prompt"], str):
        raise ValueError("the prompts are strings, not messages; gk.data.from_rows(data) turns them into messages")

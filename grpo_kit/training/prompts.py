"""The rows of a data set, ready to be asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_kit.data import check_lengths
from grpo_kit.model import Model

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Prompts:
    """Per row the messages, their token ids and the columns that rewards ask for."""

    messages: list[Any]
    token_ids: list[list[int]]
    columns: list[dict[str, Any]]


def ready_prompts(data: Dataset, model: Model, max_completion_length: int) -> Prompts:
    """Raises ValueError for data without rows and for prompts that leave no room for an answer."""
    token_ids = check_lengths(data, model, max_completion_length)
    if not token_ids:
        raise ValueError("the data has no rows")
    rows = [dict(row) for row in data]
    return Prompts([row.pop("prompt") for row in rows], token_ids, rows)

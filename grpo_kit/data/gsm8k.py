"""GSM8K: 7,473 training and 1,319 test word problems of primary school (Cobbe et al. 2021, arXiv:2110.14168)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from grpo_kit.data.formats import REASONING_FORMAT
from grpo_kit.data.rows import from_rows

if TYPE_CHECKING:
    from datasets import Dataset

SPLITS = ("train", "test")


def gsm8k(split: str = "train", n: int | None = None, system: str | None = REASONING_FORMAT) -> Dataset:
    """The first `n` problems (None: all), with columns prompt (messages), answer (number) and solution (full text).

    `system` is the system prompt, None for none. Raises ConnectionError if the Hub can't be reached and the data set
    was not loaded before, ValueError for an unknown split or an `n` that is more than there are.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {list(SPLITS)}, not {split!r}")
    rows = _load(split)
    wanted = len(rows) if n is None else n
    if not 1 <= wanted <= len(rows):
        raise ValueError(f"n must be from 1 to {len(rows)}, the number of problems in {split!r}, not {n}")
    return from_rows([to_row(rows[index]) for index in range(wanted)], system=system)


def to_row(row: Mapping[str, str]) -> dict[str, Any]:
    """A row as published, {"question", "answer"}, to {"prompt", "answer": int or float, "solution"}.

    The number is what follows the last "####", without commas. Raises ValueError if there is none.
    """
    found = re.search(r"####\s*(-?\d[\d,]*(?:\.\d+)?)\s*$", row["answer"])
    if not found:
        raise ValueError(f"this solution does not end in '#### number': {row['answer']!r}")
    value = float(found[1].replace(",", ""))
    return {
        "prompt": row["question"].strip(),
        "answer": int(value) if value.is_integer() else value,
        "solution": row["answer"],
    }


def _load(split: str) -> Any:
    """Rows of {"question", "answer"}; anything with len() and [index]."""
    import datasets

    try:
        return datasets.load_dataset("openai/gsm8k", "main", split=split)
    except ConnectionError as error:
        raise ConnectionError(
            f"GSM8K comes from the Hugging Face Hub, which can't be reached ({error}). "
            'Without a network use the like of it that is made on the spot: gk.data.reasoning_gym("gsm_symbolic", n)'
        ) from error

"""Small sums: the task on which a tiny model learns within minutes.

Not a benchmark: every question can be listed, and the answer is always a whole number that is not negative.
"""

from __future__ import annotations

import hashlib
import random
from itertools import cycle, islice
from typing import TYPE_CHECKING

from grpo_kit.data.formats import NUMBER_ONLY
from grpo_kit.data.rows import from_rows

if TYPE_CHECKING:
    from datasets import Dataset

OPERATIONS = "+-*"
Question = tuple[int, str, int]


def arithmetic(
    n: int,
    digits: int = 1,
    operations: str = "+",
    seed: int = 0,
    split: str = "train",
    system: str | None = NUMBER_ONLY,
) -> Dataset:
    """`n` questions such as "What is 3 + 5?", with columns prompt (messages) and answer (int).

    Both numbers have `digits` digits (0 to 9, 10 to 99, ...). `operations` is one or more of "+-*"; a difference never
    goes below zero. The same seed gives the same rows.

    "train" and "test" never share a question, whatever the seeds, nor do they split a pair such as 3 + 5 and 5 + 3:
    a fifth of all questions is "test". When `n` is more than there are, they repeat in the same shuffled order
    (one-digit "+" has 77 for training and 23 for testing).

    `system` is the system prompt, None for none. Raises ValueError for an argument out of range.
    """
    if n < 1 or digits < 1:
        raise ValueError(f"n and digits must be at least 1, not n={n}, digits={digits}")
    if not operations or set(operations) - set(OPERATIONS) or len(set(operations)) < len(operations):
        raise ValueError(f"operations must be some of {OPERATIONS!r}, each once, not {operations!r}")
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', not {split!r}")
    questions = _distinct_questions(n, digits, operations, seed, split)
    return from_rows([_row(question) for question in islice(cycle(questions), n)], system=system)


def _distinct_questions(n: int, digits: int, operations: str, seed: int, split: str) -> list[Question]:
    """Up to `n` different questions of the split, shuffled; fewer only when there are no more."""
    first = 0 if digits == 1 else 10 ** (digits - 1)
    numbers = 10**digits - first
    total = len(operations) * numbers**2
    # A range is sampled without being listed. At worst a tenth of it is kept (a fifth is "test", and 3 - 5 becomes
    # 5 - 3), hence twenty times n, and a thousand for what a small n may miss by chance.
    chosen = random.Random(seed).sample(range(total), min(total, 20 * n + 1000))
    found: dict[Question, None] = {}
    for index in chosen:
        rest, right = divmod(index, numbers)
        operation, left = divmod(rest, numbers)
        question = _question(first + left, operations[operation], first + right)
        if _split(question) == split:
            found[question] = None
        if len(found) == n:
            break
    return list(found)


def _question(left: int, operation: str, right: int) -> Question:
    return (max(left, right), "-", min(left, right)) if operation == "-" else (left, operation, right)


def _split(question: Question) -> str:
    """Depends on nothing but the question: not on the seed, and not on the order of its two numbers."""
    left, operation, right = question
    digest = hashlib.sha256(f"{min(left, right)}{operation}{max(left, right)}".encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") % 5 == 0 else "train"


def _row(question: Question) -> dict[str, object]:
    left, operation, right = question
    answer = {"+": left + right, "-": left - right, "*": left * right}[operation]
    return {"prompt": f"What is {left} {operation} {right}?", "answer": answer}

"""A hundred kinds of puzzle made on the spot by the `reasoning-gym` package: no download, as many rows as wanted.

Not here: the tasks' own scorers. Several tasks ("countdown", say) accept more than one answer, and their
`score_answer` may evaluate the text it is given; what a model wrote belongs in the sandbox for that.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Any

from grpo_kit.data.formats import REASONING_FORMAT
from grpo_kit.data.rows import from_rows

if TYPE_CHECKING:
    from datasets import Dataset

# Their answers become int, so that rewards written for gsm8k() work unchanged; the rare row with a fraction is skipped.
WHOLE_NUMBER_TASKS = ("gsm_symbolic",)


def reasoning_gym(task: str, n: int, seed: int = 0, system: str | None = REASONING_FORMAT, **options: Any) -> Dataset:
    """`n` rows of a task, with columns prompt (messages), answer (str), task and metadata (JSON).

    For "gsm_symbolic" the answer is an int; its rare rows with a fraction are skipped.

    `options` are the task's own, such as min_terms=2 for "chain_sum". The same seed gives the same rows. Other seeds
    give others, though a task with few possible questions may well repeat some. `system` is the system prompt, None
    for none.

    Raises ImportError if reasoning-gym is not installed, ValueError for an unknown task, option or value.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    whole = task in WHOLE_NUMBER_TASKS
    with _own_randomness(seed):
        made = _generate(task, 2 * n + 10 if whole else n, seed, options)
        entries = (made[index] for index in range(len(made)))
        wanted = (entry for entry in entries if not whole or _is_whole(entry["answer"]))
        rows = [_row(task, entry) for entry in islice(wanted, n)]
    return from_rows(rows, system=system)


def _generate(task: str, size: int, seed: int, options: dict[str, Any]) -> Any:
    registry = _package().factory.DATASETS
    if task not in registry:
        close = difflib.get_close_matches(task, registry, n=5, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are {', '.join(sorted(registry))}"
        raise ValueError(f"reasoning-gym has no task {task!r}; {hint}")
    known = [field.name for field in dataclasses.fields(registry[task][1]) if field.name not in ("seed", "size")]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"task {task!r} has no option {unknown}; it has {known}")
    try:
        return _package().create_dataset(task, size=size, seed=_spread(seed), **options)
    except AssertionError as error:  # how the package refuses a value
        raise ValueError(f"reasoning-gym refuses {options} for task {task!r}: {error}") from error


def _package() -> ModuleType:
    try:
        import reasoning_gym as package
    except ImportError as error:
        raise ImportError("this needs the package reasoning-gym: pip install grpo-kit[reasoning-gym]") from error
    return package


@contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """A few tasks draw from the global generators, which belong to the notebook: seed them here, then put them back."""
    import numpy

    before, numpy_before = random.getstate(), numpy.random.get_state()
    random.seed(_spread(seed))
    numpy.random.seed(_spread(seed))
    try:
        yield
    finally:
        random.setstate(before)
        numpy.random.set_state(numpy_before)


def _spread(seed: int) -> int:
    """The package draws row i from seed + i, so that neighbouring seeds would share all rows but one."""
    return random.Random(seed).getrandbits(31)


def _is_whole(answer: str) -> bool:
    return float(answer).is_integer()


def _row(task: str, entry: dict[str, Any]) -> dict[str, Any]:
    answer = entry["answer"]
    return {
        "prompt": entry["question"],
        "answer": int(float(answer)) if task in WHOLE_NUMBER_TASKS else str(answer),
        "task": task,
        "metadata": json.dumps(entry["metadata"], default=str),
    }

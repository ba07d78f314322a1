"""The user's own rows as a Dataset of prompts, checked once so that training meets no surprise an hour later.

Text only: no images, no tool calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset
    from pandas import DataFrame

RESERVED = ("completion", "completions", "completion_ids", "prompts")  # what a reward function is given besides columns
ROLES = ("system", "user", "assistant")

Message = dict[str, str]


def from_rows(
    rows: Sequence[Mapping[str, Any]] | Dataset | DataFrame, prompt: str = "prompt", system: str | None = None
) -> Dataset:
    """A Dataset with the column prompt (a list of {"role", "content"}) and every other column of `rows` as it is.

    `prompt` names the column that holds the prompt. A string there becomes one user message; a list of messages is
    kept: at most one system message, first, then user and assistant in turn, a user message last. `system` is put
    before each prompt, None for no system message.

    Raises ValueError, naming the row, for a prompt that is missing, empty or in the wrong order, for rows whose
    columns or types differ and for column names that rewards need for themselves; TypeError for the wrong type of rows.
    """
    records = _records(rows)
    _check_columns(records, prompt)
    built = []
    for index, record in enumerate(records):
        others = {name: value for name, value in record.items() if name != prompt}
        built.append({"prompt": _messages(record[prompt], system, f"row {index}"), **others})
    return _to_dataset(built)


def _records(rows: Any) -> list[Mapping[str, Any]]:
    import datasets
    import pandas

    if isinstance(rows, datasets.Dataset):
        records: list[Any] = rows.to_list()
    elif isinstance(rows, pandas.DataFrame):
        records = rows.to_dict(orient="records")
    elif isinstance(rows, (list, tuple)):
        records = list(rows)
    else:
        raise TypeError(f"rows must be a list of dicts, a datasets.Dataset or a DataFrame, not {type(rows).__name__}")
    if not records:
        raise ValueError("there are no rows")
    for index, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise TypeError(f"row {index} must be a dict of column name to value, not {type(record).__name__}")
    return records


def _check_columns(records: list[Mapping[str, Any]], prompt: str) -> None:
    expected = set(records[0])
    for index, record in enumerate(records):
        if prompt not in record:
            raise ValueError(
                f"row {index} has no {prompt!r}, only {list(record)}; "
                "name the column of the prompts, as in from_rows(rows, prompt='question')"
            )
        if set(record) != expected:
            missing, extra = sorted(expected - set(record)), sorted(set(record) - expected)
            raise ValueError(
                f"row {index} differs from row 0: missing columns {missing}, more columns {extra}; "
                "give every row the same columns, with None where there is no value"
            )
    reserved = sorted(expected & set(RESERVED))
    if reserved:
        raise ValueError(f"columns {reserved} must be renamed: rewards get the completions and prompts by these names")
    if prompt != "prompt" and "prompt" in expected:
        raise ValueError(f"there is a column 'prompt' besides {prompt!r}, which becomes the prompt; rename or drop one")


def _messages(value: Any, system: str | None, where: str) -> list[Message]:
    if isinstance(value, str):
        messages = [{"role": "user", "content": value}]
    elif isinstance(value, Sequence) or hasattr(value, "tolist"):  # parquet gives pandas lists as numpy arrays
        messages = [_message(item, f"{where}, message {place}") for place, item in enumerate(value)]
    else:
        raise ValueError(f"{where}: the prompt must be a string or a list of messages, not {value!r}")
    if not messages:
        raise ValueError(f"{where}: the prompt is an empty list")
    if system is not None:
        if messages[0]["role"] == "system":
            raise ValueError(f"{where} has a system message already; leave out system=, or drop that message")
        messages = [{"role": "system", "content": system}, *messages]
    _check_order(messages, where)
    return messages


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping) or "role" not in item or "content" not in item:
        raise ValueError(f'{where} must look like {{"role": "user", "content": "..."}}, not {item!r}')
    more = [key for key, value in item.items() if key not in ("role", "content") and value is not None]
    if more:
        raise ValueError(f"{where} has {more} besides role and content; only plain text messages can be trained on")
    if item["role"] not in ROLES:
        raise ValueError(f"{where} has the role {item['role']!r}; it must be one of {list(ROLES)}")
    if not isinstance(item["content"], str):
        raise ValueError(f"{where}: the content must be a string, not {item['content']!r}")
    return {"role": item["role"], "content": item["content"]}


def _check_order(messages: list[Message], where: str) -> None:
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if turns != ["user" if place % 2 == 0 else "assistant" for place in range(len(turns))] or len(turns) % 2 == 0:
        raise ValueError(
            f"{where} has the roles {roles}; a prompt is a system message or none, then user and assistant in turn, "
            "and ends with a user message, which the model answers"
        )
    for message in messages:
        if message["role"] == "user" and not message["content"].strip():
            raise ValueError(f"{where}: the prompt is empty")


def _to_dataset(rows: list[dict[str, Any]]) -> Dataset:
    import datasets

    try:
        return datasets.Dataset.from_list(rows)
    except (ValueError, TypeError, OverflowError) as error:  # Arrow's own errors are ValueErrors and TypeErrors
        raise ValueError(f"the rows can't be made a table: {_mixed_types(rows) or error}") from error


def _mixed_types(rows: list[dict[str, Any]]) -> str:
    """Names the first column that holds several types, with a row of each; "" if there is none."""
    for name in rows[0]:
        seen: dict[str, int] = {}
        for index, row in enumerate(rows):
            if row[name] is not None:
                seen.setdefault(type(row[name]).__name__, index)
        if len(seen) > 1:
            told = " and ".join(f"{kind} (row {index}: {rows[index][name]!r})" for kind, index in seen.items())
            return f"column {name!r} mixes {told}; make them one type"
    return ""

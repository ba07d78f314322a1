"""The user's rows: what passes, and errors that name the row."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_kit.data import from_rows

USER = {"role": "user", "content": "Why?"}
ASSISTANT = {"role": "assistant", "content": "Because."}
SYSTEM = {"role": "system", "content": "Be kind."}


def test_a_string_becomes_a_user_message_and_columns_stay():
    data = from_rows([{"prompt": "Why?", "answer": 3, "tags": ["a"]}, {"prompt": "How?", "answer": None, "tags": []}])
    assert data.to_list() == [
        {"prompt": [USER], "answer": 3, "tags": ["a"]},
        {"prompt": [{"role": "user", "content": "How?"}], "answer": None, "tags": []},
    ]


def test_a_system_message_comes_first():
    data = from_rows([{"prompt": "Why?"}, {"prompt": [USER, ASSISTANT, USER]}], system="Be kind.")
    assert list(data["prompt"]) == [[SYSTEM, USER], [SYSTEM, USER, ASSISTANT, USER]]


def test_the_column_of_the_prompts_can_have_any_name():
    data = from_rows([{"question": "Why?", "answer": 3}], prompt="question")
    assert data.to_list() == [{"prompt": [USER], "answer": 3}]


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [SYSTEM, USER, ASSISTANT, USER]])
def test_messages_pass_through(messages):
    assert from_rows([{"prompt": messages}])[0]["prompt"] == messages


def test_a_dataset_and_a_frame():
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    rows = [{"prompt": "Why?", "answer": 3}, {"prompt": "How?", "answer": 4}]
    expected = from_rows(rows).to_list()
    assert from_rows(datasets.Dataset.from_list(rows)).to_list() == expected
    assert from_rows(pandas.DataFrame(rows)).to_list() == expected
    assert from_rows(from_rows(rows)).to_list() == expected


def test_messages_read_from_parquet(tmp_path):
    pandas = pytest.importorskip("pandas")
    from_rows([{"prompt": [SYSTEM, USER]}]).to_parquet(tmp_path / "rows.parquet")
    assert from_rows(pandas.read_parquet(tmp_path / "rows.parquet"))[0]["prompt"] == [SYSTEM, USER]


def test_a_key_that_is_none_is_no_key():
    assert from_rows([{"prompt": [{**USER, "tool_calls": None}]}])[0]["prompt"] == [USER]


GOOD = {"prompt": "Why?", "answer": 1}
BAD_ROWS = {
    "missing prompt": ({"answer": 1}, r"row 1 has no 'prompt', only \['answer'\].*prompt='question'"),
    "other columns": ({"prompt": "Why?", "sum": 1}, r"row 1 .*missing columns \['answer'\], more columns \['sum'\]"),
    "empty": ({**GOOD, "prompt": " \n"}, "row 1: the prompt is empty"),
    "empty list": ({**GOOD, "prompt": []}, "row 1: the prompt is an empty list"),
    "none": ({**GOOD, "prompt": None}, "row 1: the prompt must be a string or a list of messages, not None"),
    "not messages": ({**GOOD, "prompt": ["Why?"]}, "row 1, message 0 must look like"),
    "no content": ({**GOOD, "prompt": [{"role": "user"}]}, "row 1, message 0 must look like"),
    "role": ({**GOOD, "prompt": [{"role": "human", "content": "Why?"}]}, "row 1, message 0 has the role 'human'"),
    "content": ({**GOOD, "prompt": [{"role": "user", "content": 3}]}, "row 1, message 0: the content must be a string"),
    "images": ({**GOOD, "prompt": [{**USER, "image": "x"}]}, r"row 1, message 0 has \['image'\] besides"),
    "assistant last": ({**GOOD, "prompt": [USER, ASSISTANT]}, "row 1 has the roles .*ends with a user message"),
    "two users": ({**GOOD, "prompt": [USER, USER, USER]}, "row 1 has the roles"),
    "system last": ({**GOOD, "prompt": [USER, SYSTEM]}, "row 1 has the roles"),
    "system only": ({**GOOD, "prompt": [SYSTEM]}, "row 1 has the roles"),
    "types": ({**GOOD, "answer": "one"}, r"column 'answer' mixes int \(row 0: 1\) and str \(row 1: 'one'\)"),
}


@pytest.mark.parametrize(("bad", "words"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_errors_name_the_row(bad, words):
    with pytest.raises(ValueError, match=words):
        from_rows([GOOD, bad])


def test_other_errors():
    with pytest.raises(ValueError, match="row 0 has a system message already"):
        from_rows([{"prompt": [SYSTEM, USER]}], system="Be quick.")
    for name in ("completion", "completions", "completion_ids", "prompts"):
        with pytest.raises(ValueError, match=rf"columns \['{name}'\] must be renamed"):
            from_rows([{**GOOD, name: 1}])
    with pytest.raises(ValueError, match="a column 'prompt' besides 'question'"):
        from_rows([{**GOOD, "question": "How?"}], prompt="question")
    with pytest.raises(ValueError, match="no rows"):
        from_rows([])
    with pytest.raises(TypeError, match="row 0 must be a dict"):
        from_rows(["Why?"])
    with pytest.raises(TypeError, match="not generator"):
        from_rows(row for row in [GOOD])
    with pytest.raises(ValueError, match=r"can't be made a table: .*object"):
        from_rows([{**GOOD, "answer": object()}])


def test_importing_the_data_room_is_light():
    root = Path(__file__).resolve().parents[2]
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import grpo_kit.data; "
    code += "print(sorted({'torch', 'datasets', 'pandas', 'numpy', 'reasoning_gym', 'IPython'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

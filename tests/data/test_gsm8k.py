"""GSM8K without the Hub: the conversion of its rows, and what is said when the Hub can't be reached."""

from __future__ import annotations

import importlib

import pytest

from grpo_kit.data import REASONING_FORMAT, gsm8k

module = importlib.import_module("grpo_kit.data.gsm8k")

ROWS = [
    {"question": " Ann has 3 pears and buys 5. How many? ", "answer": "3 + 5 = <<3+5=8>>8\n#### 8"},
    {"question": "How much is the house?", "answer": "It is 1,250,000.\n#### 1,250,000"},
    {"question": "How cold is it?", "answer": "#### #### -4"},
]


@pytest.fixture
def published(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "_load", lambda split: asked.append(split) or ROWS)
    return asked


@pytest.mark.parametrize(
    ("text", "number"),
    [("#### 8", 8), ("#### 1,250,000", 1250000), ("a #### 1\n#### -4 ", -4), ("#### 2.5", 2.5), ("####7.0", 7)],
)
def test_the_number_after_the_last_hashes(text, number):
    row = module.to_row({"question": " Why? ", "answer": text})
    assert row == {"prompt": "Why?", "answer": number, "solution": text}
    assert type(row["answer"]) is type(number)


@pytest.mark.parametrize("text", ["it is 8", "#### eight", "####", "#### nan", "#### inf", "8"])
def test_a_solution_without_a_number(text):
    with pytest.raises(ValueError, match="does not end in '#### number'"):
        module.to_row({"question": "Why?", "answer": text})


def test_the_data_set(published):
    data = gsm8k("test")
    assert published == ["test"] and len(data) == 3 and set(data.column_names) == {"prompt", "answer", "solution"}
    assert data[0] == {
        "prompt": [
            {"role": "system", "content": REASONING_FORMAT},
            {"role": "user", "content": "Ann has 3 pears and buys 5. How many?"},
        ],
        "answer": 8,
        "solution": ROWS[0]["answer"],
    }
    assert list(data["answer"]) == [8, 1250000, -4]


def test_the_first_n(published):
    assert list(gsm8k(n=2)["answer"]) == [8, 1250000]
    assert gsm8k(n=1, system=None)[0]["prompt"][0]["role"] == "user"
    for n in (0, 4):
        with pytest.raises(ValueError, match="n must be from 1 to 3"):
            gsm8k(n=n)


def test_an_unknown_split_is_refused_before_anything_is_loaded(published):
    with pytest.raises(ValueError, match=r"\['train', 'test'\], not 'validation'"):
        gsm8k("validation")
    assert published == []


def test_without_a_network_the_error_names_the_way_out(monkeypatch):
    import datasets

    def unreachable(*arguments, **options):
        assert (arguments, options) == (("openai/gsm8k", "main"), {"split": "train"})
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConnectionError, match=r"can't be reached .*gk\.data\.reasoning_gym\(\"gsm_symbolic\", n\)"):
        gsm8k()

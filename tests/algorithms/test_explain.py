"""`explain`: every algorithm has a formula that can be typeset, a source that can be read, and a use."""

from __future__ import annotations

import re

import pytest

import grpo_kit as gk
from grpo_kit.algorithms import ALGORITHMS, explain


def balanced(formula: str) -> bool:
    r"""Every { has its }, and every \left its \right."""
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", formula):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0 and len(re.findall(r"\\left\b", formula)) == len(re.findall(r"\\right\b", formula))


def test_balanced_sees_what_is_not() -> None:
    assert balanced(r"\left( \frac{a}{b} \right)")
    assert not any(map(balanced, ["{", "}{", r"\left( a", r"\frac{a}{b"]))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_is_explained(name: str) -> None:
    it = ALGORITHMS[name]
    assert it.formula.startswith("L = ") and balanced(it.formula) and "$" not in it.formula
    assert re.search(r"https://arxiv\.org/abs/\d{4}\.\d{5}\b", it.source)
    assert it.when and it.when[0].isupper() and it.when.endswith(".")
    assert it.summary and it.summary.endswith(".")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_both_ways_of_showing_it_hold_all_of_it(name: str) -> None:
    it, explanation = ALGORITHMS[name], explain(name)
    assert f"$${it.formula}$$" in explanation._repr_markdown_()
    for shown in (explanation._repr_markdown_(), repr(explanation)):
        for text in (it.name, it.summary, it.formula, it.source, *(f"{n}={v}" for n, v in it.defaults.items())):
            assert text in shown
        assert it.when[1:] in shown
        assert ("no options of its own" in shown) == (not it.defaults)
    assert explanation.defaults == it.defaults


def test_the_table_names_all() -> None:
    table = explain()
    for it in ALGORITHMS.values():
        assert f"| `{it.name}` | {it.summary} | {it.when} |" in table._repr_markdown_()
        assert re.search(rf"^{it.name} +{re.escape(it.summary)}$", repr(table), re.MULTILINE)
    # A cell that held a | would end there.
    assert {row.count("|") for row in table._repr_markdown_().splitlines()} == {4}


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"unknown algorithm 'dr-grpo'; there are .* did you mean 'dr_grpo'\?"):
        explain("dr-grpo")


def test_it_is_at_the_front_door() -> None:
    assert gk.algorithms.explain is explain

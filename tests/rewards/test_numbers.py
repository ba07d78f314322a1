from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from grpo_kit.rewards.numbers import (
    equal_numbers,
    first_number,
    is_only_number,
    last_number,
    parse_number,
    to_number,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        (" 42\n", 42),
        ("42.", 42),
        ("42.00", 42),
        ("007", 7),
        ("0", 0),
        (".5", Fraction(1, 2)),
        ("0.333...", Fraction(333, 1000)),
        ("1,234,567", 1234567),
        ("1,234.", 1234),
        ("9{,}500", 9500),
        (r"8,\!000", 8000),
        (r"1\,234\,567", 1234567),
        ("1\u202f234", 1234),
        ("-3", -3),
        ("−3", -3),
        ("–3", -3),
        ("- 5", -5),
        ("+5", 5),
        ("(-3)", -3),
        ("$42", 42),
        (r"\$42", 42),
        ("42 €", 42),
        ("$1,234.50", Fraction(2469, 2)),
        ("-$5", -5),
        ("$-5", -5),
        ("US$42", 42),
        ("USD42", 42),
        ("42 dollars", 42),
        ("42dollars", 42),
        ("3 km", 3),
        ("3 km^2", 3),
        ("60 km/h", 60),
        ("50%", 50),
        (r"50\%", 50),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("1 1/2", Fraction(3, 2)),
        ("-1 1/2", Fraction(-3, 2)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"\dfrac{3}{4}", Fraction(3, 4)),
        (r"\frac34", Fraction(3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"2\frac{1}{3}", Fraction(7, 3)),
        (r"\boxed{8,000}", 8000),
        (r"\boxed{42 \text{ dollars}}", 42),
        ("**42**", 42),
        ("_42_", 42),
        ("$5$", 5),
        ("#### 42", 42),
        ("1e5", 100000),
        ("1.5E-3", Fraction(3, 2000)),
        (r"3 \times 10^5", 300000),
        (r"3 \times 10^{-2}", Fraction(3, 100)),
        ("2.5×10^3", 2500),
        ("x = 5", 5),
        ("x = -3/4", Fraction(-3, 4)),
        ("6*7 = 42", 42),
        ("42 (that is 42.0)", 42),
        ("42!", 42),
        ("答案是42。", 42),
        ("٤٢", 42),
    ],
)
def test_texts_that_state_one_number(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "none", ",", "-", "$", "####", "NaN", "inf", "∞", "x2", "v2.05", "H2O"),
        *("1, 2", "1,23", "1 234", "5 or 6", "5-3", "3 + 4", "[8.124,12.852]", "[8,124,12,852]", "1331 and 1728"),
        *("12:30", "3:4", "1.2.3", "12/25/2024", "2024-05-01", "1/0", r"\frac{1}{0}", "2 5/4"),
        *("2^10", "2^{10}", r"2\sqrt{3}", r"2\pi", "2π", "3x", "2n", "x^2", r"\frac{1}{\sqrt{2}}", "1/2^98", "1 + 1/e"),
        *("1e999", "9" * 201, "1e" + "9" * 5000),
    ],
)
def test_texts_that_do_not(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("1, 2", 1, 2),
        ("5-3", 5, 3),
        ("5 - 3", 5, 3),
        ("from 10 to -3", 10, -3),
        ("[8.124,12.852]", 8.124, 12.852),
        ("[8,124,12,852]", 8, 852),
        ("48/2 = <<48/2=24>>24 clips", 24, 24),
        ("at 12:30 she had 7, on 2024-05-01 none", 7, 7),
        ("- 5 apples\n- 6 pears", 5, 6),
        (r"3\times4", 3, 4),
        ("so x2 is 8.", 8, 8),
        ("the end...5", 5, 5),
        ("costs 42.\n\nDone", 42, 42),
        ("about 42,", 42, 42),
        ("x^2 + 3", 3, 3),
        ("half, 1/2, of 0.25", 0.5, 0.25),
        ("9" * 500 + " 7", 7, 7),
        ("nothing", None, None),
        ("", None, None),
    ],
)
def test_first_and_last_number(text, first, last):
    assert first_number(text) == first
    assert last_number(text) == last


def test_whole_numbers_are_ints_and_others_floats():
    assert type(last_number("42.00")) is int
    assert type(last_number("1e5")) is int
    assert type(last_number("3/4")) is float
    assert last_number("it is 42.0") == 42


def test_values_at_the_limits_fit_a_float():
    assert isinstance(last_number("9" * 200 + "." + "9" * 199), float)
    assert isinstance(last_number("9" * 200 + "." + "9" * 199 + "e100"), float)
    assert last_number("1" * 200 + "e101") is None


@pytest.mark.parametrize("text", ["42", " -3\n", "1,200", "$5", "3.50", "50%", "1/2"])
def test_only_a_number(text):
    assert is_only_number(text)


@pytest.mark.parametrize("text", ["", "42 apples", "1 2", "= 4", "**4**", "1/0", "12:30"])
def test_not_only_a_number(text):
    assert not is_only_number(text)


@pytest.mark.parametrize(
    ("gold", "number"),
    [
        (42, 42),
        (True, 1),
        (0.1 + 0.2, Fraction(3, 10)),
        (Decimal("0.5"), Fraction(1, 2)),
        (Fraction(1, 3), Fraction(1, 3)),
        (np.int64(7), 7),
        (np.float32(0.5), Fraction(1, 2)),
        (np.array([4]), 4),
        ("1,000", 1000),
        ("5 + 5 = 10 apples\n#### -3", -3),
    ],
)
def test_gold_answers_as_numbers(gold, number):
    assert to_number(gold) == number


@pytest.mark.parametrize(
    "gold", [None, "", "blue", [42], {}, float("nan"), float("inf"), Decimal("NaN"), np.array([1, 2])]
)
def test_gold_answers_that_are_none(gold):
    assert to_number(gold) is None


@pytest.mark.parametrize(
    ("left", "right"),
    [
        *((42, "42.00"), ("1,000", 1000), ("3/4", 0.75), ("0.3333333333", "1/3"), (1 / 3, r"\frac{1}{3}"), ("-0", 0)),
        *(("50%", "50"), ("50%", "50%"), (0.1 + 0.2, "0.3")),
    ],
)
def test_equal(left, right):
    assert equal_numbers(left, right)
    assert equal_numbers(right, left)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        *(("50%", "0.5"), (10**12, 10**12 + 1), ("0.333", "1/3"), ("1/2^98", "1/2^99"), (0, 1e-12), (None, None)),
        *(("blue", "blue"), (float("inf"), float("inf")), ("-3", "3")),
    ],
)
def test_not_equal(left, right):
    assert not equal_numbers(left, right)
    assert not equal_numbers(right, left)


def test_a_tolerance_is_relative_to_the_right_one():
    assert equal_numbers(99, 100, tolerance=0.01)
    assert not equal_numbers(98.9, 100, tolerance=0.01)
    assert equal_numbers(-101, -100, tolerance=0.01)


HOSTILE = [
    *("1" * 10**6, "1," * 50_000, "1,111" * 20_000, ",111" * 25_000, "-" * 100_000, "1/" * 50_000, "1:" * 50_000),
    *("1." * 50_000, "1 " * 50_000, "1e" * 50_000, "$" * 100_000, "^" * 100_000, "^{" * 50_000, " " * 100_000),
    *(r"\frac{" * 16_000, r"\frac{1" * 14_000, r"1 \times " * 11_000, "x" + ".1" * 50_000, "a" * 100_000),
    *(
        "1" * 50_000 + "." + "2" * 50_000 + ".",
        "1{,}234" * 14_000 + "5",
        "\\" * 100_000,
        "9" * 50_000 + "/" + "9" * 50_000,
    ),
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12])
def test_hostile_texts_come_to_an_end(text):
    parse_number(text)
    first_number(text)
    last_number(text)
    is_only_number(text)

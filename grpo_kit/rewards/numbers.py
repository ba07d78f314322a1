"""Reads numbers out of model text.

Linear in the length of the text, exact (values are Fractions) and bounded: nothing is evaluated, a number of more than
200 digits is not read. Deliberately no algebra: 2√3, 2^10 and x + 1 are not numbers here.

What counts: 1,234,567 and LaTeX's 9{,}500 are one number, "1, 2" and [8.124,12.852] are two; a minus sign (also −)
counts unless it follows a digit, letter or bracket, so 5-3 holds 5 and 3; $42, 42 €, 42 dollars, **42**, 42. and 1e5;
3/4, \\frac{3}{4}, \\frac34, 1 1/2. 50% is 50, since only the gold answer can say which form is meant: 50% equals 50%
and 50, not 0.5. Times (12:30), dates, versions (1.2.3), powers and names (x2, v2.0) are no numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction

MOST_DIGITS = 200  # with at most 100 for the exponent, every value read fits a float
MOST_EXPONENT = 100

_MINUS = "-−–‐‑﹣－"
_TOKEN = re.compile(
    rf"""
    (?P<skip> (?:(?<![A-Za-z0-9)\]}}%])[{_MINUS}+])? (?:\\?[$€£¥₹]\s?)? (?:
          \d+(?::\d+)+ | \d+(?:\.\d+){{2,}} | \d+(?:/\d+){{2,}} | \d{{4}}-\d{{1,2}}-\d{{1,2}}(?!\d)
        | \d+(?:\.\d+)?\s?\^\s?(?:\{{[^{{}}]{{0,20}}\}}|[{_MINUS}+]?\d+) ) )
  | (?P<number> (?P<sign>(?<![A-Za-z0-9)\]}}%])[{_MINUS}+])? (?:\\?[$€£¥₹]\s?)? (?:
          (?:(?P<whole_tex>\d+)\s?)? \\[dt]?frac\s?
              (?: \{{\s?(?P<top_tex>[{_MINUS}]?\d+(?:\.\d+)?)\s?\}} | (?P<top_digit>\d) ) \s?
              (?: \{{\s?(?P<bottom_tex>\d+(?:\.\d+)?)\s?\}} | (?P<bottom_digit>\d) )
        | (?:(?P<whole>\d+)[ ])? (?P<top>\d+)/(?P<bottom>\d+)(?![\d/]|\.\d)
        | (?: (?P<integer>
                  (?<!\d,)[1-9]\d{{0,2}}(?:(?:,\\!|\{{,\}}|\\,|[,\u00a0\u2009\u202f])\d{{3}})+(?!\d)(?!,\d) | \d+ )
              (?P<decimals>\.\d+)? | (?<![\w.])(?P<only_decimals>\.\d+) )
          (?: [eE](?P<exponent>[+-]?\d+)(?![A-Za-z0-9])
            | \s?(?:\\times|\\cdot|×|\*|x)\s?10\s?(?:\^|\*\*)\s?
              (?: \{{\s?(?P<power>[{_MINUS}+]?\d+)\s?\}} | (?P<bare_power>[{_MINUS}]?\d+) ) )?
      ) (?:\s?\\?%|\s?[$€£¥₹](?![\d.]))? )
  | (?P<latex> \\(?:[A-Za-z]+|[^\dA-Za-z]) )
  | (?P<code> (?:USD|EUR|GBP|CHF|INR|US)(?=\s?[$\d]) )
  | (?P<word> [A-Za-z][A-Za-z0-9_]*(?:(?<=\d)(?:\.\d+)+)? )
  | (?P<power_of> \^\s?(?:\{{[^{{}}]{{0,20}}\}}|[{_MINUS}+]?\d+) )
  | (?P<symbol> [π√∞+÷±] )
    """,
    re.VERBOSE,
)
_DIGIT_GROUPS = (
    *("whole_tex", "top_tex", "top_digit", "bottom_tex", "bottom_digit", "whole", "top", "bottom"),
    *("integer", "decimals", "only_decimals", "exponent", "power", "bare_power"),
)
_LEADING_MINUS = re.compile(rf"^[\s$*]*[{_MINUS}]\s+(?=\S)")
_HARMLESS_LATEX = frozenset(
    {
        *(r"\text", r"\textbf", r"\textit", r"\mathrm", r"\mathbf", r"\mbox", r"\boxed", r"\fbox", r"\approx"),
        *(r"\left", r"\right", r"\quad", r"\displaystyle", r"\degree", r"\circ"),
        *(r"\(", r"\)", r"\[", r"\]", r"\,", r"\;", r"\:", r"\!", r"\$", r"\%", r"\{", r"\}", "\\ ", "\\\\"),
    }
)
_MATH_WORDS = frozenset({"x", "y", "z", "n", "i", "e", "k", "pi", "sqrt", "log", "ln", "sin", "cos", "tan"})
_ALGEBRA = frozenset("π√∞+÷±")


def parse_number(text: str) -> Fraction | None:
    """The number that `text` as a whole states, such as "42", "$1,234.50", "3 km", "x = -3/4" or "\\frac{3}{4}".

    None if it states none, several different ones, or an expression. After an equals sign only what follows counts.
    """
    after_equals = re.split("[=≈]", text)[-1]
    stated = _LEADING_MINUS.sub("-", after_equals if after_equals.strip(" .$*") else text)
    values = set()
    for match in _TOKEN.finditer(stated):
        if _spoils(match):
            return None
        if match["number"] is not None:
            values.add(_value(match))
        if len(values) > 1:
            return None
    return values.pop() if len(values) == 1 else None


def first_number(text: str) -> int | float | None:
    """The first number in `text`: an int if it is whole, a float otherwise; None if there is none."""
    return next((_plain(value) for value in map(_value, _numbers(text)) if value is not None), None)


def last_number(text: str) -> int | float | None:
    """The last number in `text`: an int if it is whole, a float otherwise; None if there is none."""
    last_first = reversed(list(_numbers(text)))
    return next((_plain(value) for value in map(_value, last_first) if value is not None), None)


def first_number_text(text: str) -> str | None:
    """The first number as it is written in `text`, with its sign, currency and percent sign; None if there is none."""
    return next((match[0].strip() for match in _numbers(text) if _value(match) is not None), None)


def last_number_text(text: str) -> str | None:
    """The last number as it is written in `text`, with its sign, currency and percent sign; None if there is none."""
    last_first = reversed(list(_numbers(text)))
    return next((match[0].strip() for match in last_first if _value(match) is not None), None)


def is_only_number(text: str) -> bool:
    """Whether `text` is one number and nothing beside it but space, currency and percent signs."""
    match = next(_numbers(text), None)
    return match is not None and _value(match) is not None and match[0].strip() == text.strip()


def to_number(value: object) -> Fraction | None:
    """A gold answer as an exact number: an int, float, Decimal, Fraction, or text for `parse_number`.

    Of GSM8K's own answers, only what follows #### counts. A float counts as its shortest 15-digit decimal, so that
    0.1 + 0.2 is 0.3. None for anything else, NaN and infinity.
    """
    if isinstance(value, str):
        return parse_number(value.rpartition("####")[2])
    if isinstance(value, float):
        return Fraction(f"{value:.15g}") if math.isfinite(value) else None
    if isinstance(value, (int, Fraction)) or (isinstance(value, Decimal) and value.is_finite()):
        return Fraction(value)
    item = getattr(value, "item", None)  # numpy and torch scalars
    return to_number(item()) if callable(item) and getattr(value, "size", 1) in (1, ()) else None


def equal_numbers(left: object, right: object, tolerance: float = 0.0) -> bool:
    """Whether both are numbers (see `to_number`) and equal, or no further apart than `tolerance` times `right`.

    "50%" equals "50" and not "0.5". A ninth-digit difference between decimals is float noise and counts as equal:
    0.3333333333 equals 1/3; whole numbers are compared exactly.
    """
    a, b = to_number(left), to_number(right)
    if a is None or b is None:
        return False
    both_whole = a.denominator == b.denominator == 1
    return abs(a - b) <= abs(b) * max(Fraction(tolerance), Fraction(0 if both_whole else 1, 10**9))


def _numbers(text: str) -> Iterator[re.Match[str]]:
    return (match for match in _TOKEN.finditer(text) if match["number"] is not None)


def _spoils(match: re.Match[str]) -> bool:
    """Whether this piece makes a text say something else than one number."""
    if match["skip"] is not None:
        return True
    if match["latex"] is not None:
        return match["latex"] not in _HARMLESS_LATEX
    if match["power_of"] is not None:  # of a number; km^2 is a unit
        return match.string[match.start() - 1 : match.start()] in tuple("0123456789)")
    return match[0] in _MATH_WORDS or match[0] in _ALGEBRA


def _value(match: re.Match[str]) -> Fraction | None:
    """The value of a number token; None if it is too long to read, divides by zero or is like 2 5/4."""
    part = match.groupdict()
    digits = [part[name] for name in _DIGIT_GROUPS if part[name]]
    if max(map(len, digits)) > MOST_DIGITS:
        return None
    exponent = _integer(part["exponent"] or part["power"] or part["bare_power"] or "0")
    if abs(exponent) > MOST_EXPONENT:
        return None
    if part["integer"] or part["only_decimals"]:
        value = _decimal((part["integer"] or "0") + (part["decimals"] or part["only_decimals"] or ""))
        value *= Fraction(10) ** exponent if exponent else 1
    else:
        bottom = _decimal(part["bottom_tex"] or part["bottom_digit"] or part["bottom"])
        if bottom == 0:
            return None
        value = _decimal(part["top_tex"] or part["top_digit"] or part["top"]) / bottom
        whole = part["whole_tex"] or part["whole"]
        if whole and not 0 < value < 1:
            return None
        value += Fraction(whole or 0)
    return -value if (part["sign"] or "+") != "+" else value


def _integer(digits: str) -> int:
    sign = -1 if digits[0] in _MINUS else 1
    return sign * int(digits.lstrip(_MINUS + "+"))


def _decimal(digits: str) -> Fraction:
    """Digits with an optional sign, thousands marks and decimals; "1{,}234.5"."""
    whole, _, decimals = digits.lstrip(_MINUS).partition(".")
    number = Fraction(int(re.sub(r"\D", "", whole) + decimals), 10 ** len(decimals))
    return -number if digits[0] in _MINUS else number


def _plain(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)

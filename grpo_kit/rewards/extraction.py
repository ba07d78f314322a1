"""Finds the part of a completion that states its answer.

Deliberately text in, text out: whether the answer is a number, and which, is for numbers.py.
"""

from __future__ import annotations

import re

from grpo_kit.rewards.numbers import first_number_text, last_number_text

# A backslash before anything but a box is skipped with what it escapes, so that \{ and \} count as no braces.
_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s?\{|\\(?!\\?(?:boxed|fbox))[^A-Za-z]|[{}]")
_BARE_BOX = re.compile(r"\\boxed\s?([^\s{}\\$.,]+)")
_ANSWER_IS = re.compile(r"\banswer(?:\s?\*{1,2})?(?:\s(?:is|was)\b|\s?[:=])[:*]{0,3}\s*", re.IGNORECASE)
_CLAUSE_END = re.compile(r"[.;,]\s|\s(?:because|since|as|which|for)\s")
_AROUND = " \t\r\n*_`$\"'"


def final_answer(text: str, tag: str = "answer") -> str | None:
    """The answer that `text` states, or None. Of several of one kind, the last.

    In this order: what stands in <answer>…</answer> (`tag`), in \\boxed{…}, after ####, after "answer is" (or
    "answer:"), and else the last number. After #### and "answer is" the first number is taken rather than the prose
    around it. An answer tag that was never closed counts if it is the only one.
    """
    for stated in (tag_content(text, tag), boxed(text), _after_hashes(text), _after_answer_is(text)):
        if stated is not None:
            return stated.strip() if stated.strip(_AROUND) else None  # an empty answer is none, wherever numbers are
    return last_number_text(text)


def tag_content(text: str, tag: str) -> str | None:
    """What stands in the last <tag>…</tag>, or after an only, unclosed <tag>; None if there is no such tag."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    if end < 0:
        _, found, content = text.partition(opening)
        return content if found and opening not in content else None
    start = text.rfind(opening, 0, end)
    return None if start < 0 else text[start + len(opening) : end]


def boxed(text: str) -> str | None:
    """What stands in the last complete \\boxed{…}, nested braces included; None if there is none."""
    open_braces: list[int | None] = []  # where the content of a box starts; None for a brace of another kind
    best: tuple[int, int] | None = None
    for match in _BOX_OR_BRACE.finditer(text):
        if match[0] == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None and (best is None or start > best[0]):
                best = (start, match.start())
        elif match[0].endswith("{") and match[0] != "\\{":
            open_braces.append(match.end() if match[0] != "{" else None)
    if best is not None:
        return text[best[0] : best[1]]
    bare = _BARE_BOX.findall(text)
    return bare[-1] if bare else None


def _after_hashes(text: str) -> str | None:
    _, found, rest = text.rpartition("####")
    return _statement(rest.lstrip().partition("\n")[0]) if found else None


def _after_answer_is(text: str) -> str | None:
    ends = [match.end() for match in _ANSWER_IS.finditer(text)]
    return _statement(text[ends[-1] :].partition("\n")[0]) if ends else None


def _statement(line: str) -> str:
    """The answer that a line begins with: its first number, after the equals sign if there is one, or its words."""
    clause = _CLAUSE_END.split(line, maxsplit=1)[0]
    number = first_number_text(clause.rpartition("=")[2]) or first_number_text(clause)
    return number or clause.strip(_AROUND + ".")

"""Rewards for replies to e-mails: the points asked for, the ideal reply, length, salutation and signature.

Words are compared without regard to case and as whole words, so "Al" is not in "also". Deliberately plain checks of
the text: nothing here judges tone.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from grpo_kit.rewards.reward import Reward, ready_made
from grpo_kit.rewards.score import Score

SIGN_OFFS = frozenset(
    {
        *("all the best", "best", "best regards", "best wishes", "kind regards", "regards", "warm regards", "warmly"),
        *("with best regards", "with kind regards", "cheers", "thanks", "many thanks", "thank you", "respectfully"),
        *("sincerely", "sincerely yours", "yours", "yours faithfully", "yours sincerely", "yours truly"),
    }
)
LINES_OF_A_SIGNATURE = 8  # sign-off, name, title, company, address, telephone …

_TITLES = frozenset(
    {
        *("mr", "mrs", "ms", "mx", "miss", "dr", "prof", "professor", "sir", "madam"),
        *("the", "and", "of", "von", "van", "de", "der"),
    }
)


def required_keywords(keywords: Sequence[str], *, weight: float = 1.0, name: str | None = None) -> Reward:
    """The share of `keywords` (words or phrases) that the completion holds, 0 to 1."""
    wanted = [keywords] if isinstance(keywords, str) else list(keywords)
    if not wanted or not all(isinstance(keyword, str) and keyword.strip() for keyword in wanted):
        raise ValueError(f"keywords must be a list of words or phrases, none of them empty, not {keywords!r}")

    def required_keywords(completion: str) -> Score:
        missing = [keyword for keyword in wanted if not holds_words(completion, keyword)]
        return Score(1 - len(missing) / len(wanted), "ok", f"missing: {', '.join(missing)}" if missing else "")

    return ready_made(required_keywords, "required_keywords", weight, name, keywords=wanted)


def matches_reply(*, column: str = "reply", weight: float = 1.0, name: str | None = None) -> Reward:
    """1.0 if the completion is the reply in the data column, but for case, spacing and the way quotes are drawn."""

    def matches_reply(completion: str, **columns: Any) -> Score | float:
        ideal = _folded(columns[column])
        if not ideal:
            return Score(None, "not applicable", f"the column {column!r} is empty")
        return 1.0 if _folded(completion) == ideal else 0.0

    return ready_made(matches_reply, "matches_reply", weight, name, [column], column=column)


def too_long(words: int, *, weight: float = 1.0, name: str | None = None) -> Reward:
    """-1.0 if the completion has more than `words` words, else 0.0."""
    if words < 1:
        raise ValueError(f"words must be at least 1, not {words!r}")

    def too_long(completion: str) -> Score | float:
        count = len(completion.split())
        return Score(-1.0, "ok", f"{count} words, {words} are allowed") if count > words else 0.0

    return ready_made(too_long, "too_long", weight, name, words=words)


def names_recipient(*, column: str = "recipient", weight: float = 1.0, name: str | None = None) -> Reward:
    """1.0 if the completion holds the recipient's name, whole or one part of it other than a title."""

    def names_recipient(completion: str, **columns: Any) -> Score | float:
        recipient = _folded(columns[column])
        parts = [part for part in re.findall(r"\w+(?:['-]\w+)*", recipient) if part not in _TITLES and len(part) > 1]
        if not parts:
            return Score(None, "not applicable", f"the column {column!r} holds no name")
        return 1.0 if any(holds_words(completion, part) for part in [recipient, *parts]) else 0.0

    return ready_made(names_recipient, "names_recipient", weight, name, [column], column=column)


def signature_block(*, signer: str = "", weight: float = 1.0, name: str | None = None) -> Reward:
    """1.0 if the completion ends with a sign-off ("Best regards,") and a name after it, on the same or the next line.

    signer: the name that must be there; any will do if it is "".
    """

    def signature_block(completion: str) -> Score | float:
        lines = [line.strip() for line in completion.splitlines() if line.strip()][-LINES_OF_A_SIGNATURE:]
        for place, line in enumerate(lines):
            signed = _after_sign_off(line)
            if signed is not None:
                block = " ".join([signed, *lines[place + 1 :]])
                return 1.0 if (holds_words(block, signer) if signer.strip() else _has_name(block)) else _NO_NAME
        return Score(0.0, "ok", "no sign-off at the end")

    return ready_made(signature_block, "signature_block", weight, name, signer=signer)


_PLACEHOLDER = re.compile(r"[\[<{][^\[\]<>{}]*[\]>}]")  # [Your Name]
_NO_NAME = Score(0.0, "ok", "no name after the sign-off")


def holds_words(text: str, words: str) -> bool:
    """Whether `words` stand in `text` as whole words, in any case and with any spacing; never for empty words."""
    parts = _folded(words).split()
    pattern = r"\s+".join(map(re.escape, parts))
    return bool(parts) and re.search(rf"(?<!\w){pattern}(?!\w)", _folded(text)) is not None


def _after_sign_off(line: str) -> str | None:
    """What follows the sign-off that a line begins with; None if it begins with none or goes on as a sentence."""
    head, _, rest = line.partition(",")
    if _folded(head).strip(" .!-–—*_") not in SIGN_OFFS:
        return None
    return rest.strip(" ,.!*_")


def _has_name(text: str) -> bool:
    return any(character.isalpha() for character in _PLACEHOLDER.sub("", text))


def _folded(value: object) -> str:
    """Text to compare: one form of each character, no case, single spaces, straight quotes; "" for None."""
    text = unicodedata.normalize("NFKC", "" if value is None else str(value)).casefold()
    return " ".join(text.replace("’", "'").replace("‘", "'").replace("“", '"').replace("”", '"').split())

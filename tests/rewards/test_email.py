from __future__ import annotations

import pytest

from grpo_kit.rewards import (
    Reward,
    Score,
    matches_reply,
    names_recipient,
    required_keywords,
    signature_block,
    too_long,
)

MAIL = """Dear Dr. Müller,

thank you for your order. Your refund of $40 is on its way; the tracking
number follows.

Best regards,
Anna Schmidt
Customer Care"""


def value(reward: Reward, completion: str, **columns: object) -> float | None:
    result = reward(completion=completion, **columns)
    return result.value if isinstance(result, Score) else result


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        (["refund"], 1.0),
        (["REFUND", "Tracking Number"], 1.0),
        (["refund", "invoice"], 0.5),
        (["fund"], 0.0),
        (["order."], 1.0),
        (["$40"], 1.0),
        (["a.c"], 0.0),
        ("refund", 1.0),
    ],
)
def test_required_keywords(keywords, expected):
    assert value(required_keywords(keywords), MAIL) == expected


def test_missing_keywords_are_told():
    assert required_keywords(["refund", "invoice"])(completion="") == Score(0.0, "ok", "missing: refund, invoice")


@pytest.mark.parametrize("keywords", [[], [""], ["a", " "], ""])
def test_empty_keywords_are_refused(keywords):
    with pytest.raises(ValueError, match="none of them empty"):
        required_keywords(keywords)


def test_matches_reply():
    reward = matches_reply()
    assert reward.columns == ("reply",)
    assert value(reward, MAIL, reply=MAIL) == 1.0
    assert value(reward, "  It’s\nfine. ", reply="it's fine.") == 1.0
    assert value(reward, "It's fine", reply="it's fine.") == 0.0
    assert value(reward, "", reply="it's fine.") == 0.0
    assert value(reward, "it's fine. it's fine.", reply="it's fine.") == 0.0


@pytest.mark.parametrize("reply", ["", " ", None])
def test_an_empty_reply_never_wins(reply):
    assert matches_reply()(completion="", reply=reply).reason == "not applicable"


def test_too_long():
    assert value(too_long(3), "one two three") == 0.0
    assert too_long(3)(completion="one two three four") == Score(-1.0, "ok", "4 words, 3 are allowed")
    assert value(too_long(3), "") == 0.0
    with pytest.raises(ValueError, match="at least 1"):
        too_long(0)


@pytest.mark.parametrize(
    ("recipient", "expected"),
    [
        ("Dr. Müller", 1.0),
        ("müller", 1.0),
        ("Mu\u0308ller", 1.0),
        ("Erika Müller", 1.0),
        ("Dr. Meyer", 0.0),
        ("Mr. Ord", 0.0),
        ("Mull", 0.0),
    ],
)
def test_names_recipient(recipient, expected):
    assert value(names_recipient(), MAIL, recipient=recipient) == expected


def test_a_name_is_a_whole_word():
    assert value(names_recipient(), "This is also fine", recipient="Al") == 0.0
    assert value(names_recipient(), "Hi Al!", recipient="Al") == 1.0
    assert value(names_recipient(), "O’Brien's mail", recipient="O'Brien") == 1.0
    assert value(names_recipient(), "李明，您好", recipient="李明") == 1.0


@pytest.mark.parametrize("recipient", ["", " ", None, "Dr.", "the", "-"])
def test_an_empty_recipient_never_wins(recipient):
    result = names_recipient()(completion=MAIL, recipient=recipient)
    assert (result.value, result.reason) == (None, "not applicable")


@pytest.mark.parametrize(
    "ending",
    [
        "Best regards,\nAnna",
        "best regards\n\nAnna",
        "Sincerely,\n\nAnna Schmidt\nHead of Care\n+49 30 1234",
        "Thanks, Anna",
        "**Kind regards,**\nAnna",
        "Yours sincerely —\nA. Schmidt",
    ],
)
def test_signatures(ending):
    assert value(signature_block(), "Dear you,\nit is fine.\n\n" + ending) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "Anna",
        "Best regards,",
        "Best regards,\n\n",
        "Best regards,\n[Your Name]",
        "Best wishes for your cake and all the rest of it.\nAnna",
        "Best regards,\nAnna\n" + "and another line\n" * 20,
    ],
)
def test_no_signatures(completion):
    assert value(signature_block(), completion) == 0.0


def test_a_given_signer_must_sign():
    assert value(signature_block(signer="Anna Schmidt"), MAIL) == 1.0
    assert value(signature_block(signer="anna"), MAIL) == 1.0
    assert signature_block(signer="Bob")(completion=MAIL) == Score(0.0, "ok", "no name after the sign-off")


@pytest.mark.parametrize("completion", ["Best,\n" * 20_000, "," * 100_000, "a " * 50_000, "\n" * 100_000])
def test_hostile_texts_come_to_an_end(completion):
    signature_block()(completion=completion)
    assert value(required_keywords(["a b c"]), completion) == 0.0
    assert value(names_recipient(), completion, recipient="Bob") == 0.0

"""Builds a ready-made reward again from its spec, for a run that is resumed in another process.

Deliberately a fixed list of factories: a spec read from disk names one of them, and never code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grpo_kit.rewards import answers, email, formats, gsm8k, lengths
from grpo_kit.rewards.human import human
from grpo_kit.rewards.rating_model import rating_model
from grpo_kit.rewards.reward import Reward
from grpo_kit.rewards.reward_model import reward_model

_FACTORIES: dict[str, Callable[..., Reward]] = {
    factory.__name__: factory
    for factory in (
        answers.exact_match,
        answers.numeric_match,
        answers.digits_with_bonus,
        answers.number_close,
        formats.xml_format,
        formats.approximate_format,
        gsm8k.gsm8k_correctness,
        gsm8k.gsm8k_integer,
        gsm8k.gsm8k_strict_format,
        gsm8k.gsm8k_soft_format,
        gsm8k.gsm8k_tag_count,
        email.required_keywords,
        email.matches_reply,
        email.too_long,
        email.names_recipient,
        email.signature_block,
        human,
        lengths.length_penalty,
        lengths.repetition_penalty,
        rating_model,
        reward_model,
    )
}


def from_spec(spec: Sequence[Any]) -> Reward:
    """The ready-made reward with this `Reward.spec`, (factory name, keyword arguments), also after JSON.

    ValueError for a factory that does not exist.
    """
    factory, options = spec
    if factory not in _FACTORIES:
        raise ValueError(f"there is no ready-made reward {factory!r}; there are {', '.join(sorted(_FACTORIES))}")
    return _FACTORIES[factory](**options)

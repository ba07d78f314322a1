"""Rewards: functions that score completions, the set of them a run uses, and ready-made ones."""

from grpo_kit.rewards.answers import digits_with_bonus, exact_match, number_close, numeric_match
from grpo_kit.rewards.completion_text import CompletionText
from grpo_kit.rewards.email import matches_reply, names_recipient, required_keywords, signature_block, too_long
from grpo_kit.rewards.extraction import final_answer
from grpo_kit.rewards.formats import approximate_format, xml_format
from grpo_kit.rewards.gsm8k import (
    gsm8k_correctness,
    gsm8k_integer,
    gsm8k_rewards,
    gsm8k_soft_format,
    gsm8k_strict_format,
    gsm8k_tag_count,
)
from grpo_kit.rewards.human import HumanReward, Question, human
from grpo_kit.rewards.lengths import length_penalty, repetition_penalty
from grpo_kit.rewards.numbers import equal_numbers, first_number, last_number, parse_number
from grpo_kit.rewards.rating_model import RatingModel, fit_ratings, rating_model
from grpo_kit.rewards.ratings import Rating
from grpo_kit.rewards.reward import Reward, reward
from grpo_kit.rewards.reward_model import reward_model
from grpo_kit.rewards.reward_set import RewardSet
from grpo_kit.rewards.score import REASONS, Score, ScoreTable
from grpo_kit.rewards.spec import from_spec

__all__ = [
    "REASONS",
    "CompletionText",
    "HumanReward",
    "Question",
    "Rating",
    "RatingModel",
    "Reward",
    "RewardSet",
    "Score",
    "ScoreTable",
    "approximate_format",
    "digits_with_bonus",
    "equal_numbers",
    "exact_match",
    "final_answer",
    "first_number",
    "fit_ratings",
    "from_spec",
    "gsm8k_correctness",
    "gsm8k_integer",
    "gsm8k_rewards",
    "gsm8k_soft_format",
    "gsm8k_strict_format",
    "gsm8k_tag_count",
    "human",
    "last_number",
    "length_penalty",
    "matches_reply",
    "names_recipient",
    "number_close",
    "numeric_match",
    "parse_number",
    "rating_model",
    "repetition_penalty",
    "required_keywords",
    "reward",
    "reward_model",
    "signature_block",
    "too_long",
    "xml_format",
]
